"""Checks of untrusted file names, hashes, JSON, and headers of safetensors files.

Hubs, model folders and adapters are not trusted. Everything read from them is checked here before
it is used: a name must be a single file name, JSON is bounded in bytes, parts and depth, and a
header must describe exactly the bytes of its file.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import struct
import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from your_ai.errors import UserError, named_errors
from your_ai.gates.text import counted, shown

NAME_BYTES = 255  # maximum length of a file name on common file systems
PATH_CHARACTERS = 1024
RESERVED_STARTS = (".your_ai", ".tmp-", ".incomplete-", ".lock-")  # names that your_ai uses
HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

MB = 1_000_000
JSON_BYTES = 32 * MB  # maximum size of a config file
INDEX_BYTES = 64 * MB  # maximum size of a list of tensors or files
JSON_PARTS = 2_000_000  # objects, lists and their entries: Python's memory use grows with them
CONFIG_PARTS = 600_000  # in a config file, which lists at most the layers of a model
JSON_DEPTH = 64

HEADER_BYTES = 32 * MB
DIMENSIONS, TENSOR_NAME_CHARACTERS = 32, 1000
# Bits per element, by the name of the dtype in a header.
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
EXPERT = re.compile(r"\bexperts\.(\d+)\.")  # a single expert; mlx-lm stacks them when it loads


# Names


def name_fault(name: object) -> str | None:
    """Say why an untrusted value cannot be the name of a file in a folder; None if it can.

    A valid name has no path separator of any system, no drive and no control characters, is not
    reserved by your_ai, and is not too long for file systems.
    """
    fault = path_fault(name)
    if fault is not None or not isinstance(name, str):
        return fault
    if "/" in name or ":" in name:
        return "points outside its folder"
    if len(name.encode()) > NAME_BYTES:
        return f"is longer than {NAME_BYTES} bytes"
    if name.lower().startswith(RESERVED_STARTS):
        return "is a name reserved by your_ai"
    return None


def path_fault(path: object) -> str | None:
    """Say as `name_fault` why a value is no path in a repository, which may have subfolders."""
    if not isinstance(path, str) or not path:
        return "is not a name"
    if len(path) > PATH_CHARACTERS:
        return f"is longer than {PATH_CHARACTERS} characters"
    parts = path.split("/")
    if "\\" in path or any(part in ("", ".", "..") for part in parts) or not path.isprintable():
        return "points outside its folder"
    return None


def clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Return two names that are equal on file systems that ignore case or normalize Unicode."""
    seen: dict[str, str] = {}
    for name in names:
        key = unicodedata.normalize("NFC", name).casefold()
        if key in seen:
            return seen[key], name
        seen[key] = name
    return None


def is_hash(value: object) -> bool:
    """Return whether an untrusted value is a SHA-1 or SHA-256, as 40 or 64 hex digits."""
    return isinstance(value, str) and HASH.fullmatch(value) is not None


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a value of JSON or YAML is a number, also an infinite one, but no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_large(path: Path, most: int) -> bool:
    """Return whether a path is no regular file, or has more than `most` bytes. Raises OSError."""
    status = path.stat()
    return not stat.S_ISREG(status.st_mode) or status.st_size > most


def links_outside(path: Path, folder: Path) -> bool:
    """Return whether a file in a folder is a link to a file outside the folder.

    Snapshots in the Hugging Face cache link to their own `blobs` folder, which counts as inside.
    """
    if not path.is_symlink():
        return False
    target, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    in_cache = target.parent == blobs and is_hash(target.name)
    return not in_cache and not target.is_relative_to(home)


# JSON


def read_bytes(path: Path, most: int) -> bytes:
    """Read an untrusted file. Never waits for a pipe or a device.

    Raises OSError if it cannot be read, and UserError if it is not a regular file or has more than
    `most` bytes.
    """
    with open_file(path) as (file, size):
        if size > most:
            raise UserError(f"{path}: has {size} bytes; the maximum is {most}")
        return file.read(most + 1)[:most]


@contextlib.contextmanager
def open_file(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open an untrusted file to read it; also its size. Never waits for a pipe or a device.

    Raises OSError if it cannot be opened, and UserError if it is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"{path}: is not a regular file")
        yield file, status.st_size


class TooLarge(ValueError):
    """The JSON has more parts or deeper nesting than a valid file."""


def parse_json(
    data: bytes, unique: bool = False, parts: int = JSON_PARTS, standard: bool = False
) -> Any:
    """Parse untrusted JSON.

    unique: reject objects that have a key twice. standard: reject NaN and Infinity.
    Raises ValueError with a reason if it is not valid JSON, and TooLarge if it is too large.
    """
    if sum(data.count(mark) for mark in (b"{", b"[", b",", b":")) > parts:
        raise TooLarge(f"it has more than {parts} parts")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=unique_keys if unique else None,
            parse_constant=refuse_constant if standard else None,
        )
    except UnicodeDecodeError as error:
        raise ValueError("it is not UTF-8") from error
    except RecursionError as error:
        raise TooLarge(f"it is nested deeper than {JSON_DEPTH}") from error
    if isinstance(value, dict | list) and is_deeper(value, JSON_DEPTH):
        raise TooLarge(f"it is nested deeper than {JSON_DEPTH}")
    return value


def refuse_constant(name: str) -> None:
    raise ValueError(f"it has {name}, which is not JSON")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {shown(key)} twice")
        found[key] = value
    return found


def is_deeper(value: Any, depth: int) -> bool:
    """Return whether lists and objects are nested deeper than `depth`; does not recurse."""
    level = [value]
    for _ in range(depth):
        outer = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in outer for v in values if isinstance(v, dict | list)]
        if not level:
            return False
    return True


def read_json(path: Path, why: str, most: int = JSON_BYTES, unique: bool = False) -> dict[str, Any]:
    """Read the JSON object in an untrusted file.

    why: the purpose of the file, for the message if it is missing.
    Raises UserError with the path for anything else.
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
    """A tensor in a safetensors file."""

    name: str
    kind: str
    """The dtype, as safetensors names it."""
    shape: tuple[int, ...]
    start: int = 0
    """Offset of the first byte in the file; 0 for a tensor that is not in a file."""
    end: int = 0
    """Offset after the last byte in the file; 0 for a tensor that is not in a file."""


def read_header(path: Path) -> list[Entry]:
    """Return the tensors of a safetensors file, in the order of their bytes. Reads only the header.

    The header must describe every byte of the file once, as safetensors itself requires. Raises
    UserError with the path and the tensor if it does not.

    Format: 8 bytes of header length (little-endian), the header as JSON, the tensors.
    """
    with named_errors(path, "read"), open_file(path) as (file, size):
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if length > size - 8:
            raise UserError(f"{path}: is cut short or damaged")
        if length > HEADER_BYTES:
            raise UserError(f"{path}: is damaged (its header has {length} bytes)")
        text = file.read(length)
    try:
        header = parse_json(text, unique=True)
        if not isinstance(header, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise UserError(f"{path}: is damaged (its header: {error})") from error
    entries = [entry_of(path, n, e, 8 + length) for n, e in header.items() if n != METADATA]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    at = 8 + length
    for entry in entries:
        if entry.start != at:
            what = "overlaps another" if entry.start < at else "has unused bytes before it"
            raise UserError(f"{path}: is damaged (tensor {shown(entry.name)} {what})")
        at = entry.end
    if at > size:
        raise UserError(f"{path}: is cut short or damaged")
    if at < size:
        unused = counted(size - at, "byte does", "bytes do")
        raise UserError(f"{path}: is damaged ({unused} not belong to a tensor)")
    return entries


def entry_of(path: Path, name: str, described: Any, base: int) -> Entry:
    """Return one tensor of a header. Its offsets are relative to `base`."""

    def damaged(why: str) -> UserError:
        return UserError(f"{path}: is damaged (tensor {shown(name)} {why})")

    if not isinstance(described, dict):
        raise damaged("is not described")
    if not name.isprintable() or len(name) > TENSOR_NAME_CHARACTERS:
        raise damaged("has an invalid name")
    kind, shape = described.get("dtype"), described.get("shape")
    offsets = described.get("data_offsets")
    if not isinstance(kind, str) or kind not in DTYPE_BITS:
        raise damaged(f"has the unknown dtype {shown(kind)}")
    if not is_counts(shape) or len(shape) > DIMENSIONS:
        raise damaged("has an invalid shape")
    if not is_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise damaged("has invalid data_offsets")
    bits = math.prod(shape) * DTYPE_BITS[kind]
    if bits != 8 * (offsets[1] - offsets[0]):
        size = counted(offsets[1] - offsets[0], "byte")
        raise damaged(f"has {size}, which does not match its shape")
    return Entry(name, kind, tuple(shape), base + offsets[0], base + offsets[1])


def is_counts(value: Any) -> TypeGuard[list[int]]:
    """Return whether an untrusted value is a list of integers from 0 to 2**62."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
