"""Rows of data files: what a line may be, in each known format."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from your_ai.data.lines import (
    CHAT_MEMORY,
    ROW_LIMIT,
    TEXT_MEMORY,
    Fields,
    RowLimit,
    decode_row,
    file_of_first_row,
    line_count,
    read_json,
    read_lines,
    text_field,
)
from your_ai.data.turns import (
    ASSISTANT,
    USER,
    calls_as_json,
    parse_tools,
    parse_turns,
    turns_of_pairs,
    with_system,
)
from your_ai.errors import UserError
from your_ai.gates.text import counted, now_and_then, quoted, share_text, shortened
from your_ai.gates.untrusted import is_number

FLOAT32_MAX = 3.4028234663852886e38


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template. Assistant turns from index `first_trained` are trained."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    first_trained: int = 0


@dataclass(frozen=True)
class Pair:
    """A prompt and its answer. A chat of two turns if the tokenizer has a chat template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Text without a prompt: every token is trained."""

    text: str


@dataclass(frozen=True)
class Preference:
    """Two answers to the same prompt, of which one is preferred."""

    chosen: Chat | Pair | Text
    rejected: Chat | Pair | Text
    margin: float = 0.0
    """By how much the score of the chosen answer is to be higher; for reward models."""


@dataclass(frozen=True)
class Labeled:
    """A prompt and an answer that is good or bad."""

    answer: Chat | Pair
    good: bool
    other: Chat | Pair | None = None
    """The same prompt with the answer of another row."""


@dataclass(frozen=True)
class Scored:
    """A prompt and an answer with a score, which a reward model learns."""

    answer: Chat | Pair
    score: float


@dataclass(frozen=True)
class Question:
    """A prompt whose answers are generated, and rewarded."""

    prompt: Chat | str
    """Messages, or text: a user's message if the tokenizer has a chat template."""
    expected: Chat | str | None
    """The right answer, if the row has one: its text; or the chat that ends with it, if it has
    calls or reasoning, which a chat template renders."""

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The prompt as messages."""
        if isinstance(self.prompt, Chat):
            return self.prompt.messages
        return [{"role": "user", "content": self.prompt}]


@dataclass(frozen=True)
class Row:
    """A row of a data file."""

    where: str
    """file:line of the user's file, for messages."""
    content: Chat | Pair | Text | Preference | Labeled | Scored | Question
    weight: float
    line: int = 0
    """Its line in the file that was read, from 1."""
    unused: tuple[str, ...] = ()
    """Its columns that have no effect."""


def texts_of(content: Any) -> list[Any]:
    """The texts of a row's content: two for a preference, the chosen first."""
    if isinstance(content, Preference):
        return [content.chosen, content.rejected]
    if isinstance(content, Labeled):
        return [content.answer] if content.other is None else [content.answer, content.other]
    return [content.answer if isinstance(content, Scored) else content]


ParseRow = Callable[[dict[str, Any], str], Row]  # (row, where) -> Row; raises UserError


def read_rows(
    path: Path, limit: RowLimit = ROW_LIMIT, parse: ParseRow | None = None
) -> Iterator[Row]:
    """Yield the rows of a JSONL file, in order. Skips blank lines.

    parse: by default `parse_row`.
    Raises UserError with file and line for a row that is too long, is not a JSON object, is not in
    a known format, or has a field of the wrong type.
    """
    found = False
    for where, line in read_lines(path, limit):
        found = True
        row = parse_line(line, where, limit, parse)
        del line  # so that a long row is in memory only once
        yield row
    if not found:
        raise UserError(f"{path}: the file is empty; give at least one row")


def with_progress(
    rows: Iterator[Row], path: Path, limit: RowLimit, write: Callable[[str], object]
) -> Iterator[Row]:
    """The rows of a JSONL file; how far they are is written every few seconds."""
    name, total = Path(file_of_first_row(path, limit)).name, line_count(path)
    report = now_and_then(
        write, lambda line: f"reading {name}: {share_text(line, total)} of {counted(total, 'row')}"
    )
    for row in rows:
        report(row.line)
        yield row


def parse_line(
    line: bytes, where: str, limit: RowLimit = ROW_LIMIT, parse: ParseRow | None = None
) -> Row:
    """Parse a line. Raises UserError if it is not a valid row, or is too large."""
    size = len(line)
    limit.check_line(line, where)
    content, place = decode_row(line, where)
    # A column without a value is as good as none: joined tables have them for rows of other kinds.
    fields = Fields({name: value for name, value in content.items() if value is not None})
    try:
        row = (parse or parse_row)(fields, place)
    except UserError as error:
        if empty := [name for name, value in content.items() if value is None]:
            names = shortened(", ".join(empty))
            raise UserError(f"{error}; columns without a value here: {names}") from error
        raise
    row = replace(row, line=int(where.rpartition(":")[2]), unused=fields.unused())
    memory = TEXT_MEMORY if isinstance(row.content, Text) else CHAT_MEMORY
    limit.check_room(size, memory * size, where)
    return row


def parse_row(row: dict[str, Any], where: str) -> Row:
    """Parse a row with answers to train on. Raises UserError if it has no known format."""
    for keys, parse in FORMATS.items():
        if all(key in row for key in keys):
            return Row(where, parse(row, where), parse_weight(row, where))
    known = "; ".join(" + ".join(keys) for keys in FORMATS)
    there = shortened(", ".join(row)) or "none"
    raise UserError(f"{where}: unknown row format; keys found: {there}; expected one of: {known}")


def parse_weight(row: dict[str, Any], where: str) -> float:
    weight = row.get("weight", 1.0)
    if not is_number(weight):
        raise UserError(f"{where}: weight: expected a number, found {quoted(weight)}")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= FLOAT32_MAX:  # also true for NaN
        raise UserError(f"{where}: weight {number:g}: must be finite and at least 0")
    return number


def parse_messages(row: dict[str, Any], where: str) -> Chat:
    key = "messages" if "messages" in row else "conversations"
    turns = row[key]
    if isinstance(turns, list) and all(isinstance(turn, str) for turn in turns):  # a person begins
        roles = cycle((USER, ASSISTANT))
        turns = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    is_pairs = isinstance(turns, list) and turns and all(isinstance(turn, list) for turn in turns)
    parsed = (turns_of_pairs if is_pairs else parse_turns)(turns, key, where)
    if parsed[-1]["role"] == USER and row.get("completion"):
        tools, asked = parse_tools(row, where), with_system(row, parsed, where)
        return Chat([*asked, *answer_turns(row["completion"], tools, where)], tools, len(asked))
    turns = with_system(row, parsed, where)
    return Chat(turns, parse_tools(row, where))


def as_chat(
    row: dict[str, Any], prompt: str | list[Any], completion: str | list[Any], where: str
) -> Chat | Pair:
    """A prompt and its answer, each a text or messages; a chat if one is messages, or the row has a
    system prompt, tools, or earlier turns.
    """
    tools, asked = parse_tools(row, where), question_turns(row, prompt, where)
    if isinstance(prompt, str) and isinstance(completion, str) and len(asked) == 1 and not tools:
        return Pair(prompt, completion)
    return Chat([*asked, *answer_turns(completion, tools, where)], tools, len(asked))


def answer_turns(
    completion: str | list[Any], tools: list[Any] | None, where: str
) -> list[dict[str, Any]]:
    """The messages of an answer: text, messages, or calls of the row's tools, also as JSON text."""
    if calls := calls_as_json(completion, tools):
        completion = [{"role": ASSISTANT, "tool_calls": calls}]
    elif isinstance(completion, str):
        completion = [{"role": ASSISTANT, "content": completion}]
    return parse_turns(completion, "completion", where)


def question_turns(
    row: dict[str, Any], prompt: str | list[Any], where: str
) -> list[dict[str, Any]]:
    """The messages of a question after the row's system prompt and earlier turns.

    prompt: text, or messages.
    """
    asked = [{"role": USER, "content": prompt}]
    asked = parse_turns(prompt, "prompt", where) if isinstance(prompt, list) else asked
    return with_system(row, [*parse_history(row, where), *asked], where)


def parse_history(row: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The turns in `history`: messages, or pairs of a question and its answer."""
    history = row.get("history")
    if not history:
        return []
    if isinstance(history, str):
        history = read_json(history, f"{where}: history") or []
    if not history:
        return []
    turns = history if isinstance(history, list) else [None]
    if all(isinstance(turn, dict) for turn in turns):
        return parse_turns(turns, "history", where)
    return turns_of_pairs(turns, "history", where)


def parse_pair(row: dict[str, Any], where: str) -> Chat | Pair:
    """A prompt and its answer: texts, or lists of messages."""
    prompt, completion = (
        row[key] if isinstance(row[key], list) else text_field(row, key, where)
        for key in ("prompt", "completion")
    )
    if isinstance(completion, list) and len(completion) == 1 and isinstance(completion[0], str):
        completion = completion[0]  # a list of answers of which there is only one
    return as_chat(row, prompt, completion, where)


def parse_alpaca(row: dict[str, Any], where: str) -> Chat | Pair:
    return as_chat(row, alpaca_prompt(row, where), text_field(row, "output", where), where)


def alpaca_prompt(row: dict[str, Any], where: str) -> str:
    prompt = text_field(row, "instruction", where)
    more = next((name for name in row if name.lower() == "input"), "input")
    if row.get(more):
        prompt += "\n\n" + text_field(row, more, where)
    return prompt


# The first format whose keys are all present is used: Alpaca rows often have a `text` as well.
FORMATS: dict[tuple[str, ...], Callable[[dict[str, Any], str], Chat | Pair | Text]] = {
    ("messages",): parse_messages,
    ("conversations",): parse_messages,
    ("prompt", "completion"): parse_pair,
    ("instruction", "output"): parse_alpaca,
    ("text",): lambda row, where: Text(text_field(row, "text", where)),
}
