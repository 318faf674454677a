"""Encode a row as token ids, and mark the tokens to train.

The turns of a chat are located by character in the text that the model's chat template renders,
and mapped to tokens by the tokenizer's offsets. So the text is tokenized as a whole, as it is when
the model is used.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from your_ai.data.preferences import Kind
from your_ai.data.rows import (
    ROW_LIMIT,
    Chat,
    Labeled,
    Pair,
    Preference,
    Question,
    Row,
    RowLimit,
    Scored,
    Text,
)
from your_ai.data.template import TEMPLATE_CHARACTERS, TemplateRefused, render
from your_ai.data.windows import SIZES, CannotJoin, Tokens, tokenize, tokenize_ids
from your_ai.errors import UserError
from your_ai.gates.text import counted
from your_ai.gates.token_ids import check_ids

# A fixed date: templates that print today's date would give other tokens tomorrow, so a resumed
# run would train on other data. This is the default date of Llama's templates.
TEMPLATE_DATE = datetime.date(2024, 7, 26)
STRFTIME_NOW = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
SPANS_SECONDS = 8.0  # for all turns of a chat; a chat of 4,000 messages takes this long
TEMPLATE_GROWTH = 2  # maximum characters that a template may render per byte of a row
SENTINEL = "\ue000\ue001"  # private use: neither in data nor in templates


@dataclass(frozen=True)
class EncodedRow:
    """The T tokens of a row."""

    tokens: np.ndarray
    """(T,) uint32."""
    trained: np.ndarray
    """(T,) bool: whether the token is a target."""


def to_score(text: EncodedRow) -> EncodedRow:
    """The text as a reward model scores it: up to its last trained token, which is where a
    generated answer would end. The only target is one more token, of which only the place counts.
    """
    end = int(np.flatnonzero(text.trained)[-1]) + 1
    tokens = np.append(text.tokens[:end], np.zeros(1, np.uint32))
    return EncodedRow(tokens, np.arange(len(tokens)) == end)


@dataclass(frozen=True)
class SamplePrompt:
    """A prompt from the data, with its answer."""

    asked: str
    """The prompt as a person would type it."""
    rendered: str
    """The input of the model as text, with its special tokens."""
    expected: str
    """The answer in the data."""
    is_good: bool = True
    """Whether it is one to expect; False for an answer with the label false."""


@dataclass(frozen=True)
class Encoder:
    """Encodes rows with the tokenizer of a model (an mlx-lm TokenizerWrapper)."""

    tokenizer: Any
    mask_prompt: bool = True
    vocabulary: int | None = None
    """The vocabulary size of the model, or None if not known."""
    limit: RowLimit = ROW_LIMIT
    kind: Kind = "answers"
    """What the rows are. Where there may be pairs or labels, the prompt is always masked."""

    def __post_init__(self) -> None:
        if getattr(self.tokenizer, "backend_tokenizer", None) is None:
            raise UserError("the model's tokenizer has no tokenizer.json, which training needs")

    @property
    def masks_prompt(self) -> bool:
        return self.mask_prompt or self.kind in ("pairs", "labels", "rated", "any")

    @cached_property
    def backend(self) -> Any:
        """The `tokenizers` object, which gives offsets. Truncation and padding are off."""
        backend = self.tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        return backend

    @cached_property
    def end_tokens(self) -> tuple[str, ...]:
        """The texts of the tokenizer's end-of-sequence tokens, which end a turn."""
        ids = sorted(self.tokenizer.eos_token_ids)
        return tuple(t for t in self.tokenizer.convert_ids_to_tokens(ids) if t)

    def encode_all(self, row: Row) -> list[EncodedRow]:
        """Encode the texts of a row: two for a preference, the chosen first; two for a labeled
        answer if another answer came with it; else one.
        """
        content = row.content
        if isinstance(content, Preference):
            chosen = self._encode(content.chosen, f"{row.where}: chosen")
            rejected = self._encode(content.rejected, f"{row.where}: rejected")
            if np.array_equal(chosen.tokens, rejected.tokens):
                raise UserError(f"{row.where}: chosen and rejected have the same tokens")
            return [chosen, rejected]
        if isinstance(content, Labeled):
            answer = self._encode(content.answer, row.where)
            if content.other is None:
                return [answer]
            return [answer, self._encode(content.other, f"{row.where}: with another row's answer")]
        if isinstance(content, Question):
            return [self._encode_question(content, row.where)]
        if isinstance(content, Scored):
            content = content.answer
        return [self._encode(content, row.where)]

    def encode(self, row: Row) -> EncodedRow:
        """Encode a row of one text. Raises UserError with its place if it has nothing to train."""
        (encoded,) = self.encode_all(row)
        return encoded

    def _encode(self, content: Chat | Pair | Text, where: str) -> EncodedRow:
        if isinstance(content, Pair) and self.tokenizer.has_chat_template:
            content = pair_to_chat(content)
        if isinstance(content, Chat):
            tokens, trained = self._encode_chat(content, where)
        elif isinstance(content, Pair):
            tokens, trained = self._encode_pair(content, where)
        else:
            tokens, trained = self._encode_text(content, where)
        trained[:1] = False  # nothing predicts the first token
        if not trained.any() or not has_answer(content):
            use = "score" if self.kind == "rated" else "train"
            raise UserError(f"{where}: no token to {use}; the row has no answer or no text")
        check_ids(tokens, self.vocabulary, self.tokenizer, where)
        return EncodedRow(tokens, trained)

    def _encode_question(self, question: Question, where: str) -> EncodedRow:
        """The tokens of a prompt up to where its answer begins."""
        chat = self._as_chat(question)
        with naming(where):
            if isinstance(chat, str):
                tokens = tokenize_ids(self.backend, chat, special=True)
            elif not self.tokenizer.has_chat_template:
                raise UserError(
                    f"{where}: a chat, but the model's tokenizer has no chat template; use an "
                    "instruct model, or prompts that are text"
                )
            else:
                text = self._render(chat.messages, chat.tools, where, answer_next=True)
                tokens = tokenize_ids(self.backend, text, special=False)
        if len(tokens) < 2:
            raise UserError(f"{where}: prompt: has {counted(len(tokens), 'token')}; 2 are needed")
        check_ids(tokens, self.vocabulary, self.tokenizer, where)
        return EncodedRow(tokens, np.arange(len(tokens)) > 0)

    def _as_chat(self, question: Question) -> Chat | str:
        """The prompt as messages, if it is to be rendered by a chat template."""
        prompt = question.prompt
        if isinstance(prompt, str) and self.tokenizer.has_chat_template:
            return Chat([{"role": "user", "content": prompt}])
        return prompt

    def prompt_of(self, row: Row) -> SamplePrompt | None:
        """Return the prompt of a row and its answer; None if the row has no prompt."""
        content, is_good = row.content, True
        if isinstance(content, Preference):
            content = content.chosen
        elif isinstance(content, Labeled):
            content, is_good = content.answer, content.good
        elif isinstance(content, Scored):
            content = content.answer
        if isinstance(content, Question):
            return self._prompt_of_question(content, row.where)
        if isinstance(content, Pair) and self.tokenizer.has_chat_template:
            content = pair_to_chat(content)
        if isinstance(content, Pair):
            return SamplePrompt(content.prompt, content.prompt, content.completion, is_good)
        if isinstance(content, Text) or content.messages[-1]["role"] != "assistant":
            return None
        *asked, answer = content.messages
        rendered = self._render(asked, content.tools, row.where, answer_next=True)
        question = asked[-1]["content"] if asked else ""
        return SamplePrompt(question, rendered, answer["content"], is_good)

    def _prompt_of_question(self, question: Question, where: str) -> SamplePrompt:
        chat, expected = self._as_chat(question), question.expected or ""
        if isinstance(chat, str):
            return SamplePrompt(chat, chat, expected)
        rendered = self._render(chat.messages, chat.tools, where, answer_next=True)
        return SamplePrompt(chat.messages[-1]["content"], rendered, expected)

    def _tokenize(self, text: str, where: str, special: bool) -> Tokens:
        """Tokenize a text, with offsets. `special` adds the tokenizer's special tokens."""
        with naming(where):
            return tokenize(self.backend, text, special)

    def _ids(self, text: str, where: str, special: bool, ends: bool) -> np.ndarray:
        """Tokenize a text to ids. Append an end token if `ends` is set or the text has none."""
        with naming(where):
            ids = tokenize_ids(self.backend, text, special)
        if ends or not len(ids) or ids[-1] not in self.tokenizer.eos_token_ids:
            return np.append(ids, self._end(where))
        return ids

    def _end(self, where: str) -> np.ndarray:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UserError(f"{where}: the model's tokenizer has no token that ends a text")
        return np.array([end], np.uint32)

    def _encode_text(self, content: Text, where: str) -> tuple[np.ndarray, np.ndarray]:
        bos = self.tokenizer.bos_token
        special = not (bos and content.text.startswith(bos))  # no second BOS token
        tokens = self._ids(content.text, where, special, ends=False)
        return tokens, np.ones(len(tokens), bool)

    def _encode_pair(self, pair: Pair, where: str) -> tuple[np.ndarray, np.ndarray]:
        # Tokenized separately, as when the model is used: the prompt ends at a token boundary.
        with naming(where):
            prompt = tokenize_ids(self.backend, pair.prompt, special=True)
        completion = self._ids(pair.completion, where, special=False, ends=True)
        trained = np.ones(len(prompt) + len(completion), bool)
        trained[: len(prompt)] = not self.masks_prompt
        return np.concatenate([prompt, completion]), trained

    def _encode_chat(self, chat: Chat, where: str) -> tuple[np.ndarray, np.ndarray]:
        if not self.tokenizer.has_chat_template:
            raise UserError(
                f"{where}: a chat, but the model's tokenizer has no chat template; "
                "use an instruct model, or rows of prompt + completion or text"
            )
        text = self._render(chat.messages, chat.tools, where)
        check_reasoning(text, chat, where)
        tokens = self._tokenize(text, where, special=False)
        if not self.masks_prompt:
            return tokens.ids, np.ones(len(tokens), bool)
        spans = self._spans(text, chat, where)
        start, end = token_spans(tokens.starts, tokens.ends, len(text))
        trained = np.zeros(len(tokens), bool)
        for first, past in spans:
            trained |= (end > first) & (start < past)
        return tokens.ids, trained

    def _render(
        self, messages: list[dict], tools: list | None, where: str, answer_next: bool = False
    ) -> str:
        """Render the chat template. `answer_next` adds the header of an assistant turn."""
        options: dict[str, Any] = {"add_generation_prompt": answer_next}
        if tools:
            options["tools"] = tools
        # Pass only the options that the template uses: mlx-lm's templates that are functions
        # do not accept others.
        template = str(self.tokenizer.chat_template)
        if "date_string" in template:
            options["date_string"] = TEMPLATE_DATE.strftime("%d %b %Y")
        if "strftime_now" in template:
            template = self.tokenizer.get_chat_template(tools=tools)
            options["chat_template"] = STRFTIME_NOW.sub(fixed_date, template)
        limit = self.limit
        most = TEMPLATE_GROWTH * limit.row_bytes + TEMPLATE_CHARACTERS
        return render(self.tokenizer, messages, where, limit.room_bytes, most, **options)

    def _spans(self, text: str, chat: Chat, where: str) -> list[tuple[int, int]]:
        """Find the span of each trained turn, in limited time: each needs two renderings."""
        began, found = time.thread_time(), []
        for index in trained_turns(chat):
            found.append(self._turn_span(text, chat, index, where))
            if time.thread_time() - began > SPANS_SECONDS:
                messages = counted(len(chat.messages), "message")
                raise UserError(
                    f"{where}: finding the answers in {messages} takes more than "
                    f"{SPANS_SECONDS:g} s; split the chat, or use --no-mask-prompt"
                )
        return found

    def _turn_span(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        """Find assistant turn `index` in the rendered chat: [start, end) in characters.

        The span is from the end of the turn's header through its end token. Both are found by
        rendering the chat up to the turn. If the template rewrites history (for example, drops old
        reasoning), they are found by rendering the chat with a sentinel in place of the turn.
        """
        span = self._span_by_prefix(text, chat, index, where)
        if span is None:
            span = self._span_by_sentinel(text, chat, index, where)
        start, end = span
        answer = text[start:end].rstrip()
        if answer.endswith(self.end_tokens):
            end = start + len(answer)  # generation stops here; the rest is never generated
            answer = answer[: -max(len(t) for t in self.end_tokens if answer.endswith(t))]
        if chat.messages[index].get("tool_calls") and not answer.strip():
            raise UserError(
                f"{where}: messages[{index}]: the model's chat template omits tool_calls"
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
        except TemplateRefused:  # some templates reject a chat that ends there
            return None
        if text.startswith(before) and text.startswith(through) and len(through) > len(before):
            return len(before), len(through)
        return None

    def _span_by_sentinel(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int]:
        marked = list(chat.messages)
        marked[index] = {**chat.messages[index], "content": SENTINEL}
        # The span contains these too, so it must start at the beginning of the turn.
        more = [marked[index].pop(key, None) for key in ("tool_calls", "reasoning_content")]
        other = self._render(marked, chat.tools, where)
        start = common_prefix(text, other)
        end = len(text) - common_prefix(text[start:][::-1], other[start:][::-1])
        if any(more):
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


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Raise UserError, whose message begins with `where`, for a text that cannot be tokenized."""
    try:
        yield
    except TypeError as error:  # a JSON escape can be half of a surrogate pair
        raise UserError(f"{where}: contains half of a character (a lone \\ud8..)") from error
    except CannotJoin as error:
        raise UserError(
            f"{where}: this tokenizer cannot process the long text in parts; split the row"
        ) from error


def token_ids(tokenizer: Any, text: str, where: str, special: bool = True) -> list[int]:
    """Tokenize a text of any length, with the same result as `tokenizer.encode`.

    Raises UserError, whose message begins with `where`, for a long text that cannot be tokenized in
    parts.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or len(text) <= SIZES.window:
        return tokenizer.encode(text, add_special_tokens=special)
    backend.no_truncation()
    backend.no_padding()
    with naming(where):
        return tokenize_ids(backend, text, special).tolist()


def token_spans(start: np.ndarray, end: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where each token starts and ends in a text of `length` characters, as (T,) arrays.

    Some tokenizers leave spaces out of their offsets, `start` and `end`, so a token of only spaces
    has zero width. Such a token gets the gap between its neighbors.
    """
    empty = start == end
    if not empty.any():
        return start, end
    before = np.maximum.accumulate(np.append(start[:1] * 0, end[:-1]))
    following = np.where(empty, start.dtype.type(length), start)[::-1]
    after = np.minimum.accumulate(following)[::-1][1:]
    after = np.append(after, start.dtype.type(length))
    return np.where(empty, before, start), np.where(empty, after, end)


def fixed_date(call: re.Match[str]) -> str:
    """The replacement for a call of `strftime_now(format)` in a template."""
    return repr(TEMPLATE_DATE.strftime(call[2]))


def pair_to_chat(pair: Pair) -> Chat:
    return Chat(
        [
            {"role": "user", "content": pair.prompt},
            {"role": "assistant", "content": pair.completion},
        ]
    )


def common_prefix(a: str, b: str) -> int:
    """The length of the common prefix of `a` and `b`, in characters."""
    return len(os.path.commonprefix([a, b]))  # noqa: RUF071 (compares characters, as wanted)


def trained_turns(chat: Chat) -> list[int]:
    """The indices of the turns to train: the assistant's, except those with weight 0."""
    return [
        index
        for index, message in enumerate(chat.messages)
        if message["role"] == "assistant" and index >= chat.first_trained
        if message.get("weight", 1)
    ]


def check_reasoning(text: str, chat: Chat, where: str) -> None:
    """Raise UserError if the template, which rendered `text`, leaves out the last reasoning.

    Templates may leave out that of turns before the last question.
    """
    asked = [i for i, message in enumerate(chat.messages) if message["role"] == "user"]
    for index in range(asked[-1] if asked else 0, len(chat.messages)):
        reasoning = (chat.messages[index].get("reasoning_content") or "").strip()
        if reasoning and reasoning not in text:
            raise UserError(
                f"{where}: messages[{index}]: the model's chat template omits reasoning_content; "
                "remove it, or choose a model whose template shows it"
            )


def has_answer(content: Chat | Pair | Text) -> bool:
    """Whether a row has anything to learn other than the end of a turn."""
    if isinstance(content, Pair):
        return bool(content.completion.strip())
    if isinstance(content, Chat):
        turns = [content.messages[i] for i in trained_turns(content)]
        return any(turn["content"].strip() or turn.get("tool_calls") for turn in turns)
    return bool(content.text.strip())
