"""Checks of untrusted names, JSON, and headers of safetensors files."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.headers import write_with_header
from your_ai.errors import UserError
from your_ai.gates import untrusted
from your_ai.gates.text import shown
from your_ai.gates.untrusted import (
    DTYPE_BITS,
    clash,
    is_hash,
    links_outside,
    name_fault,
    parse_json,
    path_fault,
    read_header,
    read_json,
)

SAME_FOLDER = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# Names


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "/", "a/b", "/etc/x", "../x", "a\\b", "C:x", "a\nb", "a\0b", "a\x7fb"),
        *("a\u202eb", "\ud800", "a" * 256, "é" * 128, ".tmp-x", ".your_ai.json", ".LOCK-a"),
        *(None, 7, True, [], {}, b"a", 1.5),
    ],
    ids=ascii,
)
def test_invalid_file_names_are_refused(name):
    assert name_fault(name) is not None


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model-00001-of-00002.safetensors", "tokenizer.model", "a b.json"),
        *("qwen.tiktoken", "a" * 255, "é" * 127, ".gitattributes", "...", "parts", "模型.json"),
    ],
)
def test_ordinary_file_names_pass(name):
    assert name_fault(name) is None


@given(st.text() | st.text("./\\:a\0~", max_size=6))
def test_a_name_that_passes_stays_in_its_folder(name):
    if name_fault(name) is None:
        assert Path("/a/folder", name).parent == Path("/a/folder")
        assert os.path.normpath(f"/a/folder/{name}") == f"/a/folder/{name}"


@given(st.text() | st.text("./\\:a\0~", max_size=8))
def test_a_path_that_passes_stays_in_its_repository(path):
    if path_fault(path) is None:
        assert os.path.normpath(f"/a/repo/{path}").startswith("/a/repo/")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["a", "b"], None),
        (["a.json", "A.json"], ("a.json", "A.json")),
        (["é", "e\u0301"], ("é", "e\u0301")),
        (["a", "a"], ("a", "a")),
        (["straße", "STRASSE"], ("straße", "STRASSE")),
    ],
)
def test_clash_finds_names_that_are_equal_on_some_file_systems(names, found):
    assert clash(names) == found


@pytest.mark.parametrize("value", ["a" * 40, "0" * 64])
def test_is_hash_accepts_hex_digits(value):
    assert is_hash(value)


@pytest.mark.parametrize("value", ["", "a" * 39, "A" * 40, "g" * 40, "a" * 40 + "\n", None, 7])
def test_is_hash_rejects_everything_else(value):
    assert not is_hash(value)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\x1b[2Jb", "a␛[2Jb"), ("a" * 500, "a" * 133 + "…" + "a" * 66), (7, "7"), (None, "None"),
        (10**5000, "a huge number"), ([1], "a list"), ({}, "a dict"),
    ],
    ids=range(7),
)  # fmt: skip
def test_an_untrusted_value_is_shown_short_and_printable(value, text):
    assert shown(value) == text


def test_leaves_detects_links_to_files_outside(tmp_path):
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.write_text("private")
    (folder / "out").symlink_to(other)
    (folder / "own").write_text("own")
    (folder / "in").symlink_to(folder / "own")
    assert [links_outside(folder / n, folder) for n in ("out", "own", "in")] == [True, False, False]


def test_a_link_to_the_blobs_of_the_cache_counts_as_inside(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "main", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name in ("a" * 64, "private"):
        (blobs / name).write_text("x")
        (snapshot / name).symlink_to(blobs / name)
    assert not links_outside(snapshot / ("a" * 64), snapshot)
    assert links_outside(snapshot / "private", snapshot)


# JSON


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 20_000 + b"]" * 20_000, "nested deeper"),
        (b'{"a":' * 65 + b"1" + b"}" * 65, "nested deeper"),
        (b"[" + b"[]," * 1_100_000 + b"[]]", "more than 2000000 parts"), (b"\xff", "not UTF-8"),
        (b"1" * 5000, "integer"), (b"{", "Expecting"), (b"", "Expecting"),
    ],
    ids=range(7),
)  # fmt: skip
def test_json_beyond_the_bounds_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)


def test_json_at_the_bounds_is_read():
    text = b'{"a":' * 64 + b"1" + b"}" * 64
    assert parse_json(text) == json.loads(text)
    assert parse_json(b"[NaN, Infinity]")[1] == math.inf  # some published configs have these


def test_duplicate_keys_are_refused_if_asked():
    assert parse_json(b'{"a": 1, "a": 2}') == {"a": 2}
    with pytest.raises(ValueError, match="a twice"):
        parse_json(b'{"a": 1, "a": 2}', unique=True)


@given(st.binary(max_size=200))
def test_parse_json_parses_any_bytes_or_raises_ValueError(data):
    try:
        found = parse_json(data)
    except ValueError:
        return
    assert json.dumps(found) == json.dumps(json.loads(data))


def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "zero.json").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe.json", tmp_path / "zero.json"):
        with pytest.raises(UserError, match="not a regular file"):
            read_json(path, "")


def test_a_file_beyond_the_maximum_size_is_refused(tmp_path):
    with (tmp_path / "a.json").open("wb") as file:
        file.truncate(untrusted.JSON_BYTES + 1)
    with pytest.raises(UserError, match="the maximum is"):
        read_json(tmp_path / "a.json", "")


# Headers


def tensor(shape: object, offsets: object, kind: object = "F32") -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": offsets}


def test_tensors_are_returned_in_the_order_of_their_bytes(tmp_path):
    header = {"b": tensor([2], [4, 12]), "a": tensor([], [0, 4]), "__metadata__": {"x": "y"}}
    path = write_with_header(tmp_path / "f", header, 12)
    base = path.stat().st_size - 12
    found = [(e.name, e.kind, e.shape, e.start - base, e.end - base) for e in read_header(path)]
    assert found == [("a", "F32", (), 0, 4), ("b", "F32", (2,), 4, 12)]


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ({"a": tensor([1], [0, 4]), "b": tensor([2], [0, 8])}, "overlaps another"),
        ({"a": tensor([1], [4, 8])}, "has unused bytes before it"),
        ({"a": tensor([1], [0, 4])}, "4 bytes do not belong to a tensor"),
        ({"a": tensor([4], [0, 16])}, "cut short"),
        ({"a": tensor([3], [0, 8])}, "does not match its shape"),
        ({"a": tensor([2], [8, 0])}, "invalid data_offsets"),
        ({"a": tensor([2], [-8, 0])}, "invalid data_offsets"),
        ({"a": tensor([2], [0, 8.0])}, "invalid data_offsets"),
        ({"a": tensor([2], [0, True])}, "invalid data_offsets"),
        ({"a": tensor([2], [0, 8, 8])}, "invalid data_offsets"),
        ({"a": tensor([-2], [0, 8])}, "invalid shape"),
        ({"a": tensor([2.0], [0, 8])}, "invalid shape"),
        ({"a": tensor("2", [0, 8])}, "invalid shape"),
        ({"a": tensor([1] * 100 + [2], [0, 8])}, "invalid shape"),
        ({"a": tensor([1 << 61, 8], [0, 8])}, "does not match its shape"),
        ({"a": tensor([1 << 80], [0, 8])}, "invalid shape"),
        ({"a": tensor([2], [0, 8], "F33")}, "unknown dtype F33"),
        ({"a": tensor([2], [0, 8], 7)}, "unknown dtype 7"),
        ({"a": None}, "is not described"),
        ({"a\x1b": None}, r"a␛ is not described"),
        ({"a\x1b": tensor([2], [0, 8])}, r"a␛ has an invalid name"),
        ({"a" * 2000: tensor([2], [0, 8])}, "has an invalid name"),
        (b'{"a": {}, "a": {}}', "a twice"),
        ([], "not an object"),
        (b"[" * 100_000, "nested deeper"),
    ],
    ids=range(25),
)
def test_a_header_that_does_not_match_its_file_is_refused(tmp_path, header, reason):
    path = write_with_header(tmp_path / "f", header, 8)
    with pytest.raises(UserError, match=reason) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).isprintable()


def test_a_huge_header_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "f"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 28))
        file.truncate(1 << 29)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError, match="its header has 268435456 bytes"):
        read_header(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


NUMBER = st.integers(-1, 20) | st.integers() | st.floats() | st.booleans() | st.none()
TENSOR = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([*DTYPE_BITS, "F33"]) | NUMBER,
        "shape": st.lists(st.integers(-1, 4) | NUMBER, max_size=3) | NUMBER,
        "data_offsets": st.lists(st.integers(-1, 20) | NUMBER, max_size=3) | NUMBER,
    },
)


@SAME_FOLDER
@given(
    header=st.dictionaries(st.text(max_size=3), TENSOR | NUMBER, max_size=3) | NUMBER,
    size=st.integers(0, 20),
)
def test_any_accepted_header_covers_every_byte_of_the_file_once(tmp_path, header, size):
    path = write_with_header(tmp_path / "f", header, size)
    try:
        entries = read_header(path)
    except UserError:
        return
    begins = [entry.start for entry in entries]
    ends = [entry.end for entry in entries]
    total = path.stat().st_size
    assert [total - size, *ends] == [*begins, total]
    for entry in entries:
        assert 8 * (entry.end - entry.start) == math.prod(entry.shape) * DTYPE_BITS[entry.kind]


@SAME_FOLDER
@given(data=st.binary(max_size=100), at=st.integers(0, 100), change=st.binary(max_size=9))
def test_a_damaged_file_is_read_or_raises_UserError(tmp_path, data, at, change):
    whole = write_with_header(tmp_path / "f", {"a": tensor([4], [0, 4], "U8")}, 4).read_bytes()
    (tmp_path / "f").write_bytes(whole[:at] + change + whole[at + len(change) :] + data)
    try:
        read_header(tmp_path / "f")
    except UserError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_any_flipped_bit_of_a_header_is_at_most_refused(tmp_path):
    path = write_with_header(tmp_path / "f", {"a": tensor([24], [0, 24], "U8")}, 24)
    whole, refusals = path.read_bytes(), 0
    for bit in range(8 * (len(whole) - 24)):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            read_header(path)
        except UserError:
            refusals += 1
    assert refusals > len(whole)


def test_a_file_may_have_no_tensor(tmp_path):
    header = {"__metadata__": {"format": "mlx"}}
    assert read_header(write_with_header(tmp_path / "f", header, 0)) == []
