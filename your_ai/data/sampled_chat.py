"""Conversations whose answers are sampled: what the model said, and which tokens it reads next.

Tokens in, tokens out: ids that were sampled are never decoded and encoded again. What is heard in
between is appended as the tokens that the chat template puts there.

Shapes: T tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from your_ai.data.chat_template import contains, has_letters, reasoning_of, split_thought
from your_ai.data.encode import Encoder
from your_ai.data.rows import Chat
from your_ai.data.turns import ASSISTANT, REASONING, parse_call, parse_turns
from your_ai.gates.text import shortened

Rewritten = Literal["split", "refuse"]
INVISIBLE = "\u200b"  # put into texts that look like tokens of the tokenizer
REWRITTEN = (
    "the model's chat template changes earlier turns of a conversation, such as their reasoning; "
    "use --rewritten-turns split, which trains them in parts, or another model"
)


@dataclass(frozen=True)
class Heard:
    """Tokens that the model reads after its answer."""

    ids: np.ndarray
    """(T,) uint32, at least one."""
    is_prompt: bool = False
    """Whether it begins a new part, because the template shows earlier turns differently now."""


class CannotGoOn(Exception):
    """A conversation ends here. One line says why."""


@dataclass
class SampledChat:
    """Messages, and the tokens that the model reads of them."""

    encoder: Encoder
    tools: list[Any] | None
    messages: list[dict[str, Any]]
    """So far."""
    where: str
    rewritten: Rewritten = "refuse"
    """What to do if the template changes earlier turns: begin a new part, or go on no more."""
    text: str = ""
    """What the template renders of them, up to where an answer begins."""
    malformed: int = field(default=0)
    """Answers with calls that cannot be read."""

    def begin(self) -> np.ndarray:
        """(T,) uint32, the prompt. Raises UserError."""
        self.text = self.render(self.messages)
        return self.ids_after(self.text, 0)

    def hear(self, ids: Sequence[int], stopped: bool) -> dict[str, Any]:
        """Append the answer with these ids; return it as a message.

        stopped: whether the last id ends it.
        """
        tokenizer = self.encoder.tokenizer
        text = tokenizer.decode(list(ids[: -1 if stopped else None]))
        message, is_whole = answer_of(tokenizer, text, self.tools)
        self.malformed += not is_whole
        for number, call in enumerate(message.get("tool_calls", ())):
            call.setdefault("id", f"{len(self.messages):04d}{number:05d}")  # as long as Mistral's
        self.messages.append(message)
        return message

    def see(self, messages: Sequence[Mapping[str, Any]], last: int) -> Heard:
        """Append messages, after the answer; return what the model reads next.

        last: the id that ended the answer. Raises CannotGoOn, UserError.
        """
        index = len(self.messages) - 1
        answer, prompt = self.messages[index], self.text
        self.append(messages)
        self.text = self.render(self.messages)
        done = self.encoder.template.render(self.messages, self.tools, self.where)
        is_same, end = done.startswith(prompt) and self.text.startswith(done), 0
        if is_same:
            chat = Chat(self.messages, self.tools)
            span = self.encoder.answers.turn_span(done, chat, index, self.where)
            is_same = span is not None and span[0] == len(prompt)
            end = span[1] if span is not None else 0
        if not is_same or is_left_out(answer, self.text[len(prompt) : end]):
            if self.rewritten == "refuse":
                raise CannotGoOn(REWRITTEN)
            return Heard(self.ids_after(self.text, 0), is_prompt=True)
        said = self.encoder.tokenizer.decode([last])
        if not self.text[:end].endswith(said):
            raise CannotGoOn(f"the answer ended with {shortened(said)!r}, not as in the template")
        return Heard(self.ids_after(self.text, end))

    def append(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append messages that are heard. Raises UserError."""
        given = [dict(each) for each in messages]
        for message in parse_turns(given, "messages", self.where) if given else ():
            self.messages.append({**self.plain(message), "role": message["role"]})

    def render(self, messages: list[dict[str, Any]]) -> str:
        return self.encoder.template.render(messages, self.tools, self.where, answer_next=True)

    def ids_after(self, text: str, start: int) -> np.ndarray:
        """The ids of a text from a character on. Raises CannotGoOn if it is within a token."""
        tokens = self.encoder.tokenized(text, self.where)
        if start == 0:
            return tokens.ids
        after = np.flatnonzero(tokens.starts >= start)
        if not len(after) or (tokens.ends[: after[0]] > start).any():
            raise CannotGoOn("the tokens of what follows begin within the answer")
        return tokens.ids[after[0] :]

    def plain(self, value: Any) -> Any:
        """A value of JSON whose texts have no token of the tokenizer that only templates and models
        write."""
        if isinstance(value, dict):
            return {name: self.plain(each) for name, each in value.items()}
        if isinstance(value, list):
            return [self.plain(each) for each in value]
        for token in self.encoder.added_tokens if isinstance(value, str) else ():
            if token in value:
                value = value.replace(token, token[:1] + INVISIBLE + token[1:])
        return value


def is_left_out(answer: Mapping[str, Any], shown: str) -> bool:
    """Return whether a part of an answer is not in what the template shows of it."""
    thought, said = split_thought(str(answer["content"]))
    texts = [said, thought, reasoning_of(dict(answer))]
    calls = answer.get("tool_calls", ())
    names = [call["function"]["name"] for call in calls]
    values = [
        str(value)
        for call in calls
        for value in call["function"]["arguments"].values()
        if isinstance(value, str)
    ]
    whole = all(contains(shown, text) for text in [*texts, *names] if text.strip())
    return not (whole and all(has_letters(shown, v) or contains(shown, v) for v in values))


def answer_of(tokenizer: Any, text: str, tools: list[Any] | None) -> tuple[dict[str, Any], bool]:
    """A message of what a model wrote, and whether its calls could be read: else they stay text.

    The reasoning and the calls are where mlx-lm knows the model's family to write them.
    """
    message: dict[str, Any] = {"role": ASSISTANT, "content": text}
    end = tokenizer.think_end if tokenizer.has_thinking else None
    if end and end in text:
        thought, _, said = text.partition(end)
        message |= {REASONING[0]: thought.replace(tokenizer.think_start, ""), "content": said}
    if not (tools and tokenizer.has_tool_calling):
        return message, True
    start, stop = tokenizer.tool_call_start, tokenizer.tool_call_end
    before, *parts = message["content"].split(start)
    if not parts:
        return message, True
    try:
        calls = []
        for part in parts:
            calls += read_calls(tokenizer, part.partition(stop)[0] if stop else part, tools)
    except ValueError:
        return message, False
    return {**message, "content": before.strip(), "tool_calls": calls}, True


def read_calls(tokenizer: Any, text: str, tools: list[Any] | None) -> list[dict[str, Any]]:
    """The calls in what a model wrote between the marks of calls. Raises ValueError."""
    try:
        found = tokenizer.tool_parser(text, tools)
        calls = [parse_call(call, "") for call in (found if isinstance(found, list) else [found])]
        json.dumps(calls, ensure_ascii=False, allow_nan=False).encode()  # no half of a character
        return calls
    except Exception as error:  # mlx-lm's parsers raise anything for what models write
        raise ValueError("a call cannot be read") from error
