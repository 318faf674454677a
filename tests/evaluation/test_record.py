from __future__ import annotations

import errno
import json
import os

import pytest

from your_ai.errors import RunError
from your_ai.evaluation import record
from your_ai.run.folder import RunFolder

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def folder(own_folder) -> RunFolder:
    (own_folder / "r").mkdir()
    return RunFolder(own_folder / "r")


def test_a_written_record_is_read_back(folder):
    found = {"version": 1, "measures": {"loss": {"base": {"value": None}}}, "text": "\u00e9\n"}
    record.write_evaluation(folder, found)
    assert record.read_evaluation(folder) == found
    assert [path.name for path in folder.path.iterdir()] == ["evaluation.json"]


def test_a_lone_surrogate_does_not_lose_the_rest_of_the_record(folder):
    record.write_evaluation(folder, {"version": 1, "text": "a\ud800b"})
    assert record.read_evaluation(folder) == {"version": 1, "text": "a?b"}


@pytest.mark.parametrize("text", [None, "", "{", "[]", '{"version": 2}', "{}", "\xff"])
def test_a_missing_or_foreign_file_reads_as_none(folder, text):
    if text is not None:
        record.evaluation_file(folder).write_text(text, encoding="latin-1")
    assert record.read_evaluation(folder) is None


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_full_disk_keeps_the_previous_record(folder, monkeypatch, fails):
    record.write_evaluation(folder, {"version": 1, "rows": 1})

    def full(*_, **__):
        raise FULL

    monkeypatch.setattr(os, fails, full)
    with pytest.raises(RunError, match=r"evaluation.json: cannot be written \(No space left"):
        record.write_evaluation(folder, {"version": 1, "rows": 2})
    assert [path.name for path in folder.path.iterdir()] == ["evaluation.json"]
    assert json.loads(record.evaluation_file(folder).read_text())["rows"] == 1
