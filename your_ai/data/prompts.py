"""Rows of prompts, whose answers are generated and rewarded.

A row is any with a prompt: `prompt` as text or messages, with any further columns, or a row of
supervised fine-tuning, whose last answer is then the expected one. Reward functions receive the
whole row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from your_ai.data.lines import (
    BYTE_ORDER_MARK,
    ROW_LIMIT,
    RowLimit,
    decode_row,
    fields_of,
    text_field,
)
from your_ai.data.rows import (
    FORMATS,
    Chat,
    Pair,
    Question,
    Row,
    parse_row,
    parse_weight,
    question_turns,
)
from your_ai.data.turns import ASSISTANT, REASONING, parse_tools
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened
from your_ai.gates.untrusted import is_number

# Columns that may have the expected answer beside a `prompt`, the most telling first.
EXPECTED = ("completion", "answer", "expected", "solution", "ground_truth", "target", "reference")


def is_prompt_row(row: Mapping[str, Any]) -> bool:
    """Return whether a row has a prompt in a known format."""
    return "prompt" in row or any(
        all(key in row for key in keys) for keys in FORMATS if keys != ("text",)
    )


def parse_prompts(row: dict[str, Any], where: str) -> Row:
    """Parse a row with a prompt. Raises UserError if it has none, or an empty one."""
    weight = parse_weight(row, where)
    beside = {"messages", "conversations"} if "prompt" in row else set[str]()
    fields_of(row).read.update({*row} - beside)  # rewards get all columns
    answer = row.get("completion")
    in_messages = isinstance(answer, list) and any(isinstance(turn, dict) for turn in answer)
    if "prompt" in row and not in_messages:
        content = Question(prompt_of(row, where), expected_of(row))
    elif is_prompt_row(row):
        content = question_of(parse_row(row, where).content, where)
        if content.expected is None:
            content = Question(content.prompt, expected_of(row))
    else:
        keys = shortened(", ".join(row)) or "none"
        raise UserError(
            f"{where}: has no prompt; keys found: {keys}; expected prompt (text or messages), or "
            "messages"
        )
    asked = content.prompt
    text = asked if isinstance(asked, str) else str(asked.messages[-1]["content"])
    if not text.strip():
        raise UserError(f"{where}: prompt: is empty")
    return Row(where, content, weight)


def parse_task(row: dict[str, Any], where: str) -> Row:
    """Parse a row for an environment, which may have any columns. Without a prompt, it is one
    itself, as JSON."""
    if is_prompt_row(row):
        return parse_prompts(row, where)
    weight = parse_weight(row, where)
    fields_of(row).read.update(row)
    text = json.dumps(row, ensure_ascii=False)
    return Row(where, Question(text, expected_of(row)), weight)


def prompt_of(row: dict[str, Any], where: str) -> Chat | str:
    """The prompt in the column `prompt`, with the row's system prompt, earlier turns and tools."""
    tools, prompt = parse_tools(row, where), row["prompt"]
    prompt = prompt if isinstance(prompt, list) else text_field(row, "prompt", where)
    turns = question_turns(row, prompt, where)
    if isinstance(prompt, str) and len(turns) == 1 and tools is None:
        return prompt
    return Chat(without_answer(turns, where), tools)


def expected_of(row: dict[str, Any]) -> str | None:
    """The expected answer in another column, as text; None if there is none."""
    for name in EXPECTED:
        value = row.get(name)
        if isinstance(value, str):
            return value
        if is_number(value):
            return str(value)
    return None


def question_of(content: Any, where: str) -> Question:
    if isinstance(content, Pair):
        return Question(content.prompt, content.completion)
    assert isinstance(content, Chat)
    answer, expected = content.messages[-1], None
    if answer["role"] == ASSISTANT:
        is_text = not (answer.get("tool_calls") or answer.get(REASONING[0]))
        expected = answer["content"] if is_text else content
    return Question(Chat(without_answer(content.messages, where), content.tools), expected)


def without_answer(turns: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """The messages up to the last that is not the assistant's."""
    asked = list(turns)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked:
        raise UserError(f"{where}: prompt: has only messages of the assistant")
    return asked


@dataclass
class PromptIndex:
    """An index of a file of n rows, as it was when it was first read."""

    offsets: np.ndarray
    """(n,) int64: where in the file each row begins, in bytes."""
    numbers: np.ndarray
    """(n,) int64: their line numbers."""
    sha256: str
    stamp: tuple[int, ...]
    """Changes when the file is written."""


@dataclass(frozen=True)
class PromptRows:
    """The n rows of a JSONL file, read again one by one when they are needed."""

    path: Path
    limit: RowLimit = ROW_LIMIT
    parse: Callable[[dict[str, Any], str], Row] = parse_prompts

    @cached_property
    def index(self) -> PromptIndex:
        """Made at the first use, which the file must not change after."""
        offsets, numbers, position, digest = array("q"), array("q"), 0, hashlib.sha256()
        with opened(self.path) as file:
            stamp, number = stamp_of(file), 0
            while line := file.readline(self.limit.row_bytes + 1):
                number += 1
                digest.update(line)
                text = line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
                if text.strip():
                    offsets.append(position)
                    numbers.append(number)
                position += len(line)
        places = np.frombuffer(offsets, np.int64), np.frombuffer(numbers, np.int64)
        return PromptIndex(*places, digest.hexdigest(), stamp)

    @property
    def offsets(self) -> np.ndarray:
        return self.index.offsets

    def check(self) -> None:
        """Raise UserError if the file cannot be read, or changed since it was first read."""
        with opened(self.path) as file:
            self.check_unchanged(file)

    def read(self, index: int) -> tuple[dict[str, Any], Row]:
        """The JSON object of a row, and the row. Raises UserError if the file has changed."""
        offset = int(self.offsets[index])
        with opened(self.path) as file:
            self.check_unchanged(file)
            file.seek(offset)
            line = file.readline(self.limit.row_bytes + 1)
        line = line if offset else line.removeprefix(BYTE_ORDER_MARK)
        content, where = decode_row(line, self.where(index))
        return content, self.parse(content, where)

    def where(self, index: int) -> str:
        return f"{self.path}:{self.index.numbers[index]}"

    def check_unchanged(self, file: BinaryIO) -> None:
        """Raise UserError if the file has other bytes than when its rows were first read."""
        stamp = stamp_of(file)
        if stamp == self.index.stamp:
            return
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        if digest.hexdigest() != self.index.sha256:
            raise UserError(
                f"{self.path}: was changed while the run reads it; restore it, then resume the "
                "run, or start a new one"
            )
        self.index.stamp = stamp


def stamp_of(file: BinaryIO) -> tuple[int, ...]:
    """Facts that change when a file is replaced or written."""
    found = os.fstat(file.fileno())
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


@contextlib.contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file of rows. Raises UserError if it cannot be read."""
    with named_errors(path, "read"), path.open("rb") as file:
        yield file
