"""A compiled function that can be forgotten.

mx.compile keeps what it compiled for every shape and never evicts it; mx.clear_cache does
not touch it. Dropping the compiled function frees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx


class Compiled:
    """`function` through mx.compile, which compiles it again after `drop`."""

    def __init__(self, function: Callable, inputs: list[Any] | None = None) -> None:
        self.function, self.inputs = function, inputs
        self._compiled: Callable | None = None

    def __call__(self, *args: Any) -> Any:
        if self._compiled is None:
            self._compiled = mx.compile(self.function, inputs=self.inputs)
        return self._compiled(*args)

    def drop(self) -> None:
        self._compiled = None
