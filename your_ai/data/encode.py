"""Encode a row as token ids, and mark the tokens to train.

The turns of a chat are located by character in the text that the model's chat template renders,
and mapped to tokens by the tokenizer's offsets. So the text is tokenized as a whole, as it is when
the model is used.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from your_ai.data.chat_template import ChatTemplate, reasoning_of, split_thought
from your_ai.data.lines import ROW_LIMIT, RowLimit
from your_ai.data.notes import Notes, not_used
from your_ai.data.preferences import Kind
from your_ai.data.rows import Chat, Labeled, Pair, Preference, Question, Row, Scored, Text
from your_ai.data.template import TemplateRefused
from your_ai.data.turns import ASSISTANT, REASONING, USER
from your_ai.data.windows import (
    SIZES,
    CannotJoin,
    Tokens,
    joined_tokens,
    tokenize,
    tokenize_ids,
)
from your_ai.errors import UserError
from your_ai.gates.text import counted, shortened
from your_ai.gates.token_ids import check_ids

SPANS_SECONDS = 8.0  # for all turns of a chat; a chat of 4,000 messages takes this long
LONG_HEADER = 200  # characters; whether it is a border is not remembered for longer ones
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
    notes: Notes = field(default_factory=Notes)
    """What was noticed in the rows that were encoded."""

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

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.limit)

    @cached_property
    def headers(self) -> dict[str, bool]:
        """Texts before an answer -> whether they alone have the tokens that they have before it."""
        return {}

    def encode_all(self, row: Row) -> list[EncodedRow]:
        """Encode the texts of a row: two for a preference, the chosen first; two for a labeled
        answer if another answer came with it; else one.
        """
        content = row.content
        for column in row.unused:
            self.notes.add(not_used(column), row.where)
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
        if isinstance(content, Pair):
            content = self._as_it_is_used(content, where)
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

    def _as_it_is_used(self, pair: Pair, where: str) -> Chat | Pair:
        """A pair as a chat if there is a template, unless it has that template's tokens already."""
        if not self.tokenizer.has_chat_template:
            return pair
        if token := self.template.wrote(pair.prompt):
            self.notes.add(
                f"prompts with tokens of the chat template, such as {token}, are used as they are",
                where,
            )
            return pair
        text = pair.completion.rstrip()
        if end := next((end for end in self.end_tokens if text.endswith(end)), None):
            self.notes.add(f"answers with {end} at their end have it only once", where)
            pair = Pair(pair.prompt, text.removesuffix(end))
        return pair_to_chat(pair)

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
                text = self.template.render(chat.messages, chat.tools, where, answer_next=True)
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
        if isinstance(content, Pair):
            content = self._as_it_is_used(content, row.where)
        if isinstance(content, Pair):
            return SamplePrompt(content.prompt, content.prompt, content.completion, is_good)
        if isinstance(content, Text) or content.messages[-1]["role"] != "assistant":
            return None
        asked = content.messages[:-1]
        rendered = self.template.render(asked, content.tools, row.where, answer_next=True)
        question = asked[-1]["content"] if asked else ""
        return SamplePrompt(question, rendered, self.expected(content, row.where), is_good)

    def expected(self, chat: Chat, where: str) -> str:
        """The last message as the model is to write it: with its reasoning and calls."""
        answer = chat.messages[-1]
        if not (answer.get("tool_calls") or reasoning_of(answer)):
            return answer["content"]
        text = self.template.render(chat.messages, chat.tools, where)
        start, end = self._turn_span(text, chat, len(chat.messages) - 1, where) or (0, 0)
        return self._without_end(text[start:end])

    def _without_end(self, text: str) -> str:
        text = text.rstrip()
        ends = (end for end in self.end_tokens if text.endswith(end))
        return text.removesuffix(max(ends, key=len, default=""))

    def _prompt_of_question(self, question: Question, where: str) -> SamplePrompt:
        chat, expected = self._as_chat(question), question.expected or ""
        if isinstance(chat, str):
            return SamplePrompt(chat, chat, expected)
        rendered = self.template.render(chat.messages, chat.tools, where, answer_next=True)
        return SamplePrompt(chat.messages[-1]["content"], rendered, expected)

    def _tokenize(self, text: str, where: str, special: bool) -> Tokens:
        """Tokenize a text, with offsets. `special` adds the tokenizer's special tokens."""
        with naming(where):
            return tokenize(self.backend, text, special)

    def _ids(self, text: str, where: str, special: bool = True, ends: bool = True) -> np.ndarray:
        """Tokenize a text to ids, without a second token at its beginning, or with an end token if
        `ends` is set and it has none.
        """
        bos = self.tokenizer.bos_token
        special = special and not (bos and text.startswith(bos))
        with naming(where):
            ids = tokenize_ids(self.backend, text, special)
        if ends and (not len(ids) or ids[-1] not in self.tokenizer.eos_token_ids):
            return np.append(ids, self._end(where))
        return ids

    def _end(self, where: str) -> np.ndarray:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UserError(f"{where}: the model's tokenizer has no token that ends a text")
        return np.array([end], np.uint32)

    def _encode_text(self, content: Text, where: str) -> tuple[np.ndarray, np.ndarray]:
        tokens = self._ids(content.text, where)
        return tokens, np.ones(len(tokens), bool)

    def _encode_pair(self, pair: Pair, where: str) -> tuple[np.ndarray, np.ndarray]:
        # Tokenized separately, as when the model is used: the prompt ends at a token boundary.
        prompt = self._ids(pair.prompt, where, ends=False)
        completion = self._ids(pair.completion, where, special=False)
        trained = np.ones(len(prompt) + len(completion), bool)
        trained[: len(prompt)] = not self.masks_prompt
        return np.concatenate([prompt, completion]), trained

    def _encode_chat(self, chat: Chat, where: str) -> tuple[np.ndarray, np.ndarray]:
        if not self.tokenizer.has_chat_template:
            raise UserError(
                f"{where}: a chat, but the model's tokenizer has no chat template; "
                "use an instruct model, or rows of prompt + completion or text"
            )
        text = self.template.render(chat.messages, chat.tools, where)
        left = self._check_shown(text, chat, where)
        if not self.masks_prompt:
            tokens = self._tokenize(text, where, special=False)
            return tokens.ids, np.ones(len(tokens), bool)
        spans = self._spans(text, chat, left, where)
        tokens = self._tokenize_at([start for start, _ in spans], text, where)
        start, end = token_spans(tokens.starts, tokens.ends, len(text))
        trained = np.zeros(len(tokens), bool)
        for first, past in spans:
            trained |= (end > first) & (start < past)
        return tokens.ids, trained

    def _check_shown(self, text: str, chat: Chat, where: str) -> set[int]:
        """Check that a chat is in `text`, which the template rendered of it, and return the answers
        that are not trained, because generation would not see or give them like that.

        Raises UserError if a message, a call or the reasoning of the last answers is left out.
        """
        messages, untrained = chat.messages, set()
        left = self.template.left_out(messages, chat.tools, text)
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
            raise UserError(f"{where}: messages[{index}]: {omits} tool_calls; {advice}")
        for index in sorted(left.reasoning):
            if index > (asked[-1] if asked else -1):
                raise UserError(f"{where}: messages[{index}]: {omits} {REASONING[0]}; {advice}")
            note = f"{omits} the reasoning of earlier answers, which are not trained"
            self.notes.add(note, where)
            untrained.add(index)
        if left.tools:
            self.notes.add(f"{omits} the tools of a chat", where)
        if token := next(filter(None, (self.template.wrote(m["content"]) for m in messages)), None):
            note = f"messages have tokens of the chat template, such as {token}, in their text"
            self.notes.add(note, where)
        for index in trained_turns(chat):
            turn = messages[index]
            if not (turn["content"].strip() or turn.get("tool_calls") or reasoning_of(turn)):
                self.notes.add("answers without text are not trained", where)
                untrained.add(index)
        return untrained

    def _spans(
        self, text: str, chat: Chat, untrained: set[int], where: str
    ) -> list[tuple[int, int]]:
        """Find the span of each trained turn, in limited time: each needs two renderings."""
        began, found = time.thread_time(), []
        for index in trained_turns(chat):
            if index not in untrained:
                found.append(self._turn_span(text, chat, index, where))
            if time.thread_time() - began > SPANS_SECONDS:
                messages = counted(len(chat.messages), "message")
                raise UserError(
                    f"{where}: finding the answers in {messages} takes more than "
                    f"{SPANS_SECONDS:g} s; split the chat, or use --no-mask-prompt"
                )
        return [span for span in found if span is not None]

    def _turn_span(self, text: str, chat: Chat, index: int, where: str) -> tuple[int, int] | None:
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
        answer = text[start:end].rstrip()
        if answer.endswith(self.end_tokens):
            end = start + len(answer)  # generation stops here; the rest is never generated
        return start, end

    def _is_seen(self, text: str, start: int, before: str, where: str) -> bool:
        """Whether an answer at `start` is trained, although the prompt of generation, `before`, is
        not what the text begins with: only if that has no more than something at its end."""
        if not before.startswith(text[:start]):
            self.notes.add("answers whose earlier turns look different in generation: not trained",
                           where)  # fmt: skip
            return False
        added = shortened(repr(before[start:]))
        self.notes.add(f"generation begins answers with {added}, which is not trained", where)
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

    def _tokenize_at(self, borders: list[int], text: str, where: str) -> Tokens:
        """Tokenize a text as generation does: what is before a border has the tokens of that alone.

        It is cut only at borders where it would have others, in the middle of a token for example.
        """
        tokens = self._tokenize(text, where, special=False)
        cuts = [border for border in borders if not self._is_border(tokens, text, border, where)]
        if not cuts:
            return tokens
        found = []
        for first, past in pairwise([0, *cuts, len(text)]):
            part = (
                self._continue(text[first:past], where)
                if first
                else self._tokenize(text[:past], where, special=False)
            )
            found.append(part.moved(first))
        return joined_tokens(found)

    def _is_border(self, tokens: Tokens, text: str, border: int, where: str) -> bool:
        """Whether the tokens before a border are those of the text before it."""
        before = int(np.searchsorted(tokens.starts, border))
        if before and tokens.ends[:before].max() > border:
            return False
        added = np.flatnonzero(np.isin(tokens.ids[:before], self.added_ids))
        first = int(added[-1]) + 1 if len(added) else 0
        begin = int(tokens.ends[first - 1]) if first else 0
        header = text[begin:border]
        if header not in self.headers:
            alone = (
                self._continue(header, where).ids
                if first
                else self._tokenize(header, where, special=False).ids
            )
            same = np.array_equal(alone, tokens.ids[first:before])
            if len(header) > LONG_HEADER:
                return same
            self.headers[header] = same
        return self.headers[header]

    def _continue(self, text: str, where: str) -> Tokens:
        """Tokenize a text that follows another: some tokenizers put a space before the first word
        of all."""
        token = self.end_tokens[0] if self.end_tokens else None
        if token is None:
            return self._tokenize(text, where, special=False)
        tokens = self._tokenize(token + text, where, special=False)
        return tokens.without_first().moved(-len(token))

    @cached_property
    def added_ids(self) -> np.ndarray:
        """The ids of tokens that a text is cut at, before its parts are tokenized."""
        return np.array(sorted(self.backend.get_added_tokens_decoder()), np.uint32)


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


def has_answer(content: Chat | Pair | Text) -> bool:
    """Whether a row has anything to learn other than the end of a turn."""
    if isinstance(content, Pair):
        return bool(content.completion.strip())
    if isinstance(content, Chat):
        turns = [content.messages[i] for i in trained_turns(content)]
        return any(
            turn["content"].strip() or turn.get("tool_calls") or reasoning_of(turn)
            for turn in turns
        )
    return bool(content.text.strip())
