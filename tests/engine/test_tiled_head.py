"""The targets of long rows, divided among groups of tiles."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.target_columns import COLUMNS
from your_ai.engine.tiled_head import in_order, target_parts
from your_ai.memory.sizes import tiles_of
from your_ai.objectives.objective import Targets


@st.composite
def rows_of_targets(draw) -> tuple[Targets, np.ndarray, tuple[int, int]]:
    """The targets of a micro-batch: dense or sparse, padded, with optional columns or without."""
    rows, tokens = draw(st.integers(1, 6)), draw(st.integers(2, 9000))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    share = draw(st.sampled_from([0.001, 0.05, 0.5, 1.0]))
    real = np.flatnonzero(rng.random(rows * tokens) < share).astype(np.int32)
    if not len(real):
        real = np.array([rng.integers(rows * tokens)], np.int32)
    padding = np.zeros(draw(st.sampled_from([0, 1, 40])), np.int32)
    positions = np.concatenate([real, padding])
    weights = np.concatenate([rng.random(len(real)) + 0.1, padding]).astype(np.float32)
    columns = {
        name: mx.array(rng.random(len(positions)).astype(np.float32))
        for name in COLUMNS
        if draw(st.booleans())
    }
    targets = Targets(
        mx.array(positions),
        mx.array(np.arange(len(positions), dtype=np.int32)),
        mx.array(weights),
        mx.array(positions // tokens),
        columns,
    )
    return targets, positions, (rows, tokens)


@given(rows_of_targets())
def test_positions_of_every_part_are_within_its_tiles(case):
    targets, positions, shape = case
    tiles = tiles_of(*shape)
    parts = target_parts(targets, positions, shape, tiles)
    covered = [tile for part in parts for tile in tiles[part.tiles]]
    assert covered == tiles
    for part in parts:
        start, stop = tiles[part.tiles][0].start, tiles[part.tiles][-1].stop
        if part.targets is None:
            continue
        own = np.array(part.targets.positions)
        assert own.min() >= 0
        assert own.max() < shape[0] * (stop - start)
        row, token = np.divmod(own, stop - start)
        count = len(part.indices)
        wanted = row * shape[1] + token + start
        assert np.array_equal(wanted[:count], positions[part.indices])
        assert np.array_equal(np.array(part.targets.tokens)[:count], part.indices)
        for column in (part.targets.weights, part.targets.columns.get("given", mx.zeros(0))):
            assert not np.array(column)[count:].any()


@given(rows_of_targets())
def test_values_of_all_parts_come_back_in_the_order_of_the_targets(case):
    targets, positions, shape = case
    parts = target_parts(targets, positions, shape, tiles_of(*shape))
    found = [part.targets.tokens for part in parts if part.targets is not None]
    assert np.array_equal(np.array(in_order(parts, found)), np.arange(len(positions)))
