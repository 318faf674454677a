"""The states of an optimizer for each parameter: in float32 or 8 bits, in memory or on disk."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import mlx.core as mx

from your_ai.engine.spill import NamedArrays
from your_ai.memory.sizes import FEWEST_QUANTIZED
from your_ai.training.quantized_states import Quantized, dequantize, quantize

State = dict[str, mx.array]  # the arrays of one parameter, by the names that MLX gives them
CODES, SCALES = "_codes", "_scales"  # of a quantized array, after its name


@dataclass(frozen=True)
class StateForm:
    """Which arrays of a state are stored in 8 bits; those of less than FEWEST_QUANTIZED values stay
    in float32.

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
    "adamw": StateForm(signed=("m",), squares=("v",)),
    "adam": StateForm(signed=("m",), squares=("v",)),
    "muon": StateForm(signed=("v",)),
    "lion": StateForm(signed=("m",)),
}
"""By optimizer, those that keep arrays of the size of the parameter."""


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
