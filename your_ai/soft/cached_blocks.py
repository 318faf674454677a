"""One block against cached keys and values, as a function that MLX can differentiate.

The blocks are the model's own. They are called with a cache object whose keys and values are
arguments, and with the arguments that the trunk would pass, which are recorded once. All rows
are padded on the left, so that a column has the same place in the cache in every row.

The cache has room for all N positions from the beginning, and a mask hides the places that are
not filled yet, and those of the column itself. So all columns of a width share one graph.

Shapes: B rows, w positions of a column, N positions of the cache, K key heads, d head size,
D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from your_ai.engine.compiled import GraphShape
from your_ai.errors import UserError, suppress_model_errors
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.parts import empty, filled, put, skeleton
from your_ai.nets.row_batches import groups_heads
from your_ai.nets.split import StandIn, replaced
from your_ai.soft.roles import Network

Pair = tuple[mx.array, mx.array]  # keys and values, (B, K, N, d) each
Column = tuple[mx.array, mx.array, mx.array]  # hidden states (B, w, D), and its keys and values


class CacheColumn(NamedTuple):
    """Consecutive positions of all rows."""

    start: int
    stop: int

    @property
    def width(self) -> int:
        """w"""
        return self.stop - self.start

    def of(self, pair: Pair) -> Pair:
        return pair[0][:, :, self.start : self.stop], pair[1][:, :, self.start : self.stop]


class ColumnInputs(NamedTuple):
    """The inputs of a block that depend on the column but not on the hidden states."""

    offsets: mx.array
    """(B,) int32, the position of the column's first token in its row, without the padding."""
    mask: mx.array
    """(B, 1, w, N + w) bool, True where a query sees a key: first those of the cache."""


@dataclass(frozen=True)
class _Mask:
    """In place of a mask."""


@dataclass(frozen=True)
class _Cache:
    """In place of the cache."""


@dataclass(frozen=True)
class CachedCall:
    """The arguments that the trunk passes to a block in generation, after the hidden states."""

    args: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    grouped: bool
    """Whether masks need a dimension for the query heads of a key head (mlx-lm's gemma2)."""

    def run(
        self, block: nn.Module, hidden: mx.array, past: Pair | None, where: ColumnInputs
    ) -> Column:
        """The output of the block, (B, w, D), and the column's own keys and values."""
        cache = _Recall(past, where.offsets)
        mask = where.mask[:, :, None] if self.grouped else where.mask

        def given(value: Any) -> Any:
            if isinstance(value, _Mask):
                return mask
            return cache if isinstance(value, _Cache) else value

        keywords = {name: given(value) for name, value in self.keywords}
        output = block(hidden, *map(given, self.args), **keywords)
        (new,) = cache.new
        return output, *new


class _Recall:
    """A cache of arrays that does not grow: new keys follow all others, whatever the mask says."""

    def __init__(self, past: Pair | None, offsets: mx.array) -> None:
        self.past, self.offset = past, offsets
        self.new: list[Pair] = []

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Pair:
        self.new.append((keys, values))
        if self.past is None:
            return keys, values
        return (
            mx.concatenate([self.past[0], keys], axis=2),
            mx.concatenate([self.past[1], values], axis=2),
        )


class _Witness:
    """In place of a cache while the trunk's calls are recorded. It knows the masks it made."""

    def __init__(self) -> None:
        self.offset = mx.zeros((1,), mx.int32)
        self.masks: list[mx.array] = []

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        if window_size is not None:
            raise TypeError("a sliding window")
        self.masks.append(mx.ones((1, 1, N, N), mx.bool_))
        return self.masks[-1]


def column_inputs(column: CacheColumn, left: mx.array, size: int) -> ColumnInputs:
    """left: (B,) int32, the padding of each row; size: N."""
    keys, queries = mx.arange(size), mx.arange(column.start, column.stop)
    past = (keys >= left[:, None]) & (keys < column.start)
    past = mx.broadcast_to(past[:, None], (len(left), column.width, size))
    own = (queries <= queries[:, None]) & (queries >= left[:, None, None])
    own = own | (queries == queries[:, None])  # padding sees itself: a softmax needs a key
    mask = mx.concatenate([past, own], axis=2)[:, None]
    return ColumnInputs((column.start - left).astype(mx.int32), mask)


@dataclass(frozen=True)
class CachedBlocks:
    """The blocks of a network in generation."""

    network: Network
    calls: list[CachedCall]

    def forward(
        self, index: int, arrays: Arrays, hidden: mx.array, past: Pair, at: ColumnInputs
    ) -> Column:
        """(B, w, D) -> the output, and the keys and values of the column."""
        return self._program(index, hidden, past).forward(
            arrays, self.network.trained(index), hidden, past, at
        )

    def backward(
        self,
        index: int,
        arrays: Arrays,
        hidden: mx.array,
        past: Pair,
        at: ColumnInputs,
        cotangents: Column,
    ) -> tuple[mx.array, Pair, Arrays]:
        """The cotangents of the hidden states, (B, w, D), and of the cache, and the gradients.

        cotangents: of the output, and of the column's own keys and values.
        """
        return self._program(index, hidden, past).backward(
            arrays, self.network.trained(index), hidden, past, at, cotangents
        )

    def _program(self, index: int, hidden: mx.array, past: Pair) -> CachedProgram:
        programs, call = self.network.programs, self.calls[index]
        shape = GraphShape(len(hidden), past[0].shape[2])
        block = self.network.parts.blocks[index]
        key = ("cached", programs.kinds[index], call)
        return programs.graphs.get(shape, key, lambda: cached_program(block, call))


@dataclass(frozen=True)
class CachedProgram:
    """The functions of blocks that have the same structure and are called in the same way."""

    forward: Callable[..., Column]
    backward: Callable[..., tuple[mx.array, Pair, Arrays]]


def cached_program(block: nn.Module, call: CachedCall) -> CachedProgram:
    template = skeleton(block)
    empty(template)

    def run(
        arrays: Arrays, trained: Arrays, hidden: mx.array, past: Pair, at: ColumnInputs
    ) -> Column:
        with filled(template, arrays, trained):
            return call.run(template, hidden, past, ColumnInputs(*at))

    def backward(
        arrays: Arrays, trained: Arrays, hidden: mx.array, past: Pair, at: ColumnInputs,
        cotangents: Column,
    ) -> tuple[mx.array, Pair, Arrays]:  # fmt: skip
        names = list(trained)

        def of(hidden: mx.array, keys: mx.array, values: mx.array, *own: mx.array) -> Any:
            return run(arrays, dict(zip(names, own, strict=True)), hidden, (keys, values), at)

        primals = [hidden, *past, *trained.values()]
        _, (grad, keys, values, *grads) = mx.vjp(of, primals, list(cotangents))
        return grad, (keys, values), dict(zip(names, grads, strict=True))

    return CachedProgram(mx.compile(run), mx.compile(backward))


def cached_blocks(network: Network) -> CachedBlocks:
    """Raises UserError if the model does not keep plain keys and values, or does not use them as
    its own generation does."""
    caches = make_prompt_cache(network.model)
    if len(caches) != len(network.parts.blocks) or any(type(c) is not KVCache for c in caches):
        raise UserError(
            f"{network.label}: its cache is not one of plain keys and values, which columns need"
        )
    with suppress_model_errors():  # an architecture with another layout
        found = CachedBlocks(network, _record(network))
        if _agrees(found):
            return found
    raise UserError(
        f"{network.label}: its blocks, one token at a time, do not compute what it does"
    )


def _record(network: Network) -> list[CachedCall]:
    """The arguments of each block, with marks in place of masks and caches."""
    witnesses = [_Witness() for _ in network.parts.blocks]
    calls: list[CachedCall] = []
    grouped = groups_heads(network.model)

    def known(value: Any) -> Any:
        if isinstance(value, _Witness):
            return _Cache()
        if any(value is mask for witness in witnesses for mask in witness.masks):
            return _Mask()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise TypeError(f"its blocks receive a {type(value).__name__}")

    def record(hidden: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        keywords = tuple((name, known(value)) for name, value in kwargs.items())
        calls.append(CachedCall(tuple(map(known, args)), keywords, grouped))
        return hidden

    blocks = [StandIn(block, record) for block in network.parts.blocks]
    rows = network.embedding.hard(mx.array([[3, 1]]))
    trunk = network.embedding.trunk_of(rows)
    replaced(trunk.module, trunk.path, blocks)(mx.zeros((1, 2), mx.int32), cache=witnesses)
    return calls


def _agrees(found: CachedBlocks) -> bool:
    """Return whether the blocks compute the model's logits for padded rows, column by column."""
    network = found.network
    tokens, paddings = mx.array([[3, 1, 2, 0, 1], [0, 0, 1, 2, 3]]), (0, 2)
    left = mx.array(paddings, mx.int32)
    columns = (CacheColumn(0, 3), CacheColumn(3, 4), CacheColumn(4, 5))
    hidden = network.embedding.after(network.embedding.hard(tokens))
    for index in range(len(found.calls)):
        arrays = network.arrays(index)
        past = empty_cache(found, index, arrays, hidden[:, :1], 5)
        outputs: list[mx.array] = []
        for column in columns:
            at = column_inputs(column, left, 5)
            output, *new = found.forward(
                index, arrays, hidden[:, column.start : column.stop], past, at
            )
            past = stored(past, column, *new)
            outputs.append(output)
        hidden = mx.concatenate(outputs, axis=1)
        mx.eval(hidden)
    ours = network.parts.finished_head(hidden).astype(mx.float32)
    distance, size = mx.array(0.0), mx.array(0.0)
    for row, padding in enumerate(paddings):
        whole = network.model(tokens[row : row + 1, padding:])[0].astype(mx.float32)
        distance += mx.square(ours[row, padding:] - whole).sum()
        size += mx.square(whole).sum()
    # Wrong masks or positions are as far away as other tokens; half precision, up to a tenth.
    tolerance = 1e-3 if hidden.dtype == mx.float32 else 0.2
    return bool(distance <= tolerance**2 * size)


def empty_cache(
    blocks: CachedBlocks, index: int, arrays: Arrays, hidden: mx.array, size: int
) -> Pair:
    """Zeros for the keys and values of a block; hidden: (B, 1, D), only for shape and dtype."""
    block, call = skeleton(blocks.network.parts.blocks[index]), blocks.calls[index]
    put(block, arrays)
    at = column_inputs(CacheColumn(0, 1), mx.zeros((len(hidden),), mx.int32), 0)
    _, *new = call.run(block, hidden, None, at)  # lazy: never evaluated
    keys, values = (mx.zeros((*a.shape[:2], size, a.shape[3]), a.dtype) for a in new)
    return keys, values


def stored(past: Pair, column: CacheColumn, keys: mx.array, values: mx.array) -> Pair:
    """The cache with the keys and values of a column."""
    place = (slice(None), slice(None), slice(column.start, column.stop))
    past[0][place] = keys
    past[1][place] = values
    return past
