"""The targets of a long row, tile by tile, so that the head sees the hidden states of one tile.

Shapes: B rows, T tokens per row, n tokens of a tile, S targets of the rows, N slots of a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Targets

SHARES = 4  # sizes of the slots of a tile, so that few graphs are compiled


class TargetPart(NamedTuple):
    """The targets of one tile."""

    indices: np.ndarray
    """Of the targets, among the S of the rows."""
    targets: Targets
    """(N,) each, with positions in the flattened (B, n) tile, and padding of weight 0."""


def target_parts(batch: Batch, tiles: list[slice]) -> list[TargetPart | None]:
    """The targets of each tile; None for a tile that has none."""
    targets = Targets.of(batch)
    row, token = np.divmod(batch.positions, batch.tokens.shape[1])
    of_tile = np.searchsorted([tile.start for tile in tiles], token, side="right") - 1
    return [
        target_part(targets, np.flatnonzero(of_tile == place), row, token, tile)
        for place, tile in enumerate(tiles)
    ]


def target_part(
    targets: Targets, indices: np.ndarray, row: np.ndarray, token: np.ndarray, tile: slice
) -> TargetPart | None:
    """row, token: (S,) of all targets."""
    count, width = len(indices), tile.stop - tile.start
    if not count:
        return None
    share = -(-width // SHARES)
    slots = np.zeros(-(-count // share) * share, np.int64)
    slots[:count] = indices
    places = (row * width + token - tile.start)[slots].astype(np.int32)
    at = mx.array(slots.astype(np.int32))
    found = Targets(*(None if array is None else array[at] for array in targets))
    real = mx.arange(len(slots)) < count
    weights = mx.where(real, found.weights, 0)
    return TargetPart(indices, found._replace(positions=mx.array(places), weights=weights))


def in_order(parts: list[TargetPart | None], found: list[mx.array], count: int) -> mx.array:
    """(S,) values of all targets, from those of each tile, (N,); count: S."""
    every = [part for part in parts if part is not None]
    values = [array[: len(part.indices)] for part, array in zip(every, found, strict=True)]
    order = np.argsort(np.concatenate([part.indices for part in every]), kind="stable")
    assert len(order) == count
    return mx.concatenate(values)[mx.array(order.astype(np.int32))]
