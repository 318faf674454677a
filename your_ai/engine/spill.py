"""Arrays on disk: block inputs between the forward and the backward pass, gradients, and the
states of the optimizer."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import mlx.core as mx

from your_ai.errors import RESUME, RunError
from your_ai.files import read_into, remedy_of, write_at
from your_ai.nets.mlx_types import DTYPE_NAMES, memory_of

COPIED_BYTES = 1 << 20  # of a file, at a time
ALIGNMENT = 8  # of a safetensors header


class SavedInputs(Protocol):
    """A stack of block inputs, from which they are taken."""

    def pop(self) -> mx.array: ...

    def below_top(self, count: int) -> mx.array:
        """The array with `count` others above it; it stays on the stack."""


class Inputs(SavedInputs, Protocol):
    """The same while it is filled, too: a list, or one on disk."""

    def append(self, array: mx.array) -> None: ...

    def clear(self) -> None: ...


class Stack(list[mx.array]):
    """A stack of arrays in memory, with the methods of `Spilled`."""

    def below_top(self, count: int) -> mx.array:
        return self[-1 - count]


class ArrayFile:
    """An unnamed temporary file of arrays, which is deleted when the process ends.

    folder: the folder of the file; created when the first array is written.
    contents: what the arrays are, for errors.

    All methods raise RunError if the file cannot be written or read.
    """

    def __init__(self, folder: Path, contents: str) -> None:
        self.folder, self.contents = folder, contents
        self._file: BinaryIO | None = None

    def write(self, array: mx.array, offset: int) -> None:
        data = bytes_of(array)
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 (open as long as this is)
                    dir=self.folder, buffering=0
                )
            write_at(self._file.fileno(), data, offset)
        except OSError as error:
            raise self._failure("written", error) from error

    def read(self, shape: tuple[int, ...], dtype: mx.Dtype, offset: int) -> mx.array:
        data = mx.zeros(dtype.size * math.prod(shape), mx.uint8)
        self.read_into(memory_of(data), offset)
        return data.view(dtype).reshape(shape)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a buffer of bytes."""
        assert self._file is not None
        try:
            if read_into(self._file.fileno(), buffer, offset) < len(buffer):
                raise OSError(errno.EIO, "the file ended early")
        except OSError as error:
            raise self._failure("read", error) from error

    def truncate(self) -> None:
        """Free the disk space of all arrays."""
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def _failure(self, done: str, error: OSError) -> RunError:
        return RunError(
            f"{self.folder}: {self.contents} cannot be {done} ({error.strerror}); "
            f"{remedy_of(error)}, {RESUME}"
        )


def bytes_of(array: mx.array) -> memoryview:
    """The bytes of an array; without a copy if it was evaluated and is contiguous."""
    if array.dtype != mx.bfloat16:  # of which no memoryview can be made
        data = memory_of(array)
        if data.c_contiguous and array.ndim and array.size:
            return data.cast("B")
    return memory_of(mx.contiguous(array).reshape(-1).view(mx.uint8))


class Spilled:
    """A stack of arrays in a file. Raises RunError if the file cannot be written or read."""

    def __init__(self, folder: Path) -> None:
        self._file = ArrayFile(folder, "block inputs")
        self._held: list[tuple[tuple[int, ...], mx.Dtype]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def append(self, array: mx.array) -> None:
        self._file.write(array, self._bytes)
        self._held.append((array.shape, array.dtype))
        self._bytes += array.nbytes

    def pop(self) -> mx.array:
        array = self.below_top(0)
        self._held.pop()
        self._bytes -= array.nbytes
        return array

    def below_top(self, count: int) -> mx.array:
        """The array with `count` others above it; it stays on the stack."""
        sizes = [dtype.size * math.prod(shape) for shape, dtype in self._held[-1 - count :]]
        shape, dtype = self._held[-1 - count]
        return self._file.read(shape, dtype, self._bytes - sum(sizes))

    def clear(self) -> None:
        """Remove arrays left over from a failed step, and free their disk space."""
        self._held.clear()
        self._bytes = 0
        self._file.truncate()


class Place(NamedTuple):
    """The place of an array in a file."""

    offset: int
    """In bytes."""
    shape: tuple[int, ...]
    dtype: mx.Dtype

    @property
    def nbytes(self) -> int:
        return self.dtype.size * math.prod(self.shape)


def header_of(places: Mapping[str, Place], library: str = "mlx") -> bytes:
    """The beginning of a safetensors file with arrays in these places after it.

    library: whose layout the arrays have, mlx or pt.
    """
    entries = {
        name: {
            "dtype": DTYPE_NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [place.offset, place.offset + place.nbytes],
        }
        for name, place in places.items()
    }
    header = json.dumps({"__metadata__": {"format": library}, **entries}).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    return len(header).to_bytes(8, "little") + header


class NamedArrays:
    """Arrays by name in a file, one after the other; each keeps its place, shape and dtype.

    Raises RunError if the file cannot be written or read.
    """

    def __init__(self, folder: Path, contents: str) -> None:
        self._file = ArrayFile(folder, contents)
        self.places: dict[str, Place] = {}
        self._bytes = 0

    def put(self, name: str, array: mx.array) -> None:
        """Write an array, over the one that has this name."""
        place = self.places.get(name)
        if place is None:
            place = self.places[name] = Place(self._bytes, array.shape, array.dtype)
            self._bytes += place.nbytes
        if (array.shape, array.dtype) != (place.shape, place.dtype):
            raise ValueError(f"{name}: its place is for {place.dtype} {place.shape}")
        self._file.write(array, place.offset)

    def get(self, name: str) -> mx.array:
        place = self.places[name]
        return self._file.read(place.shape, place.dtype, place.offset)

    def save(self, path: Path) -> None:
        """Write all arrays as a safetensors file, a part at a time. Raises OSError if it cannot be
        written."""
        with path.open("wb") as file:
            file.write(header_of(self.places))
            for start in range(0, self._bytes, COPIED_BYTES):
                part = memoryview(bytearray(min(COPIED_BYTES, self._bytes - start)))
                self._file.read_into(part, start)
                file.write(part)
