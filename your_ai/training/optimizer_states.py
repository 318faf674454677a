"""The states of an optimizer for each parameter: in float32 or 8 bits, in memory or on disk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from your_ai.config.optimizers import OPTIMIZERS
from your_ai.engine.block_files import BlockFiles, Like
from your_ai.engine.spill import NamedArrays
from your_ai.memory.sizes import FEWEST_QUANTIZED
from your_ai.memory.sizes import QUANTIZED_BLOCK as BLOCK

# States of an optimizer in 8 bits, by blockwise dynamic quantization, and parameters in
# bfloat16


DECADES = 7
MANTISSA_BITS = 8  # that select a cell, together with the exponent
TINY = 1e-30
SMALLEST_EXPONENT = -24  # quotients below 2 to this power are in the first cell


class Quantized(NamedTuple):
    """An array in 8 bits, of n values after padding to whole blocks."""

    codes: mx.array
    """(n,) uint8"""
    scales: mx.array
    """(n / BLOCK,) float32, the largest absolute value of each block."""


class Codebook(NamedTuple):
    """The numbers that replace absolute quotients."""

    numbers: mx.array
    """(count,) float32, ascending from 0 to 1."""
    below: mx.array
    """(cells,) uint8, the index of the largest number that is not above the cell's values; if a
    number is in the cell, of the one before it."""


@lru_cache
def codebook(signed: bool) -> Codebook:
    """129 numbers if codes also have a sign, else 256."""
    numbers = [0.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        numbers += (10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2).tolist()
    found = np.array([*numbers, 1.0], np.float32)
    cells = -SMALLEST_EXPONENT << MANTISSA_BITS
    first = (127 + SMALLEST_EXPONENT) << MANTISSA_BITS
    bits = (np.arange(cells + 1) + first).astype(np.uint32) << (23 - MANTISSA_BITS)
    edges = bits.view(np.float32)  # the smallest value of each cell
    below = np.searchsorted(found, edges, side="right") - 1
    assert np.all(np.diff(below) <= 1)
    below[0] = 0
    return Codebook(mx.array(found), mx.array(below.astype(np.uint8)))


def cells_of(sizes: mx.array) -> mx.array:
    """The cell of each quotient, 0 to 1."""
    first = (127 + SMALLEST_EXPONENT) << MANTISSA_BITS
    bits = (sizes.view(mx.uint32) >> (23 - MANTISSA_BITS)).astype(mx.int32)
    return mx.clip(bits - first, 0, -SMALLEST_EXPONENT << MANTISSA_BITS)


def next_of(index: mx.array, numbers: mx.array) -> mx.array:
    """uint8, the index of the next larger number, or of the largest."""
    return index + (index < len(numbers) - 1).astype(mx.uint8)


def quantize(values: mx.array, signed: bool, noise: mx.array | None = None) -> Quantized:
    """Quantize float32 values of any shape; signed: whether some may be below 0.

    noise: values from 0 to 1 in the shape of `values`. With it, a value becomes the number above
    it with the probability that makes the mean exact (stochastic rounding); without it, the
    nearest.
    """
    numbers, below = codebook(signed)
    blocks = in_blocks(values)
    scales = mx.abs(blocks).max(axis=1)
    quotients = blocks / mx.where(scales > 0, scales, 1.0)[:, None]
    sizes = mx.abs(quotients)
    low = below[cells_of(sizes)]
    above = numbers[next_of(low, numbers)]
    low = mx.where(sizes >= above, next_of(low, numbers), low)
    under, high = numbers[low], next_of(low, numbers)
    share = (sizes - under) / mx.maximum(numbers[high] - under, TINY)
    index = mx.where(share > (0.5 if noise is None else in_blocks(noise)), high, low)
    if signed:  # the largest negative number has no code: 127 numbers, 0, and 128 numbers
        index = mx.where(quotients < 0, 127 - mx.minimum(index, 127), 127 + index)
    return Quantized(index.astype(mx.uint8).reshape(-1), scales)


def dequantize(found: Quantized, signed: bool, shape: tuple[int, ...]) -> mx.array:
    """The float32 values, in `shape`."""
    numbers = codebook(signed).numbers
    index = found.codes.reshape(-1, BLOCK).astype(mx.int32)
    quotients = numbers[mx.abs(index - 127)] * mx.sign(index - 127) if signed else numbers[index]
    flat = (quotients * found.scales[:, None]).reshape(-1)
    return flat[: int(np.prod(shape))].reshape(shape)


def in_bfloat16(values: mx.array, noise: mx.array) -> mx.array:
    """Round float32 values to bfloat16 at random, so that the mean is exact.

    bfloat16 is the upper half of float32: `noise`, from 0 to 1 (exclusive) in the shape of
    `values`, is added to the lower half, which is cut off.
    """
    bits = values.view(mx.uint32) + (noise * 2.0**16).astype(mx.uint32)
    return (bits & mx.array(0xFFFF0000, mx.uint32)).view(mx.float32).astype(mx.bfloat16)


def in_blocks(values: mx.array) -> mx.array:
    """(n / BLOCK, BLOCK), padded with zeros."""
    flat = values.reshape(-1)
    return mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)


State = dict[str, mx.array]  # the arrays of one parameter, by the names that MLX gives them
CODES, SCALES = "_codes", "_scales"  # of a quantized array, after its name
KIND = "states"  # the beginning of the names of the files of whole weights


@dataclass(frozen=True)
class StateForm:
    """The arrays of a state that are stored in 8 bits; those of less than FEWEST_QUANTIZED values
    stay in float32.

    A second moment is stored as its square root: its own values would span twice the decades, and
    one that is rounded to 0 makes an update without bounds. It is rounded at random, in proportion,
    because it changes by a thousandth a step, and would stay the same when rounded to the nearest.
    The random numbers depend on the step and the parameter alone.
    """

    signed: tuple[str, ...] = ()
    """Arrays whose values may be negative."""
    squares: tuple[str, ...] = ()
    """Second moments."""

    def stored(self, state: State, key: mx.array) -> State:
        """A state as it is stored; key: (2,) uint32, as from `rounding_key`."""
        found = {}
        for name, array in state.items():
            if array.size < FEWEST_QUANTIZED or name not in (*self.signed, *self.squares):
                found[name] = array
                continue
            if name in self.signed:
                quantized = quantize(array, signed=True)
            else:
                noise = mx.random.uniform(shape=array.shape, key=key)
                quantized = quantize(mx.sqrt(array), signed=False, noise=noise)
            found[name + CODES], found[name + SCALES] = quantized
        return found

    def whole(self, stored: State, shape: tuple[int, ...]) -> State:
        """The state in float32; shape: of the parameter."""
        found = {}
        for name, array in stored.items():
            if not name.endswith((CODES, SCALES)):
                found[name] = array
            elif name.endswith(CODES):
                name = name.removesuffix(CODES)
                quantized = Quantized(array, stored[name + SCALES])
                values = dequantize(quantized, name in self.signed, shape)
                found[name] = values if name in self.signed else mx.square(values)
        return found


FLOAT32 = StateForm()
IN_8_BITS = {
    name: StateForm(signed=kind.signed, squares=kind.squares)
    for name, kind in OPTIMIZERS.items()
    if kind.work_in_8_bits is not None
}


def rounding_key(name: str, step: int) -> mx.array:
    """The key of the random rounding of a parameter's state in a step."""
    return mx.array([zlib.crc32(name.encode()), step], mx.uint32)


class States(Protocol):
    """The stored state of each parameter, by its name."""

    def get(self, name: str) -> State: ...

    def put(self, states: Mapping[str, State], *also: Any) -> None:
        """Replace the states of some parameters. also: arrays that are evaluated with them, if
        they are evaluated."""

    def saved(self, more: Mapping[str, mx.array]) -> dict[str, mx.array] | Callable[[Path], None]:
        """All arrays by name, or a function that writes them to a safetensors file.

        more: arrays that are saved with them.
        """

    def names(self) -> set[str]:
        """The names of all arrays."""

    def clear(self) -> None:
        """Forget all."""


class HeldStates:
    """States in memory."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def get(self, name: str) -> State:
        return self._states[name]

    def put(self, states: Mapping[str, State], *also: Any) -> None:
        self._states.update(states)

    def saved(self, more: Mapping[str, mx.array]) -> dict[str, mx.array]:
        found = dict(more)
        for name, state in self._states.items():  # in the same order after a resume
            found |= {f"{name}.{leaf}": state[leaf] for leaf in sorted(state)}
        return found

    def names(self) -> set[str]:
        return set(self.saved({}))

    def clear(self) -> None:
        self._states.clear()


class FileStates:
    """States of whole weights on disk, in a file for each block whose states are not its first.

    first: makes the first state of a parameter, which is not evaluated. Raises RunError if a file
    cannot be written or read.
    """

    def __init__(self, folder: Path, names: Iterable[str], first: Callable[[str], State]) -> None:
        self._first = first
        states = {name: first(name) for name in names}
        self._leaves = {name: list(state) for name, state in states.items()}
        likes = {
            f"{name}.{leaf}": Like.of(array)
            for name, state in states.items()
            for leaf, array in sorted(state.items())
        }
        self.files = BlockFiles(folder, KIND, likes)
        self.files.clear()

    def get(self, name: str) -> State:
        leaves = self._leaves[name]
        if not all(self.files.has(f"{name}.{leaf}") for leaf in leaves):
            return self._first(name)
        return {leaf: self.files.get(f"{name}.{leaf}") for leaf in leaves}

    def put(self, states: Mapping[str, State], *also: Any) -> None:
        mx.eval(states, *also)
        for name, state in states.items():
            self.files.put({f"{name}.{leaf}": state[leaf] for leaf in self._leaves[name]})

    def saved(self, more: Mapping[str, mx.array]) -> dict[str, mx.array]:
        """Only the arrays beside them: their files are saved alone."""
        return dict(more)

    def names(self) -> set[str]:
        return set()

    def clear(self) -> None:
        self.files.clear()


class SpilledStates:
    """States on disk, in an unnamed file in `folder`.

    Raises RunError if the file cannot be written or read.
    """

    def __init__(self, folder: Path) -> None:
        self._file = NamedArrays(folder, "optimizer states")
        self._leaves: dict[str, list[str]] = {}

    def get(self, name: str) -> State:
        return {leaf: self._file.get(f"{name}.{leaf}") for leaf in self._leaves[name]}

    def put(self, states: Mapping[str, State], *also: Any) -> None:
        mx.eval(states, *also)
        for name, state in states.items():
            self._leaves[name] = list(state)
            for leaf, array in state.items():
                self._file.put(f"{name}.{leaf}", array)

    def saved(self, more: Mapping[str, mx.array]) -> Callable[[Path], None]:
        def save(path: Path) -> None:
            for name, array in more.items():
                self._file.put(name, array)
            self._file.save(path)

        return save

    def names(self) -> set[str]:
        return {f"{name}.{leaf}" for name, leaves in self._leaves.items() for leaf in leaves}

    def clear(self) -> None:
        self._leaves.clear()
