"""A model's chat template: how it takes messages, and what it shows of them.

Templates know different roles, names of reasoning and forms of tool calls, and leave out what they
do not know, without a word. So a template is tried: messages of the same kinds, with marks in place
of their texts, show which of them are in what it renders. That is done once for each sequence of
kinds; the texts of a row itself are then looked for in what is rendered of them.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from your_ai.data.lines import ROW_LIMIT, RowLimit
from your_ai.data.template import TEMPLATE_CHARACTERS, render, render_all
from your_ai.data.turns import ASSISTANT, MEANINGS, REASONING, SYSTEM, USER, name_of_tool
from your_ai.errors import UserError

# A fixed date: templates that print today's date would give other tokens tomorrow, so a resumed
# run would train on other data. This is the default date of Llama's templates.
TEMPLATE_DATE = datetime.date(2024, 7, 26)
STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
TEMPLATE_GROWTH = 2  # maximum characters that a template may render per byte of a row
THINK, THOUGHT = "<think>", "</think>"  # around reasoning in a content
MOST_TRIED = 200  # messages of a chat with which the template is tried
MOST_KEPT = 2048  # sequences of kinds whose result is remembered
WORDS = re.compile(r"\s+")


def mark(number: int, what: str) -> str:
    """A text that no template changes, and that occurs nowhere else."""
    return f"Qzx{number}{what}xzQ"


@dataclass(frozen=True)
class LeftOut:
    """What the template does not show of a chat: the messages by index; and of each, what."""

    contents: frozenset[int] = frozenset()
    reasoning: frozenset[int] = frozenset()
    calls: frozenset[int] = frozenset()
    tools: bool = False


@dataclass
class ChatTemplate:
    """The chat template of a tokenizer (an mlx-lm TokenizerWrapper that has one)."""

    tokenizer: Any
    limit: RowLimit = ROW_LIMIT
    _tried: dict[Any, LeftOut | None] = field(default_factory=dict)

    @cached_property
    def source(self) -> str:
        return str(self.tokenizer.chat_template)

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        where: str,
        answer_next: bool = False,
    ) -> str:
        """The text of a chat. `answer_next` adds the header of an answer. Raises UserError."""
        return self._render(self.prepared(messages), tools, where, answer_next)

    def render_all(self, chats: list[list[dict[str, Any]]]) -> list[str] | None:
        """The texts of chats without tools; None if they cannot be rendered together."""
        room, most = self.limit.room_bytes, self._most_characters
        prepared = [self.prepared(messages) for messages in chats]
        texts = render_all(self.tokenizer, prepared, room, **self._options(None, False))
        return texts if texts and max(map(len, texts)) <= most else None

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        where: str,
        answer_next: bool = False,
    ) -> str:
        room, most = self.limit.room_bytes, self._most_characters
        options = self._options(tools, answer_next)
        return render(self.tokenizer, messages, where, room, most, **options)

    @property
    def _most_characters(self) -> int:
        return TEMPLATE_GROWTH * self.limit.row_bytes + TEMPLATE_CHARACTERS

    def _options(self, tools: list[Any] | None, answer_next: bool) -> dict[str, Any]:
        """The options that the template uses: mlx-lm's templates that are functions do not accept
        others."""
        options: dict[str, Any] = {"add_generation_prompt": answer_next}
        if tools:
            options["tools"] = tools
        if "date_string" in self.source:
            options["date_string"] = TEMPLATE_DATE.strftime("%d %b %Y")
        if "strftime_now" in self.source:
            template = self.tokenizer.get_chat_template(tools=tools)
            options["chat_template"] = STRFTIME_NOW.sub(fixed_date, template)
        return options

    # How it takes messages

    def prepared(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the roles, the name of reasoning, and the form of arguments that the
        template knows."""
        return [self._prepared(message) for message in messages]

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        role, changes = message["role"], dict[str, Any]()
        if role in MEANINGS and not self.names(role):
            changes["role"] = MEANINGS[role]
        reasoning = reasoning_of(message)
        if reasoning and self.reasoning_name != REASONING[0]:
            changes[self.reasoning_name] = message[REASONING[0]]
        calls = message.get("tool_calls")
        if calls and self.wants_text_arguments:
            changes["tool_calls"] = [with_text_arguments(call) for call in calls]
        return {**message, **changes} if changes else message

    def names(self, word: str) -> bool:
        """Whether the template has a word as a text, such as a role."""
        return any(f"{quote}{word}{quote}" in self.source for quote in "'\"")

    @cached_property
    def reasoning_name(self) -> str:
        """What the template calls the reasoning of a message."""
        found = (n for n in REASONING if re.search(rf"\.{n}\b", self.source) or self.names(n))
        return next(found, REASONING[0])

    @cached_property
    def wants_text_arguments(self) -> bool:
        """Whether the template joins the arguments of calls to other texts, so that they must be
        JSON text."""
        asked = {"role": USER, "content": "a"}
        call = {"name": "f", "arguments": {mark(0, "k"): mark(0, "v")}}
        calls = [{"id": "call00000", "type": "function", "function": call}]
        said = {"role": ASSISTANT, "content": "", "tool_calls": calls}

        def shows(message: dict[str, Any]) -> bool:
            try:
                return mark(0, "v") in self._render([asked, message], None, "")
            except UserError:
                return False

        texts = [with_text_arguments(each) for each in calls]
        return not shows(said) and shows({**said, "tool_calls": texts})

    # What it shows

    def left_out(
        self, messages: list[dict[str, Any]], tools: list[Any] | None, text: str
    ) -> LeftOut:
        """What is not in `text`, which `render` gave of a chat."""
        tried = self._try(messages, tools)
        names = ("contents", "reasoning", "calls")
        found: dict[str, set[int]] = {name: set(getattr(tried, name, ())) for name in names}
        for index, message in enumerate(messages):
            thought, said = split_thought(message["content"])
            if not contains(text, said):
                found["contents"].add(index)
            if not contains(text, thought) or not contains(text, reasoning_of(message)):
                found["reasoning"].add(index)
            calls = message.get("tool_calls", ())
            if not all(contains(text, call["function"]["name"]) for call in calls):
                found["calls"].add(index)
        no_tools = tools is not None and not all(
            contains(text, name) for name in filter(None, map(name_of_tool, tools))
        )
        return LeftOut(
            **{name: frozenset(indices) for name, indices in found.items()},
            tools=no_tools or (tried is not None and tried.tools),
        )

    def _try(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> LeftOut | None:
        """What the template leaves out of messages of these kinds; None if it refuses the marks."""
        if len(messages) > MOST_TRIED:
            return None
        key = (*map(kind_of_message, messages), bool(tools))
        if key not in self._tried:
            if len(self._tried) >= MOST_KEPT:
                self._tried.clear()
            self._tried[key] = self._try_marks(messages, tools)
        return self._tried[key]

    def _try_marks(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> LeftOut | None:
        marked = [marked_message(index, message) for index, message in enumerate(messages)]
        marked_tools = [marked_tool(tool) for tool in tools] if tools else None
        try:
            text = self.render(marked, marked_tools, "")
        except UserError:
            return None

        def missing(what: str, has: Sequence[bool]) -> frozenset[int]:
            return frozenset(
                i for i, there in enumerate(has) if there and not contains(text, mark(i, what))
            )

        thoughts = [split_thought(message["content"]) for message in messages]
        return LeftOut(
            contents=missing("c", [bool(said.strip()) for _, said in thoughts]),
            reasoning=missing("r", [
                bool(reasoning_of(m) or thought.strip())
                for m, (thought, _) in zip(messages, thoughts, strict=True)
            ]),
            calls=missing("a", [bool(message.get("tool_calls")) for message in messages]),
            tools=bool(tools) and not contains(text, mark(0, "t")),
        )  # fmt: skip

    @cached_property
    def special_tokens(self) -> tuple[str, ...]:
        """The special tokens that the template writes, the longest first."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        added = backend.get_added_tokens_decoder().values() if backend else ()
        asked = [{"role": USER, "content": "a"}, {"role": ASSISTANT, "content": "b"}]
        text = ""
        for messages in ([{"role": SYSTEM, "content": "c"}, *asked], asked):
            try:
                text += self._render(messages, None, "") + self._render(asked[:1], None, "", True)
            except UserError:
                continue
        found = {
            token.content for token in added if token.content.strip() and token.content in text
        }
        return tuple(sorted(found, key=len, reverse=True))

    def wrote(self, text: str) -> str | None:
        """A special token of the template that is in a text; None if there is none."""
        return next((token for token in self.special_tokens if token in text), None)


def fixed_date(call: re.Match[str]) -> str:
    """The replacement for a call of `strftime_now(format)` in a template."""
    return repr(TEMPLATE_DATE.strftime(call[2]))


def with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def reasoning_of(message: dict[str, Any]) -> str:
    return (message.get(REASONING[0]) or "").strip()


def split_thought(content: str) -> tuple[str, str]:
    """The reasoning in a content, and what follows it."""
    before, found, after = content.rpartition(THOUGHT)
    if not found:
        return "", content
    return before.replace(THINK, "").replace(THOUGHT, ""), after


def contains(text: str, piece: str) -> bool:
    """Whether a piece is in a text: as it is, as JSON, or with other space or capitals."""
    piece = piece.strip()
    if piece in text:
        return True
    for ascii_only in (False, True):
        if json.dumps(piece, ensure_ascii=ascii_only)[1:-1] in text:
            return True
    return WORDS.sub("", piece).lower() in WORDS.sub("", text).lower()


def kind_of_message(message: dict[str, Any]) -> tuple[str, bool, bool, bool, int]:
    """What a template may treat differently."""
    thought, said = split_thought(message["content"])
    return (
        message["role"],
        bool(said.strip()),
        bool(thought.strip()),
        bool(reasoning_of(message)),
        len(message.get("tool_calls", ())),
    )


def marked_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message of the same kind with marks in place of its texts."""
    thought, said = split_thought(message["content"])
    content = mark(index, "c") if said.strip() else ""
    if thought.strip():
        content = f"{THINK}{mark(index, 'r')}{THOUGHT}{content}"
    marked = {**message, "content": content}
    if reasoning_of(message):
        marked[REASONING[0]] = mark(index, "r")
    if calls := message.get("tool_calls"):
        marked["tool_calls"] = [
            {**c, "function": {**c["function"], "arguments": {"k": mark(index, "a")}}}
            for c in calls
        ]
    return marked


def marked_tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or not isinstance(tool.get("function"), dict):
        return tool
    return {**tool, "function": {**tool["function"], "name": mark(0, "t")}}
