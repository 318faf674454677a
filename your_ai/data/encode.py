"""A row -> token ids, and which of them are trained.

The turns of a chat are located in the text that the model's own template renders,
in characters, and mapped to tokens by the tokenizer's offsets, so that the text is
tokenized once and whole, as it will be when the model is used.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from your_ai.data.rows import Chat, Pair, Row, Text
from your_ai.errors import UserError

# Templates that print today's date would give other tokens tomorrow, and a resumed run
# other data. This is the date that Llama's templates fall back to.
TEMPLATE_DATE = datetime.date(2024, 7, 26)
STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
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

    def __post_init__(self) -> None:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            raise UserError("the model's tokenizer has no tokenizer.json, which training needs")

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers` object, which gives offsets; set to neither cut nor pad."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

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
            tokens, trained = self._encode_pair(content, row.where)
        else:
            tokens, trained = self._encode_text(content, row.where)
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

    def _tokenize(self, text: str, where: str, special: bool) -> Any:
        """The `tokenizers` encoding of a text; `special` adds what the tokenizer always adds."""
        try:
            return self.backend.encode(text, add_special_tokens=special)
        except TypeError as error:  # JSON can hold half of a surrogate pair, as an escape
            raise UserError(f"{where}: holds half of a character (a lone \\ud8..)") from error

    def _encode_text(self, content: Text, where: str) -> tuple[list[int], list[bool]]:
        bos = self.tokenizer.bos_token
        special = not (bos and content.text.startswith(bos))  # one is enough
        tokens = self._tokenize(content.text, where, special).ids
        if not tokens or tokens[-1] not in self.tokenizer.eos_token_ids:
            tokens = [*tokens, self.tokenizer.eos_token_id]
        return tokens, [True] * len(tokens)

    def _encode_pair(self, pair: Pair, where: str) -> tuple[list[int], list[bool]]:
        # Apart, as they are when the model is used: the prompt ends at a token.
        prompt = self._tokenize(pair.prompt, where, special=True).ids
        completion = self._tokenize(pair.completion, where, special=False).ids
        completion = [*completion, self.tokenizer.eos_token_id]
        trained = [not self.mask_prompt] * len(prompt) + [True] * len(completion)
        return prompt + completion, trained

    def _encode_chat(self, chat: Chat, where: str) -> tuple[list[int], Sequence[bool]]:
        if not self.tokenizer.has_chat_template:
            raise UserError(
                f"{where}: a chat, but the model's tokenizer has no chat template; "
                "use an instruct model, or rows of prompt + completion or text"
            )
        text = self._render(chat.messages, chat.tools, where)
        encoding = self._tokenize(text, where, special=False)
        if not self.mask_prompt:
            return encoding.ids, [True] * len(encoding.ids)
        spans = [self._turn_span(text, chat, index, where) for index in trained_turns(chat)]
        start, end = token_spans(encoding.offsets, len(text))
        trained = np.zeros(len(encoding.ids), bool)
        for first, past in spans:
            trained |= (end > first) & (start < past)
        return encoding.ids, trained

    def _render(
        self, messages: list[dict], tools: list | None, where: str, answer_next: bool = False
    ) -> str:
        """The template's text; `answer_next` adds the header of an assistant turn."""
        options: dict[str, Any] = {}
        if tools:
            options["tools"] = tools
        # Only what a template asks for: mlx-lm's templates that are functions take no more.
        template = str(self.tokenizer.chat_template)
        if "date_string" in template:
            options["date_string"] = TEMPLATE_DATE.strftime("%d %b %Y")
        if "strftime_now" in template:
            template = self.tokenizer.get_chat_template(tools=tools)
            options["chat_template"] = STRFTIME_NOW.sub(fixed_date, template)
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
            answer = answer[: -max(len(t) for t in self.end_tokens if answer.endswith(t))]
        if chat.messages[index].get("tool_calls") and not answer.strip():
            raise UserError(
                f"{where}: messages[{index}]: the model's chat template leaves out tool_calls"
            )
        return start, end

    def _span_by_prefix(
        self, text: str, chat: Chat, index: int, where: str
    ) -> tuple[int, int] | None:
        try:
            before = self._render(chat.messages[:index], chat.tools, where, answer_next=True)
            through = text
            if index + 1 < len(chat.messages):
                through = self._render(chat.messages[: index + 1], chat.tools, where)
        except UserError:  # some templates refuse a chat that is cut there
            return None
        if text.startswith(before) and text.startswith(through) and len(through) > len(before):
            return len(before), len(through)
        return None

    def _span_by_sentinel(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        marked = list(chat.messages)
        marked[index] = {**chat.messages[index], "content": SENTINEL}
        calls = marked[index].pop("tool_calls", None)
        other = self._render(marked, chat.tools, where)
        start = common_prefix(text, other)
        end = len(text) - common_prefix(text[start:][::-1], other[start:][::-1])
        if calls:  # they stand in the sentinel's place as well, which must begin the turn
            before = self._render(chat.messages[:index], chat.tools, where, answer_next=True)
            shown = text.startswith(before) and start == len(before)
        else:
            shown = text[start:end] in chat.messages[index]["content"]
        if SENTINEL not in other or not shown:
            raise UserError(
                f"{where}: messages[{index}]: the chat template does not show where this "
                "turn begins and ends; use --no-mask-prompt"
            )
        tail = text[end:]
        for token in self.end_tokens:
            if tail.lstrip().startswith(token):
                return start, end + tail.index(token) + len(token)
        return start, end


def token_spans(offsets: list[tuple[int, int]], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each token starts and ends in a text of `length` characters, as (T,) arrays.

    Some tokenizers leave spaces out of their offsets, so that a token of spaces alone
    has no width: it is given the gap between its neighbours.
    """
    start, end = np.array(offsets, np.int64).reshape(-1, 2).T
    empty = start == end
    before = np.maximum.accumulate(np.append(0, end[:-1]))
    following = np.where(empty, length, start)[::-1]
    after = np.append(np.minimum.accumulate(following)[::-1][1:], length)
    return np.where(empty, before, start), np.where(empty, after, end)


def fixed_date(call: re.Match[str]) -> str:
    """What stands in a template for `strftime_now(format)`."""
    return repr(TEMPLATE_DATE.strftime(call[2]))


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


def trained_turns(chat: Chat) -> list[int]:
    """The places of the turns to train: the assistant's, but those of weight 0."""
    return [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.first_trained
        if message.get("weight", 1)
    ]


def has_answer(content: Chat | Pair | Text) -> bool:
    """Whether a row has anything to learn beside the end of a turn."""
    if isinstance(content, Pair):
        return bool(content.completion.strip())
    if isinstance(content, Chat):
        turns = [content.messages[i] for i in trained_turns(content)]
        return any(turn["content"].strip() or turn.get("tool_calls") for turn in turns)
    return bool(content.text.strip())
