"""Supervised fine-tuning: next-token cross-entropy on the trained tokens.

Shapes: B rows, T tokens of a row, D hidden size, S targets.
"""

from __future__ import annotations

import mlx.core as mx

from your_ai import losses
from your_ai.losses import Head


def at_targets(hidden: mx.array, positions: mx.array) -> mx.array:
    """(S, D) the hidden states at `positions` of the flattened (B, T, D), and no others."""
    return hidden.reshape(-1, hidden.shape[-1])[positions]


def trainable_loss_sum(
    hidden: mx.array,
    positions: mx.array,
    targets: mx.array,
    weights: mx.array,
    scale: mx.array,
    head: Head,
) -> mx.array:
    """The weighted sum of the targets' cross-entropy; its gradients come out times `scale`."""
    return losses.trainable_loss(at_targets(hidden, positions), targets, weights, scale, head)


def loss_and_gradient(
    hidden: mx.array,
    positions: mx.array,
    targets: mx.array,
    weights: mx.array,
    scale: mx.array,
    head: Head,
) -> tuple[mx.array, mx.array]:
    """`trainable_loss_sum` and its gradient in `hidden`, (B, T, D)."""
    rows = at_targets(hidden, positions)
    loss, grad = losses.loss_and_gradient(rows, targets, weights, scale, head)
    flat = mx.zeros((hidden.size // hidden.shape[-1], hidden.shape[-1]), grad.dtype)
    return loss, flat.at[positions].add(grad).reshape(hidden.shape)


def loss_sum(
    hidden: mx.array, positions: mx.array, targets: mx.array, weights: mx.array, head: Head
) -> mx.array:
    """The same sum, to be evaluated alone."""
    return losses.chunked_loss(at_targets(hidden, positions), targets, weights, head)


def predictions(hidden: mx.array, positions: mx.array, head: Head) -> mx.array:
    """(S,) the likeliest token at each target."""
    return losses.chunked_predictions(at_targets(hidden, positions), head)


def score(
    hidden: mx.array, positions: mx.array, targets: mx.array, head: Head
) -> tuple[mx.array, mx.array]:
    """(S,) the loss of each target, and (S,) the likeliest token in its place."""
    rows = at_targets(hidden, positions)
    found = losses.chunked_losses(rows, targets, head)
    (rows,) = mx.depends([rows], [found])  # one walk through the vocabulary after the other
    return found, losses.chunked_predictions(rows, head)
