"""Offload block inputs to disk between the forward and the backward pass."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import BinaryIO, Protocol

import mlx.core as mx
import numpy as np

from your_ai.errors import RunError
from your_ai.files import read_at, write_at


class Inputs(Protocol):
    """A stack of block inputs: a list, or one on disk."""

    def append(self, array: mx.array) -> None: ...

    def pop(self) -> mx.array: ...

    def below_top(self, count: int) -> mx.array:
        """The array with `count` others above it; it stays on the stack."""

    def clear(self) -> None: ...


class Stack(list[mx.array]):
    """A stack of arrays in memory, with the methods of `Spilled`."""

    def below_top(self, count: int) -> mx.array:
        return self[-1 - count]


class Spilled:
    """A stack of arrays in an unnamed temporary file, which is deleted when the process ends.

    folder: the folder of the file; created when the first array is added. Raises RunError if
    the file cannot be written or read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file: BinaryIO | None = None
        self._held: list[tuple[tuple[int, ...], mx.Dtype]] = []
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def append(self, array: mx.array) -> None:
        data = memoryview(mx.contiguous(array).view(mx.uint8).reshape(-1))  # numpy lacks bfloat16
        try:
            if self._file is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(  # noqa: SIM115 (open as long as this is)
                    dir=self.folder, buffering=0
                )
            write_at(self._file.fileno(), data, self._bytes)
        except OSError as error:
            raise self._failure("written", error) from error
        self._held.append((array.shape, array.dtype))
        self._bytes += array.nbytes

    def pop(self) -> mx.array:
        array = self.below_top(0)
        self._held.pop()
        self._bytes -= array.nbytes
        return array

    def below_top(self, count: int) -> mx.array:
        """The array with `count` others above it; it stays on the stack."""
        sizes = [dtype.size * int(np.prod(shape)) for shape, dtype in self._held[-1 - count :]]
        shape, dtype = self._held[-1 - count]
        try:
            data = read_at(self._file.fileno(), sizes[0], self._bytes - sum(sizes))
        except OSError as error:
            raise self._failure("read", error) from error
        return mx.array(np.frombuffer(data, np.uint8)).view(dtype).reshape(shape)

    def clear(self) -> None:
        """Remove arrays left over from a failed step, and free their disk space."""
        self._held.clear()
        self._bytes = 0
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def _failure(self, done: str, error: OSError) -> RunError:
        return RunError(
            f"{self.folder}: block inputs cannot be {done} ({error.strerror}); free some disk "
            "space, then resume the run, or train without --spill"
        )
