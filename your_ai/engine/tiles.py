"""Run a block of a model on tiles of tokens, forward and backward.

A block is cut at its attention: from the hidden states of a tile to its queries, keys and values,
and from the output of attention to the output of the block. Only attention needs other tokens, and
it meets them tile by tile. So the work of a block takes the memory of a tile, beside the hidden
states of the row and the block's keys and values, and their gradients.

The backward pass computes the keys and values of all tiles again, then goes from the last tile to
the first: no later tile adds to the gradients of the keys and values of a tile that it reaches.

Shapes: B rows, T tokens per row, n tokens of a tile, D hidden size, H query heads, K key heads,
d head size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.engine.compiled import Compile, Graphs, GraphShape
from your_ai.engine.mlp import replace_mlps
from your_ai.engine.spill import SavedInputs
from your_ai.errors import suppress_model_errors
from your_ai.memory.sizes import tiles_of
from your_ai.nets.block_calls import Mask
from your_ai.nets.mixers.replace import replace_mixers
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys, TokenKeys
from your_ai.nets.parts import Parts, empty, filled, put, skeleton
from your_ai.nets.tile_calls import TileCall, tile_calls
from your_ai.nets.tiled_attention import PairFunction, Tile, TileCache, TiledAttention

TRIED = (slice(0, 2), slice(2, 4), slice(4, 5))  # tiles of the row that tests a block
PROMISED = 1e-3  # difference of a block on tiles from the whole block, relative
HALF_PRECISION = 5e-2  # the same, in 16 bits
Reach = int | None


class Projected(NamedTuple):
    """The arrays that a block hands to its attention for a tile."""

    q: mx.array
    """(B, H, n, d)"""
    k: mx.array
    """(B, K, n, d)"""
    v: mx.array
    sinks: mx.array | None = None
    """(H,)"""


@dataclass(frozen=True)
class TileProgram:
    """The functions of blocks that have the same structure and are called in the same way.

    Each takes (frozen, trained, hidden, inputs): the arrays of the block, (B, n, D), and what else
    depends on the tile, by name.
    """

    scales: set[float]
    """Of attention; found while `project` is traced."""
    project: Callable[..., Projected]
    keys: Callable[..., tuple[mx.array, mx.array]]
    """(...) -> keys and values"""
    finish: Callable[..., mx.array]
    """(..., output of attention) -> output of the block"""
    finish_back: Callable[..., tuple[Arrays, mx.array, mx.array]]
    """(..., output of attention, cotangent) -> gradients, cotangents of `hidden` and of the output
    of attention"""
    project_back: Callable[..., tuple[Arrays, mx.array | None]]
    """(..., cotangents of queries, keys and values) -> gradients, cotangent of `hidden`"""
    project_lowest: Callable[..., tuple[Arrays, mx.array | None]]
    """Same as `project_back`, but without the cotangent."""

    @property
    def scale(self) -> float:
        (scale,) = self.scales
        return scale


def tile_program(
    block: nn.Module, call: TileCall, dropout_keys: DropoutKeys, compiled: Compile
) -> TileProgram:
    """Make the program of a block.

    Raises Untiled, or any error of the architecture's code, if the block cannot be cut.
    """
    template = skeleton(block)
    replace_mixers(template)
    replace_mlps(template, dropout_keys)
    empty(template)
    scales: set[float] = set()

    def run(
        frozen: Arrays, trained: Arrays, hidden: mx.array, inputs: Arrays,
        answer: mx.array | None = None,
    ) -> tuple[mx.array, TileCache]:  # fmt: skip
        keys = TokenKeys(inputs["keys"], inputs["places"]) if "keys" in inputs else None
        dropout_keys.set(keys)
        try:
            cache = TileCache(inputs["offset"], answer)
            with filled(template, frozen, trained):
                output = call.run(template, hidden, cache, inputs)
        finally:
            dropout_keys.set(None)
        scales.add(cache.call.scale)
        return output, cache

    def project(*given: Any) -> Projected:
        q, k, v, _, sinks = run(*given)[1].call
        return Projected(q, k, v, sinks)

    def finish(*given: Any) -> mx.array:
        return run(*given)[0]

    def finish_back(
        frozen: Arrays, trained: Arrays, hidden: mx.array, inputs: Arrays,
        attended: mx.array, cotangent: mx.array,
    ) -> tuple[Arrays, mx.array, mx.array]:  # fmt: skip
        names = list(trained)

        def of(hidden: mx.array, attended: mx.array, *values: mx.array) -> mx.array:
            own = dict(zip(names, values, strict=True))
            return finish(frozen, own, hidden, inputs, attended)

        primals = [hidden, attended, *trained.values()]
        _, (grad, of_attended, *grads) = mx.vjp(of, primals, [cotangent])
        return dict(zip(names, grads, strict=True)), grad, of_attended

    def project_back(
        lowest: bool, frozen: Arrays, trained: Arrays, hidden: mx.array, inputs: Arrays,
        *cotangents: mx.array,
    ) -> tuple[Arrays, mx.array | None]:  # fmt: skip
        names = list(trained)

        def of(hidden: mx.array, *values: mx.array) -> tuple[mx.array, ...]:
            return project(frozen, dict(zip(names, values, strict=True)), hidden, inputs)[:3]

        _, (grad, *grads) = mx.vjp(of, [hidden, *trained.values()], list(cotangents))
        return dict(zip(names, grads, strict=True)), None if lowest else grad

    return TileProgram(
        scales,
        compiled(project),
        compiled(lambda *given: project(*given)[1:3]),
        compiled(finish),
        compiled(finish_back),
        compiled(partial(project_back, False)),
        compiled(partial(project_back, True)),
    )


@dataclass(frozen=True)
class TiledBlock:
    """A block on the tiles of rows of one shape."""

    program: TileProgram
    call: TileCall
    tiles: list[slice]
    compiled: Callable[[Hashable, PairFunction], PairFunction]
    """(key, function) -> the function, compiled once per key."""

    def forward(
        self, frozen: Arrays, trained: Arrays, hidden: list[mx.array], extras: Arrays, reach: Reach
    ) -> None:
        """Replace `hidden`, (B, n, D) of each tile, with the output of the block."""
        tiles = self._places(extras)
        keys: list[mx.array] = []
        values: list[mx.array] = []
        for own, tile in enumerate(tiles):
            given = (frozen, trained, hidden[own], self._inputs(extras, tile))
            q, k, v, sinks = self.program.project(*given)
            mx.eval(q, k, v)
            keys.append(k)
            values.append(v)
            attended, _ = self._attention(reach).forward(q, own, keys, values, tiles, sinks)
            hidden[own] = self.program.finish(*given, attended)
            del given, q, k, v, attended
            mx.eval(hidden[own])

    def backward(
        self, frozen: Arrays, trained: Arrays, inputs: SavedInputs, extras: Arrays, reach: Reach,
        cotangents: list[mx.array], lowest: bool,
    ) -> Arrays:  # fmt: skip
        """The gradients of the trained arrays. Replaces `cotangents`, of the output, with those of
        the input, unless the block is the lowest; takes the input, tile by tile, off the stack.
        """
        tiles = self._places(extras)
        keys: list[mx.array] = []
        values: list[mx.array] = []
        for own, tile in enumerate(tiles):
            hidden = inputs.below_top(len(tiles) - 1 - own)
            k, v = self.keys_of(frozen, trained, hidden, extras, tile)
            mx.eval(k, v)
            keys.append(k)
            values.append(v)
        del hidden, k, v
        attention = self._attention(reach)
        grads_k = [mx.zeros(k.shape, mx.float32) for k in keys]
        grads_v = [mx.zeros(v.shape, mx.float32) for v in values]
        project_back = self.program.project_lowest if lowest else self.program.project_back
        total: Arrays = {}
        for own in reversed(range(len(tiles))):
            given = (frozen, trained, inputs.pop(), self._inputs(extras, tiles[own]))
            q, _, _, sinks = self.program.project(*given)
            attended, sums = attention.forward(q, own, keys, values, tiles, sinks)
            found, of_hidden, of_attended = self.program.finish_back(
                *given, attended, cotangents.pop(own)
            )
            total = summed(total, found)
            mx.eval(total, of_hidden, of_attended)
            of_q = attention.backward(
                q, own, keys, values, tiles, attended, sums, of_attended, grads_k, grads_v
            )
            del q, attended, sums, of_attended
            of_k = grads_k.pop().astype(keys.pop().dtype)
            of_v = grads_v.pop().astype(values.pop().dtype)
            found, rest = project_back(*given, of_q, of_k, of_v)
            total = summed(total, found)
            cotangents.insert(own, of_hidden if rest is None else of_hidden + rest)
            del given, found, of_hidden, rest, of_q, of_k, of_v
            mx.eval(total, cotangents[own])
        return {name: grad.astype(trained[name].dtype) for name, grad in total.items()}

    def keys_of(
        self, frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Arrays, tile: Tile
    ) -> tuple[mx.array, mx.array]:
        """The keys and values of a tile, which are in memory until the last tile is done."""
        return self.program.keys(frozen, trained, hidden, self._inputs(extras, tile))

    def _places(self, extras: Arrays) -> list[Tile]:
        segments = extras.get("segments")
        return [
            Tile(t.start, t.stop, None if segments is None else segments[:, t]) for t in self.tiles
        ]

    def _inputs(self, extras: Arrays, tile: Tile) -> Arrays:
        return tile_inputs(self.call, extras, tile)

    def _attention(self, reach: Reach) -> TiledAttention:
        """reach: the maximum length of a text in a packed row; no key is farther away."""
        found = [n for n in (self.call.mask.window, reach) if n is not None]
        mask = Mask(min(found, default=None), None, self.call.mask.chunk)
        return TiledAttention(self.program.scale, mask, self.compiled)


def tile_inputs(call: TileCall, extras: Arrays, tile: Tile) -> Arrays:
    """The arguments of a block for a tile, beside the hidden states.

    extras: of the whole rows; arrays of (B, T), or (B, 1) or (1, T) that broadcast.
    """
    found = call.given(tile.start, tile.stop)
    for name, array in extras.items():
        if name != "segments":
            found[name] = array if array.shape[1] == 1 else array[:, tile.start : tile.stop]
    return found | {"offset": mx.array(tile.start)}


def summed(total: Arrays, found: Arrays) -> Arrays:
    """The sums of the gradients of tiles, in float32."""
    if not total:
        return {name: grad.astype(mx.float32) for name, grad in found.items()}
    return {name: total[name] + grad.astype(mx.float32) for name, grad in found.items()}


class TiledBlocks:
    """The blocks of a model that can run on tiles.

    kinds: of the blocks; equal ones share programs.
    """

    def __init__(
        self,
        parts: Parts,
        dropout_keys: DropoutKeys,
        graphs: Graphs,
        kinds: list[Hashable],
    ) -> None:
        self.parts, self.dropout_keys = parts, dropout_keys
        self.graphs, self.kinds = graphs, kinds
        self._calls: dict[int, list[TileCall | None]] = {}
        self._works: dict[Hashable, bool] = {}

    def of(
        self, index: int, shape: GraphShape, frozen: Arrays, trained: Arrays
    ) -> TiledBlock | None:
        """Block `index` on the tiles of rows of a shape; None if it runs on whole rows.

        frozen, trained: the arrays of the block, with which its kind is tested once.
        """
        tiles = tiles_of(shape.rows, shape.tokens)
        if len(tiles) == 1:
            return None
        call = self._call(index, shape.tokens)
        if call is None or not self._does_work(index, call, frozen, trained):
            return None
        key = ("tiles", self.kinds[index], call.key)
        program = self.graphs.get(shape, key, lambda: self._program(index, call))

        def compiled(key: Hashable, function: PairFunction) -> PairFunction:
            return self.graphs.get(shape, key, lambda: self.graphs.compile(function))

        return TiledBlock(program, call, tiles, compiled)

    def _call(self, index: int, tokens: int) -> TileCall | None:
        if tokens not in self._calls:
            self._calls[tokens] = [None] * len(self.kinds)
            with suppress_model_errors():  # code that wants other lengths
                self._calls[tokens] = tile_calls(self.parts, tokens)
        return self._calls[tokens][index]

    def _program(self, index: int, call: TileCall) -> TileProgram:
        block = self.parts.blocks[index]
        return tile_program(block, call, self.dropout_keys, self.graphs.compile)

    def _does_work(self, index: int, call: TileCall, frozen: Arrays, trained: Arrays) -> bool:
        key = (self.kinds[index], call.key)
        if key not in self._works:
            self._works[key] = False
            with suppress_model_errors():  # an architecture with another layout
                self._works[key] = self._agrees(index, frozen, trained)
        return self._works[key]

    def _agrees(self, index: int, frozen: Arrays, trained: Arrays) -> bool:
        """Return whether a block computes the same on tiles as on a whole row, without windows."""
        tokens = TRIED[-1].stop
        call, whole = self._tried(tokens)[index], self.parts.calls(tokens)[index]
        if call is None:
            return False
        dtype = whole.state.arrays[0].dtype
        hidden = mx.random.normal((1, tokens, whole.state.features), key=mx.random.key(0))
        hidden = hidden.astype(dtype)
        functions: dict[Hashable, PairFunction] = {}

        def compiled(key: Hashable, function: PairFunction) -> PairFunction:
            return functions.setdefault(key, self.graphs.compile(function))

        tiled = TiledBlock(self._program(index, call), call, list(TRIED), compiled)
        found = [hidden[:, tile] for tile in TRIED]
        tiled.forward(frozen, trained, found, {}, None)
        block = skeleton(self.parts.blocks[index])
        put(block, frozen)
        put(block, trained)
        wanted = whole.run(block, hidden, None).astype(mx.float32)
        distance = mx.square(mx.concatenate(found, axis=1).astype(mx.float32) - wanted).sum()
        tolerance = PROMISED if dtype == mx.float32 else HALF_PRECISION
        return bool(distance <= tolerance**2 * mx.square(wanted).sum())

    def _tried(self, tokens: int) -> list[TileCall | None]:
        return tile_calls(self.parts, tokens)


def joined(tiles: list[mx.array]) -> mx.array:
    """(B, T, D) of tiles, which are taken from the list."""
    whole = tiles[0] if len(tiles) == 1 else mx.concatenate(tiles, axis=1)
    tiles.clear()
    return whole


def cut(arrays: list[mx.array], tiles: list[slice]) -> list[mx.array]:
    """(B, n, D) of each tile, of an array that may be cut already, and is taken from the list.

    The tiles are copies: a part of an array would keep all of it in memory.
    """
    if len(arrays) == len(tiles):
        return arrays
    whole = joined(arrays)
    found = [mx.take(whole, mx.arange(tile.start, tile.stop), axis=1) for tile in tiles]
    mx.eval(found)
    return found
