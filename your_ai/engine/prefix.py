"""The frozen-prefix cache: the output of the frozen blocks below the adapters, for each text.

The output of these blocks depends only on the tokens of a text. The hidden states are stored
without padding, with the tokens as the key, in memory or in a folder:

    prefix.json     everything else that the hidden states depend on; written last
    hidden.bin      the hidden states, one text after another
    index.bin       one record per text, written after its hidden states

The cache is written without fsync: each text is checked when it is read, and a damaged one is
computed again. A folder has only one writer, because the run is locked, or else a folder that
several runs share.

Shapes: B rows, T tokens per row, n tokens per text, D hidden size.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO, Protocol

import mlx.core as mx
import numpy as np

from your_ai.data.batches import MULTIPLE, PADDING, round_up
from your_ai.errors import RESUME, RunError, UserError
from your_ai.files import open_to_append, read_at, remedy_of, write_at
from your_ai.nets.mlx_types import memory_of
from your_ai.run.folder import LOCK_WAIT_S

FORMAT = "2"  # version of the files and of the computation of hidden states
KEY, HIDDEN, INDEX = "prefix.json", "hidden.bin", "index.bin"
LOCK = "lock"  # of a folder that several runs share
RECORD = struct.Struct("<16sQII")  # digest, offset, tokens, crc32 of the hidden states
ROOM_BYTES = 1_000_000_000  # disk space reserved for checkpoints
PREFIX_CACHE = "--prefix-cache"  # the option that asks for it, with the values disk and off


class Store(Protocol):
    """A store of hidden states. tokens: (m,) int32, the key, such as a text; hidden: (n, D).

    bytes_held: bytes of the hidden states, in memory or on disk.
    """

    @property
    def bytes_held(self) -> int: ...

    def has(self, tokens: np.ndarray) -> bool: ...

    def get(self, tokens: np.ndarray) -> mx.array | None: ...

    def put(self, tokens: np.ndarray, hidden: mx.array) -> None:
        """Store the hidden states of a text, unless it is stored already."""

    def close(self) -> None: ...


def digest_of(tokens: np.ndarray) -> bytes:
    return blake2b(np.ascontiguousarray(tokens, "<i4").data, digest_size=16).digest()


class MemoryStore:
    """Hidden states in memory."""

    def __init__(self) -> None:
        self.bytes_held = 0
        self._held: dict[bytes, mx.array] = {}

    def has(self, tokens: np.ndarray) -> bool:
        return digest_of(tokens) in self._held

    def get(self, tokens: np.ndarray) -> mx.array | None:
        return self._held.get(digest_of(tokens))

    def put(self, tokens: np.ndarray, hidden: mx.array) -> None:
        if self.has(tokens):
            return
        # Copies a slice out of the larger buffer of its batch, which can then be freed.
        own = mx.contiguous(hidden)
        mx.eval(own)
        self._held[digest_of(tokens)] = own
        self.bytes_held += own.nbytes

    def close(self) -> None:
        self._held.clear()
        self.bytes_held = 0


class DiskStore:
    """Hidden states in a folder.

    key: everything the hidden states depend on, except the tokens. If the folder has a
    different key or cannot be read, it is emptied, and `emptied` gives the reason.
    `faults` counts texts that were damaged when read.
    shared: other runs may use the folder too, but not at the same time. option: that asks for it.
    Raises RunError if the folder cannot be written, and UserError if another run is using it.
    """

    def __init__(
        self,
        folder: Path,
        key: dict[str, str],
        hidden_size: int,
        dtype: mx.Dtype,
        shared: bool = False,
        option: str = PREFIX_CACHE,
    ) -> None:
        self.folder, self.hidden_size, self.dtype = folder, hidden_size, dtype
        self.option = option
        self.emptied, self.faults = "", 0
        self._places: dict[bytes, tuple[int, int, int]] = {}  # offset, tokens, crc32
        self._data_bytes = self._index_bytes = 0  # up to the end of the last complete record
        full_key = {
            **key,
            "cache_format": FORMAT,
            "cache_hidden_size": str(hidden_size),
            "cache_dtype": str(dtype).removeprefix("mlx.core."),
        }
        try:
            self._lock = locked_file(folder) if shared else None
            there = any(p.exists() and p.stat().st_size for p in (folder / HIDDEN, folder / INDEX))
            reason = self._links() or _difference(folder / KEY, full_key) or self._open()
            if reason:
                self.emptied = reason if there else ""
                self._begin(full_key)
        except OSError as error:
            raise self._failure(error) from error

    @property
    def bytes_held(self) -> int:
        return self._data_bytes

    def has(self, tokens: np.ndarray) -> bool:
        return digest_of(tokens) in self._places

    def get(self, tokens: np.ndarray) -> mx.array | None:
        digest = digest_of(tokens)
        if digest not in self._places:
            return None
        offset, count, checksum = self._places[digest]
        data = b""
        with contextlib.suppress(OSError):
            data = read_at(self._data.fileno(), count * self._row_bytes, offset)
        if len(data) != count * self._row_bytes or zlib.crc32(data) != checksum:
            del self._places[digest]
            self.faults += 1
            return None
        # Read as bytes, because numpy has no bfloat16.
        hidden = mx.array(np.frombuffer(data, np.uint8)).view(self.dtype)
        return hidden.reshape(count, self.hidden_size)

    def put(self, tokens: np.ndarray, hidden: mx.array) -> None:
        """Raises RunError if the disk is full; texts stored before stay readable."""
        if not len(hidden) or hidden.shape[1:] != (self.hidden_size,):
            raise ValueError(f"hidden states of {hidden.shape}")
        if hidden.dtype != self.dtype:
            raise ValueError(f"hidden states of {hidden.dtype} in a cache of {self.dtype}")
        digest = digest_of(tokens)
        if digest in self._places:
            return
        data = memory_of(mx.contiguous(hidden).view(mx.uint8).reshape(-1))
        place = (self._data_bytes, len(hidden), zlib.crc32(data))
        try:
            write_at(self._data.fileno(), data, self._data_bytes)
            write_at(
                self._index.fileno(), memoryview(RECORD.pack(digest, *place)), self._index_bytes
            )
        except OSError as error:
            with contextlib.suppress(OSError):  # any rest is cut off when the cache is next opened
                self._cut()
            raise self._failure(error) from error
        self._places[digest] = place
        self._data_bytes += len(data)
        self._index_bytes += RECORD.size

    def close(self) -> None:
        self._data.close()
        self._index.close()
        if self._lock is not None:
            self._lock.close()

    @property
    def _row_bytes(self) -> int:
        return self.hidden_size * self.dtype.size

    def _begin(self, key: dict[str, str]) -> None:
        """Create an empty cache. The key is written last: without it, the next run starts over."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (KEY, INDEX, HIDDEN):
            (self.folder / name).unlink(missing_ok=True)
        self._open_files("x+b")
        self._places.clear()
        self._data_bytes = self._index_bytes = 0
        (self.folder / KEY).write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")

    def _open(self) -> str | None:
        """Load the existing texts. Return the reason if that fails, otherwise None."""
        try:
            self._open_files("r+b")
            size = os.fstat(self._data.fileno()).st_size
            records = self._index.read()
            whole = len(records) // RECORD.size * RECORD.size
            for digest, *place in RECORD.iter_unpack(records[:whole]):
                offset, tokens, _ = place
                end = offset + tokens * self._row_bytes
                # A record must begin where the previous one ends; otherwise it was cut off.
                if offset != self._data_bytes or not tokens or end > size:
                    break
                self._places[digest] = tuple(place)  # the last record of a text counts
                self._data_bytes = end
                self._index_bytes += RECORD.size
            self._cut()
        except OSError as error:
            return f"its files cannot be read ({error.strerror})"
        if self._places or not whole:
            return None
        self._data.close()
        self._index.close()
        return "its files are damaged"

    def _links(self) -> str | None:
        """The reason not to write to the files: a symbolic link points to a file elsewhere."""
        linked = any((self.folder / name).is_symlink() for name in (KEY, HIDDEN, INDEX))
        return "its files are symbolic links" if linked else None

    def _open_files(self, mode: str) -> None:
        self._data = (self.folder / HIDDEN).open(mode, buffering=0)
        self._index = (self.folder / INDEX).open(mode, buffering=0)

    def _cut(self) -> None:
        """Truncate the files after the last complete record."""
        self._index.truncate(self._index_bytes)
        self._data.truncate(self._data_bytes)

    def _failure(self, error: OSError) -> RunError:
        return RunError(
            f"{self.folder}: hidden states cannot be written ({error.strerror}); "
            f"{remedy_of(error)}, {RESUME}, or train with {self.option} off"
        )


def _difference(path: Path, key: dict[str, str]) -> str | None:
    """The reason why a cache does not match this key, or None if it does."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return f"its {KEY} cannot be read"
    if not isinstance(found, dict):
        return f"its {KEY} cannot be read"
    others = [name for name in {**key, **found} if found.get(name) != key.get(name)]
    return f"it was made with a different {', '.join(others)}" if others else None


def shared_place(folder: Path, key: dict[str, str], hidden_size: int, dtype: mx.Dtype) -> Path:
    """The cache with this key in a folder of caches; its name is a hash of the key."""
    parts = json.dumps([sorted(key.items()), hidden_size, str(dtype)])
    return folder / blake2b(parts.encode(), digest_size=8).hexdigest()


def locked_file(folder: Path) -> BinaryIO:
    """Lock a cache that several runs share, until the file is closed or this process ends.

    Raises UserError if another run has locked it, and OSError if the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = open_to_append(folder / LOCK)
    deadline = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                raise UserError(
                    f"--prefix-cache-folder: another run is using {folder}; wait for it, or give "
                    "another folder"
                ) from None
            time.sleep(0.1)


def remove(folder: Path) -> None:
    """Delete a cache, if it exists."""
    shutil.rmtree(folder, ignore_errors=True)


# -- disk space ---------------------------------------------------------------------------


def needed_bytes(tokens: int, hidden_size: int, dtype: mx.Dtype) -> int:
    return tokens * hidden_size * dtype.size


def check_room(
    folder: Path, tokens: int, hidden_size: int, dtype: mx.Dtype, option: str = PREFIX_CACHE
) -> None:
    """Raise UserError if the cache does not fit on the disk.

    tokens: number of tokens of the texts that are not stored yet; folder: need not exist. option:
    that asks for the cache, with the values disk and off.
    """
    if not tokens:
        return
    needed = needed_bytes(tokens, hidden_size, dtype) + ROOM_BYTES
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed:
        # One is rounded up and one down, so that the message shows needed > free.
        needs_gb, free_gb = math.ceil(needed / 1e8) / 10, math.floor(free / 1e8) / 10
        raise UserError(
            f"{option} disk: needs {needs_gb:.1f} GB in {folder}, only {free_gb:.1f} GB "
            f"free; free some disk space, or train with {option} off"
        )


# -- batches ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """A text in a batch: its tokens, (n,) int32, begin at column `start` of row `row`."""

    row: int
    start: int
    tokens: np.ndarray

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


def spans_of(tokens: np.ndarray, rows: np.ndarray, lengths: np.ndarray | None = None) -> list[Span]:
    """The texts of a batch, by row and column; tokens: (B, T).

    rows: (B, T) ids if the batch is packed: a run of equal ids is a text. Otherwise (B, 1): each
        row is one text.
    lengths: (B,) tokens per row, required if the batch is not packed; 0 for a row without text.
    """
    if rows.ndim == 1 or rows.shape[1] == 1:
        if lengths is None:
            raise ValueError("rows that are not packed need their lengths")
        return [Span(b, 0, tokens[b, :n]) for b, n in enumerate(lengths.tolist()) if n]
    spans = []
    for b, ids in enumerate(rows):
        edges = [0, *(np.flatnonzero(ids[1:] != ids[:-1]) + 1).tolist(), len(ids)]
        for start, end in itertools.pairwise(edges):
            if ids[start] != PADDING:
                spans.append(Span(b, start, tokens[b, start:end]))
    return spans


def assemble(
    of_text: Callable[[np.ndarray], mx.array],
    spans: Sequence[Span],
    shape: tuple[int, int, int],
    dtype: mx.Dtype,
) -> mx.array:
    """(B, T, D): the hidden states of each text at its place, zeros elsewhere.

    of_text: returns the hidden states of a text, (n, D). Spans must not overlap.
    """
    rows, length, hidden_size = shape
    pieces: list[list[mx.array]] = [[] for _ in range(rows)]
    ends = [0] * rows
    for span in sorted(spans, key=lambda span: (span.row, span.start)):
        if span.start > ends[span.row]:
            pieces[span.row].append(mx.zeros((span.start - ends[span.row], hidden_size), dtype))
        pieces[span.row].append(of_text(span.tokens))
        ends[span.row] = span.end
    for row, end in enumerate(ends):
        if end < length:
            pieces[row].append(mx.zeros((length - end, hidden_size), dtype))
    return mx.concatenate([p for row in pieces for p in row]).reshape(shape)


def missing(store: Store, texts: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The texts that are not in the store, each once."""
    seen: set[bytes] = set()
    for tokens in texts:
        digest = digest_of(tokens)
        if digest not in seen and not store.has(tokens):
            yield tokens
        seen.add(digest)


def padded(tokens: np.ndarray) -> np.ndarray:
    """A text as a separate row, (1, T), where T depends only on its own length."""
    return np.pad(tokens, (0, round_up(len(tokens), MULTIPLE) - len(tokens)))[None]
