"""JSONL files -> rows: which files a data folder has, and each line checked as it is read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.config import DEMO, packaged
from your_ai.errors import UserError

SPLITS = ("train", "valid", "test")
FLOAT32_MAX = 3.4028234663852886e38


def find_splits(data: str) -> dict[str, Path]:
    """The file of each split; `demo` means the embedded demo's rows.

    data: a folder with train.jsonl and perhaps valid.jsonl and test.jsonl, or one file
    of training rows. Raises UserError where there is nothing to train on.
    """
    path = packaged("models", "demo", "data") if data == DEMO else Path(data).expanduser()
    if path.is_file():
        return {"train": path}
    if not path.exists():
        raise UserError(f"--data {data}: no such file or folder")
    splits = {s: path / f"{s}.jsonl" for s in SPLITS if (path / f"{s}.jsonl").is_file()}
    if "train" not in splits:
        raise UserError(f"--data {data}: the folder has no train.jsonl")
    return splits


@dataclass(frozen=True)
class Chat:
    """Messages for the chat template; assistant turns from `first_trained` on are trained."""

    messages: list[dict]
    tools: list | None = None
    first_trained: int = 0


@dataclass(frozen=True)
class Pair:
    """A prompt and its answer: a chat of two turns where the tokenizer has a template."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Text:
    """Text without a prompt: every token is trained."""

    text: str


@dataclass(frozen=True)
class Row:
    where: str  # file:line, for messages
    content: Chat | Pair | Text
    weight: float


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, in order; blank lines are passed over.

    Raises UserError that names file and line for a row that is no JSON object, is in
    no known format, or has a field of the wrong type.
    """
    found = False
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                where = f"{path}:{number}"
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark
                if not line.strip():
                    continue
                found = True
                yield parse_row(decode_line(line, where), where)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    if not found:
        raise UserError(f"{path}: the file is empty; give at least one row")


def decode_line(line: bytes, where: str) -> dict:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: is not UTF-8 text") from error
    except (ValueError, RecursionError) as error:
        reason = getattr(error, "msg", "a number too long, or nested too deeply")
        raise UserError(f"{where}: is not valid JSON ({reason}); one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, found {type(row).__name__}")
    return row


def parse_row(row: dict, where: str) -> Row:
    """A row in any known format. Raises UserError where it is in none."""
    for keys, parse in FORMATS.items():
        if all(key in row for key in keys):
            return Row(where, parse(row, where), parse_weight(row, where))
    known = "; ".join(" + ".join(keys) for keys in FORMATS)
    keys = ", ".join(map(str, row)) or "none"
    raise UserError(f"{where}: no known format; keys found: {keys}; keys of a format: {known}")


def parse_weight(row: dict, where: str) -> float:
    weight = row.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, (int, float)):
        raise UserError(f"{where}: weight: expected a number, found {weight!r}")
    try:
        number = float(weight)
    except OverflowError:
        number = math.inf
    if not 0 <= number <= FLOAT32_MAX:  # and a NaN is neither
        raise UserError(f"{where}: weight {number:g}: must be finite and at least 0")
    return number


def text_field(row: dict, key: str, where: str) -> str:
    value = row.get(key)
    if not isinstance(value, str):
        raise UserError(f"{where}: {key}: expected text, found {type(value).__name__}")
    return value


def parse_messages(row: dict, where: str) -> Chat:
    return Chat(parse_turns(row["messages"], "messages", where), parse_tools(row, where))


def parse_tools(row: dict, where: str) -> list | None:
    tools = row.get("tools")
    if isinstance(tools, str):  # some data sets keep the list as JSON text
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise UserError(f"{where}: tools: is not valid JSON") from error
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where}: tools: expected a list, found {type(tools).__name__}")
    return tools or None


def parse_turns(turns: Any, key: str, where: str) -> list[dict]:
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: {key}: expected a list of messages")
    return [parse_message(turn, f"{where}: {key}[{i}]") for i, turn in enumerate(turns)]


def parse_message(message: Any, where: str) -> dict:
    """A message as chat templates take it: text content, tool arguments as objects."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UserError(f'{where}: expected an object with "role" and "content"')
    content = message.get("content")
    calls = message.get("tool_calls")
    if isinstance(content, list):  # the parts of the OpenAI format
        kinds = [p.get("type") if isinstance(p, dict) else type(p).__name__ for p in content]
        if any(kind != "text" for kind in kinds):
            raise UserError(f"{where}: content: only text parts can be trained, found {kinds}")
        texts = [text_field(part, "text", f"{where}: content") for part in content]
        content = "".join(texts)
    if content is None and calls:
        content = ""
    if not isinstance(content, str):
        raise UserError(f"{where}: content: expected text, found {type(content).__name__}")
    if message.get("weight", 1) not in (0, 1):  # OpenAI's: 0 leaves an assistant turn untrained
        raise UserError(f"{where}: weight {message['weight']!r}: a message's is 0 or 1")
    parsed = {**message, "content": content}
    if calls is not None:
        if not isinstance(calls, list):
            raise UserError(f"{where}: tool_calls: expected a list")
        parsed["tool_calls"] = [parse_call(call, where) for call in calls]
    return parsed


def parse_call(call: Any, where: str) -> Any:
    """A tool call whose arguments are an object: OpenAI's JSON text would be quoted twice."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError as error:
        raise UserError(f"{where}: tool_calls: the arguments are not valid JSON") from error
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
    if row.get("system"):
        parsed.insert(0, {"role": "system", "content": text_field(row, "system", where)})
    return Chat(parsed, parse_tools(row, where))


def parse_pair(row: dict, where: str) -> Chat | Pair:
    if isinstance(row["prompt"], list) and isinstance(row["completion"], list):
        prompt = parse_turns(row["prompt"], "prompt", where)
        completion = parse_turns(row["completion"], "completion", where)
        return Chat(prompt + completion, parse_tools(row, where), first_trained=len(prompt))
    return Pair(text_field(row, "prompt", where), text_field(row, "completion", where))


def parse_alpaca(row: dict, where: str) -> Pair:
    prompt = text_field(row, "instruction", where)
    if row.get("input"):
        prompt += "\n\n" + text_field(row, "input", where)
    return Pair(prompt, text_field(row, "output", where))


def parse_text(row: dict, where: str) -> Text:
    return Text(text_field(row, "text", where))


# The first whose keys are all there: Alpaca rows often carry a rendered `text` as well.
FORMATS = {
    ("messages",): parse_messages,
    ("conversations",): parse_sharegpt,
    ("prompt", "completion"): parse_pair,
    ("instruction", "output"): parse_alpaca,
    ("text",): parse_text,
}
