"""Attention tile by tile is attention over the whole row."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest

from your_ai.nets import tiled_attention
from your_ai.nets.attention import attention
from your_ai.nets.block_calls import Mask
from your_ai.nets.tiled_attention import Tile, TileCache, TiledAttention, Untiled

TOKENS, STARTS = 23, (0, 8, 16, 23)
CASES = [  # window, chunk, packed, sinks
    (None, None, False, False),
    (None, None, True, False),
    (None, None, False, True),
    (5, None, False, False),  # some tiles are out of reach
    (10, None, True, True),  # the first query of the third tile sees the last key of the first
    (None, 10, False, False),
    (None, 4, False, False),
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(tiled_attention, "TILE_SCORE_BYTES", 1)
    monkeypatch.setattr(tiled_attention, "FEWEST_QUERIES", 3)


def random(key: int, *shape: int) -> mx.array:
    return mx.random.normal(shape, key=mx.random.key(key))


@pytest.mark.parametrize(("window", "chunk", "packed", "with_sinks"), CASES)
def test_output_and_gradients_are_those_of_the_whole_row(window, chunk, packed, with_sinks):
    q, k, v = random(0, 2, 4, TOKENS, 8), random(1, 2, 2, TOKENS, 8), random(2, 2, 2, TOKENS, 6)
    cotangent = random(3, 2, 4, TOKENS, 6)
    segments = mx.array([[0] * 3 + [1] * 14 + [2] * 6, [0] * 20 + [1] * 3]) if packed else None
    sinks = random(4, 4) if with_sinks else None

    def whole(q: mx.array, k: mx.array, v: mx.array) -> mx.array:
        return attention(q, k, v, 0.3, window, segments, None, sinks, chunk)

    (expected,), grads = mx.vjp(whole, [q, k, v], [cotangent])
    tiles = [
        Tile(a, b, None if segments is None else segments[:, a:b]) for a, b in pairwise(STARTS)
    ]
    tiled = TiledAttention(0.3, Mask(window, None, chunk), lambda key, function: function)
    of = [[x[:, :, t.start : t.stop] for t in tiles] for x in (q, k, v, cotangent)]
    found = [tiled.forward(of[0][i], i, of[1], of[2], tiles, sinks) for i in range(len(tiles))]
    output = mx.concatenate([each for each, _ in found], axis=2)
    assert mx.allclose(output, expected, rtol=1e-5, atol=1e-6)
    grads_k, grads_v = ([mx.zeros(x.shape) for x in each] for each in of[1:3])
    grads_q = []
    for i in reversed(range(len(tiles))):
        arrays = (of[0][i], i, of[1], of[2], tiles, *found[i], of[3][i])
        grads_q.insert(0, tiled.backward(*arrays, grads_k, grads_v))
    for ours, theirs in zip((grads_q, grads_k, grads_v), grads, strict=True):
        assert mx.allclose(mx.concatenate(ours, axis=2), theirs, rtol=1e-4, atol=1e-5)


def test_tiles_out_of_reach_are_not_computed():
    keys: list[tuple] = []

    def compiled(key: tuple, function):
        keys.append(key)
        return function

    tiles = [Tile(start, start + 4) for start in range(0, 16, 4)]
    x = [random(i, 1, 1, 4, 2) for i in range(4)]
    TiledAttention(1.0, Mask(window=3), compiled).forward(x[3], 3, x, x, tiles, None)
    assert len(keys) == 2  # its own and the one before


def test_a_block_that_attends_twice_or_not_at_all_cannot_be_cut():
    cache, x = TileCache(mx.array(0)), random(0, 1, 1, 4, 2)
    with pytest.raises(Untiled, match="0 times"):
        _ = cache.call
    cache.attend(x, x, x, 1.0, "causal", None)
    assert cache.call.scale == 1.0
    cache.attend(x, x, x, 1.0, "causal", None)
    with pytest.raises(Untiled, match="2 times"):
        _ = cache.call


def test_attention_with_a_mask_of_its_own_cannot_be_cut():
    x = random(0, 1, 1, 4, 2)
    with pytest.raises(Untiled, match="mask"):
        TileCache(mx.array(0)).attend(x, x, x, 1.0, mx.zeros((4, 4)), None)
