"""What was noticed in rows is said once for each kind."""

from __future__ import annotations

import json

import pytest

from your_ai.data.lines import Fields
from your_ai.data.notes import MOST_KINDS, Notes, notes_from


def test_a_kind_is_counted_and_has_its_first_place():
    notes = Notes()
    for number in (3, 5):
        notes.add("no answer", f"f:{number}")
    notes.add("no tools", "f:9")
    assert notes.lines() == [
        "no answer: 2 rows, the first in f:3",
        "no tools: 1 row, the first in f:9",
    ]
    assert notes_from(json.loads(json.dumps(notes.as_json()))) == notes


def test_kinds_are_few():
    notes = Notes()
    for number in range(MOST_KINDS + 7):
        notes.add(f"column {number}", f"f:{number}")
    *_, last = lines = notes.lines()
    assert len(lines) == MOST_KINDS + 1
    assert last == f"more was noticed than these lines say: 7 rows, the first in f:{MOST_KINDS}"


@pytest.mark.parametrize("content", [[1], [["a", "b", "c"]], [["a", 1]], [[1, 1, "f"]]])
def test_other_contents_are_refused(content):
    with pytest.raises((ValueError, TypeError)):
        notes_from(content)


def test_fields_that_are_not_read_are_unused_unless_they_are_empty():
    fields = Fields({"a": 1, "b": 2, "c": 3, "d": None, "e": "", "f": []})
    assert fields["a"] == 1
    assert fields.without("a").get("b") == 2
    assert fields.unused() == ("c",)


def test_several_answers_of_a_row_count_once():
    notes = Notes()
    for where in (
        "a.jsonl:1: chosen",
        "a.jsonl:1: rejected",
        "a.jsonl:1 (trained: 'x')",
        "a.jsonl:12",
    ):
        notes.add("kind", where)
    notes.add("kind", "b.json: row 12")
    assert notes.lines() == ["kind: 3 rows, the first in a.jsonl:1: chosen"]
