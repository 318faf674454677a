"""Where the answers of a chat are in its rendered text, and whether all of it is there."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from typing import Any

from your_ai.data.chat_template import (
    MOST_KEPT,
    MOST_TRIED,
    NAME,
    ChatTemplate,
    LeftOut,
    kind_of_message,
    marked_message,
    reasoning_of,
    split_thought,
)
from your_ai.data.notes import Notes, compared
from your_ai.data.rows import Chat
from your_ai.data.template import TemplateRefused
from your_ai.data.turns import (
    ASSISTANT,
    KNOWN_ROLES,
    MEANINGS,
    REASONING,
    TOOL,
    USER,
    calls_as_json,
)
from your_ai.errors import UserError
from your_ai.gates.text import counted, shortened

SPANS_SECONDS = 8.0  # for all turns of a chat; a chat of 4,000 messages takes this long
# Of messages and calls; of others, what is rendered without them says whether they are used.
KEYS = {"role", "content", "weight", "tool_calls", "id", "tool_call_id", REASONING[0]}
CALL_KEYS = {"id", "type", "function", "name", "arguments"}
MOST_WITHOUT = 32  # rows that are rendered without a key, until it is taken to have no effect
TAG = re.compile(r"<[^\s<>]+>|\[/?[A-Z_]+\]")
SENTINEL = "\ue000\ue001"  # private use: neither in data nor in templates


@dataclass(frozen=True)
class Frame:
    """Texts that a template writes around the contents of messages of certain kinds."""

    parts: tuple[str, ...]
    """Before each content."""
    end: str
    """After the last one."""
    borders: dict[int, tuple[int, int]]
    """Of each answer: where the prompt of generation ends, counted from the beginning of its
    content, and where it ends, counted from the end of its content."""

    def spans(self, text: str, messages: list[dict[str, Any]]) -> dict[int, tuple[int, int]] | None:
        """The span of each answer in `text`, if that is what the frame makes of the messages."""
        for trimmed in (False, True):
            at, found = 0, {}
            for index, (part, message) in enumerate(zip(self.parts, messages, strict=True)):
                content = message["content"].strip() if trimmed else message["content"]
                if not text.startswith(part, at) or not text.startswith(content, at + len(part)):
                    break
                start, at = at + len(part), at + len(part) + len(content)
                if index in self.borders:
                    before, after = self.borders[index]
                    found[index] = start + before, at + after
            else:
                if text[at:] == self.end:
                    return found
        return None


def is_plain(message: dict[str, Any]) -> bool:
    """Return whether a message has a content, and nothing else that a template shows."""
    content = message["content"]
    return bool(
        content.strip()
        and not message.get("tool_calls")
        and not reasoning_of(message)
        and split_thought(content)[1] is content
    )


@dataclass(frozen=True)
class ChatAnswers:
    """Finds answers in what a template renders. end_tokens: the texts that end a turn."""

    template: ChatTemplate
    end_tokens: tuple[str, ...]
    notes: Notes
    _frames: dict[Any, Frame | None] = field(default_factory=dict)
    _without: dict[tuple[str, str, str], int] = field(default_factory=dict)
    """(role, "messages" or "calls", key) -> rows that are the same without it; -1: one was not."""

    def framed(self, text: str, chat: Chat) -> dict[int, tuple[int, int]] | None:
        """The span of each answer in `text`, if the template is known to write there the contents
        of the messages, and always the same around them; else None."""
        frame = self._frame(chat)
        return None if frame is None else frame.spans(text, chat.messages)

    def check_shown(self, text: str, chat: Chat, is_framed: bool, where: str) -> set[int]:
        """Check that a chat is in `text`, which the template rendered of it, and return the answers
        that are not trained, because generation would not see or give them like that.

        is_framed: whether all contents are known to be there.
        Raises UserError if a message, a call or the reasoning of the last answers is left out.
        """
        messages = chat.messages
        left = LeftOut() if is_framed else self.template.left_out(messages, chat.tools, text)
        untrained = self.check_left(left, messages, where)
        if token := next(filter(None, (self.template.wrote(m["content"]) for m in messages)), None):
            note = f"messages have tokens of the chat template, such as {token}, in their text"
            self.notes.add(note, where)
        self.name_unused(text, chat, where)
        if any(m["role"] == "user" and not m["content"].strip() for m in messages):
            self.notes.add("questions without text are trained as they are", where)
        if out_of_order(messages, text):
            note = "results of tools are in another order than their calls, without their ids"
            self.notes.add(note, where)
        for role in sorted({message["role"] for message in messages} - {*KNOWN_ROLES.values()}):
            note = f"messages of the role {shortened(role)} are shown, and not trained"
            self.notes.add(note, where)
        for index in trained_turns(chat):
            turn = messages[index]
            if calls_as_json(turn["content"], chat.tools):
                note = "answers that are calls of tools as JSON text are trained as text"
                self.notes.add(f"{note}; write tool_calls for the template's own form", where)
            if not (turn["content"].strip() or turn.get("tool_calls") or reasoning_of(turn)):
                self.notes.add("answers without text are not trained", where)
                untrained.add(index)
        return untrained

    def once(self, chat: Chat, where: str) -> Chat:
        """The chat without what the template writes itself: end tokens at the end of its answers,
        and tags around its other messages, such as `<tool_response>`."""
        found = {}
        for index, message in enumerate(chat.messages):
            content = message["content"]
            if message["role"] == ASSISTANT:
                content = self.without_end(content, where)
            elif begins := TAG.match(content.strip()):
                content = self.without_tags(chat, index, begins[0], where)
            if content != message["content"]:
                found[index] = {**message, "content": content}
        if not found:
            return chat
        return replace(chat, messages=[found.get(i, m) for i, m in enumerate(chat.messages)])

    def without_end(self, content: str, where: str) -> str:
        """An answer without an end token that the template writes after it."""
        text = content.rstrip()
        for end in self.end_tokens:
            if text.endswith(end) and end in self.template.special_tokens:
                self.notes.add(f"answers with {end} at their end have it only once", where)
                return text.removesuffix(end)
        return content

    def without_tags(self, chat: Chat, index: int, tag: str, where: str) -> str:
        """The content of a message that begins with a tag, without it and the one at its end if the
        template writes both around the message."""
        content: str = chat.messages[index]["content"]
        marked = list(chat.messages)
        marked[index] = {**marked[index], "content": SENTINEL}
        try:
            text = self.template.render(marked, chat.tools, "")
        except UserError:
            return content
        before, _, after = text.partition(SENTINEL)
        end = TAG.match(after.lstrip())
        inner = content.strip()
        if end is None or not inner.endswith(end[0]) or not before.rstrip().endswith(tag):
            return content
        self.notes.add(f"messages with {tag} around them have it only once", where)
        return inner.removeprefix(tag).removesuffix(end[0]).strip()

    def check_left(self, left: LeftOut, messages: list[dict[str, Any]], where: str) -> set[int]:
        """Refuse or name what the template has left out of a chat; return the earlier answers
        without their reasoning.

        Raises UserError as `check_shown`.
        """
        untrained: set[int] = set()
        asked = [i for i, message in enumerate(messages) if message["role"] == USER]
        omits = "the model's chat template omits"
        advice = "remove it, or choose a model whose template shows it"
        for index in sorted(left.contents):
            role = messages[index]["role"]
            if role == ASSISTANT and messages[index].get("tool_calls"):
                self.notes.add(f"{omits} the text beside tool calls", where)
            else:
                raise UserError(
                    f"{where}: messages[{index}]: {omits} this message of the role {role}; {advice}"
                )
        for index in sorted(left.calls):
            raise UserError(
                f"{where}: messages[{index}]: {omits} tool_calls or a part of them; {advice}"
            )
        for index in sorted(left.reasoning):
            if index > (asked[-1] if asked else -1):
                raise UserError(f"{where}: messages[{index}]: {omits} its reasoning; {advice}")
            note = f"{omits} the reasoning of earlier answers, which are not trained"
            if messages[index]["role"] != ASSISTANT:
                note = f"{omits} the reasoning of messages that are no answers"
            self.notes.add(note, where)
            untrained.add(index)
        if NAME in left.tools:
            self.notes.add(f"{omits} the tools of a chat, or some of them", where)
        elif left.tools:
            self.notes.add(f"{omits} {' and '.join(sorted(left.tools))} of tools", where)
        return untrained

    def name_unused(self, text: str, chat: Chat, where: str) -> None:
        """Name the keys of messages and calls without which the chat is rendered as the same
        `text`. Once a key had an effect, it is not tried again."""
        unused: set[tuple[str, str]] = set()
        for message in chat.messages:
            role = message["role"]
            linked = {"name"} if MEANINGS.get(role, role) == TOOL else set[str]()  # with its call
            keys = {("messages", key) for key in {*message} - KEYS - linked}
            keys |= {("calls", key) for call in message.get("tool_calls", ()) for key in call}
            keys |= {
                ("calls", key) for call in message.get("tool_calls", ()) for key in call["function"]
            }
            for of, key in keys - {("calls", key) for key in CALL_KEYS}:
                if self.has_no_effect(text, chat, role, of, key):
                    unused.add((of, key))
        for of, key in sorted(unused):
            self.notes.add(f"the key {shortened(key)} of {of} is not used", where)

    def has_no_effect(self, text: str, chat: Chat, role: str, of: str, key: str) -> bool:
        """Return whether a chat is rendered as `text` without a key of its messages or calls."""
        same = self._without.get((role, of, key), 0)
        if 0 <= same < MOST_WITHOUT:
            others = [without_key(m, of, key) if m["role"] == role else m for m in chat.messages]
            try:
                is_same = self.template.render(others, chat.tools, "") == text
            except UserError:  # of the template, which misses the key
                is_same = False
            self._without[role, of, key] = same = same + 1 if is_same else -1
        return same > 0

    def spans(self, text: str, chat: Chat, turns: list[int], where: str) -> list[tuple[int, int]]:
        """Find the spans of answers, in limited time, because each needs two renderings."""
        began, found = time.thread_time(), []
        for index in turns:
            found.append(self.turn_span(text, chat, index, where))
            if time.thread_time() - began > SPANS_SECONDS:
                messages = counted(len(chat.messages), "message")
                raise UserError(
                    f"{where}: finding the answers in {messages} takes more than "
                    f"{SPANS_SECONDS:g} s; split the chat, or use --no-mask-prompt"
                )
        return [span for span in found if span is not None]

    def turn_span(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int] | None:
        """Find assistant turn `index` in the rendered chat: [start, end) in characters; None if
        generation would see other turns before it.

        The span is from the end of the turn's header through its end token. The header ends where
        the prompt of generation does, if the chat begins with that; else it is found by rendering
        the chat with a sentinel in place of the turn, as is the end if the chat up to the turn is
        not what it begins with.
        """
        before = self._begun(chat, index, where, answer_next=True)
        through = self._begun(chat, index + 1, where)
        start, end = (None if part is None else len(part) for part in (before, through))
        if before is None or not text.startswith(before):
            start = None
        if through is None or not text.startswith(through):
            end = None
        if start is None or end is None or end <= start:
            first, past = self._span_by_sentinel(text, chat, index, where)
            if (
                start is None
                and before is not None
                and not self._is_seen(text, first, before, where)
            ):
                return None
            start, end = (first, past) if start is None else (start, max(start, past))
        return start, self.end(text, start, end)

    def end(self, text: str, start: int, end: int) -> int:
        """The end of a span: generation stops at an end token, so the rest is never generated."""
        answer = text[start:end].rstrip()
        return start + len(answer) if answer.endswith(self.end_tokens) else end

    def _frame(self, chat: Chat) -> Frame | None:
        """The frame in which the template renders chats of these kinds; None if not known."""
        messages = chat.messages
        if chat.tools or len(messages) > MOST_TRIED or not all(map(is_plain, messages)):
            return None
        key = tuple(map(kind_of_message, messages))
        if key not in self._frames:
            if len(self._frames) >= MOST_KEPT:
                self._frames.clear()
            self._frames[key] = self._frame_of_marks(messages)
        return self._frames[key]

    def _frame_of_marks(self, messages: list[dict[str, Any]]) -> Frame | None:
        marked = [marked_message(at, message) for at, message in enumerate(messages)]
        chat = Chat(marked)
        try:
            text = self.template.render(marked, None, "")
            parts, rest = [], text
            for message in marked:
                before, found, rest = rest.partition(message["content"])
                if not found:
                    return None
                parts.append(before)
            borders = {}
            for at, message in enumerate(marked):
                if message["role"] != ASSISTANT:
                    continue
                begun = self._begun(chat, at, "", answer_next=True)
                through = self._begun(chat, at + 1, "")
                if begun is None or through is None or not text.startswith(begun):
                    return None
                if not text.startswith(through) or len(through) <= len(begun):
                    return None
                place = text.index(message["content"])
                borders[at] = len(begun) - place, len(through) - place - len(message["content"])
        except UserError:
            return None
        return Frame(tuple(parts), rest, borders)

    def _is_seen(self, text: str, start: int, before: str, where: str) -> bool:
        """Return whether an answer at `start` is trained, although the text does not begin with the
        prompt of generation, `before`: only if that has no more than something at its end."""
        if not before.startswith(text[:start]):
            same = common_prefix(text[:start], before)
            parts = (whole[max(same - 10, 0) : same + 20] for whole in (text[:start], before))
            self.notes.add(
                "answers whose earlier turns look different in generation are not trained; a row "
                "that ends with such an answer trains it",
                compared(where, *parts),
            )
            return False
        added = shortened(repr(before[start:]))
        note = f"the prompt of generation ends with {added}, which these rows do not have"
        self.notes.add(note, where)
        return True

    def _begun(self, chat: Chat, count: int, where: str, answer_next: bool = False) -> str | None:
        """The first messages of a chat; None if the template rejects a chat that ends there."""
        try:
            return self.template.render(chat.messages[:count], chat.tools, where, answer_next)
        except TemplateRefused:
            return None

    def _span_by_sentinel(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        marked = list(chat.messages)
        left_out = ("tool_calls", REASONING[0])  # they are in the span, which begins before them
        marked[index] = {k: v for k, v in chat.messages[index].items() if k not in left_out}
        marked[index]["content"] = SENTINEL
        other = self.template.render(marked, chat.tools, where)
        start = common_prefix(text, other)
        end = len(text) - common_prefix(text[start:][::-1], other[start:][::-1])
        said = split_thought(chat.messages[index]["content"])[1]
        if SENTINEL not in other or said.strip() not in text[start:end]:
            raise UserError(
                f"{where}: messages[{index}]: the chat template does not show where this "
                "turn begins and ends; use --no-mask-prompt"
            )
        tail = text[end:]
        for token in self.end_tokens:
            if tail.lstrip().startswith(token):
                return start, end + tail.index(token) + len(token)
        return start, end


def trained_turns(chat: Chat) -> list[int]:
    """The indices of the turns to train: the assistant's, except those with weight 0."""
    return [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.first_trained
        if message.get("weight", 1)
    ]


def out_of_order(messages: list[dict[str, Any]], text: str) -> bool:
    """Return whether results of tools have another order than the calls with their ids, and `text`
    does not have the ids."""
    called = [str(call.get("id")) for m in messages for call in m.get("tool_calls", ())]
    given = [str(m["tool_call_id"]) for m in messages if m.get("tool_call_id") is not None]
    known = [at for at in given if at in called]
    is_other = known != sorted(known, key=called.index)
    return is_other and not all(each in text for each in known)


def without_key(message: dict[str, Any], of: str, key: str) -> dict[str, Any]:
    """The message without a key of its own, or of its calls."""
    if of == "messages":
        return {name: value for name, value in message.items() if name != key}
    calls = [
        {name: value for name, value in call.items() if name != key}
        | {"function": {name: value for name, value in call["function"].items() if name != key}}
        for call in message.get("tool_calls", ())
    ]
    return {**message, "tool_calls": calls} if calls else message


def common_prefix(a: str, b: str) -> int:
    """The length of the common prefix of `a` and `b`, in characters."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (compares characters, as wanted)
