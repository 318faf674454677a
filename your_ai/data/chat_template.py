"""A model's chat template: how it takes messages, and what it shows of them.

Templates know different roles, names of reasoning and forms of tool calls, and leave out what they
do not know, without a word. So a template is tried: messages of the same kinds, with marks in place
of their texts and of those of calls and tools, show which of them are in what it renders. That is
done once for each sequence of kinds; the texts of a row itself are then looked for in what is
rendered of them.
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
LETTERS = re.compile(r"[A-Za-z0-9]+")
FIRST_NUMBER = 10**12  # of the numbers that are marks
NAME, ARGUMENTS = "name", "arguments"  # the parts of calls; tools have a name, too
DESCRIPTIONS, PARAMETERS = "descriptions", "parameters"  # the other parts of tools
ALL_PARTS = (NAME, ARGUMENTS, DESCRIPTIONS, PARAMETERS)


def mark(number: int, what: str) -> str:
    """A text that no template changes, and that occurs nowhere else."""
    return f"Qzx{number}{what}xzQ"


@dataclass(frozen=True)
class LeftOut:
    """The parts of a chat that a template does not show: of messages, by index; and of tools."""

    contents: frozenset[int] = frozenset()
    reasoning: frozenset[int] = frozenset()
    calls: frozenset[int] = frozenset()
    tools: frozenset[str] = frozenset()
    """Of all tools: NAME, DESCRIPTIONS, PARAMETERS."""


@dataclass
class ToolTexts:
    """The texts and numbers of calls and tools; if `marks` is set, with marks in their place."""

    marks: bool
    calls: dict[tuple[int, str], list[str]] = field(default_factory=dict)
    """By message and part."""
    tools: dict[str, list[str]] = field(default_factory=dict)
    """By part."""
    made: int = 0

    def take(self, parts: dict[Any, list[str]], of: Any, value: Any) -> Any:
        """Add a text or a number to the parts. Returns what takes its place."""
        if value is None or isinstance(value, bool) or not str(value).strip():
            return value
        if self.marks:
            is_text = isinstance(value, str)
            number, self.made = self.made, self.made + 1
            value = mark(number, "v") if is_text else type(value)(FIRST_NUMBER + number)
        parts.setdefault(of, []).append(str(value))
        return value

    def of_message(self, index: int, message: dict[str, Any]) -> dict[str, Any]:
        if calls := message.get("tool_calls"):
            return {**message, "tool_calls": [self._of_call(index, call) for call in calls]}
        return message

    def _of_call(self, index: int, call: dict[str, Any]) -> dict[str, Any]:
        function = call["function"]
        name = self.take(self.calls, (index, NAME), function["name"])
        arguments = self._of_value(index, function["arguments"])
        return {**call, "function": {**function, "name": name, "arguments": arguments}}

    def _of_value(self, index: int, value: Any) -> Any:
        if isinstance(value, list):
            return [self._of_value(index, each) for each in value]
        if isinstance(value, dict):
            return {
                self._of_value(index, key): self._of_value(index, each)
                for key, each in value.items()
            }
        return self.take(self.calls, (index, ARGUMENTS), value)

    def of_tool(self, tool: Any) -> Any:
        taken, name = self._of_schema(tool), name_of_tool(tool)
        if name is not None:
            taken["function"]["name"] = self.take(self.tools, NAME, name)
        return taken

    def _of_schema(self, value: Any, key: str = "") -> Any:
        """A part of a tool: the keys of `properties` are names, others have a meaning."""
        if isinstance(value, list):
            return [self._of_schema(each) for each in value]
        if isinstance(value, dict) and key == "properties":
            return {
                self.take(self.tools, PARAMETERS, name): self._of_schema(each)
                for name, each in value.items()
            }
        if isinstance(value, dict):
            return {key: self._of_schema(each, key) for key, each in value.items()}
        if isinstance(value, str) and key == "description":
            return self.take(self.tools, DESCRIPTIONS, value)
        return value

    def left_out(self, text: str, parts: Sequence[str]) -> tuple[set[int], set[str]]:
        """The messages whose calls are not all in a text, and what is not of the tools."""

        def missing(texts: list[str]) -> bool:
            return not all(contains(text, each) or has_letters(text, each) for each in texts)

        calls = {i for (i, part), texts in self.calls.items() if part in parts and missing(texts)}
        return calls, {p for p, texts in self.tools.items() if p in parts and missing(texts)}


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
            dated = STRFTIME_NOW.sub(lambda call: repr(TEMPLATE_DATE.strftime(call[2])), template)
            options["chat_template"] = dated
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
        """Return whether the template has a word as a text, such as a role."""
        return any(f"{quote}{word}{quote}" in self.source for quote in "'\"")

    @cached_property
    def reasoning_name(self) -> str:
        """The template's name for the reasoning of a message."""
        found = (n for n in REASONING if re.search(rf"\.{n}\b", self.source) or self.names(n))
        return next(found, REASONING[0])

    @cached_property
    def wants_text_arguments(self) -> bool:
        """True if the template joins the arguments of calls to other texts, so that they must be
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
        """The parts that are not in `text`, which `render` gave of a chat."""
        tried = self._try(messages, tools)
        names = ("contents", "reasoning", "calls")
        found: dict[str, set[int]] = {name: set(getattr(tried, name, ())) for name in names}
        for index, message in enumerate(messages):
            thought, said = split_thought(message["content"])
            if not contains(text, said):
                found["contents"].add(index)
            if not contains(text, thought) or not contains(text, reasoning_of(message)):
                found["reasoning"].add(index)
        own = ToolTexts(marks=False)
        for index, message in enumerate(messages):
            own.of_message(index, message)
        for tool in tools or ():
            own.of_tool(tool)
        calls, parts = own.left_out(text, ALL_PARTS if tried is None else (NAME,))
        return LeftOut(
            contents=frozenset(found["contents"]),
            reasoning=frozenset(found["reasoning"]),
            calls=frozenset(found["calls"] | calls),
            tools=frozenset(parts) | (tried.tools if tried is not None else frozenset()),
        )

    def _try(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> LeftOut | None:
        """The parts that are left out of messages of these kinds; None if it refuses the marks."""
        if len(messages) > MOST_TRIED:
            return None
        parts = ToolTexts(marks=True)
        marked = [
            parts.of_message(index, marked_message(index, message))
            for index, message in enumerate(messages)
        ]
        marked_tools = [parts.of_tool(tool) for tool in tools or ()]
        functions = [[c["function"] for c in m.get("tool_calls", ())] for m in marked]
        shape = hash(json.dumps([functions, marked_tools]))  # the whole may be long
        key = (*map(kind_of_message, messages), shape)
        if key not in self._tried:
            if len(self._tried) >= MOST_KEPT:
                self._tried.clear()
            self._tried[key] = self._try_marks(messages, marked, marked_tools, parts)
        return self._tried[key]

    def _try_marks(
        self,
        messages: list[dict[str, Any]],
        marked: list[dict[str, Any]],
        tools: list[Any],
        parts: ToolTexts,
    ) -> LeftOut | None:
        try:
            text = self.render(marked, tools or None, "")
        except UserError:
            return None

        def missing(what: str, has: Sequence[bool]) -> frozenset[int]:
            return frozenset(
                i for i, there in enumerate(has) if there and not contains(text, mark(i, what))
            )

        thoughts = [split_thought(message["content"]) for message in messages]
        calls, of_tools = parts.left_out(text, ALL_PARTS)
        return LeftOut(
            contents=missing("c", [bool(said.strip()) for _, said in thoughts]),
            reasoning=missing("r", [
                bool(reasoning_of(m) or thought.strip())
                for m, (thought, _) in zip(messages, thoughts, strict=True)
            ]),
            calls=frozenset(calls),
            tools=frozenset(of_tools),
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
    """Return whether a piece is in a text: as it is, as JSON, or with other space or capitals."""
    piece = piece.strip()
    if piece in text:
        return True
    for ascii_only in (False, True):
        if json.dumps(piece, ensure_ascii=ascii_only)[1:-1] in text:
            return True
    return WORDS.sub("", piece).lower() in WORDS.sub("", text).lower()


def has_letters(text: str, piece: str) -> bool:
    """Return whether the letters and digits of a piece are in a text, with any escapes between."""
    words = LETTERS.findall(piece)
    return bool(words) and all(word in text for word in words)


def kind_of_message(message: dict[str, Any]) -> tuple[object, ...]:
    """The properties of a message that a template may treat differently."""
    thought, said = split_thought(message["content"])
    return (
        message["role"],
        bool(said.strip()),
        bool(thought.strip()),
        bool(reasoning_of(message)),
    )


def marked_message(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message of the same kind with marks in place of its texts; its calls stay."""
    thought, said = split_thought(message["content"])
    content = mark(index, "c") if said.strip() else ""
    if thought.strip():
        content = f"{THINK}{mark(index, 'r')}{THOUGHT}{content}"
    marked = {**message, "content": content}
    if reasoning_of(message):
        marked[REASONING[0]] = mark(index, "r")
    return marked
