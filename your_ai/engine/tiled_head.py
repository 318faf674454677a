"""The targets of a long row, tile by tile, so that the head sees few hidden states at a time.

Several tiles go through the head together: it reads or dequantizes its weight once for them.

Shapes: B rows, T tokens per row, n tokens of the tiles of a part, S targets of the rows, N slots
of a part.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.memory.sizes import HEAD_ROWS
from your_ai.nets import losses
from your_ai.nets.head import Head
from your_ai.nets.mlx_types import Arrays
from your_ai.objectives.objective import Objective, Sums, Targets

SHARES = 4  # sizes of the slots of a part, so that few graphs are compiled


class TargetPart(NamedTuple):
    """The targets of some tiles."""

    tiles: slice
    """Which tiles."""
    indices: np.ndarray
    """Of the targets, among the S of the rows."""
    targets: Targets | None
    """(N,) each, with positions in the flattened (B, n) tokens, and padding of weight 0; None if
    there are none."""


def target_parts(
    targets: Targets, positions: np.ndarray, shape: tuple[int, int], tiles: list[slice]
) -> list[TargetPart]:
    """The targets of groups of tiles.

    positions: (S,) as in `Targets`. shape: (B, T).
    """
    rows, tokens = shape
    row, token = np.divmod(positions, tokens)
    together = max(1, HEAD_ROWS // (rows * (tiles[0].stop - tiles[0].start)))
    found = []
    for first in range(0, len(tiles), together):
        group = tiles[first : first + together]
        start, stop = group[0].start, group[-1].stop
        indices = np.flatnonzero((start <= token) & (token < stop))
        own = None
        if len(indices):
            places = row * (stop - start) + token - start
            own = slots_of(targets, indices, places, -(-rows * (stop - start) // SHARES))
        found.append(TargetPart(slice(first, first + len(group)), indices, own))
    return found


def slots_of(targets: Targets, indices: np.ndarray, places: np.ndarray, share: int) -> Targets:
    """The targets at `indices`, with padding to a multiple of `share`.

    places: (S,) the positions of all targets in the part, out of range for those of other parts.
    """
    count = len(indices)
    # The padding repeats a target of the part. MLX checks no index: the head would gather other
    # memory for a position out of range, and its backward pass would write there.
    slots = np.full(-(-count // share) * share, indices[0])
    slots[:count] = indices
    at = mx.array(slots.astype(np.int32))
    found = targets.part(at)
    real = mx.arange(len(slots)) < count
    columns = dict(found.columns)
    if "given" in columns:
        columns["given"] = mx.where(real, columns["given"], 0)
    return found._replace(
        positions=mx.array(places[slots].astype(np.int32)),
        weights=mx.where(real, found.weights, 0),
        columns=columns,
    )


def in_order(parts: list[TargetPart], found: list[mx.array]) -> mx.array:
    """(S,) values of all targets, from those of each part that has some, (N,)."""
    every = [part.indices for part in parts if part.targets is not None]
    values = [array[: len(own)] for own, array in zip(every, found, strict=True)]
    order = np.argsort(np.concatenate(every), kind="stable")
    return mx.concatenate(values)[mx.array(order.astype(np.int32))]


# From hidden states to the targets, the head and the objective


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


def score(
    hidden: mx.array, targets: Targets, objective: Objective, head: Head
) -> tuple[mx.array, ...]:
    """(S,) the cross-entropy of each target, and (S,) the most likely token there; with hidden
    states of a teacher, also what `chunked_comparison` finds."""
    rows = at_targets(hidden, targets)
    found = losses.chunked_losses(rows, targets.tokens, head)
    (rows,) = mx.depends([rows], [found])  # one pass over the vocabulary after the other
    tokens = losses.chunked_predictions(rows, head)
    if targets.teacher is None:
        return found, tokens
    (rows,) = mx.depends([rows], [tokens])
    return found, tokens, *losses.chunked_comparison(rows, targets, objective, head)
