"""Rollouts in files: read back exactly, and nothing else is taken for them."""

from __future__ import annotations

import errno
import gzip
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import RunError
from your_ai.run import rollout_files
from your_ai.run.rollout_files import (
    RolloutRecord,
    by_reward,
    read_rollouts,
    rollout_file,
    rollout_steps,
    write_rollouts,
)

RECORD = RolloutRecord(
    row=3,
    sample=0,
    where="train.jsonl:4",
    question="Why?",
    expected=None,
    completion="Because.",
    tokens=[5, 6, 1],
    stopped=True,
    rewards={"exact_match": 1.0, "judge": None},
    reward=1.0,
)
# Where str.splitlines cuts, and what UTF-8 cannot have.
ODD = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg\r\nh\ud800\udc00i\x00\U0001f600"
TEXTS = st.text(st.characters()) | st.sampled_from([ODD, ""])
NUMBERS = st.floats(allow_nan=False, allow_infinity=False, width=32)
REWARDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def records(draw, names: list[str], scored: bool) -> RolloutRecord:
    tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
    scores = st.lists(NUMBERS, min_size=len(tokens), max_size=len(tokens))
    scores = scores if scored else st.none()
    return RolloutRecord(
        row=draw(st.integers(0, 2**40)), sample=draw(st.integers(0, 63)), where=draw(TEXTS),
        question=draw(TEXTS), expected=draw(st.none() | TEXTS), completion=draw(TEXTS),
        tokens=tokens, stopped=draw(st.booleans()), rewards={name: draw(REWARDS) for name in names},
        reward=draw(REWARDS), advantage=draw(NUMBERS), reply=draw(st.none() | TEXTS),
        old=draw(scores), reference=draw(scores),
    )  # fmt: skip


def write(path: Path, *contents: object) -> Path:
    """A file of rollouts with any contents."""
    lines = [c if isinstance(c, str) else json.dumps(c) for c in contents]
    path.write_bytes(gzip.compress("".join(line + "\n" for line in lines).encode()))
    return path


@pytest.fixture
def path(tmp_path) -> Path:
    return rollout_file(tmp_path, 1)


@given(
    st.builds(records, st.lists(TEXTS, max_size=3, unique=True), st.booleans()).flatmap(
        lambda one: st.lists(one, min_size=1, max_size=4)
    )
)
def test_what_is_written_is_read_back(tmp_path_factory, found):
    path = rollout_file(tmp_path_factory.getbasetemp(), 1)
    write_rollouts(path, found)
    assert read_rollouts(path) == found


def test_equal_rollouts_are_equal_bytes(tmp_path):
    paths = [rollout_file(tmp_path, step) for step in (1, 2)]
    for path in paths:
        write_rollouts(path, [RECORD])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_they_are_written_over_those_before(path):
    write_rollouts(path, [RECORD] * 3)
    write_rollouts(path, [RECORD])
    assert read_rollouts(path) == [RECORD]
    assert os.listdir(path.parent) == [path.name]


def test_steps_are_listed_in_order(tmp_path):
    for step in (12, 2, 1_234_567):
        write_rollouts(rollout_file(tmp_path, step), [RECORD])
    (tmp_path / "rollouts" / "step-3.jsonl.gz").touch()
    (tmp_path / "rollouts" / ".tmp-step-000004.jsonl.gz").touch()
    assert rollout_steps(tmp_path) == [2, 12, 1_234_567]


def test_a_run_without_rollouts_has_no_steps(tmp_path):
    assert rollout_steps(tmp_path) == []


# -- files that are no rollouts


def test_no_file_is_none(path):
    assert read_rollouts(path) is None


def test_a_folder_is_refused(path):
    path.mkdir(parents=True)
    assert read_rollouts(path) is None


@pytest.mark.parametrize("data", [b"", b"{}", b"\x1f\x8b", gzip.compress(b"", mtime=0)])
def test_files_without_rows_are_refused(tmp_path, data):
    path = tmp_path / "r.gz"
    path.write_bytes(data)
    assert read_rollouts(path) is None


def test_a_file_cut_anywhere_is_refused(path):
    write_rollouts(path, [replace(RECORD, sample=n) for n in range(4)])
    data = path.read_bytes()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert read_rollouts(path) is None, size


def test_a_changed_byte_is_refused_or_changes_nothing(path):
    """gzip's header has bytes that say nothing of the contents."""
    found = [replace(RECORD, sample=n) for n in range(4)]
    write_rollouts(path, found)
    data = path.read_bytes()
    for place in range(len(data)):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :])
        assert read_rollouts(path) in (None, found), place


@pytest.mark.parametrize(
    "change",
    [
        {"row": "3"}, {"row": -1}, {"row": 1.5}, {"row": True}, {"sample": None}, {"sample": -1},
        {"where": 1}, {"question": None}, {"expected": 4}, {"completion": ["Because."]},
        {"tokens": []}, {"tokens": "abc"}, {"tokens": [1.0]}, {"tokens": [True]}, {"tokens": [-1]},
        {"tokens": [2**31]}, {"stopped": "yes"}, {"rewards": None}, {"rewards": []},
        {"rewards": [["exact_match", 1]]}, {"rewards": {"exact_match": "1"}},
        {"rewards": {"exact_match": float("nan")}}, {"reward": "1"}, {"reward": True},
        {"reward": float("inf")}, {"advantage": None}, {"advantage": float("nan")}, {"reply": 1},
        {"old": 1}, {"old": "abc"}, {"old": [1.0]}, {"old": [1.0, None, 1.0]},
        {"reference": {"a": 1, "b": 2, "c": 3}}, {"reference": [0.0, 0.0, True]},
    ],
    ids=repr,
)  # fmt: skip
def test_fields_of_wrong_types_are_refused(tmp_path, change):
    assert read_rollouts(write(tmp_path / "r.gz", asdict(RECORD) | change)) is None


@pytest.mark.parametrize(
    "line", ["", "1", "null", "[]", "{}", "{", '"a"', "[" * 100_000, "1" * 10_000], ids=str
)
def test_lines_that_are_no_rollouts_are_refused(tmp_path, line):
    assert read_rollouts(write(tmp_path / "r.gz", asdict(RECORD), line[:200_000])) is None


def test_rollouts_of_different_kinds_are_refused(tmp_path):
    """All of a step have the same rewards and log-probabilities."""
    for change in ({"rewards": {"other": 1.0}}, {"old": [0.0] * 3}, {"reference": [0.0] * 3}):
        path = write(tmp_path / "r.gz", asdict(RECORD), asdict(RECORD) | change)
        assert read_rollouts(path) is None


def test_fields_of_later_versions_are_ignored(tmp_path):
    assert read_rollouts(write(tmp_path / "r.gz", asdict(RECORD) | {"new": 1})) == [RECORD]


@pytest.mark.parametrize("character", [b" ", b"\n", b"1"])
def test_a_bomb_is_refused(tmp_path, monkeypatch, character):
    monkeypatch.setattr(rollout_files, "MOST_BYTES", 1 << 20)
    path = tmp_path / "r.gz"
    path.write_bytes(gzip.compress(json.dumps(asdict(RECORD)).encode() + character * (1 << 21)))
    assert read_rollouts(path) is None


# -- disks


def test_a_full_disk_is_one_error_and_leaves_what_was_there(path, monkeypatch):
    write_rollouts(path, [RECORD])
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", Mock(side_effect=full))
    with pytest.raises(RunError, match=r"step-000001.*No space left.*free some disk space"):
        write_rollouts(path, [RECORD] * 2)
    assert read_rollouts(path) == [RECORD]
    assert os.listdir(path.parent) == [path.name]


def test_a_file_in_the_place_of_the_folder_is_one_error(tmp_path):
    (tmp_path / "rollouts").touch()
    with pytest.raises(RunError, match="cannot be written"):
        write_rollouts(rollout_file(tmp_path, 1), [RECORD])


def test_missing_rewards_come_last_in_both_orders():
    rewards = [None, 0.5, float("nan"), 1.0, 0.5]
    found = [replace(RECORD, sample=i, reward=r) for i, r in enumerate(rewards)]
    assert [r.sample for r in by_reward(found, highest=True)] == [3, 1, 4, 0, 2]
    assert [r.sample for r in by_reward(found, highest=False)] == [1, 4, 3, 0, 2]
