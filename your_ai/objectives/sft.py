"""Supervised fine-tuning: next-token cross-entropy on the trained tokens.

Shapes: B rows, T tokens of a row, D hidden size, S targets, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from your_ai.losses import cross_entropy_sum


def target_logits(
    hidden: mx.array, positions: mx.array, head: Callable[[mx.array], mx.array]
) -> mx.array:
    """(S, V) logits at `positions` of the flattened (B, T, D) hidden states, and nowhere else."""
    return head(hidden.reshape(-1, hidden.shape[-1])[positions][None])[0]


def loss_sum(
    hidden: mx.array,
    positions: mx.array,
    targets: mx.array,
    weights: mx.array,
    head: Callable[[mx.array], mx.array],
) -> mx.array:
    """The weighted sum of the targets' cross-entropy. positions, targets, weights: (S,)."""
    return cross_entropy_sum(target_logits(hidden, positions, head), targets, weights)
