"""Gates for what others made: names of files, hashes, JSON, and headers of safetensors files.

Hubs, model folders and adapters are not trusted. What is read of them passes here before it is
used: names become single file names, JSON is bounded in bytes, parts and depth, and a header
describes exactly the bytes of its file.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
import struct
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import shown

NAME_BYTES = 255  # of a file name, on all file systems in use
PATH_CHARACTERS = 1024
RESERVED_STARTS = (".your_ai", ".tmp-", ".incomplete-", ".lock-")  # of files that your_ai writes
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

MB = 1_000_000
JSON_BYTES = 32 * MB  # of a configuration
INDEX_BYTES = 64 * MB  # of a list of tensors or files
JSON_PARTS = 2_000_000  # objects, lists and their entries: what Python holds grows with them
CONFIG_PARTS = 600_000  # of a configuration, which lists no more than a model's layers
JSON_DEPTH = 64

HEADER_BYTES = 32 * MB
DIMENSIONS, TENSOR_NAME_CHARACTERS = 32, 1000
# Bits of a number, by the name of its type in a header.
DTYPE_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("BOOL", "I8", "U8"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
METADATA = "__metadata__"
BLOCK = re.compile(r"\b(?:layers|blocks|h)\.(\d+)\.(.*)")  # in a tensor's name
EXPERT = re.compile(r"\bexperts\.(\d+)\.")  # one of them, which mlx-lm stacks when it loads


# Names


def name_fault(name: object) -> str | None:
    """Why a foreign value cannot be the name of one file in a folder; None where it can.

    A name has no separator of any system, no drive and no control character, is not a name
    that your_ai itself writes, and has a length that file systems take.
    """
    fault = path_fault(name)
    if fault is not None or not isinstance(name, str):
        return fault
    if "/" in name or ":" in name:
        return "would leave its folder"
    if len(name.encode()) > NAME_BYTES:
        return f"is longer than {NAME_BYTES} bytes"
    if name.lower().startswith(RESERVED_STARTS):
        return "is a name that your_ai keeps for itself"
    return None


def path_fault(path: object) -> str | None:
    """The same for the path of a file in a repo, which may be in subfolders there."""
    if not isinstance(path, str) or not path:
        return "is no name"
    if len(path) > PATH_CHARACTERS:
        return f"is longer than {PATH_CHARACTERS} characters"
    parts = path.split("/")
    if "\\" in path or any(part in ("", ".", "..") for part in parts) or not path.isprintable():
        return "would leave its folder"
    return None


def clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Two names that are one on file systems that ignore case or normalize Unicode."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def is_hash(value: object) -> bool:
    """Whether a foreign value is a SHA-1 or SHA-256, as 40 or 64 hex digits."""
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def is_large(path: Path, most: int) -> bool:
    """Whether something is no regular file, or has more bytes. Raises OSError."""
    status = path.stat()
    return not stat.S_ISREG(status.st_mode) or status.st_size > most


def leaves(path: Path, folder: Path) -> bool:
    """Whether a file in a folder is a link to a file elsewhere.

    A snapshot of the Hugging Face cache links to its own `blobs`, which counts as inside.
    """
    if not path.is_symlink():
        return False
    target, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    in_cache = target.parent == blobs and is_hash(target.name)
    return not in_cache and not target.is_relative_to(home)


# JSON


def read_bytes(path: Path, most: int) -> bytes:
    """A foreign file. Raises OSError where it cannot be read, UserError for what is no file of
    at most so many bytes; never waits for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: is not a regular file")
        if status.st_size > most:
            raise UserError(f"{path}: has {status.st_size} bytes, more than the {most} it may have")
        return file.read(most + 1)[:most]


class Excessive(ValueError):
    """JSON with more parts, or a greater depth, than honest files have."""


def parse_json(data: bytes, unique: bool = False, parts: int = JSON_PARTS) -> Any:
    """Foreign JSON as Python has it. unique: no object may have a key twice.

    Raises ValueError, whose text says why, for what is no JSON, and Excessive.
    """
    if sum(data.count(mark) for mark in (b"{", b"[", b",", b":")) > parts:
        raise Excessive(f"it has more than {parts} parts")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys if unique else None)
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise Excessive(f"it is nested deeper than {JSON_DEPTH}") from error
    if isinstance(value, dict | list) and is_deeper(value, JSON_DEPTH):
        raise Excessive(f"it is nested deeper than {JSON_DEPTH}")
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {shown(key)} twice")
        found[key] = value
    return found


def is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth`; does not recurse."""
    level = [value]
    for _ in range(depth):
        outer = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in outer for v in values if isinstance(v, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path, why: str, most: int = JSON_BYTES, unique: bool = False) -> dict[str, Any]:
    """The JSON object in a foreign file. why: what the file is for, where it is missing.

    Raises UserError, which names the file, for anything else.
    """
    parts = CONFIG_PARTS if most <= JSON_BYTES else JSON_PARTS
    try:
        content = parse_json(read_bytes(path, most), unique, parts)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing; {why}") from error
    except OSError as error:
        raise UserError(f"{path}: cannot be read as JSON ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object")
    return content


# Headers of safetensors files


@dataclass(frozen=True)
class Entry:
    """A tensor in a file.

    name: as the file has it; kind: its type as safetensors has it; shape: of its numbers;
    start, end: of its bytes in the file; 0 for a tensor of no file.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    start: int = 0
    end: int = 0


def read_header(path: Path) -> list[Entry]:
    """The tensors of a safetensors file, in the order of their bytes. Reads its header alone.

    The header must describe every byte of the file once, as safetensors itself demands. Raises
    UserError, which names the file and the tensor, for any other.

    Format: 8 bytes of header length (little-endian), the header as JSON, the tensors.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise UserError(f"{path}: is not a regular file")
            size, prefix = status.st_size, file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
            if length > size - 8:
                raise UserError(f"{path}: is cut short or damaged")
            if length > HEADER_BYTES:
                raise UserError(f"{path}: is damaged (its header has {length} bytes)")
            text = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        header = parse_json(text, unique=True)
        if not isinstance(header, dict):
            raise ValueError("it is no object")
    except ValueError as error:
        raise UserError(f"{path}: is damaged (its header: {error})") from error
    entries = [entry_of(path, n, e, 8 + length) for n, e in header.items() if n != METADATA]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    at = 8 + length
    for entry in entries:
        if entry.start != at:
            what = "overlaps another" if entry.start < at else "leaves bytes out before it"
            raise UserError(f"{path}: is damaged (tensor {shown(entry.name)} {what})")
        at = entry.end
    if at > size:
        raise UserError(f"{path}: is cut short or damaged")
    if at < size:
        raise UserError(f"{path}: is damaged (has {size - at} bytes that are of no tensor)")
    return entries


def entry_of(path: Path, name: str, described: Any, base: int) -> Entry:
    """One tensor of a header, whose offsets are counted from `base`."""

    def damaged(why: str) -> UserError:
        return UserError(f"{path}: is damaged (tensor {shown(name)} {why})")

    if not isinstance(described, dict):
        raise damaged("is not described")
    if not name.isprintable() or len(name) > TENSOR_NAME_CHARACTERS:
        raise damaged("has a name that no tensor has")
    kind, shape = described.get("dtype"), described.get("shape")
    offsets = described.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPE_BITS:
        raise damaged(f"has an unknown type {shown(kind)}")
    if not is_counts(shape) or len(shape) > DIMENSIONS:
        raise damaged("has no sound shape")
    if not is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged("has no sound data_offsets")
    bits = math.prod(shape) * DTYPE_BITS[kind]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise damaged(f"has {offsets[1] - offsets[0]} bytes, which is not what its shape takes")
    return Entry(name, kind, tuple(shape), base + offsets[0], base + offsets[1])


def is_counts(value: Any) -> bool:
    """Whether a foreign value is a list of whole numbers from 0 to 2**62."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
