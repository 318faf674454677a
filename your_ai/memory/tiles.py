"""How a long row is cut into tiles of tokens: one answer for the engines and the estimates.

Shapes: B rows, T tokens per row.
"""

from __future__ import annotations

from your_ai.memory.sizes import TILE_TOKENS, TILED_FROM

FEWEST_TILE_TOKENS = 64  # of each row, however many rows there are


def tiles_of(rows: int, tokens: int) -> list[slice[int, int, None]]:
    """The tiles of B rows of T tokens, of about equal size; one tile if they are not long."""
    if rows * tokens <= TILED_FROM:
        return [slice(0, tokens)]
    most = max(TILE_TOKENS // rows, min(FEWEST_TILE_TOKENS, TILE_TOKENS))
    count = -(-tokens // most)
    size = -(-tokens // count)
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
