"""Tools: typed Python functions that the model calls, as an Environment."""

from __future__ import annotations

import contextlib
import inspect
import json
import select
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from your_ai.environments.attempts import CallDied, attempt
from your_ai.environments.awaiting import finished, loop
from your_ai.environments.protocol import MOST_CALLS, EnvironmentFailed, Observation
from your_ai.environments.schemas import fault_of_arguments, tool_schema
from your_ai.errors import UserError
from your_ai.gates.functions import UsersCodeFailed, described, load_module, running_users_code
from your_ai.gates.text import nearest, quoted, shown

PYTHON = "python"  # the built-in tool, as `--tools python`


@dataclass(frozen=True)
class ToolFunction:
    """A function that the model can call, and its schema."""

    function: Callable[..., Any]
    schema: dict[str, Any]


@dataclass
class ToolEnvironment:
    """Conversations with tools: a step answers the calls of a message.

    Each call runs as `attempt` does: what it changes, such as global variables of its module,
    stays for the later calls of the same conversation, and no other conversation sees it. A call
    that takes too long or crashes is an error message for the model, and has changed nothing
    there. An exception is an error message too.
    """

    tools: Mapping[str, ToolFunction]
    timeout_s: float
    output_characters: int

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """The messages of a row's `prompt` or `messages`, and the schemas of all tools."""
        schemas = [tool.schema for tool in self.tools.values()]
        return Observation(messages_of(row), schemas)

    def step(self, message: Mapping[str, Any]) -> Observation:
        calls = message.get("tool_calls") or []
        answers, errors = list[dict[str, Any]](), 0
        for index, call in enumerate(calls):
            function = call.get("function") or {}
            name = str(function.get("name"))
            try:
                if index >= MOST_CALLS:
                    raise ToolError(f"more than {MOST_CALLS} calls at once")
                text = self.call(name, function.get("arguments"))
            except ToolError as error:
                text = f"error: {error}"
                errors += 1
            known = {"tool_call_id": call["id"]} if isinstance(call.get("id"), str) else {}
            content = cut(text, self.output_characters)
            answers.append({"role": "tool", "name": name, "content": content, **known})
        info = {"tool_calls": len(calls), "tool_errors": errors}
        return Observation(answers, done=not calls, info=info)

    def call(self, name: str, arguments: Any) -> str:
        """The result of a call as text. Raises ToolError."""
        tool = self.tools.get(name)
        if tool is None:
            hint = nearest(name, self.tools) or f"; the tools are {', '.join(self.tools)}"
            raise ToolError(f"there is no tool {quoted(name, 80)}{hint}")
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        if fault := fault_of_arguments(arguments, tool.schema):
            raise ToolError(fault)

        def result() -> str:
            try:
                with running_users_code():
                    return text_of(finished(tool.function(**arguments)))
            except KeyboardInterrupt as error:  # raised by the function: no user can be here
                raise ToolError(described(error)) from error

        try:
            return attempt(result, self.timeout_s)
        except UsersCodeFailed as error:
            cause = error.__cause__ or error
            raise cause if isinstance(cause, ToolError) else ToolError(described(cause)) from None
        except CallDied as error:
            if not hasattr(select, "epoll"):  # a copy of a process has no kqueue (macOS)
                loop.cache_clear()
            raise ToolError(f"{name}: {error}") from None
        except OSError as error:
            raise ToolError(f"{name} cannot be started ({error.strerror})") from None

    def close(self) -> None:
        """End nothing: the process ends."""


class ToolError(Exception):
    """A call without a result. Its text is for the model."""


def messages_of(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages that a row begins with: its `prompt`, as text or as messages, or those of
    `messages` before an answer at their end. Raises EnvironmentFailed if it has neither."""
    prompt = row.get("prompt")
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    messages = prompt if prompt is not None else row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise EnvironmentFailed("the row has no prompt and no messages")
    last = messages[-1]
    answered = prompt is None and isinstance(last, Mapping) and last.get("role") == "assistant"
    return list(messages[:-1] if answered else messages)


def text_of(result: Any) -> str:
    """The result of a tool as text: a text as it is, anything else as JSON. Raises ToolError."""
    if isinstance(result, str):
        return str.__str__(result)  # of a subclass, too, the text alone
    try:
        return json.dumps(result, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ToolError(f"its result is not JSON ({shown(str(error))})") from error


def cut(text: str, most: int) -> str:
    """A text of at most `most` characters, and a note where something is missing."""
    return text if len(text) <= most else f"{text[:most]}\n[cut off after {most:,} characters]"


def load_tools(
    given: Sequence[str], make_python: Callable[[], Callable[..., Any]]
) -> tuple[dict[str, ToolFunction], bool]:
    """The tools by their names, and whether all their modules say that they are pure.

    given: each `module`, `module:name`, or `python`.
    make_python: makes the function of the built-in tool, where it is given.
    Raises UserError.
    """
    tools, pure = dict[str, ToolFunction](), True
    for text in given:
        where = f"--tools {text}"
        if text == PYTHON:
            found, pure = {PYTHON: make_python()}, False
        else:
            module_name, _, wanted = text.partition(":")
            module = load_module(module_name, where)
            found = functions_of(module, wanted, where)
            pure &= getattr(module, "is_pure", False) is True
        for name, function in found.items():
            if name in tools:
                raise UserError(f"{where}: there are two tools {name}; rename one of them")
            tools[name] = ToolFunction(function, tool_schema(function, name, f"{where}: {name}"))
    return tools, pure


def functions_of(module: ModuleType, wanted: str, where: str) -> dict[str, Callable[..., Any]]:
    """The public functions that a module defines, or the one that is wanted by its name."""
    known: dict[str, Callable[..., Any]] = {
        name: value
        for name, value in vars(module).items()
        if inspect.isroutine(value) and not name.startswith("_")
    }
    if wanted and wanted not in known:
        hint = nearest(wanted, known)
        raise UserError(f"{where}: {module.__name__} has no function {shown(wanted)}{hint}")
    own = {n: value for n, value in known.items() if value.__module__ == module.__name__}
    if not (own or wanted):
        raise UserError(f"{where}: {module.__name__} has no public functions")
    return {wanted: known[wanted]} if wanted else own
