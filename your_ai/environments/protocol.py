"""Environments: what a conversation sees after each message of the model, and its reward.

Also the form that observations have between processes: JSON, which is checked on both sides.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from your_ai.gates.functions import as_float
from your_ai.gates.text import nearest, quoted, shown
from your_ai.gates.untrusted import is_number, parse_json

MB = 1_000_000
GRACE_S = 5.0  # for what is not the user's code
MOST_NUMBER = 1e12  # of rewards and of what is counted: sums stay finite
NO_NUMBER = f"not a number of at most {MOST_NUMBER:g}"
MOST_CALLS = 32  # of one message to tools; further ones are errors
TEXT_KEYS = ("role", "content", "reasoning_content", "name", "tool_call_id")
ROLES = ("system", "developer", "user", "assistant", "tool")


class EnvironmentFailed(Exception):
    """The environment of a conversation failed, which ends the conversation. One line says why."""


@dataclass(frozen=True)
class Observation:
    """An answer to a conversation: what it sees next."""

    messages: Sequence[Mapping[str, Any]]
    """To append, in OpenAI's form: role, content (text), name, tool_call_id; in a prompt also
    reasoning_content and tool_calls."""
    tools: Sequence[Mapping[str, Any]] = ()
    """JSON schemas in OpenAI's form; only `reset` gives them."""
    reward: float | None = None
    """Of the step before it."""
    done: bool = False
    """Whether the conversation ends here."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Anything more to record, as JSON."""


class Environment(Protocol):
    """The other side of a conversation. Each conversation has an object and a process of its own.

    The methods may be async, and may return a dict with the fields of Observation. A class
    attribute `is_pure = True` says that the same calls always give the same results.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin the conversation of a row of the data."""

    def step(self, message: Mapping[str, Any]) -> Observation | Awaitable[Observation]:
        """Answer a message of the assistant, whose `tool_calls` are parsed: each {"type",
        "function": {"name", "arguments"}} with an object as arguments, and an "id" if the model
        gave one."""

    def close(self) -> None:
        """End the conversation. Not called if it was ended by force."""


@dataclass(frozen=True)
class HostOptions:
    """A choice of environment or tools for a host to serve, and limits of each conversation."""

    environment: str = ""
    """`module:Class` or `verifiers:NAME`, or else tools."""
    tools: Sequence[str] = ()
    """Each `module`, `module:name`, or `python`."""
    timeout_s: float = 30.0
    """Of a call of the user's code."""
    memory_mb: int = 1024
    """Of a conversation's processes, each, beyond what it shares with the others."""
    output_characters: int = 8192
    """Of a tool's result; the rest is cut off."""
    trust_code: bool = False
    """Let the tool `python` run without a sandbox where there is none."""
    watches: bool = sys.platform == "darwin"
    """Look at the memory of processes, because the system does not limit it."""

    @property
    def most_bytes(self) -> int:
        """The most of an answer. A character may take six bytes in JSON."""
        return 4 * MB + 6 * MOST_CALLS * self.output_characters

    def seconds_of(self, message: Mapping[str, Any]) -> float:
        """The most that the answer to a message may take."""
        if self.environment:
            return self.timeout_s
        calls = message.get("tool_calls") or ()
        return self.timeout_s * min(max(1, len(calls)), MOST_CALLS) + GRACE_S


FIELDS_OF_OBSERVATION = tuple(each.name for each in fields(Observation))


def observation_of(value: Any) -> Observation:
    """Check what an environment returned. Raises EnvironmentFailed."""
    given = vars(value) if isinstance(value, Observation) else value
    if not isinstance(given, Mapping):
        raise EnvironmentFailed(f"returned {shown(value)}, not an Observation or a dict")
    for name in given:
        if name not in FIELDS_OF_OBSERVATION:
            hint = nearest(str(name), FIELDS_OF_OBSERVATION)
            raise EnvironmentFailed(f"returned an unknown key {quoted(name, 80)}{hint}")
    reward, done, info = given.get("reward"), given.get("done", False), given.get("info", {})
    if reward is not None:
        number = as_float(reward) if is_number(reward) or hasattr(reward, "dtype") else math.nan
        if not abs(number) <= MOST_NUMBER:
            raise EnvironmentFailed(f"reward: {quoted(reward, 80)} is {NO_NUMBER}, or None")
        reward = number
    if not isinstance(done, bool):
        raise EnvironmentFailed(f"done: {quoted(done, 80)} is not True or False")
    if not isinstance(info, Mapping):
        raise EnvironmentFailed(f"info: {shown(info)} is not a dict")
    for name, value in info.items():
        if is_number(value) and not abs(as_float(value)) <= MOST_NUMBER:
            raise EnvironmentFailed(f"info: {quoted(name, 80)}: {quoted(value, 80)} is {NO_NUMBER}")
    tools = objects_in(given.get("tools", ()), "tools")
    messages = objects_in(given.get("messages"), "messages")
    return Observation([checked_message(each) for each in messages], tools, reward, done, info)


def objects_in(value: Any, name: str) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple) or not all(isinstance(v, Mapping) for v in value):
        raise EnvironmentFailed(f"{name}: {shown(value)} is not a list of dicts")
    return [dict(each) for each in value]


def checked_message(message: dict[str, Any]) -> dict[str, Any]:
    for name, value in message.items():
        if name == "tool_calls":  # of an earlier turn of the assistant, in the prompt
            objects_in(value, "messages: tool_calls")
            continue
        if name not in TEXT_KEYS:
            raise EnvironmentFailed(f"messages: unknown key {quoted(name, 80)}")
        if not isinstance(value, str):
            raise EnvironmentFailed(f"messages: {name}: {shown(value)} is not text")
    if message.get("role") not in ROLES or "content" not in message:
        raise EnvironmentFailed(f"messages: expected a role ({', '.join(ROLES)}) and a content")
    return message


# Between processes: one line of JSON for each request, and one for each answer.


def line_of(value: Any) -> bytes:
    """A line of JSON. Halves of surrogate pairs become question marks.

    Raises EnvironmentFailed for what is not JSON, NaN among it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentFailed(f"returned what is not JSON ({shown(str(error))})") from error
    return text.encode("utf-8", "replace") + b"\n"


def answer_of(line: bytes) -> Observation:
    """The observation in an answer, which any code may have written. Raises EnvironmentFailed."""
    try:
        answer = parse_json(line, standard=True)
        if b"\\ud" in line.lower():  # may be half a surrogate pair, which is no text
            answer = parse_json(line_of(answer), standard=True)
    except ValueError as error:
        raise EnvironmentFailed(f"its answer cannot be read: {shown(str(error))}") from error
    if not isinstance(answer, dict) or not {"observation", "error"} & set(answer):
        raise EnvironmentFailed("its answer has another form")
    if "error" in answer:
        raise EnvironmentFailed(shown(answer["error"], 1000))
    return observation_of(answer["observation"])
