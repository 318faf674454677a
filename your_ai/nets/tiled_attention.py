"""Attention of a tile of queries over all tiles of keys up to its own, one after the other.

It is nets.attention with a running softmax (FlashAttention-2, Dao, 2023, arXiv 2307.08691): no
array grows with the row but the keys and values themselves. A tile of queries meets its own tile of
keys first, in which every query sees a key, so that the running maximum is finite from then on.

Shapes: B rows, n queries and m keys of a tile, H query heads, K key heads, R = H / K, d head size,
N queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from your_ai.memory.sizes import FEWEST_QUERIES, TILE_SCORE_BYTES
from your_ai.nets.attention import by_key_head, contiguous_float32, fold
from your_ai.nets.block_calls import Mask, seen_keys
from your_ai.nets.numerics import exp

PairFunction = Callable[..., tuple[mx.array, mx.array, mx.array]]


class Untiled(Exception):
    """A block that cannot run on tiles."""


class TileCache:
    """In place of a KV cache: the attention of a block hands its queries, keys and values over.

    offset: () int32, the position of the first token of the tile.
    answer: (B, H, n, d), what attention returns; zeros by default.
    """

    def __init__(self, offset: mx.array, answer: mx.array | None = None) -> None:
        self.offset, self.answer = offset, answer
        self.calls: list[AttentionCall] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values

    def attend(
        self, q: mx.array, k: mx.array, v: mx.array, scale: Any, mask: Any, sinks: mx.array | None
    ) -> mx.array:
        """In place of mlx-lm's scaled_dot_product_attention."""
        causal = isinstance(mask, str) and mask == "causal"
        if not causal or not isinstance(scale, (int, float)) or k.shape[2] != q.shape[2]:
            raise Untiled("attention with a mask or a scale of its own")
        self.calls.append(AttentionCall(q, k, v, float(scale), sinks))
        return mx.zeros((*q.shape[:3], v.shape[3]), q.dtype) if self.answer is None else self.answer

    @property
    def call(self) -> AttentionCall:
        """The only call of the attention. Raises Untiled if there was none, or several."""
        if len(self.calls) != 1:
            raise Untiled(f"attention is called {len(self.calls)} times")
        return self.calls[0]


class AttentionCall(NamedTuple):
    """The arguments of a call of attention."""

    q: mx.array
    """(B, H, n, d)"""
    k: mx.array
    """(B, K, n, d)"""
    v: mx.array
    scale: float
    sinks: mx.array | None
    """(H,), as in `attention.attention`."""


class Tile(NamedTuple):
    """Consecutive tokens of all rows."""

    start: int
    stop: int
    segments: mx.array | None = None
    """(B, n) int32, of packed rows."""


class Running(NamedTuple):
    """The softmax of a tile of queries over the keys so far, all float32."""

    top: mx.array
    """(B, K, R, n, 1) the largest score."""
    total: mx.array
    """(B, K, R, n, 1) the sum of exp(score - top)."""
    output: mx.array
    """(B, K, R, n, d) the sum of exp(score - top) times value."""


@dataclass(frozen=True)
class TiledAttention:
    """Attention between tiles, by compiled functions that all pairs of tiles share.

    Compare nets.attention for what is computed in which precision.
    """

    scale: float
    mask: Mask
    """Without segments, which belong to tiles."""
    compiled: Callable[[Hashable, PairFunction], PairFunction]
    """(key, function) -> the function, compiled once per key."""

    def forward(
        self, q: mx.array, own: int, keys: list[mx.array], values: list[mx.array],
        tiles: list[Tile], sinks: mx.array | None,
    ) -> tuple[mx.array, mx.array]:  # fmt: skip
        """The output, (B, H, n, d), and the log-sum-exp, (B, K, R, n, 1), of tile `own`.

        keys, values: of the tiles up to this one.
        """
        state = begin(q, keys[own], values[own], sinks)
        for other in self._seen(own, tiles):
            function, where = self._pair(forward_pair, tiles[own], tiles[other])
            state = Running(*function(q, keys[other], values[other], *state, *where))
            mx.eval(state)
        output = (state.output / state.total).astype(q.dtype)
        return output.reshape(*q.shape[:3], -1), state.top + mx.log(state.total)

    def backward(
        self, q: mx.array, own: int, keys: list[mx.array], values: list[mx.array],
        tiles: list[Tile], output: mx.array, sums: mx.array, cotangent: mx.array,
        grads_k: list[mx.array], grads_v: list[mx.array],
    ) -> mx.array:  # fmt: skip
        """The gradient of q; adds to those of the keys and values, which are float32."""
        delta = (cotangent.astype(mx.float32) * output).sum(axis=-1, keepdims=True)
        delta = mx.unflatten(delta, 1, (keys[own].shape[1], -1))
        grad_q = mx.zeros(q.shape, mx.float32)
        for other in self._seen(own, tiles):
            function, where = self._pair(backward_pair, tiles[own], tiles[other])
            given = (q, keys[other], values[other], cotangent, sums, delta)
            found = function(*given, grad_q, grads_k[other], grads_v[other], *where)
            grad_q, grads_k[other], grads_v[other] = found
            mx.eval(found)
        return grad_q.astype(q.dtype)

    def _seen(self, own: int, tiles: list[Tile]) -> Iterator[int]:
        """The tiles of keys that some query of a tile sees, its own first."""
        start, first = tiles[own].start, 0
        if self.mask.window is not None:
            first = max(first, start - self.mask.window + 1)
        if self.mask.chunk is not None:
            first = max(first, start // self.mask.chunk * self.mask.chunk)
        return (other for other in range(own, -1, -1) if tiles[other].stop > first)

    def _pair(
        self, function: PairFunction, own: Tile, other: Tile
    ) -> tuple[PairFunction, list[mx.array]]:
        """The function of a pair of tiles, and its last arguments."""
        window, chunk = self.mask.window, self.mask.chunk
        if window is not None and own.stop - 1 < other.start + window:
            window = None
        if chunk is not None and (own.stop - 1) // chunk == other.start // chunk:
            chunk = None
        kind = PairKind(
            self.scale, own.start == other.start, window, chunk, own.segments is not None
        )
        where = [mx.array(own.start), mx.array(other.start)]
        if own.segments is not None and other.segments is not None:
            where += [own.segments, other.segments]
        run = self.compiled((function.__name__, kind), lambda *args: function(kind, *args))
        return run, where


class PairKind(NamedTuple):
    """Properties that many pairs of a tile of queries and one of keys share."""

    scale: float
    own: bool
    """Whether both are the same tile."""
    window: int | None
    """None if all queries of the one see all keys of the other."""
    chunk: int | None
    packed: bool


def begin(q: mx.array, k: mx.array, v: mx.array, sinks: mx.array | None) -> Running:
    """The softmax over no keys but the sinks."""
    shape = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1], q.shape[2])
    top, total = mx.full((*shape, 1), -mx.inf), mx.zeros((*shape, 1))
    if sinks is not None:
        top = mx.broadcast_to(sinks.astype(mx.float32).reshape(shape[1], -1, 1, 1), top.shape)
        total = mx.ones_like(top)
    return Running(top, total, mx.zeros((*shape, v.shape[3])))


def forward_pair(
    kind: PairKind, q: mx.array, k: mx.array, v: mx.array,
    top: mx.array, total: mx.array, output: mx.array, *where: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:  # fmt: skip
    """The softmax of a tile of queries after a further tile of keys."""
    queries, k, v = by_key_head(q, k), contiguous_float32(k), mx.contiguous(v)
    found: list[tuple[mx.array, mx.array, mx.array]] = []
    done = [k]
    for rows, keys in blocks(q.shape, k.shape[2], kind.own):
        (rows_q, *where) = mx.depends([queries[..., rows, :], *where], done)
        scores = pair_scores(kind, rows_q.astype(mx.float32), k[:, :, keys], rows, keys, where)
        before = top[..., rows, :]
        largest = mx.maximum(before, scores.max(axis=-1, keepdims=True))
        p, shrink = exp(scores - largest), mx.exp(before - largest)
        new = fold(p.astype(v.dtype)) @ v[:, :, keys]
        new = new.reshape(*p.shape[:-1], -1).astype(mx.float32)
        sums = total[..., rows, :] * shrink + p.sum(axis=-1, keepdims=True)
        found.append((largest, sums, output[..., rows, :] * shrink + new))
        done = list(found[-1])
    tops, totals, outputs = (
        mx.concatenate([*arrays], axis=-2) for arrays in zip(*found, strict=True)
    )
    return tops, totals, outputs


def backward_pair(
    kind: PairKind, q: mx.array, k: mx.array, v: mx.array, cotangent: mx.array,
    sums: mx.array, delta: mx.array, grad_q: mx.array, grad_k: mx.array, grad_v: mx.array,
    *where: mx.array,
) -> tuple[mx.array, mx.array, mx.array]:  # fmt: skip
    """The gradients so far of q, k and v, with those of this pair."""
    queries, cotangent = by_key_head(q, k), by_key_head(cotangent, k)
    k, v = contiguous_float32(k), contiguous_float32(v)
    grads_q: list[mx.array] = []
    done = [k, v]
    for rows, keys in blocks(q.shape, k.shape[2], kind.own):
        (rows_q, *where) = mx.depends([queries[..., rows, :], *where], done)
        rows_q = rows_q.astype(mx.float32)
        scores = pair_scores(kind, rows_q, k[:, :, keys], rows, keys, where)
        p = exp(scores - sums[..., rows, :])
        rows_c = fold(cotangent[..., rows, :])
        grad_p = rows_c.astype(mx.float32) @ v[:, :, keys].swapaxes(-1, -2)
        grad_s = fold(p * (grad_p.reshape(p.shape) - delta[..., rows, :])) * kind.scale
        p = fold(p.astype(q.dtype)).swapaxes(-1, -2)
        grad_v = added(grad_v, keys, p @ rows_c)
        grad_k = added(grad_k, keys, grad_s.swapaxes(-1, -2) @ fold(rows_q))
        grads_q.append((grad_s @ k[:, :, keys]).reshape(rows_q.shape))
        done = [grads_q[-1], grad_k, grad_v]
    grad = mx.concatenate(grads_q, axis=-2).reshape(grad_q.shape)
    return grad_q + grad, grad_k, grad_v


def added(total: mx.array, keys: slice, part: mx.array) -> mx.array:
    if keys.stop == total.shape[2]:
        return total + part
    return total.at[:, :, keys].add(part)


def blocks(shape: tuple[int, ...], keys: int, own: bool) -> Iterator[tuple[slice, slice]]:
    """The queries of each block of a tile, and the keys of a tile that some of them may see.

    shape: of q. keys: m. own: whether the keys are those of the same tile.
    """
    B, H, n, _ = shape
    count = max(FEWEST_QUERIES, TILE_SCORE_BYTES // (4 * B * H * keys))
    count = -(-n // -(-n // min(count, n)))
    for start in range(0, n, count):
        stop = min(n, start + count)
        yield slice(start, stop), slice(0, stop if own else keys)


def pair_scores(
    kind: PairKind, q: mx.array, k: mx.array, rows: slice, keys: slice, where: Sequence[mx.array]
) -> mx.array:
    """Scores of a block, (B, K, R, N, m), -inf where a query does not see a key.

    q: (B, K, R, N, d), k: (B, K, m, d), both float32; where: the positions of the first query and
    key of the tiles, and the segments of both if rows are packed.
    """
    scores = mx.unflatten((fold(q) * kind.scale) @ k.swapaxes(-1, -2), 2, q.shape[2:4])
    limited = kind.window is not None or kind.chunk is not None or kind.packed
    if not kind.own and not limited:
        return scores
    query = where[0] + mx.arange(rows.start, rows.stop)[:, None]
    key = where[1] + mx.arange(keys.start, keys.stop)
    seen = seen_keys(query, key, kind.window, kind.chunk)
    if kind.packed:
        same = where[2][:, rows, None] == where[3][:, None, keys]
        seen = seen & same[:, None, None]
    return mx.where(seen, scores, -mx.inf)
