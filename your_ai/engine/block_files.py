"""Arrays of the blocks in files, one for each block, which is replaced as a whole.

A file never changes once it is complete. So a checkpoint is a link to each of them, without a copy,
and holds what was in them when it was made, however the next steps replace them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import mlx.core as mx

from your_ai.engine.spill import Place, bytes_of, header_of
from your_ai.errors import RESUME, RunError
from your_ai.files import read_into, remedy_of, write_at
from your_ai.gates.untrusted import read_header
from your_ai.nets.mlx_types import DTYPE_NAMES, Arrays, memory_of

BLOCK = re.compile(r".*?\blayers\.(\d+)\.")
T = TypeVar("T")
Writer = Callable[[Path], None]


class Like(NamedTuple):
    """The kind of an array."""

    shape: tuple[int, ...]
    dtype: mx.Dtype

    @staticmethod
    def of(array: mx.array) -> Like:
        return Like(array.shape, array.dtype)


def file_of(kind: str, name: str) -> str:
    """The name of the file of an array: `weights-00012.safetensors` for one of block 12."""
    match = BLOCK.match(name)
    return f"{kind}-{'rest' if match is None else match[1].zfill(5)}.safetensors"


def by_file(kind: str, arrays: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """The arrays of each file, in their order."""
    found: dict[str, dict[str, T]] = {}
    for name, array in arrays.items():
        found.setdefault(file_of(kind, name), {})[name] = array
    return found


def places_of(likes: Mapping[str, Like]) -> tuple[bytes, dict[str, Place]]:
    """The header of a file of these arrays, one after the other, and their places in the file."""
    places, end = {}, 0
    for name, like in likes.items():
        places[name] = Place(end, *like)
        end += places[name].nbytes
    header = header_of(places)
    begin = len(header)
    return header, {n: p._replace(offset=begin + p.offset) for n, p in places.items()}


def write_arrays(arrays: Mapping[str, mx.array], path: Path) -> None:
    """Write a file like those of `BlockFiles`, array by array. Raises OSError."""
    header, _ = places_of({name: Like.of(array) for name, array in arrays.items()})
    with path.open("wb") as file:
        file.write(header)
        for array in arrays.values():
            mx.eval(array)
            file.write(bytes_of(array))


def link(source: Path, path: Path) -> None:
    """Make `path` the same file as `source`, or a copy where that is not possible."""
    try:
        os.link(source, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EXDEV, errno.EMLINK, errno.ENOTSUP):
            raise
        shutil.copyfile(source, path)


class BlockFiles:
    """Arrays by name, in a file for each block.

    folder: of the files; made when it is needed.
    kind: the beginning of the names of the files.
    likes: all arrays, in the order in which they are written.
    on_new: is called with a file that was replaced, and the arrays in it.

    A file comes to be when all arrays of its block are put for the first time. All methods raise
    RunError if a file cannot be written or read.
    """

    def __init__(
        self,
        folder: Path,
        kind: str,
        likes: Mapping[str, Like],
        on_new: Callable[[Path, list[str]], None] = lambda path, names: None,
    ) -> None:
        self.folder, self.kind, self.on_new = folder, kind, on_new
        found = {file: places_of(own) for file, own in by_file(kind, likes).items()}
        self.headers = {file: header for file, (header, _) in found.items()}
        self.places = {file: places for file, (_, places) in found.items()}
        self.there: set[str] = set()
        """The files that are complete."""
        self._left: dict[str, set[str]] = {}  # of a file that is written, the arrays to come

    def has(self, name: str) -> bool:
        return file_of(self.kind, name) in self.there

    def get(self, name: str) -> mx.array:
        file = file_of(self.kind, name)
        place, path = self.places[file][name], self.folder / file
        data = mx.zeros(place.nbytes, mx.uint8)
        try:
            with path.open("rb") as opened:
                if read_into(opened.fileno(), memory_of(data), place.offset) < place.nbytes:
                    raise OSError(errno.EIO, "the file ended early")
        except OSError as error:
            raise failure(path, "read", error) from error
        array = data.view(place.dtype).reshape(place.shape)
        mx.eval(array)
        return array

    def put(self, arrays: Arrays) -> None:
        """Write arrays to new files, each of which takes its place when it has all of its block."""
        for name, array in arrays.items():
            file = file_of(self.kind, name)
            place, part = self.places[file][name], self.folder / f"new-{file}"
            if Like.of(array) != place[1:]:
                raise ValueError(f"{name}: its place is for {place.dtype} {place.shape}")
            try:
                if file not in self._left:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    part.write_bytes(self.headers[file])
                    self._left[file] = set(self.places[file])
                with part.open("r+b", buffering=0) as opened:
                    write_at(opened.fileno(), bytes_of(array), place.offset)
                self._left[file].remove(name)
                if not self._left[file]:
                    del self._left[file]
                    os.replace(part, self.folder / file)
                    self._is_new(file)
            except OSError as error:
                raise failure(self.folder / file, "written", error) from error

    def saved(self) -> dict[str, Writer]:
        """Functions that make links to the complete files, by their names."""
        return {file: linking(self.folder / file) for file in sorted(self.there)}

    def clear(self) -> None:
        """Delete all files, also those of an earlier process."""
        for path in (*self.folder.glob(f"{self.kind}-*"), *self.folder.glob(f"new-{self.kind}-*")):
            with suppress(FileNotFoundError):
                path.unlink()
        self.there.clear()
        self._left.clear()

    def restore(self, folder: Path) -> None:
        """Have the files of a checkpoint. Raises ValueError if they are not such files."""
        self.clear()
        self.folder.mkdir(parents=True, exist_ok=True)
        for source in sorted(folder.glob(f"{self.kind}-*.safetensors")):
            file = source.name
            wanted = {
                name: (DTYPE_NAMES[p.dtype], p.shape, p.offset)
                for name, p in self.places.get(file, {}).items()
            }
            if {e.name: (e.kind, e.shape, e.start) for e in read_header(source)} != wanted:
                raise ValueError(f"{source}: has other arrays than the model")
            try:
                link(source, self.folder / file)
            except OSError as error:
                raise failure(self.folder / file, "written", error) from error
            self._is_new(file)

    def _is_new(self, file: str) -> None:
        self.there.add(file)
        self.on_new(self.folder / file, list(self.places[file]))


def linking(source: Path) -> Writer:
    """Make f(path), which makes a link to `source`."""
    return lambda path: link(source, path)


def failure(path: Path, done: str, error: OSError) -> RunError:
    return RunError(f"{path}: cannot be {done} ({error.strerror}); {remedy_of(error)}, {RESUME}")
