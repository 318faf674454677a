"""JSONL files -> rows: each line is checked as it is read.

Data is not trusted. The length of a line is limited before it is read. Its nesting and keys are
checked before they are used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from your_ai.config import FIELDS
from your_ai.errors import UserError
from your_ai.gates.text import counted, quoted, shortened
from your_ai.gates.untrusted import is_number

FLOAT32_MAX = 3.4028234663852886e38
MAX_DEPTH = 64  # nesting of objects and lists; JSON schemas of tools have about 20 levels
BLOCK_BYTES = 1 << 20
ORIGIN = "your_ai: from"  # the key of a converted row's place, as `file:line`
ROW_NUMBER = re.compile(r":( row )?\d+$")  # at the end of a place
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


# Peak memory of reading a row, in bytes per byte of its line, measured on the worst rows:
# while it is parsed, while a text is tokenized, while a chat is rendered and tokenized.
LINE_MEMORY, TEXT_MEMORY, CHAT_MEMORY = 10, 16, 36
STRUCTURE_MEMORY = {b"{": 240, b"[": 64, b",": 40}  # bytes for each of these in a line
SHORT_BYTES = 1 << 16  # rows up to this size are always read


@dataclass(frozen=True)
class RowLimit:
    """The limits on the size of a row."""

    row_bytes: int = FIELDS["max_row_bytes"].default
    """Maximum length of its line, in bytes."""
    room_bytes: int = 1 << 33
    """Memory that reading it may use in addition to what the process uses already."""

    def too_long(self, where: str) -> UserError:
        most = f"{self.row_bytes:,} bytes"
        return UserError(
            f"{where}: the row has more than {most}; raise --max-row-bytes or split it"
        )

    def check_room(self, size: int, needed_bytes: int, where: str) -> None:
        """Raise UserError if reading a row of `size` bytes needs more memory than is left."""
        if size > SHORT_BYTES and needed_bytes > self.room_bytes:
            raise UserError(
                f"{where}: reading a row of {size:,} bytes needs {needed_bytes / 1e6:,.0f} MB, but "
                f"{max(0, self.room_bytes) / 1e6:,.0f} MB are left; raise --max-memory or split it"
            )

    def parse(self, line: bytes, where: str, parse: ParseRow | None = None) -> Row:
        """Parse a line. Raises UserError if it is not a valid row, or is too large."""
        size = len(line)
        self.check_line(line, where)
        content, place = decode_row(line, where)
        row = replace((parse or parse_row)(content, place), line=int(where.rpartition(":")[2]))
        memory = TEXT_MEMORY if isinstance(row.content, Text) else CHAT_MEMORY
        self.check_room(size, memory * size, where)
        return row

    def check_line(self, line: bytes, where: str) -> None:
        """Raise UserError if parsing a line as JSON needs more memory than is left."""
        size, is_long = len(line), len(line) > SHORT_BYTES
        costs = STRUCTURE_MEMORY.items() if is_long else ()
        structure = sum(cost * line.count(character) for character, cost in costs)
        self.check_room(size, LINE_MEMORY * size + structure, where)


ROW_LIMIT = RowLimit()


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template. Assistant turns from index `first_trained` are trained."""

    messages: list[dict]
    tools: list | None = None
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
    expected: str | None
    """The right answer, if the row has one."""


@dataclass(frozen=True)
class Row:
    """A row of a data file."""

    where: str
    """file:line of the user's file, for messages."""
    content: Chat | Pair | Text | Preference | Labeled | Scored | Question
    weight: float
    line: int = 0
    """Its line in the file that was read, from 1."""


ParseRow = Callable[[dict, str], Row]  # (row, where) -> Row; raises UserError


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
        row = limit.parse(line, where, parse)
        del line  # so that a long row is in memory only once
        yield row
    if not found:
        raise UserError(f"{path}: the file is empty; give at least one row")


def read_lines(path: Path, limit: RowLimit) -> Iterator[tuple[str, bytes]]:
    """Yield (`file:line`, line) for each line that is not blank.

    Raises UserError if the file cannot be read or a line is too long.
    """
    try:
        with path.open("rb") as file:
            yield from lines_of(file, path, limit)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def lines_of(file: BinaryIO, path: Path, limit: RowLimit) -> Iterator[tuple[str, bytes]]:
    """Like `read_lines`, for an open file. path: its name in messages."""
    number = 0
    while line := file.readline(limit.row_bytes + 1):
        number += 1
        where = f"{path}:{number}"
        if len(line) > limit.row_bytes and line.rstrip(b"\r\n") == line:
            raise limit.too_long(where)
        if number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        if line.strip():
            yield where, line
        del line


def checked_sha256(path: Path, limit: RowLimit) -> str:
    """Compute the sha256 of a file of rows, without a whole row in memory.

    Raises UserError for the first line that is too long, as soon as it is found.
    """
    digest = hashlib.sha256()
    lines = length = 0
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                start = 0
                while (end := block.find(b"\n", start)) >= 0:
                    length += end - start
                    if length > limit.row_bytes:
                        raise limit.too_long(f"{path}:{lines + 1}")
                    start, length, lines = end + 1, 0, lines + 1
                length += len(block) - start
                if length > limit.row_bytes:
                    raise limit.too_long(f"{path}:{lines + 1}")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    return digest.hexdigest()


class Repeated(ValueError):
    """An object has a key twice. JSON readers differ in which value they use."""


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise Repeated(f"has the key {shortened(twice)} twice")
    return found


def read_json(text: str, label: str, hint: str = "") -> Any:
    """Parse untrusted JSON. The nesting is limited, and duplicate keys are rejected.

    Raises UserError, whose message begins with `label`.
    """
    try:
        value = json.loads(text, object_pairs_hook=unique)
    except Repeated as error:
        raise UserError(f"{label}: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "a number too long, or nested too deeply")
        raise UserError(f"{label}: is not valid JSON ({reason}){hint}") from error
    check_depth(text, value, label)
    return value


def check_depth(text: str, value: Any, label: str) -> None:
    """Raise UserError if a value, parsed from `text`, is nested too deeply."""
    if text.count("[") + text.count("{") > MAX_DEPTH and depth_of(value) > MAX_DEPTH:
        raise UserError(f"{label}: is nested too deeply; the maximum is {MAX_DEPTH} levels")


def depth_of(value: Any) -> int:
    """The nesting depth of objects and lists, counted up to MAX_DEPTH + 1."""
    level, depth = [value], 0
    while depth <= MAX_DEPTH:
        level = [v for v in level if isinstance(v, dict | list)]
        if not level:
            break
        level = [i for v in level for i in (v.values() if isinstance(v, dict) else v)]
        depth += 1
    return depth


def decode_line(line: bytes, where: str) -> dict:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text") from error
    row = read_json(text, where, "; write one object per line")
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def decode_row(line: bytes, where: str) -> tuple[dict, str]:
    """The object in a line, and the place that it was converted from, or else `where`."""
    row = decode_line(line, where)
    place = row.pop(ORIGIN, None)
    return row, place if isinstance(place, str) else where


def files_of_rows(path: Path, limit: RowLimit = ROW_LIMIT) -> str:
    """The user's files that the rows of a JSONL file are from, for messages: the first by name.

    It is the file itself if its rows were not converted.
    """
    return files_in(decode_row(line, where)[1] for where, line in read_lines(path, limit))


def files_in(places: Iterable[str]) -> str:
    """The files of places such as `file:line`: the first by name, and how many others."""
    first, *others = dict.fromkeys(ROW_NUMBER.sub("", place) for place in places)
    return f"{first} and {counted(len(others), 'other')}" if others else first


def file_of_first_row(path: Path, limit: RowLimit = ROW_LIMIT) -> str:
    """The user's file that the first row of a JSONL file is from, for progress."""
    try:
        for where, line in read_lines(path, limit):
            limit.check_line(line, where)
            return files_in([decode_row(line, where)[1]])
    except UserError:  # reading the rows will say it
        pass
    return str(path)


def read_first_row(path: Path, limit: RowLimit) -> dict[str, Any]:
    """The first row of a file. Raises UserError if it cannot be read."""
    for where, line in read_lines(path, limit):
        limit.check_line(line, where)
        row, _ = decode_row(line, where)
        return row
    raise UserError(f"{path}: the file is empty; give at least one row")


def parse_row(row: dict, where: str) -> Row:
    """Parse a row with answers to train on. Raises UserError if it has no known format."""
    for keys, parse in FORMATS.items():
        if all(key in row for key in keys):
            return Row(where, parse(row, where), parse_weight(row, where))
    known = "; ".join(" + ".join(keys) for keys in FORMATS)
    keys = shortened(", ".join(row)) or "none"
    raise UserError(f"{where}: unknown row format; keys found: {keys}; expected one of: {known}")


def parse_weight(row: dict, where: str) -> float:
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


def text_field(row: dict, key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}: expected text, found {type(value).__name__}")
    return value


def parse_messages(row: dict, where: str) -> Chat:
    turns = with_system(row, parse_turns(row["messages"], "messages", where), where)
    return Chat(turns, parse_tools(row, where))


def with_system(row: dict, turns: list[dict], where: str) -> list[dict]:
    """The turns after the system prompt in `system`, unless they begin with one themselves."""
    if not row.get("system") or (turns[:1] and turns[0]["role"] == "system"):
        return turns
    return [{"role": "system", "content": text_field(row, "system", where)}, *turns]


def as_chat(row: dict, prompt: str, completion: str, where: str) -> Chat | Pair:
    """A prompt and its answer; a chat if the row has a system prompt."""
    if not row.get("system"):
        return Pair(prompt, completion)
    asked = with_system(row, [{"role": "user", "content": prompt}], where)
    return Chat([*asked, {"role": "assistant", "content": completion}], first_trained=len(asked))


def parse_tools(row: dict, where: str) -> list | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # some datasets store the list as JSON text
        tools = read_json(tools, f"{where}: tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: tools: expected a list, found {type(tools).__name__}")
    return tools or None


def parse_turns(turns: Any, key: str, where: str) -> list[dict]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: {key}: expected a list of messages")
    return [parse_message(turn, f"{where}: {key}[{i}]") for i, turn in enumerate(turns)]


def parse_message(message: Any, where: str) -> dict:
    """Convert a message to the form for chat templates: text content, tool arguments as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f'{where}: expected an object with "role" and "content"')
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, list):  # content parts of the OpenAI format
        kinds = [p.get("type") if isinstance(p, dict) else type(p).__name__ for p in content]
        if any(kind != "text" for kind in kinds):
            found = quoted(kinds)
            raise UserError(f"{where}: content: only text parts can be trained, found {found}")
        texts = [text_field(part, "text", f"{where}: content") for part in content]
        content = "".join(texts)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{where}: content: expected text, found {type(content).__name__}")
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not isinstance(reasoning, str):
        found = type(reasoning).__name__
        raise UserError(f"{where}: reasoning_content: expected text, found {found}")
    if message.get("weight", 1) not in (0, 1):  # as at OpenAI: 0 excludes an assistant turn
        found = quoted(message["weight"])
        raise UserError(f"{where}: weight {found}: the weight of a message must be 0 or 1")
    parsed = {**message, "content": content}
    if calls is not None:
        if not isinstance(calls, list):
            raise UserError(f"{where}: tool_calls: expected a list")
        parsed["tool_calls"] = [parse_call(call, where) for call in calls]
    return parsed


def parse_call(call: Any, where: str) -> Any:
    """Convert a tool call's arguments from OpenAI's JSON text to an object.

    Otherwise the template would quote them twice.
    """
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = read_json(function["arguments"], f"{where}: tool_calls: arguments")
    return {**call, "function": {**function, "arguments": arguments}}


SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "observation": "tool",
}


def parse_sharegpt(row: dict, where: str) -> Chat:
    turns = row["conversations"]
    if not isinstance(turns, list):
        raise UserError(f"{where}: conversations: expected a list of turns")
    messages = []
    for i, turn in enumerate(turns):
        if isinstance(turn, dict) and "from" in turn:
            role = turn["from"]
            if not isinstance(role, str):
                raise UserError(f"{where}: conversations[{i}]: from: expected text")
            turn = {"role": SHAREGPT_ROLES.get(role, role), "content": turn.get("value")}
        messages.append(turn)
    parsed = parse_turns(messages, "conversations", where)
    return Chat(with_system(row, parsed, where), parse_tools(row, where))


def parse_pair(row: dict, where: str) -> Chat | Pair:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        prompt = with_system(row, parse_turns(row["prompt"], "prompt", where), where)
        completion = parse_turns(row["completion"], "completion", where)
        return Chat(prompt + completion, parse_tools(row, where), first_trained=len(prompt))
    texts = (text_field(row, key, where) for key in ("prompt", "completion"))
    return as_chat(row, *texts, where)


def parse_alpaca(row: dict, where: str) -> Chat | Pair:
    prompt = text_field(row, "instruction", where)
    if row.get("input"):
        prompt += "\n\n" + text_field(row, "input", where)
    return as_chat(row, prompt, text_field(row, "output", where), where)


def parse_text(row: dict, where: str) -> Text:
    return Text(text_field(row, "text", where))


# The first format whose keys are all present is used: Alpaca rows often have a `text` as well.
FORMATS = {
    ("messages",): parse_messages,
    ("conversations",): parse_sharegpt,
    ("prompt", "completion"): parse_pair,
    ("instruction", "output"): parse_alpaca,
    ("text",): parse_text,
}
