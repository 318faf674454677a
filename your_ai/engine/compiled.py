"""What is compiled for each shape of a batch, and what is forgotten of it.

mx.compile keeps what it compiled for every shape and never evicts it; mx.clear_cache does
not touch it, and no gauge of MLX counts it. A graph of a long row takes some 10 MB of the
process, and data has a dozen lengths: so only as many are kept as there is room for.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

from your_ai.data.batches import Batch

T = TypeVar("Made")


class GraphShape(NamedTuple):
    """What a graph is compiled for: B rows of T tokens, S targets, and `Batch.max_segment_tokens`.

    trained: gradients are computed.
    """

    rows: int
    tokens: int
    targets: int = 0
    max_segment_tokens: int | None = None
    trained: bool = False


def shape_of(batch: Batch, trained: bool = False) -> GraphShape:
    return GraphShape(*batch.tokens.shape, len(batch.targets), batch.max_segment_tokens, trained)


class Graphs:
    """What was compiled, by shape; the shapes that were used least recently go first.

    size_of: bytes of the process that all of a shape take, as estimated; room_bytes: for all
    shapes together. That in use is kept, whatever it takes.
    """

    def __init__(
        self,
        size_of: Callable[[GraphShape], float] = lambda _: 0,
        room_bytes: float = math.inf,
    ) -> None:
        self.size_of, self.room_bytes = size_of, room_bytes
        self._held: OrderedDict[GraphShape, dict[Hashable, Any]] = OrderedDict()

    def get(self, shape: GraphShape, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for a shape under `key`; made now where it was not, or was forgotten."""
        if shape not in self._held:
            room = self.room_bytes - self.size_of(shape)
            while self._held and sum(map(self.size_of, self._held)) > room:
                self._held.popitem(last=False)
            self._held[shape] = {}
        self._held.move_to_end(shape)
        held = self._held[shape]
        if key not in held:
            held[key] = make()
        return held[key]

    def drop(self) -> None:
        """Forget everything."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)
