"""How rows are cut into tiles."""

from __future__ import annotations

from itertools import pairwise

import pytest

from your_ai.memory.sizes import FEWEST_TILE_TOKENS, TILE_TOKENS, TILED_FROM, tiles_of


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, TILED_FROM + 1), (1, 5000), (4, 700), (9, 131), (1, 131_072)]
)
def test_tiles_cover_a_row_once_and_are_about_equal(rows, tokens):
    found = tiles_of(rows, tokens)
    assert len(found) > 1
    assert found[0].start == 0
    assert found[-1].stop == tokens
    assert all(a.stop == b.start for a, b in pairwise(found))
    sizes = [tile.stop - tile.start for tile in found]
    assert len(set(sizes)) <= 2  # so that few graphs are compiled
    assert max(sizes) * rows <= max(TILE_TOKENS, FEWEST_TILE_TOKENS * rows)
    assert 2 * min(sizes) > max(sizes)


@pytest.mark.parametrize(("rows", "tokens"), [(1, 2), (1, TILED_FROM), (8, TILED_FROM // 8)])
def test_short_rows_are_one_tile(rows, tokens):
    assert tiles_of(rows, tokens) == [slice(0, tokens)]
