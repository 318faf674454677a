"""The event file: written events are read back, and unreadable lines are skipped."""

from __future__ import annotations

import errno
import json
import os
import tempfile
import typing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import RunError, UserError
from your_ai.run import events
from your_ai.run.events import EventLog, Notice, Record, Stage, from_line, tail, to_line

finite = st.floats(allow_nan=False)
VALUES = {
    int: st.integers(), float: finite, str: st.text(), bool: st.booleans(),
    int | None: st.none() | st.integers(), float | None: st.none() | finite,
    list[str]: st.lists(st.text()),
    list[list[float]]: st.lists(st.lists(finite, min_size=2, max_size=2)),
    list[float]: st.lists(finite), dict[str, float]: st.dictionaries(st.text(), finite),
}  # fmt: skip


@st.composite
def records(draw: st.DrawFn) -> Record:
    kind = draw(st.sampled_from(sorted(events.KINDS.values(), key=lambda k: k.__name__)))
    fields = {name: draw(VALUES[hint]) for name, hint in typing.get_type_hints(kind).items()}
    return Record(draw(finite), kind(**fields))


def texts(found: list[Record]) -> list[str]:
    return [record.event.text for record in found]


def log_notices(path: Path, *notices: str) -> None:
    log = EventLog(path)
    for text in notices:
        log.write(Notice(text=text))
    log.close()


def example(kind: type) -> Record:
    values = {
        int: 3,
        bool: True,
        int | None: None,
        float | None: 0.5,
        float: 0.5,
        str: "text\nin ünïcode \u2028",
        list[str]: ["a", "b\r\n"],
        list[list[float]]: [[1e9, 0.5]],
        list[float]: [0.5, 2.0],
        dict[str, float]: {"rewards/margins": 0.5},
    }
    fields = {name: values[hint] for name, hint in typing.get_type_hints(kind).items()}
    return Record(1.5, kind(**fields))


@pytest.mark.parametrize("kind", events.KINDS.values(), ids=list(events.KINDS))
def test_every_kind_of_event_is_read_back(own_folder, kind):
    log = EventLog(own_folder / "events.jsonl")
    log.write(example(kind).event)
    log.close()
    (record,), _ = tail(own_folder / "events.jsonl")
    assert record.event == example(kind).event


@given(records())
def test_a_record_is_written_as_one_line_and_read_back(record):
    line = to_line(record)
    assert len(line.encode().splitlines()) == 1
    assert line.endswith("\n")
    assert from_line(line) == record


def test_an_event_is_written_in_one_write(own_folder, monkeypatch):
    """Otherwise a reader could see lines of two writers mixed."""
    log = EventLog(own_folder / "events.jsonl")
    written = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda _, data: written.append(data) or len(data))
        log.write(Notice(text="x" * 10_000))
    log.close()
    assert len(written) == 1


def test_unknown_fields_are_ignored():
    line = json.dumps({"event": "notice", "time": 1, "text": "a", "colour": "blue"})
    assert from_line(line) == Record(1.0, Notice(text="a"))


@pytest.mark.parametrize(
    "line",
    [
        b"", b"\n", b"\0\0\0\0\n", b"\xff\xfe\n", b"text\n", b"null\n", b"3\n", b"[]\n", b"{}\n",
        b'{"event": "notice", "time": 1, "text": "ha',
        b'{"event": "from a newer version", "time": 1}\n', b'{"event": [], "time": 1}\n',
        b'{"event": null, "time": 1}\n', b'{"event": "notice", "text": "no time"}\n',
        b'{"event": "notice", "time": "noon", "text": "a"}\n',
        b'{"event": "notice", "time": null, "text": "a"}\n', b'{"event": "notice", "time": 1}\n',
        b'{"event": "notice", "time": 1' + b"0" * 400 + b', "text": "a"}\n', b"[" * 100_000 + b"\n",
    ],
    ids=lambda line: repr(line[:40]),
)  # fmt: skip
def test_an_unknown_line_is_none(line):
    assert from_line(line) is None


@pytest.mark.parametrize("metrics", ["[]", "3", '{"a": "b"}', '{"a": null}', '{"a": {}}'])
def test_metrics_must_be_numbers(metrics):
    line = to_line(example(events.Step))
    assert from_line(line) is not None
    assert from_line(line.replace('{"rewards/margins": 0.5}', metrics)) is None


@pytest.mark.parametrize("front", [[1], [[1, 2, 3]], [[1, "2"]], ["12"], {}])
def test_a_front_has_pairs_of_numbers(front):
    fields = {"plan": "fused", "micro_tokens": 1, "spill": False, "level": 0}
    line = {"event": "planned", "time": 1.0, **fields, "estimate_bytes": 1, "text": "t"}
    assert events.from_line(json.dumps(line | {"front": [[1, 2.5]]})) is not None
    assert events.from_line(json.dumps(line | {"front": front})) is None


@pytest.mark.parametrize(
    "between",
    [
        b'\xff\n{"event": "from a newer version", "time": 1}\n\n',
        to_line(Record(1.0, Stage(text="half")))[:-4].encode(),  # as a killed run leaves it
    ],
)
def test_unknown_lines_and_a_half_line_are_skipped(own_folder, between):
    path = own_folder / "events.jsonl"
    log_notices(path, "before")
    with path.open("ab") as file:
        file.write(between)
    log_notices(path, "after")
    assert texts(tail(path)[0]) == ["before", "after"]


def test_a_missing_file_has_no_events(own_folder):
    assert tail(own_folder / "events.jsonl") == ([], 0)
    assert tail(own_folder / "events.jsonl", 5) == ([], 5)


def test_a_half_written_line_is_left_for_the_next_call(own_folder):
    """However much of the file exists yet, each event is returned once, in order."""
    whole, part = own_folder / "whole.jsonl", own_folder / "part.jsonl"
    log_notices(whole, "one", "zwei, ü", "three")
    content = whole.read_bytes()
    for size in range(len(content) + 1):
        part.write_bytes(content[:size])
        first, offset = tail(part)
        part.write_bytes(content)
        rest, end = tail(part, offset)
        assert texts(first + rest) == ["one", "zwei, ü", "three"]
        assert end == len(content)


def test_an_event_records_the_time(own_folder, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1234.5)
    log_notices(own_folder / "events.jsonl", "a")
    (record,), _ = tail(own_folder / "events.jsonl")
    assert record.time == 1234.5


def test_an_event_after_a_cut_event_starts_a_new_line(own_folder, monkeypatch):
    write, room = os.write, iter([10])

    def until_full(file: int, data: bytes) -> int:
        size = next(room, None)
        if size is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:size])

    log = EventLog(own_folder / "events.jsonl")
    with monkeypatch.context() as full:
        full.setattr(os, "write", until_full)
        with pytest.raises(RunError):
            log.write(Notice(text="cut"))
    log.write(Notice(text="whole"))
    log.close()
    records, _ = tail(own_folder / "events.jsonl")
    assert [record.event.text for record in records] == ["whole"]


def test_an_endless_line_is_refused_quickly(own_folder):
    """10 GB of one line: reading a small part shows that it is not an events file."""
    path = own_folder / "events.jsonl"
    with path.open("wb") as file:
        file.truncate(10_000_000_000)
    with pytest.raises(UserError, match="is not an events file"):
        tail(path)


def test_an_event_after_a_long_line_is_read(own_folder, monkeypatch):
    monkeypatch.setattr(events, "LINE_BYTES", 100)
    path = own_folder / "events.jsonl"
    record = Record(1.0, events.Notice(text="a"))
    path.write_text(events.to_line(record) + "x" * 1000 + "\n" + events.to_line(record) + "half")
    found, offset = tail(path)
    assert found == [record, record]
    assert offset == path.stat().st_size - 4


def test_folders_pipes_and_devices_are_refused(own_folder):
    os.mkfifo("fifo")
    for path in (own_folder, own_folder / "fifo", Path("/dev/zero")):
        with pytest.raises(UserError, match="cannot be read"):
            tail(path)
        with pytest.raises(RunError, match="cannot be written"):
            EventLog(path)


def test_lines_that_are_no_events_are_counted_over_all_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "STRANGE_BYTES", 100)
    path = tmp_path / "events.jsonl"
    path.write_text("strange\n" * 50)
    rest = events.EventsTail(path)
    while rest.strange_bytes + 10 < 100:
        rest.read(10)
    with pytest.raises(UserError, match="is not an events file"):
        rest.read()


def test_only_some_kinds_are_returned_and_the_others_not_parsed(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    for event in (Stage(text="a"), Notice(text="b"), Stage(text="c")):
        events.write_event(path, event)
    with path.open("a") as file:  # as another program may write it
        for kind, text in (("stage", "d"), ("notice", "e")):
            file.write(json.dumps({"time": 1, "event": kind, "text": text}) + "\n")
    parsed = []
    monkeypatch.setattr(events, "from_line", lambda line: parsed.append(line) or from_line(line))
    found, offset = tail(path, 0, (Stage,))
    assert texts(found) == ["a", "c", "d"]
    assert (len(parsed), offset) == (4, path.stat().st_size)


@pytest.mark.parametrize("half", ["", '{"event": "sta'])
def test_the_end_of_a_file_is_after_its_last_whole_line(tmp_path, half):
    path = tmp_path / "events.jsonl"
    assert events.end_of(path) == 0
    events.write_event(path, Stage(text="a"))
    size = path.stat().st_size
    path.write_text(path.read_text() + half)
    assert events.end_of(path) == size == tail(path)[1]


def test_a_file_of_strange_lines_is_skimmed_in_little_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MOST_LINES", 1000)
    path = tmp_path / "events.jsonl"
    path.write_text("".join(f'{{"event": "x{n}", "time": 1}}\n' for n in range(2000)))
    parsed = []
    monkeypatch.setattr(events, "from_line", lambda line: parsed.append(line) or from_line(line))
    assert events.skim(path, most=20) == []
    assert len(parsed) <= 20 + 1 + events.LAST_LINES


@given(st.lists(st.sampled_from("sssssssgn"), max_size=300))
def test_a_skimmed_file_has_all_rare_events_with_those_before_them_and_the_last_of_all(kinds):
    written = {"s": Stage, "g": Notice, "n": events.Continued}
    fields = {"s": {"text": ""}, "g": {"text": ""}, "n": {"step": 1, "seconds": 1.0}}
    lines = [
        to_line(Record(float(at), written[kind](**fields[kind]))) for at, kind in enumerate(kinds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_text("".join(lines))
        found = [int(record.time) for record in events.skim(path, most=20)]
    assert found == sorted(set(found))
    for kind in set(kinds):
        of_kind = [at for at, each in enumerate(kinds) if each == kind]
        if len(of_kind) <= 20:
            wanted = {*of_kind, *(max(0, at - 1) for at in of_kind)}
        else:
            wanted = {*of_kind[:: len(of_kind) // 20], *of_kind[-events.LAST_LINES :]}
        assert wanted <= set(found)
