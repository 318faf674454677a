"""Answers that a user found good or bad: rows for --objective kto, and for dpo where two answers
to one question were judged differently.

Both files are in studio/answers/. What a thumb is about is the whole row, so that it is found
again on any page, and can be taken back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from your_ai.errors import UserError, named_errors
from your_ai.files import read_text, replace_text
from your_ai.session.room import starting
from your_ai.studio.pages import STUDIO

ANSWERS = STUDIO / "answers"
MOST_BYTES = 1 << 26
LABEL = "label"
ROLES = {"prompt", "tools", "completion"}

ThumbRow = dict[str, Any]  # prompt, maybe tools, and completion; with a label if it is judged


def labels_file(run: str) -> Path:
    return ANSWERS / f"{run}.jsonl"


def pairs_file(run: str) -> Path:
    return ANSWERS / f"{run}-pairs.jsonl"


def row_of(asked: dict[str, Any], answer: str) -> ThumbRow:
    """An answer as a row: in the form that its prompt has, a text or messages."""
    if isinstance(asked["prompt"], str):
        return {**asked, "completion": answer}
    return {**asked, "completion": [{"role": "assistant", "content": answer}]}


def is_row(row: Any) -> bool:
    """Return whether this has the form of `row_of`: all that training could refuse in it is the
    user's own text."""
    if not isinstance(row, dict) or not {"prompt", "completion"} <= row.keys() <= ROLES:
        return False
    texts = [row["prompt"], row["completion"]]
    turns = [turn for text in texts if isinstance(text, list) for turn in text]
    return all(text and isinstance(text, str | list) for text in texts) and all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) for turn in turns
    )


def judged_rows(run: str) -> list[ThumbRow]:
    """The rows with a thumb. Raises UserError if the file is damaged."""
    return rows_in(labels_file(run), LABEL)


def rows_in(path: Path, column: str) -> list[ThumbRow]:
    """The rows of a file, which all have a column; none if there is no file. Raises UserError."""
    try:
        rows = [json.loads(line) for line in read_text(path, MOST_BYTES).splitlines()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read; correct it, or move it away") from error
    kind = bool if column == LABEL else list | str
    if not all(isinstance(row, dict) and isinstance(row.get(column), kind) for row in rows):
        raise UserError(f"{path}: has rows without {column}; correct it, or move it away")
    return rows


def judge(run: str, row: ThumbRow, label: bool | None) -> None:
    """Give an answer a thumb, up or down; None takes it back. Raises UserError."""
    path = labels_file(run)
    with named_errors(path, "written"):
        ANSWERS.mkdir(parents=True, exist_ok=True)
        with starting(ANSWERS):  # one at a time
            rows_in(pairs_file(run), "chosen")  # else it has thumbs of a run of that name
            rows = [each for each in judged_rows(run) if without_label(each) != row]
            rows += [] if label is None else [{**row, LABEL: label}]
            write(path, rows)
            write(pairs_file(run), list(pairs_of(rows)))


def write(path: Path, rows: list[ThumbRow]) -> None:
    """Write the rows; without any, there is no file."""
    if rows:
        replace_text(path, "".join(json.dumps(row, ensure_ascii=True) + "\n" for row in rows))
    else:
        path.unlink(missing_ok=True)


def without_label(row: ThumbRow) -> ThumbRow:
    return {name: value for name, value in row.items() if name != LABEL}


def pairs_of(rows: list[ThumbRow]) -> Iterator[ThumbRow]:
    """Each good answer with each bad one to the same prompt."""
    for good in rows:
        for bad in rows:
            asked = {k: v for k, v in without_label(good).items() if k != "completion"}
            if (
                good[LABEL]
                and not bad[LABEL]
                and asked | {"completion": bad["completion"]} == (without_label(bad))
            ):
                yield {**asked, "chosen": good["completion"], "rejected": bad["completion"]}
