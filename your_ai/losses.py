"""Losses, as sums over targets: whoever has the whole batch divides, once.

Shapes: S targets, V vocabulary.
"""

from __future__ import annotations

import mlx.core as mx


def cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """The sum over targets of weight x -log softmax(logits)[target], in float32.

    logits: (S, V); targets: (S,) int; weights: (S,), 0 for padding.
    """
    logits = logits.astype(mx.float32)
    scores = mx.take_along_axis(logits, targets[:, None], axis=-1).squeeze(-1)
    return ((mx.logsumexp(logits, axis=-1) - scores) * weights).sum()
