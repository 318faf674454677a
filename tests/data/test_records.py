"""Each form of data file gives the same records, and a damaged one a line that says where."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data import records
from your_ai.data.lines import RowLimit
from your_ai.data.records import form_of, read_records
from your_ai.errors import UserError

LIMIT = RowLimit()
ROWS = [
    {"question": "How many lamps?", "answer": "three"},
    {"question": 'Say "yes",\nthen stop; ok\t?', "answer": "yes — ünïcode 🦙"},
    {"question": "x" * 300, "answer": "{1: [2]}"},
]


def write_csv(path: Path, rows: list[dict], delimiter: str = ",", encoding: str = "utf-8") -> Path:
    with path.open("w", newline="", encoding=encoding) as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_table(path: Path, table: pa.Table) -> Path:
    """A file of Parquet, of Arrow's stream or of Feather, as its name says."""
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=2)
        return path
    make = pa.ipc.new_stream if path.suffix == ".arrow" else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as sink, make(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def compress_zstd(content: bytes) -> bytes:
    return pa.Codec("zstd").compress(content, asbytes=True)


COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": compress_zstd}


def lines_of(rows: list[dict]) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def written(name: str, rows: list[dict]) -> Path:
    """A file of the form that its name says."""
    path = Path(name)
    if path.suffix in COMPRESS:
        plain = written(name.removesuffix(path.suffix), rows)
        path.write_bytes(COMPRESS[path.suffix](plain.read_bytes()))
        plain.unlink()
    elif path.suffix in (".csv", ".tsv"):
        encoding = "utf-16" if "16" in name else "utf-8-sig" if "bom" in name else "utf-8"
        delimiter = ";" if "semicolon" in name else "\t" if path.suffix == ".tsv" else ","
        write_csv(path, rows, delimiter, encoding)
    elif path.suffix in (".parquet", ".arrow", ".feather"):
        write_table(path, pa.Table.from_pylist(rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2 if "indented" in name else None))
    else:
        path.write_bytes(lines_of(rows))
    return path


def read(path: Path, limit: RowLimit = LIMIT) -> list[dict]:
    return [record for _, record in read_records(path, limit)]


@pytest.mark.parametrize(
    "name",
    [
        *("a.jsonl", "a.ndjson", "a.json", "indented.json", "a.csv", "a.tsv", "semicolon.csv"),
        *("bom.csv", "utf16.csv", "a.parquet", "a.arrow", "a.feather", "a.jsonl.gz", "a.csv.gz"),
        *("a.jsonl.bz2", "a.csv.bz2", "a.json.xz", "a.csv.xz", "a.jsonl.zst", "a.csv.zst"),
        *("a.json.zst", "a.tsv.zst", "a.txt.zst", "a.json.gz", "A.CSV", "unknown", "a.txt"),
    ],
)
def test_every_form_gives_the_same_records(name):
    assert read(written(name, ROWS)) == ROWS


@pytest.mark.parametrize("first", ["", '"version": "1.1", "n": -1.5, "info": {"by": "x, y"}, '])
@pytest.mark.parametrize("rest", ["", ', "license": {"a": [1]}, "tags": ["x"]'])
@pytest.mark.parametrize("key", ["data", "rows", "train"])
@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_may_hold_the_list_of_rows(first, rest, key, indent):
    rows = json.dumps(ROWS, indent=indent)
    Path("a.json").write_text(f'{{{first}"{key}": {rows}{rest}}}')
    assert read(Path("a.json")) == ROWS


def test_rows_whose_own_key_is_data_stay_rows():
    rows = [{"data": [{"from": "human", "value": "a"}]}, {"data": [{"from": "gpt", "value": "b"}]}]
    for name in ("a.jsonl", "a.json", "stdin"):
        Path(name).write_bytes(lines_of(rows))
        assert read(Path(name)) == rows
    Path("one.jsonl").write_bytes(lines_of(rows[:1]))
    assert read(Path("one.jsonl")) == rows[:1]


MAP = pa.map_(pa.string(), pa.string())
CALL = pa.struct([("name", pa.string()), ("arguments", MAP)])
MAPS = {
    "a column": (MAP, [("a", "x"), ("b", None)], {"a": "x", "b": None}),
    "in a list of structs": (
        pa.list_(CALL),
        [{"name": "f", "arguments": [("a", "x")]}, {"name": None, "arguments": None}],
        [{"name": "f", "arguments": {"a": "x"}}, {}],
    ),
    "of maps": (pa.map_(pa.string(), MAP), [("a", [("b", "x")])], {"a": {"b": "x"}}),
    "of lists": (
        pa.map_(pa.string(), pa.list_(CALL)),
        [("a", [{"name": "f"}])],
        {"a": [{"name": "f"}]},
    ),
    "with numbers as keys": (pa.map_(pa.int64(), pa.float64()), [(1, 0.5)], {"1": 0.5}),
    "empty": (MAP, [], {}),
    "in a large list": (pa.large_list(MAP), [[("a", "x")], None], [{"a": "x"}, None]),
    "in a list of two": (pa.list_(MAP, 2), [[("a", "x")], []], [{"a": "x"}, {}]),
    "no map": (pa.list_(pa.list_(pa.string())), [["a", "x"]], [["a", "x"]]),
}


@pytest.mark.parametrize("form", ["parquet", "arrow"])
@pytest.mark.parametrize("kind", MAPS)
def test_a_map_is_an_object_at_any_depth(kind, form):
    kind, value, wanted = MAPS[kind]
    table = pa.table({"text": pa.array(["t"]), "m": pa.array([value], kind)})
    assert read(write_table(Path(f"a.{form}"), table)) == [{"text": "t", "m": wanted}]


def test_a_key_that_is_twice_in_a_map_is_refused():
    table = pa.table({"m": pa.array([[("a", "x"), ("a", "y")]], MAP)})
    with pytest.raises(UserError, match=r"^a\.parquet: row 1: has the key a twice"):
        read(write_table(Path("a.parquet"), table))


def test_a_text_gives_its_paragraphs():
    path = Path("book.md")
    path.write_bytes("\ufeff# One\nline\n\n \n\nTwo\r\n\r\n\r\nThree".encode())
    found = list(read_records(path, LIMIT))
    assert [record["text"] for _, record in found] == ["# One\nline", "Two", "Three"]
    assert [where for where, _ in found] == ["book.md:1", "book.md:6", "book.md:9"]


def test_empty_cells_of_a_table_are_texts_and_those_of_arrow_are_not_there():
    Path("a.csv").write_text("a,b\n,x\n")
    assert read(Path("a.csv")) == [{"a": "", "b": "x"}]
    rows = [{"a": None, "b": [{"c": None, "d": 1.5}]}, {"a": "x", "b": None}]
    assert read(written("a.parquet", rows)) == [{"b": [{"d": 1.5}]}, {"a": "x"}]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_columns_of_the_same_name_are_refused(form):
    table = pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"])
    with pytest.raises(UserError, match="has two columns text"):
        read(write_table(Path(f"a.{form}"), table))


def test_the_line_that_names_the_delimiter_is_not_a_row():
    Path("a.csv").write_text("sep=;\r\na;b,c\r\n1;2\r\n")
    assert read(Path("a.csv")) == [{"a": "1", "b,c": "2"}]


NAME = st.text(st.sampled_from("ab ,;|\t\n"), max_size=8).map("x{}".format)


@given(st.sampled_from(",;|\t"), st.lists(NAME, min_size=2, max_size=4), st.integers(2, 60))
def test_names_of_columns_may_have_any_characters(delimiter, names, count):
    """Programs quote those with the delimiter, and no others."""
    names = [f"{name} {number}" for number, name in enumerate(names)]
    rows = [[f"{number} and" for number, _ in enumerate(names)]] * count
    with Path("names.csv").open("w", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([names, *rows])
    tidy = [" ".join(name.split()) for name in names]
    assert read(Path("names.csv")) == [dict(zip(tidy, row, strict=True)) for row in rows]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_lines_of_a_table_may_end_in_any_way(end):
    Path("a.csv").write_bytes(f'a,b{end}1,"x{end}y"{end}{end},,{end}'.replace(",,", ",").encode())
    assert read(Path("a.csv")) == [{"a": "1", "b": f"x{end}y"}]


def test_text_of_arrow_that_is_not_utf_8_is_refused():
    broken = pa.array([b"\xff"]).cast(pa.binary()).view(pa.binary())
    column = pa.StringArray.from_buffers(1, broken.buffers()[1], broken.buffers()[2])
    path = write_table(Path("a.parquet"), pa.table({"text": column}))
    with pytest.raises(UserError, match=r"^a\.parquet: is not a whole Parquet file \(.*utf-8"):
        read(path)


def test_content_tells_the_form_where_the_name_is_wrong():
    Path("rows.csv").write_bytes(lines_of(ROWS))
    assert form_of(Path("rows.csv")) == "jsonl"
    Path("rows.jsonl").write_text(json.dumps(ROWS))
    assert form_of(Path("rows.jsonl")) == "json"
    written("rows.csv", ROWS).rename("table")
    assert form_of(Path("table")) == "csv"
    written("rows.parquet", ROWS).rename("rows.data")
    assert form_of(Path("rows.data")) == "parquet"


HUGE = b'{"text": "' + b"x" * 5000 + b'"}'
DAMAGED = {
    "csv named jsonl": ("a.jsonl", b"a,b\n1,2\n", "looks like CSV"),
    "csv named json": ("a.json", b"a;b\n1;2\n", "looks like CSV"),
    "unknown form": ("rows.xls", b"\xd0\xcf\x11\xe0", "unknown form of data"),
    "text named parquet": ("a.parquet", b"hello", "is not Parquet"),
    "cut parquet": ("a.parquet", b"PAR1" + bytes(100), "not a whole Parquet file"),
    "cut arrow": ("a.arrow", b"ARROW1\0\0" + bytes(8), "not a whole Arrow file"),
    "cut stream": ("a.arrow", b"\xff\xff\xff\xff\x10\x00\x00\x00", "not a whole Arrow file"),
    "cut gzip": ("a.csv.gz", gzip.compress(b"a,b\n" + b"1,2\n" * 9999)[:-20], "cut short"),
    "cut bzip2": ("a.csv.bz2", bz2.compress(b"a,b\n" + b"1,2\n" * 9999)[:-20], "cut short"),
    "cut xz": ("a.csv.xz", lzma.compress(b"a,b\n" + b"1,2\n" * 9999)[:-40], "cut short"),
    "cut zstd": ("a.csv.zst", compress_zstd(b"a,b\n" + b"1,2\n" * 9999)[:-9], "cut short"),
    "bzip2 of noise": ("a.csv.bz2", b"BZh91AY&SY" + bytes(40), "damaged"),
    "xz of noise": ("a.csv.xz", b"\xfd7zXZ\x00" + bytes(40), "damaged"),
    "zstd of noise": ("a.csv.zst", b"\x28\xb5\x2f\xfd" + b"x" * 40, "damaged"),
    "an object with two lists": (
        "a.json",
        b'{"data": [{"a": 1}], "test": [{"a": 2}]}',
        "two lists",
    ),
    "an object not closed": ("a.json", b'{"data": [{"a": 1}]', "expected } here"),
    "rows that are no objects": ("a.json", b'{"data": [{"a": 1}, 2]}', "row 2: expected"),
    "gzip of noise": ("a.csv.gz", b"\x1f\x8b\x08" + bytes(40), "damaged"),
    "too many cells": ("a.csv", b"a,b\n1,2\n1,2,3\n", r"a\.csv:3: has 3 cells"),
    "too few cells": ("a.csv", b"a,b\n1\n", r"a\.csv:2: has 1 cell,"),
    "a column twice": ("a.csv", b"a,a\n1,2\n", "two columns a"),
    "a column without a name": ("a.csv", b"a,\n1,2\n", "column 2 has no name"),
    "an open quote": ("a.csv", b'a,b\n1,"2\n3,4\n', "is not valid CSV"),
    "latin 1": ("a.csv", "a,b\n1,é\n".encode("latin-1"), "is not UTF-8 text"),
    "only a header": ("a.csv", b"a,b\n", "the file is empty"),
    "an array cut": ("a.json", b'[{"a": 1}, {"a"', "row 2: is not valid JSON"),
    "an array not closed": ("a.json", b'[{"a": 1}', r"expected , here, but the file ends"),
    "an array and more": ("a.json", b'[{"a": 1}] x', "after the end of the array"),
    "an array of numbers": ("a.json", b"[1, 2]", "row 1: expected an object, found int"),
    "an array with a missing comma": ("a.json", b'[{"a": 1} {"a": 2}]', "expected , here"),
    "an array that nests": ("a.json", b'[{"a": ' + b"[" * 99 + b"]" * 99 + b"}]", "nested"),
    "an array with a key twice": ("a.json", b'[{"a": 1, "a": 2}]', "row 1: has the key a twice"),
    "an empty array": ("a.json", b"[]", "the file is empty"),
    "an array in latin 1": ("a.json", '[{"a": "é"}]'.encode("latin-1"), "is not UTF-8 text"),
    "a text in latin 1": ("a.txt", "é".encode("latin-1"), r"a\.txt:1: is not UTF-8 text"),
    "an empty text": ("a.txt", b"\n \n", "the file is empty"),
    "a long row": ("a.json", b"[" + HUGE + b"]", "raise --max-row-bytes"),
    "a long line": ("a.jsonl", HUGE, "raise --max-row-bytes"),
    "a long cell": ("a.csv", b"a,b\n1," + b"x" * 5000 + b"\n", "raise --max-row-bytes"),
    "long cells": ("a.csv", b"a,b\n1,2\n" + (b"x" * 800 + b",") * 9 + b"\n", "a.csv:3"),
    "a long paragraph": ("a.txt", b"x " * 3000, "raise --max-row-bytes"),
    "a long quoted cell": ("a.csv", b'a,b\n1,"' + b"x\n" * 3000 + b'"\n', "raise --max-row"),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_file_is_refused_in_one_line(kind):
    name, content, reason = DAMAGED[kind]
    Path(name).write_bytes(content)
    with pytest.raises(UserError, match=reason) as caught:
        read(Path(name), RowLimit(row_bytes=2000))
    assert str(caught.value).startswith(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_long_row_of_a_parquet_file_is_refused():
    path = written("a.parquet", [{"text": "x" * 5000}])
    with pytest.raises(UserError, match=r"a\.parquet: row 1: the row has more than 2,000 bytes"):
        read(path, RowLimit(row_bytes=2000))


def test_values_that_json_lacks_are_texts_or_left_out():
    import datetime
    import decimal

    row = {"d": datetime.date(2024, 1, 2), "n": decimal.Decimal("1.5"), "b": b"\xff", "f": 1.0}
    row["t"] = b"ok"
    first, second = read(written("a.parquet", [row, {**row, "f": float("nan")}]))
    assert first == {"d": "2024-01-02", "n": "1.5", "b": {"bytes": 1}, "t": "ok", "f": 1.0}
    assert second["f"] is None


cells = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)


@given(st.lists(st.fixed_dictionaries({"a": cells, "b": cells}), min_size=1, max_size=6))
def test_any_table_gives_its_cells(rows):
    rows = [row for row in rows if any(row.values())] or [{"a": "x", "b": ""}]
    path = Path("any.csv")
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, ["a", "b"])
    writer.writeheader()
    writer.writerows(rows)
    path.write_bytes(buffer.getvalue().encode())
    assert read(path) == rows


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers() | cells, max_size=4)))
def test_any_array_gives_its_objects_however_it_is_cut_into_blocks(rows):
    path = Path("any.json")
    path.write_text(json.dumps(rows), encoding="utf-8")
    blocks, records.HEAD_BYTES = records.HEAD_BYTES, 16
    try:
        if rows:
            assert read(path) == rows
    finally:
        records.HEAD_BYTES = blocks


def test_a_table_without_a_name_is_known_by_its_rows(tmp_path):
    path = tmp_path / "stdin"
    path.write_text('prompt,chosen,rejected\n"{""a"": 1, ""b"": 2}","x, y\nz",w\n')
    assert form_of(path) == "csv"
    path.write_text('a;b\n"1;2";3\n')
    assert form_of(path) == "csv"
