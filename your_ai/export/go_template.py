"""The model's chat template as a Go template, which Ollama runs.

A chat template is a program in Jinja's language. It is not translated. It is run on probe chats,
which show the texts that it puts around the messages: a `ChatShape`. From these texts the Go
template is made. The shape is then compared with the chat template on other probe chats, with
other roles, lengths and contents; only if all agree is the Go template used.

Ollama's templates have no way to remove spaces. A chat template that removes spaces around a
message therefore agrees for all messages but those that begin or end with one.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from your_ai.data.template import TemplateRefused, render
from your_ai.generation.generate import TEMPLATE_BYTES, Message

# What the probe chats say: private-use characters are neither in templates nor in data.
SYSTEM, USER, ANSWER, AGAIN = "\ue000S\ue001", "\ue000U\ue001", "\ue000A\ue001", "\ue000V\ue001"
ROLES = {SYSTEM: "system", USER: "user", ANSWER: "assistant", AGAIN: "user"}
# For the comparison: contents that a template may treat in another way than plain words.
CONTENTS = ("Hello", 'a "b"\n\n{c} {{ d }} <e> é 日本', "<|x|> [INST] 1 + 1 = 2", "x", "Yes.\nNo")
REASONED: list[Message] = [
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello."},
    {"role": "user", "content": "Bye"},
]
PLACES = Literal["own", "first", "last", "none"]
MEANT = ("{{", '"""')  # a Go template's action, the end of a text in a Modelfile
GO_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


@dataclass(frozen=True)
class ChatShape:
    """The texts that a chat template puts around the messages of a chat."""

    begin: str
    """Before everything, without what the tokenizer adds."""
    without_system: str
    """In the place of the system message, if there is none."""
    system: tuple[str, str]
    """Before and after the system message."""
    system_place: PLACES
    """A turn of its own, or before the text of the first or the last question; `none` if the
    chat template accepts no system message: then it is put before the first question."""
    user: tuple[str, str]
    assistant: tuple[str, str]
    generation: str
    """At the end, before the answer."""

    def render(self, messages: Sequence[Message]) -> str:
        """The text of a chat, as the Go template makes it."""
        system = next((m["content"] for m in messages if m["role"] == "system"), "")
        users = [i for i, m in enumerate(messages) if m["role"] == "user"]
        at = {"own": -1, "last": users[-1]}.get(self.system_place, users[0])
        text = self.begin + ("" if system else self.without_system)
        for index, message in enumerate(messages):
            around = {"system": self.system, "user": self.user, "assistant": self.assistant}
            before, after = around[message["role"]]
            content = message["content"]
            if message["role"] == "system" and self.system_place != "own":
                continue
            if index == at and system:
                content = self.system[0] + system + self.system[1] + content
            text += before + content + after
        return text + self.generation

    @property
    def go_template(self) -> str:
        """The same as a Go template over Ollama's `.System` and `.Messages`."""
        merged = self.system[0], "{{ $system }}", self.system[1]
        user = around_content(self.user)
        if self.system_place == "own":
            start = '{{ range .Messages }}{{ if eq .Role "system" }}'
            start += around_content(self.system) + '{{ else if eq .Role "user" }}'
        elif self.system_place == "last":
            start = "{{ $system := .System }}{{ range $i, $m := .Messages }}"
            start += '{{ if eq .Role "user" }}'
            is_last = "{{ if and $system (eq (len (slice $.Messages $i)) 1) }}"
            user = with_before_content(self.user, is_last, merged, "{{ end }}")
        else:
            start = '{{ $system := .System }}{{ range .Messages }}{{ if eq .Role "user" }}'
            user = with_before_content(
                self.user, "{{ if $system }}", merged, '{{ $system = "" }}{{ end }}'
            )
        absent = ""
        if self.without_system:
            absent = "{{ if not .System }}" + go_text(self.without_system) + "{{ end }}"
        return (
            go_text(self.begin)
            + absent
            + start
            + user
            + '{{ else if eq .Role "assistant" }}'
            + around_content(self.assistant)
            + "{{ end }}{{ end }}"
            + go_text(self.generation)
        )


# Without a chat template: the texts one after the other, each question and system prompt on a
# new line, as `generation.generate.prompt_tokens` joins them.
PLAIN = (
    '{{ range $i, $m := .Messages }}{{ if and $i (ne $m.Role "assistant") }}\n{{ end }}'
    "{{ $m.Content }}{{ end }}"
)


def around_content(texts: tuple[str, str]) -> str:
    return go_text(texts[0]) + "{{ .Content }}" + go_text(texts[1])


def with_before_content(
    texts: tuple[str, str], condition: str, merged: tuple[str, str, str], end: str
) -> str:
    before, content, after = merged
    added = condition + go_text(before) + content + go_text(after) + end
    return go_text(texts[0]) + added + "{{ .Content }}" + go_text(texts[1])


def go_text(text: str) -> str:
    """A text in a Go template; as a string constant if it has a meaning there or in a Modelfile."""
    if not any(mark in text for mark in MEANT) and not text.endswith("{") and is_kept(text):
        return text
    constant = (GO_ESCAPES.get(c) or (c if is_kept(c) else f"\\U{ord(c):08x}") for c in text)
    return '{{ "' + "".join(constant) + '" }}'


def is_kept(text: str) -> bool:
    """Return whether Ollama's parser of Modelfiles keeps each character of a text.

    It drops, without a word, what Go's strconv.IsPrint calls unprintable, such as the no-break
    space, but for tabs and line ends.
    """
    return all(c in " \n\r\t" or unicodedata.category(c)[0] in "LMNPS" for c in text)


def shape_of(tokenizer: Any) -> ChatShape | None:
    """The shape of the tokenizer's chat template; None if a Go template cannot say the same.

    Raises UserError if the chat template does not end in bounded time and memory.
    """

    def rendered(*contents: str) -> str:
        return run_template(tokenizer, [{"role": ROLES[c], "content": c} for c in contents])

    try:
        single, double = rendered(USER), rendered(USER, ANSWER, AGAIN)
        asked = asked_again = None
        with contextlib.suppress(TemplateRefused):
            asked, asked_again = rendered(SYSTEM, USER), rendered(SYSTEM, USER, ANSWER, AGAIN)
        turns = split(double, USER, ANSWER, AGAIN)
        if turns is None or (first := split(single, USER)) is None:
            return None
        shape = shape_from(tokenizer, first, turns, asked, asked_again)
        if shape is None:
            return None
        for messages in comparisons(has_system=asked is not None):
            if shape.render(messages) != run_template(tokenizer, messages):
                return None
    except TemplateRefused:
        return None
    return shape


def drops_reasoning(tokenizer: Any, shape: ChatShape) -> bool:
    """Return whether the chat template leaves out earlier reasoning, which the shape keeps."""
    try:
        return run_template(tokenizer, REASONED) != shape.render(REASONED)
    except TemplateRefused:
        return False


def run_template(tokenizer: Any, messages: list[Message]) -> str:
    return render(tokenizer, messages, "TEMPLATE", TEMPLATE_BYTES, add_generation_prompt=True)


def split(text: str, *marks: str) -> list[str] | None:
    """The parts of a text around the marks; None if they are not there once each, in order."""
    parts = []
    for mark in marks:
        part, found, text = text.partition(mark)
        if not found or mark in text:
            return None
        parts.append(part)
    return [*parts, text]


def shape_from(
    tokenizer: Any,
    single: list[str],
    double: list[str],
    asked: str | None,
    asked_again: str | None,
) -> ChatShape | None:
    """The shape that these renderings suggest, which still has to be compared.

    single: the texts around a question; double: those around two questions and an answer.
    asked, asked_again: the same with a system message; None if the template takes none.
    """
    before, after = single
    _, to_answer, to_question, _ = double
    ends = [t for t in end_texts(tokenizer) if t]
    cut = end_length(to_answer, ends)
    cut = cut if after.startswith(to_answer[:cut]) else 0
    place: PLACES = "none"
    system, own = ("", "\n\n"), None
    if asked is not None and asked_again is not None:
        if (found := split(asked, SYSTEM, USER)) is None:
            return None
        start, between, _ = found
        if not start.startswith(before):
            place, own = "own", between
        else:
            is_last = asked_again.find(SYSTEM) > asked_again.find(ANSWER)
            place = "last" if is_last else "first"
            system = start[len(before) :], between
    shared = [before, to_question, *([own] if own is not None else [])]
    user_before = common_end(shared)
    room = len(to_question) - end_length(to_question, ends)
    user_before = user_before[max(0, len(user_before) - room) :]
    bos = getattr(tokenizer, "bos_token", None) or ""
    user_before = user_before.removeprefix(bos)  # the first one is added by the tokenizer
    begin = before[: len(before) - len(user_before)]
    without_system = ""
    if own is not None:
        bos = bos if begin.startswith(bos) and start.startswith(bos) else ""
        begin, without_system = bos, begin[len(bos) :]
        system = start[len(bos) :], own[: len(own) - len(user_before)]
    return ChatShape(
        begin=begin,
        without_system=without_system,
        system=system,
        system_place=place,
        user=(user_before, to_answer[:cut]),
        assistant=(to_answer[cut:], to_question[: len(to_question) - len(user_before)]),
        generation=after[cut:],
    )


def end_texts(tokenizer: Any) -> list[str]:
    """The texts of the tokens that end an answer."""
    return [tokenizer.decode([end]) for end in sorted(tokenizer.eos_token_ids)]


def end_length(text: str, ends: Sequence[str]) -> int:
    """The length of the end token with which a text begins, and of the spaces after it."""
    end = next((end for end in ends if text.startswith(end)), None)
    if end is None:
        return 0
    return len(text) - len(text[len(end) :].lstrip())


def common_end(texts: Sequence[str]) -> str:
    """The longest text with which all texts end."""
    backwards = [text[::-1] for text in texts]
    return os.path.commonprefix(backwards)[::-1]  # noqa: RUF071 (compares characters, as wanted)


def comparisons(has_system: bool) -> list[list[Message]]:
    """Chats for the comparison of a shape with the chat template."""
    chats = []
    for turns in (1, 3, 5):
        for system in ((), ("system",)) if has_system else ((),):
            roles = [*system, *(("user", "assistant")[i % 2] for i in range(turns))]
            for start in range(len(CONTENTS)):
                contents = (CONTENTS[(start + i) % len(CONTENTS)] for i in range(len(roles)))
                chats.append(
                    [{"role": r, "content": c} for r, c in zip(roles, contents, strict=True)]
                )
    return chats
