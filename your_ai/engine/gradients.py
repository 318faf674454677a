"""The gradients of a step, summed over its micro-batches: in memory, or on disk.

An engine that computes block by block adds the gradients of a block as soon as they are there. On
disk they never exist together in memory, however many blocks and micro-batches there are, and the
update reads those of a few parameters at a time. Their norm is known before the update begins, so
that gradients are clipped, and a step that is not finite changes nothing.

The gradients of a micro-batch have the dtype of the parameters. Sums are in float32, because each
addition in bfloat16 would round the sum again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten, tree_unflatten

from your_ai.engine.spill import NamedArrays
from your_ai.nets.mlx_types import Arrays

FLOAT32_BYTES = mx.float32.size


class Gradients(Protocol):
    """The gradients of the trained parameters, by name."""

    def add(self, grads: Arrays, *also: Any) -> None:
        """Add the gradients of some parameters to those of earlier micro-batches.

        grads is emptied, so that arrays are freed. also: arrays that are evaluated with them.
        """

    def sizes(self) -> dict[str, int]:
        """Bytes in float32 by name, in the order of the model's parameters."""

    def squares(self) -> Iterator[mx.array]:
        """() float32, the sum of squares of each parameter's gradient, in the order of `sizes`."""

    def take(self, names: Iterable[str]) -> Arrays:
        """Return the gradients of some parameters, and forget them."""

    def clear(self) -> None:
        """Forget all."""


class HeldGradients:
    """Gradients in memory."""

    def __init__(self, grads: Any = None) -> None:
        """grads: a tree of gradients to begin with."""
        self.arrays: Arrays = dict(tree_flatten(grads)) if grads is not None else {}

    def add(self, grads: Arrays, *also: Any) -> None:
        sums: Arrays = {}
        for name in list(grads):
            grad, total = grads.pop(name), self.arrays.pop(name, None)
            sums[name] = grad if total is None else total.astype(mx.float32) + grad
            del grad, total
        mx.eval(sums, *also)
        self.arrays |= sums

    def sizes(self) -> dict[str, int]:
        return {name: FLOAT32_BYTES * self.arrays[name].size for name in in_order(self.arrays)}

    def squares(self) -> Iterator[mx.array]:
        return (square_of(self.arrays[name]) for name in in_order(self.arrays))

    def take(self, names: Iterable[str]) -> Arrays:
        return {name: self.arrays.pop(name) for name in names}

    def clear(self) -> None:
        self.arrays.clear()


class SpilledGradients:
    """Gradients on disk, in float32, in an unnamed file in `folder`.

    All methods but `clear` raise RunError if the file cannot be written or read.
    """

    def __init__(self, folder: Path) -> None:
        self._file = NamedArrays(folder, "gradients")
        self._squares: dict[str, mx.array] = {}

    def add(self, grads: Arrays, *also: Any) -> None:
        mx.eval(grads, *also)
        for name in list(grads):
            grad = grads.pop(name).astype(mx.float32)
            if name in self._squares:
                grad = self._file.get(name) + grad
            square = square_of(grad)
            mx.eval(grad, square)
            self._file.put(name, grad)
            self._squares[name] = square

    def sizes(self) -> dict[str, int]:
        return {name: self._file.places[name].nbytes for name in in_order(self._squares)}

    def squares(self) -> Iterator[mx.array]:
        return (self._squares[name] for name in in_order(self._squares))

    def take(self, names: Iterable[str]) -> Arrays:
        found = {}
        for name in names:
            del self._squares[name]
            found[name] = self._file.get(name)
        return found

    def clear(self) -> None:
        self._squares.clear()


def gradients_in(folder: Path | None) -> Gradients:
    """Gradients on disk in `folder`, or without one in memory."""
    return HeldGradients() if folder is None else SpilledGradients(folder)


def square_of(grad: mx.array) -> mx.array:
    """() float32"""
    return mx.square(grad.astype(mx.float32)).sum()


def in_order(names: Iterable[str]) -> list[str]:
    """Parameter names in the order of the model's tree: block 2 before block 10."""
    return [name for name, _ in tree_flatten(tree_unflatten([(name, name) for name in names]))]
