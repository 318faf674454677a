"""Files of any known form -> records: one JSON-like object each, with the place it came from.

The forms: JSON lines, a JSON array or an object that holds one, CSV, TSV, Parquet, Arrow, XLSX,
plain text and documents; text forms may be compressed. Nothing here knows what a record means;
`columns.py` makes rows of them.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import csv
import datetime
import gzip
import io
import json
import lzma
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from your_ai.data.documents import DOCUMENT_FORMS, binary_form, passages_in
from your_ai.data.lines import (
    BYTE_ORDER_MARK,
    Repeated,
    RowLimit,
    check_depth,
    decode_line,
    lines_of,
    unique,
)
from your_ai.errors import UserError, named_errors
from your_ai.gates.isolated import run_isolated
from your_ai.gates.text import counted, quoted, shortened

# Open files that may be compressed; their content decides, not their names


COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
MAGIC_BYTES = 10


def open_zstd(path: Path) -> BinaryIO:
    import pyarrow as pa  # slow to import

    if not pa.Codec.is_available("zstd"):
        raise UserError(
            f"{path}: is compressed with zstd, which this pyarrow cannot read; run: pip install "
            "--force-reinstall pyarrow, or give .gz, .bz2 or .xz"
        )
    return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"))


OPENERS: dict[re.Pattern[bytes], Callable[[Path], BinaryIO]] = {
    re.compile(rb"\x1f\x8b"): gzip.open,  # type: ignore[dict-item]
    re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"): bz2.open,  # type: ignore[dict-item]
    re.compile(rb"\xfd7zXZ\x00"): lzma.open,  # type: ignore[dict-item]
    re.compile(rb"\x28\xb5\x2f\xfd"): open_zstd,
}


def without_compression(name: str) -> str:
    """A file name in lower case, without the suffix of a compression."""
    name = name.lower()
    return next((name.removesuffix(end) for end in COMPRESSED if name.endswith(end)), name)


def opener_of(path: Path) -> Callable[[Path], BinaryIO] | None:
    """The function that opens a compressed file; None if it is not compressed. Raises OSError."""
    with path.open("rb") as file:
        head = file.read(MAGIC_BYTES)
    return next((opener for magic, opener in OPENERS.items() if magic.match(head)), None)


def is_compressed(path: Path) -> bool:
    """Raises UserError if the file cannot be read."""
    with named_errors(path, "read"):
        return opener_of(path) is not None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file, decompressed. It may not be able to seek. Raises UserError."""
    opener = None
    try:
        opener = opener_of(path)
        with path.open("rb") if opener is None else opener(path) as file:
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"{path}: is damaged or cut short ({error})") from error
    except OSError as error:
        if opener is not None and error.errno is None:  # of bz2 and zstd
            raise UserError(f"{path}: is damaged or cut short ({error})") from error
        raise UserError(f"{path}: cannot be read ({error.strerror or error})") from error


Record = tuple[str, dict[str, Any]]  # `file:row`, for messages; and the object
# A record, or why it is none where the reader can go on after it.
RecordOrFault = tuple[str, dict[str, Any] | UserError]

SUFFIXES = {
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    **dict.fromkeys((".arrow", ".feather"), "arrow"),
    ".xlsx": "xlsx",
    **DOCUMENT_FORMS,
}
BINARY = {"parquet": "Parquet", "arrow": "Arrow"} | {
    form: form.upper() for form in ("xlsx", "pdf", "docx", "epub")
}
DOCUMENTS = frozenset(DOCUMENT_FORMS.values())
# Keys of an object that is not a row, but holds them.
ROW_LISTS = (
    *("data", "rows", "examples", "items", "records", "samples"),
    *("instances", "entries", "train"),
)
MAGIC = {b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff\xff\xff\xff": "arrow"}
HEAD_BYTES = 1 << 16
BATCH_ROWS = 256  # rows of a Parquet or Arrow file that are in memory together
DELIMITERS = ",;\t|"
HEAD_ROWS = 50  # of a table, which say what its delimiter is
SEPARATOR = re.compile(r"sep=([,;\t|])\r?\n", re.IGNORECASE)
ROWS_BEGIN = re.compile(  # an object with texts, numbers and flat objects before its list of rows
    r'\s*\{\s*(?:"[^"]*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[-+.\w]+|\{[^{}]*\})\s*,\s*)*'
    rf'"(?:{"|".join(ROW_LISTS)})"\s*:\s*\[\s*\{{'
)
WAYS_OUT = (
    "give .jsonl, .json, .csv, .tsv, .xlsx, .parquet, .arrow, .txt, .md, .html, .pdf, .docx or "
    ".epub"
)


def form_of(path: Path) -> str:
    """The form of a file, by its content where that is unmistakable, or else by its name.

    Raises UserError if neither tells, if they contradict each other, or if it cannot be read.
    """
    head = head_of(path)
    by_name = SUFFIXES.get(suffix_of(path))
    for magic, form in MAGIC.items():
        if head.startswith(magic):
            return form
    if (binary := binary_form(path, head)) is not None:
        return binary
    if by_name in BINARY:
        raise UserError(f"{path}: is not {BINARY[by_name]}, though its name says so; {WAYS_OUT}")
    begins = text_of(head).lstrip()[:1]
    if by_name in DOCUMENTS and not is_json_line(head):
        return by_name
    if begins == "[":
        return "json"
    if begins == "{":
        return "json" if by_name != "jsonl" and holds_rows(head) else "jsonl"
    if by_name in ("csv", "tsv", "text", "html"):
        return by_name
    if any(fields_of_two_rows(text_of(head), delimiter) for delimiter in DELIMITERS):
        if by_name is None:
            return "csv"
        raise UserError(f"{path}: this looks like CSV; rename it to end in .csv")
    if by_name is not None:
        return by_name  # its reader says what is wrong with it
    raise UserError(f"{path}: unknown form of data; {WAYS_OUT}")


def suffix_of(path: Path) -> str:
    """The suffix that names the form, in lower case, without that of a compression."""
    return Path(without_compression(path.name)).suffix


def head_of(path: Path) -> bytes:
    """The first bytes of a file, decompressed. Raises UserError if it cannot be read."""
    with opened(path) as file:
        return file.read(HEAD_BYTES)


def text_of(head: bytes) -> str:
    """The beginning of a file as text, for a guess."""
    encoding = encoding_of(head)
    return head.decode(encoding, errors="replace").removeprefix("\ufeff")


def encoding_of(head: bytes) -> str:
    """utf-8, or utf-16 as its byte order mark says (spreadsheets write it as "Unicode text")."""
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return "utf-16" if head.startswith(marks) else "utf-8"


def is_json_line(head: bytes) -> bool:
    """Return whether the first line that is not blank is a JSON object."""
    first = next((line for line in head.splitlines() if line.strip()), b"")
    with contextlib.suppress(ValueError, RecursionError):
        return isinstance(json.loads(first), dict)
    return False


def holds_rows(head: bytes) -> bool:
    """Return whether a JSON text is one object with a list of rows, not rows one per line."""
    if not ROWS_BEGIN.match(text_of(head)):
        return False
    lines = [line for line in head.splitlines() if line.strip()]
    return not (len(lines) > 1 and is_json_line(head))


def fields_of_two_rows(text: str, delimiter: str) -> bool:
    """Return whether the first two rows have as many fields as each other, and more than one."""
    with contextlib.suppress(csv.Error):
        rows = list(islice(csv.reader(io.StringIO(text), delimiter=delimiter), 2))
        return len(rows) == 2 and len(rows[0]) == len(rows[1]) > 1
    return False


def read_records(path: Path, limit: RowLimit) -> Iterator[Record]:
    """Yield the records of a file, in order.

    Raises UserError with file and row for what cannot be read, or is larger than `limit`.
    """
    for where, record in records_and_faults(path, limit):
        if isinstance(record, UserError):
            raise record
        yield where, record


def records_and_faults(path: Path, limit: RowLimit) -> Iterator[RecordOrFault]:
    """Yield the records of a file as `read_records` does, and errors of those that can be skipped.

    Raises UserError for faults after which nothing can be read.
    """
    found = False
    for record in READERS[form_of(path)](path, limit):
        found = True
        yield record
    if not found:
        raise UserError(f"{path}: the file is empty; give at least one row")


def read_jsonl(path: Path, limit: RowLimit) -> Iterator[RecordOrFault]:
    with opened(path) as file:
        for where, line in lines_of(file, path, limit):
            try:
                limit.check_line(line, where)
                record: dict[str, Any] | UserError = decode_line(line, where)
            except UserError as error:
                record = error
            yield where, record


def read_json(path: Path, limit: RowLimit) -> Iterator[RecordOrFault]:
    """Yield the objects of a JSON array, of which only one is in memory.

    The array may be in an object, under one of ROW_LISTS.
    """
    with opened(path) as file:
        window = JsonWindow(io.TextIOWrapper(file, encoding="utf-8-sig"), path, limit)
        is_inside = window.next() == "{"
        if is_inside:
            window.skip_to_rows()
        window.take("[", path)
        number = 0
        while window.next() != "]" or number:
            where = f"{path}: row {number + 1}"
            value = window.value(where)
            is_object = isinstance(value, dict)
            fault = f"{where}: expected an object, found {type(value).__name__}"
            yield where, value if is_object else UserError(fault)
            number += 1
            if window.next() == "]":
                break
            window.take(",", where)
        window.take("]", path)
        if is_inside:
            window.skip_rest()
        if rest := window.next():
            raise UserError(f"{path}: has {quoted(rest)} after the end of the array")


class JsonWindow:
    """The part of a JSON text that is being parsed."""

    def __init__(self, reader: io.TextIOWrapper, path: Path, limit: RowLimit) -> None:
        self.reader, self.path, self.limit = reader, path, limit
        self.decoder = json.JSONDecoder(object_pairs_hook=unique)
        self.text, self.ended = "", False

    def read(self) -> None:
        """Read as much again as is there, so that a long value is not parsed many times."""
        try:
            block = self.reader.read(max(HEAD_BYTES, len(self.text)))
        except UnicodeDecodeError as error:
            raise UserError(f"{self.path}: is not UTF-8 text") from error
        self.text, self.ended = self.text + block, not block

    def next(self) -> str:
        """The next character that is not white space; empty at the end."""
        self.text = self.text.lstrip()
        while not self.text and not self.ended:
            self.read()
            self.text = self.text.lstrip()
        return self.text[:1]

    def take(self, expected: str, where: object) -> None:
        if (found := self.next()) != expected:
            what = f"found {quoted(found)}" if found else "the file ends"
            raise UserError(f"{where}: expected {expected} here, but {what}")
        self.text = self.text[1:]

    def key(self) -> Any:
        """The next key of an object, and the colon after it."""
        name = self.value(str(self.path))
        self.take(":", self.path)
        return name

    def skip_to_rows(self) -> None:
        """Skip the beginning of an object up to its list of rows."""
        self.take("{", self.path)
        while self.key() not in ROW_LISTS or self.next() != "[":
            self.value(str(self.path))
            self.take(",", self.path)

    def skip_rest(self) -> None:
        """Skip the rest of the object. Raises UserError if it has another list of rows."""
        while self.next() == ",":
            self.take(",", self.path)
            name = self.key()
            value = self.value(str(self.path))
            if isinstance(value, list) and value and isinstance(value[0], dict):
                raise UserError(
                    f"{self.path}: has two lists of rows, the second is {shortened(str(name))}; "
                    "give a file for each"
                )
        self.take("}", self.path)

    def value(self, where: str) -> Any:
        """Parse the next value. Raises UserError, whose message begins with `where`."""
        self.next()
        while True:
            try:
                value, end = self.decoder.raw_decode(self.text)
                if end < len(self.text) or self.ended:  # else a number may go on
                    break
            except Repeated as error:
                raise UserError(f"{where}: {error}") from error
            except (ValueError, RecursionError) as error:
                if self.ended or isinstance(error, RecursionError):
                    reason = getattr(error, "msg", "nested too deeply")
                    raise UserError(f"{where}: is not valid JSON ({reason})") from error
            if len(self.text) > self.limit.row_bytes:
                raise self.limit.too_long(where)
            self.read()
        if end > self.limit.row_bytes:
            raise self.limit.too_long(where)
        check_depth(self.text[:end], value, where)
        self.text = self.text[end:]
        return value


def read_csv(path: Path, limit: RowLimit, delimiter: str | None = None) -> Iterator[RecordOrFault]:
    """Yield the lines of a table, whose first line names the columns."""
    head = head_of(path)
    with opened(path) as file:
        encoding = encoding_of(head)
        lines = io.TextIOWrapper(file, encoding.replace("utf-8", "utf-8-sig"), newline="")
        if named := SEPARATOR.match(text_of(head)):  # Excel's line that names the delimiter
            delimiter = named[1]
            lines.readline()
        if delimiter is None:
            delimiter = likely_delimiter(text_of(head))
        limit_before = csv.field_size_limit(limit.row_bytes)
        reader = csv.reader(bounded(lines, path, limit), delimiter=delimiter, strict=True)
        try:
            names: list[str] = []
            for cells in reader:
                where = f"{path}:{reader.line_num}"
                if not any(cells):
                    continue
                if not names:
                    names = checked_names(cells, where)
                    continue
                if len(cells) != len(names):
                    yield (
                        where,
                        UserError(
                            f"{where}: has {counted(len(cells), 'cell')}, but the first line names "
                            f"{counted(len(names), 'column')}; is a quote or a delimiter missing?"
                        ),
                    )
                elif sum(map(len, cells)) > limit.row_bytes:
                    yield where, limit.too_long(where)
                else:
                    yield where, dict(zip(names, cells, strict=True))
        except csv.Error as error:
            where = f"{path}:{reader.line_num}"
            if "field limit" in str(error):
                raise limit.too_long(where) from error
            raise UserError(f"{where}: is not valid CSV ({error})") from error
        except UnicodeError as error:
            raise UserError(
                f"{path}:{reader.line_num + 1}: is not UTF-8 text; save the table as UTF-8 (in "
                "Excel: CSV UTF-8)"
            ) from error
        finally:
            csv.field_size_limit(limit_before)


def bounded(lines: io.TextIOWrapper, path: Path, limit: RowLimit) -> Iterator[str]:
    """The lines of a text, of limited length."""
    number = 0
    while line := lines.readline(limit.row_bytes + 1):
        number += 1
        if len(line) > limit.row_bytes and not line.endswith(("\n", "\r")):
            raise limit.too_long(f"{path}:{number}")
        yield line


def likely_delimiter(text: str) -> str:
    """The delimiter at which the first rows are alike: most of them have as many cells as the first
    one, which has several; of those that agree as often, the one with most cells."""

    def alike(delimiter: str) -> tuple[float, int]:
        table = csv.reader(io.StringIO(text), delimiter=delimiter)
        rows: list[list[str]] = []
        with contextlib.suppress(csv.Error):
            rows += (row for row in islice(table, HEAD_ROWS) if any(row))
        rows = rows[:-1] or rows  # the last one may be cut off
        if not rows or len(rows[0]) < 2:
            return 0.0, 0
        return sum(len(row) == len(rows[0]) for row in rows) / len(rows), len(rows[0])

    return max(DELIMITERS, key=alike)


def checked_names(cells: list[str], where: str) -> list[str]:
    """The names of the columns. Raises UserError for one that is missing or there twice."""
    names = [" ".join(cell.split()) for cell in cells]  # spreadsheets break long ones into lines
    while names and not names[-1]:
        raise UserError(f"{where}: column {len(names)} has no name; the first line must name all")
    if len(set(names)) < len(names):
        name = next(name for name, count in Counter(names).items() if count > 1)
        raise UserError(f"{where}: has two columns {shortened(name or 'without a name')}")
    return names


def read_parquet(path: Path, limit: RowLimit) -> Iterator[Record]:
    import pyarrow as pa
    import pyarrow.parquet

    with arrow_errors(path, "Parquet"), pa.parquet.ParquetFile(path) as file:
        if file.metadata.num_columns == 0:
            return
        checked_names(file.schema_arrow.names, str(path))
        yield from rows_of(path, file.iter_batches(BATCH_ROWS), limit)


def read_arrow(path: Path, limit: RowLimit) -> Iterator[Record]:
    """Yield the rows of an Arrow file, or of a stream, as `datasets` saves them."""
    import pyarrow as pa

    with arrow_errors(path, "Arrow"), pa.OSFile(str(path)) as source:
        if head_of(path).startswith(b"ARROW1"):
            file = pa.ipc.open_file(source)
            checked_names(file.schema.names, str(path))
            batches = (file.get_batch(index) for index in range(file.num_record_batches))
        else:
            stream = pa.ipc.open_stream(source)
            checked_names(stream.schema.names, str(path))
            batches = iter(stream)
        parts = (
            batch.slice(start, BATCH_ROWS)
            for batch in batches
            for start in range(0, batch.num_rows, BATCH_ROWS)
        )
        yield from rows_of(path, parts, limit)


@contextlib.contextmanager
def arrow_errors(path: Path, name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = shortened(" ".join(str(error).split()))
        raise UserError(f"{path}: is not a whole {name} file ({reason})") from error


def rows_of(path: Path, batches: Iterator[Any], limit: RowLimit) -> Iterator[Record]:
    """Yield the rows of Arrow's batches, without the columns in which they have nothing."""
    number = 0
    for batch in batches:
        convert = {field.name: converter_of(field.type) for field in batch.schema}
        for row in batch.to_pylist():
            number += 1
            where = f"{path}: row {number}"
            try:
                plain = {n: convert[n](value) for n, value in row.items() if value is not None}
            except Repeated as error:
                raise UserError(f"{where}: {error}") from error
            if size_of(plain) > limit.row_bytes:
                raise limit.too_long(where)
            yield where, plain


def converter_of(kind: Any) -> Callable[[Any], Any]:
    """A function that makes JSON of values of an Arrow type; a MAP becomes an object.

    Arrow gives a MAP as a list of pairs, which nothing but its type tells from a list.
    """
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        return converter_of(kind.storage_type)
    if pa.types.is_map(kind):
        item = converter_of(kind.item_type)
        return lambda pairs: map_of(pairs, item)
    if pa.types.is_struct(kind) and has_map(kind):
        parts = {field.name: converter_of(field.type) for field in kind}
        return lambda value: {n: parts[n](v) for n, v in value.items() if v is not None}
    if has_map(kind):
        part = converter_of(kind.value_type)
        return lambda values: [None if value is None else part(value) for value in values]
    return as_json


def has_map(kind: Any) -> bool:
    """Return whether a type has a MAP in it, at any depth."""
    import pyarrow as pa

    if pa.types.is_map(kind):
        return True
    if pa.types.is_struct(kind):
        return any(has_map(field.type) for field in kind)
    inner = getattr(kind, "storage_type", None) or getattr(kind, "value_type", None)
    return inner is not None and has_map(inner)


def map_of(pairs: list[tuple[Any, Any]], item: Callable[[Any], Any]) -> dict[str, Any]:
    """An object of the pairs of a MAP. Raises Repeated for a key that is there twice."""
    found = unique([(str(as_json(key)), value) for key, value in pairs])
    return {name: None if value is None else item(value) for name, value in found.items()}


def as_json(value: Any) -> Any:
    """A value of Arrow as JSON has it; objects without the fields that have no value."""
    if isinstance(value, dict):
        return {str(name): as_json(part) for name, part in value.items() if part is not None}
    if isinstance(value, list | tuple):
        return [as_json(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | Decimal):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")  # some writers do not say that their columns are text
        except UnicodeDecodeError:
            return {"bytes": len(value)}  # an image or sound, which is named as not used
    return value


def size_of(value: Any) -> int:
    """About how many characters a value takes as JSON."""
    if isinstance(value, dict):
        return sum(len(name) + size_of(part) for name, part in value.items())
    if isinstance(value, list):
        return sum(map(size_of, value))
    return len(value) if isinstance(value, str) else 8


def read_text(path: Path, limit: RowLimit) -> Iterator[Record]:
    """Yield the paragraphs of a text, which are separated by blank lines."""
    with opened(path) as file:
        first, parts, size = 1, list[bytes](), 0
        for number, line in enumerate(iter(lambda: file.readline(limit.row_bytes + 1), b""), 1):
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                first = first if parts else number
                parts.append(line)
                size += len(line)
                if size > limit.row_bytes:
                    raise limit.too_long(f"{path}:{first}")
                continue
            if parts:
                yield paragraph(parts, f"{path}:{first}")
            parts, size = [], 0
        if parts:
            yield paragraph(parts, f"{path}:{first}")


def paragraph(lines: list[bytes], where: str) -> Record:
    try:
        return where, {"text": b"".join(lines).decode("utf-8").strip()}
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text") from error


def read_workbook(path: Path, limit: RowLimit) -> Iterator[Record]:
    """Yield the rows of the first sheet that has some, as of a CSV file."""
    names: list[str] = []
    for number, cells in run_isolated("your_ai.data.workbooks", path):
        where = f"{path}: row {number}"
        if not names:
            names = checked_names(cells, where)
            continue
        if sum(map(len, cells)) > limit.row_bytes:
            raise limit.too_long(where)
        yield where, dict(zip(names, cells, strict=True))


def read_passages(path: Path, limit: RowLimit, form: str) -> Iterator[Record]:
    """Yield the pages or sections of a document."""
    for number, passage in enumerate(passages_in(path, form), 1):
        where = f"{path}: row {number} ({passage.place})"
        if len(passage.text) > limit.row_bytes:
            raise limit.too_long(where)
        yield where, {"text": passage.text}


READERS: dict[str, Callable[[Path, RowLimit], Iterator[RecordOrFault]]] = {
    "jsonl": read_jsonl,
    "json": read_json,
    "csv": read_csv,
    "tsv": partial(read_csv, delimiter="\t"),
    "parquet": read_parquet,
    "arrow": read_arrow,
    "xlsx": read_workbook,
    **{form: partial(read_passages, form=form) for form in DOCUMENTS},
    "text": read_text,  # which may be compressed, and of any size
}
