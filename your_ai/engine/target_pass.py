"""From hidden states to the targets, the head and the objective.

Shapes: B rows, T tokens per row, D hidden size, S targets.
"""

from __future__ import annotations

import mlx.core as mx

from your_ai.nets import losses
from your_ai.nets.head import Head
from your_ai.nets.mlx_types import Arrays
from your_ai.objectives.objective import Objective, Sums, Targets


def at_targets(hidden: mx.array, targets: Targets) -> mx.array:
    """Select from (B, T, D) the hidden states that predict the targets, (S, D)."""
    return hidden.reshape(-1, hidden.shape[-1])[targets.positions]


def trainable_loss(
    hidden: mx.array, targets: Targets, objective: Objective, scale: mx.array, head: Head
) -> Sums:
    """The sums of the objective; the gradients of the loss are multiplied by `scale`."""
    return losses.trainable_loss(at_targets(hidden, targets), targets, objective, scale, head)


def loss_and_gradient(
    hidden: mx.array, targets: Targets, objective: Objective, scale: mx.array, head: Head
) -> tuple[Sums, mx.array, Arrays]:
    """Same as `trainable_loss`, and the gradients with respect to `hidden`, (B, T, D), and to the
    trained arrays of the head, by name in the model.
    """
    rows = at_targets(hidden, targets)
    sums, grad, of_head = losses.loss_and_gradient(rows, targets, objective, scale, head)
    flat = mx.zeros((hidden.size // hidden.shape[-1], hidden.shape[-1]), grad.dtype)
    return sums, flat.at[targets.positions].add(grad).reshape(hidden.shape), of_head


def loss(hidden: mx.array, targets: Targets, objective: Objective, head: Head) -> Sums:
    """The sums of the objective, without gradients."""
    return losses.chunked_loss(at_targets(hidden, targets), targets, objective, head)


def log_probabilities(hidden: mx.array, targets: Targets, head: Head) -> mx.array:
    """(S,) the log-probability of each target, without gradients."""
    return -losses.chunked_losses(at_targets(hidden, targets), targets.tokens, head)


def predictions(hidden: mx.array, targets: Targets, head: Head) -> mx.array:
    """(S,) the most likely token at each target."""
    return losses.chunked_predictions(at_targets(hidden, targets), head)


def score(hidden: mx.array, targets: Targets, head: Head) -> tuple[mx.array, mx.array]:
    """(S,) the cross-entropy of each target, and (S,) the most likely token there."""
    rows = at_targets(hidden, targets)
    found = losses.chunked_losses(rows, targets.tokens, head)
    (rows,) = mx.depends([rows], [found])  # one pass over the vocabulary after the other
    return found, losses.chunked_predictions(rows, head)
