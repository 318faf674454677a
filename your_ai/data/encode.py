"""A row -> token ids, and which of them are trained.

The turns of a chat are located in the text that the model's own template renders,
in characters, and mapped to tokens by the tokenizer's offsets, so that the text is
tokenized once and whole, as it will be when the model is used.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from your_ai.data.rows import Chat, Pair, Row, Text
from your_ai.errors import UserError

# Templates that print today's date would give other tokens tomorrow, and a resumed run
# other data. This is the date that Llama's templates fall back to.
TEMPLATE_DATE = datetime.date(2024, 7, 26)
SENTINEL = "\ue000\ue001"  # private use: neither in data nor in templates


@dataclass(frozen=True)
class Encoded:
    """tokens: (T,) uint32; trained: (T,) bool, true where the token is a target."""

    tokens: np.ndarray
    trained: np.ndarray


@dataclass(frozen=True)
class Prompt:
    """asked: what a person would type; rendered: what the model is given, as text that
    holds its special tokens; expected: the answer in the data."""

    asked: str
    rendered: str
    expected: str


@dataclass(frozen=True)
class Encoder:
    """Encodes rows with the tokenizer of a model (an mlx-lm TokenizerWrapper)."""

    tokenizer: Any
    mask_prompt: bool = True

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers` object, which gives offsets; set to neither cut nor pad."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UserError("the model's tokenizer has no tokenizer.json, which training needs")
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def template_options(self) -> dict[str, Any]:
        template = str(self.tokenizer.chat_template or "")
        options: dict[str, Any] = {}
        if "strftime_now" in template:
            options["strftime_now"] = TEMPLATE_DATE.strftime
        if "date_string" in template:
            options["date_string"] = TEMPLATE_DATE.strftime("%d %b %Y")
        return options

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The texts of the tokens that end a turn, as the tokenizer knows them."""
        ids = sorted(self.tokenizer.eos_token_ids)
        return tuple(t for t in self.tokenizer.convert_ids_to_tokens(ids) if t)

    def encode(self, row: Row) -> Encoded:
        """Raises UserError, naming the row, where nothing in it can be trained."""
        content = row.content
        if isinstance(content, Pair) and self.tokenizer.has_chat_template:
            content = pair_to_chat(content)
        if isinstance(content, Chat):
            tokens, trained = self._encode_chat(content, row.where)
        elif isinstance(content, Pair):
            tokens, trained = self._encode_pair(content)
        else:
            tokens, trained = self._encode_text(content)
        trained = np.array(trained, bool)
        trained[:1] = False  # nothing predicts the first token
        if not trained.any() or not has_answer(content):
            raise UserError(f"{row.where}: no token to train: the row has no answer, or no text")
        return Encoded(np.array(tokens, np.uint32), trained)

    def prompt_of(self, row: Row) -> Prompt | None:
        """What a row asks and what should be answered; None for a row that asks nothing."""
        content = row.content
        if isinstance(content, Pair) and self.tokenizer.has_chat_template:
            content = pair_to_chat(content)
        if isinstance(content, Pair):
            return Prompt(content.prompt, content.prompt, content.completion)
        if isinstance(content, Text) or content.messages[-1]["role"] != "assistant":
            return None
        *asked, answer = content.messages
        rendered = self._render(asked, content.tools, row.where, answer_next=True)
        return Prompt(asked[-1]["content"] if asked else "", rendered, answer["content"])

    def _encode_text(self, content: Text) -> tuple[list[int], list[bool]]:
        tokens = self.backend.encode(content.text).ids
        if not tokens or tokens[-1] not in self.tokenizer.eos_token_ids:
            tokens = [*tokens, self.tokenizer.eos_token_id]
        return tokens, [True] * len(tokens)

    def _encode_pair(self, pair: Pair) -> tuple[list[int], list[bool]]:
        # Apart, as they are when the model is used: the prompt ends at a token.
        prompt = self.backend.encode(pair.prompt).ids
        completion = self.backend.encode(pair.completion, add_special_tokens=False).ids
        completion = [*completion, self.tokenizer.eos_token_id]
        trained = [not self.mask_prompt] * len(prompt) + [True] * len(completion)
        return prompt + completion, trained

    def _encode_chat(self, chat: Chat, where: str) -> tuple[list[int], list[bool]]:
        if not self.tokenizer.has_chat_template:
            raise UserError(
                f"{where}: a chat, but the model's tokenizer has no chat template; "
                "use an instruct model, or rows of prompt + completion or text"
            )
        text = self._render(chat.messages, chat.tools, where)
        encoding = self.backend.encode(text, add_special_tokens=False)
        if not self.mask_prompt:
            return encoding.ids, [True] * len(encoding.ids)
        spans = [
            self._turn_span(text, chat, index, where)
            for index, message in enumerate(chat.messages)
            if message["role"] == "assistant" and index >= chat.first_trained
        ]
        trained = [
            any(end > a and start < b for a, b in spans) and end > start
            for start, end in encoding.offsets
        ]
        return encoding.ids, trained

    def _render(
        self, messages: list[dict], tools: list | None, where: str, answer_next: bool = False
    ) -> str:
        """The template's text; `answer_next` adds the header of an assistant turn."""
        options = dict(self.template_options)
        if tools:
            options["tools"] = tools
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=answer_next, **options
            )
        except Exception as error:  # templates raise what they like
            raise UserError(f"{where}: the chat template refuses the row ({error})") from error

    def _turn_span(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        """Where assistant turn `index` stands in the rendered chat: [start, end) in characters.

        From after its header to its end token, both found by rendering the chat up to
        the turn; where a template rewrites history (drops old reasoning, say), by
        rendering it with a sentinel in the turn's place.
        """
        span = self._span_by_prefix(text, chat, index, where)
        if span is None:
            span = self._span_by_sentinel(text, chat, index, where)
        start, end = span
        answer = text[start:end].rstrip()
        if answer.endswith(self.end_tokens):
            end = start + len(answer)  # generation stops there: what follows is never produced
        return start, end

    def _span_by_prefix(
        self, text: str, chat: Chat, index: int, where: str
    ) -> tuple[int, int] | None:
        try:
            before = self._render(chat.messages[:index], chat.tools, where, answer_next=True)
            through = self._render(chat.messages[: index + 1], chat.tools, where)
        except UserError:  # some templates refuse a chat that is cut there
            return None
        if text.startswith(before) and text.startswith(through) and len(through) > len(before):
            return len(before), len(through)
        return None

    def _span_by_sentinel(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        message = chat.messages[index]
        marked = list(chat.messages)
        marked[index] = {**message, "content": SENTINEL}
        other = self._render(marked, chat.tools, where)
        start = common_prefix(text, other)
        end = len(text) - common_prefix(text[start:][::-1], other[start:][::-1])
        if (
            message.get("tool_calls")
            or SENTINEL not in other
            or text[start:end] not in (message["content"])
        ):
            raise UserError(
                f"{where}: messages[{index}]: the chat template does not show where this "
                "turn begins and ends; use --no-mask-prompt"
            )
        tail = text[end:]
        for token in self.end_tokens:
            if tail.lstrip().startswith(token):
                return start, end + tail.index(token) + len(token)
        return start, end


def pair_to_chat(pair: Pair) -> Chat:
    return Chat(
        [
            {"role": "user", "content": pair.prompt},
            {"role": "assistant", "content": pair.completion},
        ]
    )


def common_prefix(a: str, b: str) -> int:
    """How many characters `a` and `b` begin with alike."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (characters are what is wanted)


def has_answer(content: Chat | Pair | Text) -> bool:
    """Whether a row has anything to learn beside the end of a turn."""
    if isinstance(content, Pair):
        return bool(content.completion.strip())
    if isinstance(content, Chat):
        return any(
            m["content"].strip() or m.get("tool_calls")
            for m in content.messages[content.first_trained :]
            if m["role"] == "assistant"
        )
    return bool(content.text.strip())
