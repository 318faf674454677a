"""A cache of the compiled graphs of each batch shape, with eviction.

mx.compile keeps a graph for every shape and never evicts it. mx.clear_cache does not free it,
and no memory counter of MLX includes it. The graph of a long row takes about 10 MB of process
memory, and data has about a dozen lengths. So this cache keeps only the graphs that fit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import mlx.core as mx
import mlx.nn as nn

from your_ai.data.batches import Batch
from your_ai.nets.adapter_kinds import normed_layers, use_any_norms
from your_ai.nets.parts import skeleton

P = ParamSpec("P")
T = TypeVar("T")
TRIED_TOKENS = 4  # length of the row that tests whether a model can be compiled


class Compile(Protocol):
    """Compiles a function, if the model can be compiled."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T]: ...


class GraphShape(NamedTuple):
    """The shape that a graph is compiled for."""

    rows: int
    """B"""
    tokens: int
    """T, tokens per row."""
    targets: int = 0
    """S"""
    max_segment_tokens: int | None = None
    """As in `Batch`."""
    trained: bool = False
    """Whether the graph computes gradients."""


def shape_of(batch: Batch, trained: bool = False) -> GraphShape:
    rows, tokens = batch.tokens.shape
    return GraphShape(rows, tokens, len(batch.targets), batch.max_segment_tokens, trained)


class Graphs:
    """Compiled graphs by shape. The least recently used shapes are evicted first.

    size_of: estimated process memory of all graphs of a shape, in bytes.
    room_bytes: memory limit for all shapes together. The shape in use is always kept.

    With `compiles` set to False, functions run as they are.
    """

    compiles = True

    def __init__(
        self,
        size_of: Callable[[GraphShape], float] = lambda _: 0,
        room_bytes: float = math.inf,
    ) -> None:
        self.size_of, self.room_bytes = size_of, room_bytes
        self._held: OrderedDict[GraphShape, dict[Hashable, Any]] = OrderedDict()

    def get(self, shape: GraphShape, key: Hashable, make: Callable[[], T]) -> T:
        """Return the graph of a shape under `key`; make it if it is missing or was evicted."""
        if shape not in self._held:
            room = self.room_bytes - self.size_of(shape)
            while self._held and sum(map(self.size_of, self._held)) > room:
                self._held.popitem(last=False)
            self._held[shape] = {}
        self._held.move_to_end(shape)
        held = self._held[shape]
        if key not in held:
            held[key] = make()
        found: T = held[key]
        return found

    def compile(self, function: Callable[P, T], inputs: Any = None) -> Callable[P, T]:
        """`mx.compile`, unless this model cannot be compiled."""
        return mx.compile(function, inputs=inputs) if self.compiles else function

    def drop(self) -> None:
        """Evict everything."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


def can_compile(model: nn.Module) -> bool:
    """Return whether the model's code builds a graph without reading values of arrays.

    Some routers of experts call `tolist`, which fails while a function is compiled.
    """
    try:
        twin = skeleton(model)
        with use_any_norms(normed_layers(twin)):
            mx.compile(twin)(mx.arange(TRIED_TOKENS)[None])  # never evaluated
    except ValueError as error:
        return "[eval]" not in str(error)
    return True
