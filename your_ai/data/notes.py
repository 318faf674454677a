"""What was noticed in rows: each kind once, with how often it occurred and where first."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from your_ai.gates.text import counted, shortened

MOST_KINDS = 50  # a file whose every row has other columns is named with that many of them

PLACE = re.compile(r".*?:(?: row )?\d+(?![^:( ])")  # the row, as `file:line`, of a place in it
MORE = "more was noticed than these lines say"


@dataclass
class Notes:
    """Kinds of what was noticed, in the order in which they came."""

    found: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Text -> the number of rows, and the place of the first."""
    rows: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Text -> the row to which it was added last."""

    def add(self, text: str, where: str) -> None:
        text = text if text in self.found or len(self.found) < MOST_KINDS else MORE
        count, first = self.found.get(text, (0, where))
        place = PLACE.match(where)
        row = place[0] if place else where
        if self.rows.get(text) != row:  # not again for another answer of the same row
            self.found[text] = count + 1, first
        self.rows[text] = row

    def add_all(self, others: Notes) -> None:
        """Add what was noticed in the rows of a further file."""
        for text, (count, first) in others.found.items():
            before, place = self.found.get(text, (0, first))
            self.found[text] = before + count, place

    def lines(self) -> list[str]:
        """`answers without text are not trained: 3 rows, the first in data.jsonl:1`"""
        return [
            f"{text}: {counted(count, 'row')}, the first in {first}"
            for text, (count, first) in self.found.items()
        ]

    def as_json(self) -> list[list[Any]]:
        return [[text, count, first] for text, (count, first) in self.found.items()]


def notes_from(content: Any) -> Notes:
    """Read what `as_json` gave. Raises ValueError if it is anything else."""
    found = {}
    for text, count, first in content:
        if not (isinstance(text, str) and isinstance(first, str) and type(count) is int):
            raise ValueError("expected texts, numbers and places")
        found[text] = count, first
    return Notes(found)


def compared(where: str, trained: str, generated: str) -> str:
    """The place of a row, with what is there in training and in generation."""
    trained, generated = (shortened(repr(text), 60) for text in (trained, generated))
    return f"{where} (trained: {trained}, in generation: {generated})"


def not_used(column: str) -> str:
    name = shortened(column) if column.strip() else "without a name"
    return f"the column {name} is not used (see --columns and --prompt-template)"
