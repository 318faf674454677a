"""Calls of tools by a model that answers a user: they run in processes of an `EnvironmentPool`."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

from your_ai.data.chat_template import NAME, ChatTemplate
from your_ai.data.turns import TOOL, USER
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import EnvironmentFailed
from your_ai.errors import UserError
from your_ai.generation.generate import Message

T = TypeVar("T")

POLL_S = 0.05  # between two chances to stop while a tool runs
UNUSED_ROW = {"prompt": "tools"}  # that a conversation of the pool begins with
KEYS = itertools.count()
NO_TURNS = "no answer within --max-turns"  # why an answer ended that calls tools again


@dataclass(frozen=True)
class AnswerPiece:
    """A piece of an answer; an empty one while a tool runs."""

    text: str = ""
    """Of the model, to be shown."""
    tokens: int = 0
    between: Message | None = None
    """A message before the answer: calls of tools, whose text was shown already, or a result."""
    ended: str = ""
    """`stop`, `length` or NO_TURNS, of the last piece."""


@dataclass
class ToolCaller:
    """Runs calls in one conversation of a pool, which keeps the state of its tools."""

    pool: EnvironmentPool
    key: int | None = None
    """None where the next call begins anew."""

    def results(
        self, message: Message
    ) -> Generator[AnswerPiece, None, Sequence[Mapping[str, Any]]]:
        """Run the calls of a message. Yield while they run; return their results as messages.

        A failure is a result, after which the tools begin anew; so do they where the caller stops.
        Raises RunError if there can be no more calls.
        """
        try:
            if self.key is None:
                self.key = next(KEYS)
                yield from finished_later(self.pool.start(self.key, UNUSED_ROW, self.key))
            return (yield from finished_later(self.pool.step(self.key, message))).messages
        except EnvironmentFailed as error:
            self.key = None
            return [
                {
                    "role": TOOL,
                    "name": call["function"]["name"],
                    "content": f"error: {error}",
                    "tool_call_id": call["id"],
                }
                for call in message["tool_calls"]
            ]
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """End the conversation of the pool."""
        if self.key is not None:
            self.pool.close(self.key)
            self.key = None


def finished_later(future: Future[T]) -> Generator[AnswerPiece, None, T]:
    """Yield until a future has its result; return it. Cancel it if the caller stops."""
    try:
        while not wait([future], POLL_S).done:
            yield AnswerPiece()
        return future.result()
    finally:
        future.cancel()


def check_can_call(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError for a model that is not shown tools, or whose calls cannot be read."""
    if not tokenizer.has_chat_template:
        raise UserError(
            "--tools: the model's tokenizer has no chat template; use an instruct model"
        )
    if not tokenizer.has_tool_calling:
        raise UserError(
            "--tools: mlx-lm does not know how models of this family write calls; use one of "
            "another, such as Qwen3, Gemma 4 or LFM2"
        )
    if not shows_tools(ChatTemplate(tokenizer), tools):
        raise UserError(
            "--tools: the model's chat template does not show tools to the model; use a model "
            "whose template does"
        )


def shows_tools(template: ChatTemplate, tools: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a chat template shows the names of tools to the model. Raises UserError."""
    asked, shown = [{"role": USER, "content": "Hello"}], [dict(tool) for tool in tools]
    text = template.render(asked, shown, "tools", answer_next=True)
    return NAME not in template.left_out(asked, shown, text).tools


def shown_characters(tokenizer: Any, text: str) -> int:
    """The characters of a growing text up to its first call, or to what may become one."""
    start: str = tokenizer.tool_call_start
    if start in text:
        return text.index(start)
    partial = (n for n in range(min(len(start), len(text)), 0, -1) if text.endswith(start[:n]))
    return len(text) - next(partial, 0)
