"""Lines of JSONL files -> objects. Data is not trusted: the length of a line is limited before it
is read, its nesting and keys are checked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from your_ai.config import TrainConfig
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import counted, shortened
from your_ai.gates.untrusted import is_deeper

MAX_DEPTH = 64  # nesting of objects and lists; JSON schemas of tools have about 20 levels
BLOCK_BYTES = 1 << 20
ORIGIN = "your_ai: from"  # the key of a converted row's place, as `file:line`
ROW_NUMBER = re.compile(r":( row )?\d+( \(.*\))?$")  # at the end of a place
JSON_LIST = re.compile(r'\s*\[\s*[{"]')  # how a list of objects or texts begins
ROLE_NAMES = ("role", "from", "speaker")  # of a message
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


# Peak memory of reading a row, in bytes per byte of its line, measured on the worst rows:
# while it is parsed, while a text is tokenized, while a chat is rendered and tokenized.
LINE_MEMORY, TEXT_MEMORY, CHAT_MEMORY = 10, 16, 36
STRUCTURE_MEMORY = {b"{": 240, b"[": 64, b",": 40}  # bytes for each of these in a line
SHORT_BYTES = 1 << 16  # rows up to this size are always read


@dataclass(frozen=True)
class RowLimit:
    """The limits on the size of a row."""

    row_bytes: int = TrainConfig.max_row_bytes
    """Maximum length of its line, in bytes."""
    room_bytes: int = 1 << 33
    """Memory that reading it may use in addition to what the process uses already."""

    def too_long(self, where: str) -> UserError:
        most = f"{self.row_bytes:,} bytes"
        return UserError(
            f"{where}: the row has more than {most}; raise --max-row-bytes or split it"
        )

    def check_room(self, size: int, needed_bytes: int, where: str) -> None:
        """Raise UserError if reading a row of `size` bytes needs more memory than is left."""
        if size > SHORT_BYTES and needed_bytes > self.room_bytes:
            raise UserError(
                f"{where}: reading a row of {size:,} bytes needs {needed_bytes / 1e6:,.0f} MB, but "
                f"{max(0, self.room_bytes) / 1e6:,.0f} MB are left; raise --max-memory or split it"
            )

    def check_line(self, line: bytes, where: str) -> None:
        """Raise UserError if parsing a line as JSON needs more memory than is left."""
        size, is_long = len(line), len(line) > SHORT_BYTES
        costs = STRUCTURE_MEMORY.items() if is_long else ()
        structure = sum(cost * line.count(character) for character, cost in costs)
        self.check_room(size, LINE_MEMORY * size + structure, where)


ROW_LIMIT = RowLimit()


def read_lines(path: Path, limit: RowLimit) -> Iterator[tuple[str, bytes]]:
    """Yield (`file:line`, line) for each line that is not blank.

    Raises UserError if the file cannot be read or a line is too long.
    """
    with named_errors(path, "read"), path.open("rb") as file:
        yield from lines_of(file, path, limit)


def lines_of(file: BinaryIO, path: Path, limit: RowLimit) -> Iterator[tuple[str, bytes]]:
    """Yield lines as `read_lines` does, of an open file. path: its name in messages."""
    number = 0
    while line := file.readline(limit.row_bytes + 1):
        number += 1
        where = f"{path}:{number}"
        if len(line) > limit.row_bytes and line.rstrip(b"\r\n") == line:
            raise limit.too_long(where)
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield where, line
        del line


def line_count(path: Path) -> int:
    """The number of lines of a file, which ends with one; 0 if it cannot be read."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(BLOCK_BYTES), b""))
    except OSError:
        return 0


def checked_sha256(path: Path, limit: RowLimit) -> str:
    """Compute the sha256 of a file of rows, without a whole row in memory.

    Raises UserError for the first line that is too long, as soon as it is found.
    """
    digest = hashlib.sha256()
    lines = length = 0
    with named_errors(path, "read"), path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            start = 0
            while (end := block.find(b"\n", start)) >= 0:
                length += end - start
                if length > limit.row_bytes:
                    raise limit.too_long(f"{path}:{lines + 1}")
                start, length, lines = end + 1, 0, lines + 1
            length += len(block) - start
            if length > limit.row_bytes:
                raise limit.too_long(f"{path}:{lines + 1}")
    return digest.hexdigest()


class Repeated(ValueError):
    """An object has a key twice. JSON readers differ in which value they use."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Repeated(f"has the key {shortened(name)} twice")
            seen.add(name)
    return found


def read_json(text: str, label: str, hint: str = "") -> Any:
    """Parse untrusted JSON. The nesting is limited, and duplicate keys are rejected.

    Raises UserError, whose message begins with `label`.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except Repeated as error:
        raise UserError(f"{label}: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "a number too long, or nested too deeply")
        raise UserError(f"{label}: is not valid JSON ({reason}){hint}") from error
    check_depth(text, value, label)
    return value


def check_depth(text: str, value: Any, label: str) -> None:
    """Raise UserError if a value, parsed from `text`, is nested too deeply."""
    if text.count("[") + text.count("{") > MAX_DEPTH and is_deeper(value, MAX_DEPTH):
        raise UserError(f"{label}: is nested too deeply; the maximum is {MAX_DEPTH} levels")


def decode_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text") from error
    row = read_json(text, where, "; write one object per line")
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def decode_row(line: bytes, where: str) -> tuple[dict[str, Any], str]:
    """The object in a line, and the place that it was converted from, or else `where`."""
    row = decode_line(line, where)
    place = row.pop(ORIGIN, None)
    where = place if isinstance(place, str) else where
    return parsed_texts(row, where), where


def parsed_texts(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row with those fields as values that tables can only have as text."""
    row = dict(row)
    for key in ("messages", "conversations"):
        if isinstance(row.get(key), str) and JSON_LIST.match(row[key]):
            row[key] = read_json(row[key], f"{where}: {key}", "; write the list as JSON")
    for key in ("prompt", "completion", "chosen", "rejected"):
        if looks_like_messages(row.get(key)):
            row[key] = read_json(row[key], f"{where}: {key}")
    if isinstance(row.get("weight"), str):
        try:
            row["weight"] = float(row["weight"])
        except ValueError as error:
            text = shortened(row["weight"]) or "nothing"
            raise UserError(f"{where}: weight: expected a number, found {text}") from error
    return row


def looks_like_messages(value: Any) -> bool:
    """Return whether a text is a list of messages as JSON, as tables have them."""
    if not isinstance(value, str) or not JSON_LIST.match(value):
        return False
    try:
        turns = read_json(value, "")
    except UserError:
        return False
    return all(isinstance(t, dict) and any(name in t for name in ROLE_NAMES) for t in turns)


def files_of_rows(path: Path, limit: RowLimit = ROW_LIMIT) -> str:
    """The user's files that the rows of a JSONL file are from, for messages: the first by name.

    It is the file itself if its rows were not converted.
    """
    return files_in(decode_row(line, where)[1] for where, line in read_lines(path, limit))


def files_in(places: Iterable[str]) -> str:
    """The files of places such as `file:line`: the first by name, and how many others."""
    first, *others = dict.fromkeys(ROW_NUMBER.sub("", place) for place in places)
    return f"{first} and {counted(len(others), 'other')}" if others else first


def file_of_first_row(path: Path, limit: RowLimit = ROW_LIMIT) -> str:
    """The user's file that the first row of a JSONL file is from, for progress."""
    try:
        for where, line in read_lines(path, limit):
            limit.check_line(line, where)
            return files_in([decode_row(line, where)[1]])
    except UserError:  # reading the rows will say it
        pass
    return str(path)


def read_first_row(path: Path, limit: RowLimit) -> dict[str, Any]:
    """The first row of a file. Raises UserError if it cannot be read."""
    for where, line in read_lines(path, limit):
        limit.check_line(line, where)
        row, _ = decode_row(line, where)
        return row
    raise UserError(f"{path}: the file is empty; give at least one row")


def as_line(row: Mapping[str, Any]) -> str:
    """A row as a line of a data file; half of a character, as JSON may have it, is escaped."""
    text = json.dumps(row, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        text = json.dumps(row)
    return text + "\n"


class Fields(dict[str, Any]):
    """The fields of a row. It remembers which were read: those that were not have no effect."""

    def __init__(self, row: dict[str, Any], read: set[str] | None = None) -> None:
        super().__init__(row)
        self.read: set[str] = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def without(self, *keys: str, **changes: Any) -> Fields:
        """Other fields of the same row; what is read of them is read of this."""
        rest = {key: value for key, value in self.items() if key not in keys}
        return Fields(rest | changes, self.read)

    def unused(self) -> tuple[str, ...]:
        """The fields that have a value and were not read."""
        return tuple(
            key for key, value in self.items()
            if key not in self.read and value not in (None, "", [], {})
        )  # fmt: skip


def fields_of(row: dict[str, Any]) -> Fields:
    return row if isinstance(row, Fields) else Fields(row)


def text_field(row: dict[str, Any], key: str, where: str) -> str:
    """The text in a field; a whole number is text, as in a table. Raises UserError."""
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}: expected text, found {kind_in_words(value)}")
    return value


def kind_in_words(value: Any) -> str:
    """The kind of a value that is no text, for an error. A number such as 1.10 is no text: what is
    read of it is 1.1."""
    if value is None or value != value:  # NaN, as tables write null
        return "nothing"
    help_ = "; write it as text, in quotes" if isinstance(value, bool | float) else ""
    return f"{type(value).__name__}{help_}"
