"""How the trunk calls a block on a tile of a row: as in chunked prefill, with a TileCache.

Arrays that depend on the length of the row are recorded for the row itself, and cut.

Shapes: B rows, T tokens per row, n tokens of a tile, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.nets.block_calls import (
    Call,
    Given,
    Mask,
    StateSlot,
    given_name,
    leaves,
    mapped,
)
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.parts import Parts
from your_ai.nets.tiled_attention import TileCache

CACHE = "cache"  # the argument of a block that takes a KV cache


@dataclass(frozen=True)
class TileCall:
    """The call of a block on a tile of rows of one length."""

    args: tuple[Any, ...]
    """As of `Call`."""
    keywords: tuple[tuple[str, Any], ...]
    leaf: int
    """The index of the hidden states in the leaves of the block's result."""
    mask: Mask
    cache_place: int
    """Of the argument `cache` among the positional ones."""
    constants: Arrays = field(default_factory=dict, repr=False)
    """By the names in `Given`, of the whole row."""
    axes: Mapping[str, int | None] = field(default_factory=dict, repr=False)
    """The axis of tokens of each constant; None if it has none."""

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls that pass the same, but for the constants."""
        return repr((self.args, self.keywords, self.leaf, self.cache_place))

    def given(self, start: int, stop: int) -> Arrays:
        """The constants of the tokens from `start` to `stop`."""
        return {
            name: array if axis is None else array[(slice(None),) * axis + (slice(start, stop),)]
            for name, array in self.constants.items()
            for axis in [self.axes[name]]
        }

    def run(
        self, block: nn.Module, hidden: mx.array, cache: TileCache, given: Arrays
    ) -> mx.array:  # fmt: skip
        """(B, n, D) -> (B, n, D); the attention of `block` must know a TileCache."""

        def filled(value: Any) -> Any:
            if isinstance(value, StateSlot):
                return hidden
            if isinstance(value, Given):
                return given[value.name]
            return "causal" if isinstance(value, Mask) else value

        args = list(mapped(filled, self.args))
        keywords = {name: mapped(filled, value) for name, value in self.keywords}
        if self.cache_place < len(args):
            args[self.cache_place] = cache
        else:
            keywords[CACHE] = cache
        result: mx.array = leaves(block(*args, **keywords))[self.leaf]
        return result


def tile_calls(parts: Parts, tokens: int) -> list[TileCall | None]:
    """The call of each block on tiles of rows of `tokens` tokens; None for blocks that get more
    than hidden states, masks and constants, or have no cache."""
    if parts.has_context:
        return [None] * len(parts.blocks)
    recorded, longer = (
        parts.trunk.record(mx.zeros((1, n), mx.int32), parts.wiring.answer(1, n)).args
        for n in (tokens, tokens + 1)
    )
    calls = zip(parts.calls(tokens), parts.blocks, recorded, longer, strict=True)
    return [
        tile_call(call, block, leaves(given), leaves(more)) for call, block, given, more in calls
    ]


def axis_of_tokens(array: mx.array, longer: mx.array) -> int | None:
    """The axis along which an array of one more token is longer; None if there is none.

    Raises ValueError if tokens are not in one axis.
    """
    pairs = enumerate(zip(array.shape, longer.shape, strict=True))
    differ = [axis for axis, (size, other) in pairs if size != other]
    if len(differ) > 1:
        raise ValueError("tokens are in several axes")
    return differ[0] if differ else None


def tile_call(call: Call, block: nn.Module, given: list[Any], longer: list[Any]) -> TileCall | None:
    """given, longer: the leaves of the arguments for rows of some tokens, and of one more."""
    names = list(inspect.signature(type(block).__call__).parameters)
    plain = call.state.is_plain and call.after.is_plain and len(call.passed) == 1
    if CACHE not in names or not plain or not call.passed[0][0]:
        return None
    used = {slot.name for slot in call.slots if isinstance(slot, Given)}
    arrays = {given_name(at): pair for at, pair in enumerate(zip(given, longer, strict=True))}
    try:
        axes = {name: axis_of_tokens(*arrays[name]) for name in arrays if name in used}
    except ValueError:
        return None
    return TileCall(
        call.args, call.keywords, call.passed[0][1], call.mask or Mask(),
        names.index(CACHE) - 1, {name: arrays[name][0] for name in axes}, axes,
    )  # fmt: skip
