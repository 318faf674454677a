"""Bytes of blocks that run on tiles of a row (engine/tiles.py).

Beside the work on one tile, a block holds a few numbers for each token of the row: the hidden
states, and its keys and values; in the backward pass the cotangents in place of the hidden states,
and the gradients of keys and values in float32.

Shapes: B rows, T tokens per row, n tokens of a tile, D hidden size.
"""

from __future__ import annotations

from your_ai.memory.facts import ModelFacts
from your_ai.memory.memoized import memoized
from your_ai.memory.mixer_facts import ATTENTION, MLA, SLIDING
from your_ai.memory.sizes import FEWEST_QUERIES, TILE_SCORE_BYTES, tiles_of
from your_ai.memory.workload import Workload

NOISE_ARRAYS = 4.5  # (B, T, D) in float32 that exist while noise is added to embeddings
# The same where it is added tile by tile, under mx.compile: of a tile, and of the row.
TILED_NOISE_ARRAYS = (7, 0.6)


def noise_bytes(facts: ModelFacts, rows: int, tokens: int) -> float:
    """Bytes while noise is added to the embeddings, with their sum; tile by tile, if a row is long,
    so that the parts exist beside the whole (nets/neftune.py)."""
    hidden = rows * tokens * facts.hidden
    tiles = len(tiles_of(rows, tokens))
    if tiles == 1:
        return NOISE_ARRAYS * 4 * hidden + hidden * facts.float_bytes
    of_tile, of_row = TILED_NOISE_ARRAYS
    work = 4 * (of_tile * rows * tile_tokens(rows, tokens) * facts.hidden + of_row * hidden)
    return work + 2 * hidden * facts.float_bytes


@memoized
def is_tiled(workload: Workload, rows: int, tokens: int) -> bool:
    """Return whether every block runs on tiles of such rows, unless it keeps outputs."""
    if workload.soft is not None:  # it has engines of its own
        return False
    return len(tiles_of(rows, tokens)) > 1 and can_tile(workload.facts)


@memoized
def can_tile(facts: ModelFacts) -> bool:
    """Return whether the blocks of such a model have attention alone, in a form that
    engine/tiles.py can cut, and pass on nothing but hidden states."""
    mixers = [kind.mixers for kind in facts.kinds]
    plain = all(len(m) == 1 and m[0].kind in (ATTENTION, SLIDING, MLA) for m in mixers)
    plain = plain and not any(mixer.untiled for (mixer,) in mixers)
    return plain and not facts.softcaps and not facts.passed


def tile_tokens(rows: int, tokens: int) -> int:
    """n"""
    first = tiles_of(rows, tokens)[0]
    return first.stop - first.start


def tiled_forward_bytes(workload: Workload, rows: int, tokens: int, of_tile: float) -> float:
    """Bytes of the forward pass of a block; of_tile: of that of rows of n tokens."""
    facts, table = workload.facts, workload.process.coefficients.tiles
    per_token = (facts.hidden + cached(facts)) * facts.float_bytes
    attention = attention_bytes(workload, rows, tokens)
    return rows * tokens * per_token + max(table["forward"] * of_tile, attention)


def tiled_backward_bytes(
    workload: Workload, rows: int, tokens: int, forward: float, backward: float
) -> float:
    """Bytes of the backward pass of a block; forward, backward: of the passes of rows of n tokens.

    An MLP without adapters is not sliced, and needs as much as in the forward pass.
    """
    facts, table = workload.facts, workload.process.coefficients.tiles
    per_token = (facts.hidden + cached(facts)) * facts.float_bytes + 4 * cached(facts)
    attention = attention_bytes(workload, rows, tokens)
    work = max(table["forward"] * forward, table["backward"] * backward, attention)
    return rows * tokens * per_token + work


def attention_bytes(workload: Workload, rows: int, tokens: int) -> float:
    """Bytes of attention between two tiles: the scores of some blocks of queries, or of all if they
    are few, and float32 arrays like the queries."""
    table, facts, n = workload.process.coefficients.tiles, workload.facts, tile_tokens(rows, tokens)
    width = max((m.heads * m.value_dim for kind in facts.kinds for m in kind.mixers), default=0)
    every = table["pair"] * 4 * rows * facts.heads * n**2
    queries = table["queries"] * 4 * rows * n * (width or facts.hidden)
    return min(table["scores"] * TILE_SCORE_BYTES, every) + queries


@memoized
def cached(facts: ModelFacts) -> int:
    """Numbers of the keys and values of a token in a block."""
    most = max((m.cached for kind in facts.kinds for m in kind.mixers), default=0)
    return most or 2 * facts.hidden


def tiled_query_blocks(facts: ModelFacts, rows: int, tokens: int) -> int:
    """Blocks of queries in the compiled graphs of attention: of a tile with itself, and with
    another; twice, if the last tile is shorter."""
    tiles, n = tiles_of(rows, tokens), tile_tokens(rows, tokens)
    most = max(FEWEST_QUERIES, TILE_SCORE_BYTES // (4 * rows * max(1, facts.heads) * n))
    shapes = len({tile.stop - tile.start for tile in tiles})
    return 2 * shapes * -(-n // min(most, n))
