"""Encode a row as token ids, and mark the tokens to train.

The turns of a chat are located by character in the text that the model's chat template renders,
and mapped to tokens by the tokenizer's offsets. So the text is tokenized as a whole, as it is when
the model is used.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice, pairwise
from typing import Any

import numpy as np

from your_ai.data.answers import ChatAnswers, trained_turns
from your_ai.data.chat_template import ChatTemplate, reasoning_of
from your_ai.data.lines import ROW_LIMIT, RowLimit
from your_ai.data.notes import Notes, compared, not_used
from your_ai.data.preferences import Kind
from your_ai.data.rows import Chat, Labeled, Pair, Preference, Question, Row, Scored, Text, texts_of
from your_ai.data.turns import ASSISTANT, SYSTEM, USER, is_transcript, turns_of_transcript
from your_ai.data.windows import (
    SIZES,
    CannotJoin,
    Tokens,
    joined_tokens,
    tokenize,
    tokenize_all,
    tokenize_ids,
)
from your_ai.errors import UserError
from your_ai.gates.text import counted, shortened
from your_ai.gates.token_ids import check_ids

LONG_HEADER = 200  # characters; whether it is a border is not remembered for longer ones
ROWS_AHEAD = 128
CHARACTERS_TOGETHER = 8 * SIZES.window  # maximum of texts that are tokenized at once


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


@dataclass
class ReadAhead:
    """Texts and tokens made of rows before they are needed, by the ids of their pairs and chats."""

    used: dict[int, Chat | Pair] = field(default_factory=dict)
    """Of a pair or a chat, what is rendered."""
    texts: dict[int, str] = field(default_factory=dict)
    tokens: dict[int, Tokens] = field(default_factory=dict)

    def pop(self, chat: Chat) -> tuple[str, Tokens] | None:
        tokens = self.tokens.pop(id(chat), None)
        return None if tokens is None else (self.texts[id(chat)], tokens)


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
        return end_texts(self.tokenizer)

    @cached_property
    def template(self) -> ChatTemplate:
        return ChatTemplate(self.tokenizer, self.limit)

    @cached_property
    def answers(self) -> ChatAnswers:
        return ChatAnswers(self.template, self.end_tokens, self.notes)

    @cached_property
    def _ready(self) -> ReadAhead:
        """The texts and tokens of the rows that come next."""
        return ReadAhead()

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

    def after_prompt(self, row: Row, prompt: str) -> Row:
        """The row with a system prompt, before its own if it has one; at the beginning of its first
        message where the template shows no system prompts."""
        content = row.content
        if isinstance(content, Question):
            asked = self._as_chat(content)
            return replace(row, content=replace(content, prompt=self._after(asked, prompt)))
        if not isinstance(content, Pair | Chat):
            raise UserError(f"{row.where}: a text without a prompt; no other prompt can go before")
        used = self._as_it_is_used(content, row.where)
        if isinstance(used, Pair):
            return replace(row, content=Pair(f"{prompt}\n\n{used.prompt}", used.completion))
        return replace(row, content=self._after(used, prompt))

    def _after(self, asked: Chat | str, prompt: str) -> Any:
        if isinstance(asked, str):
            return f"{prompt}\n\n{asked}"
        first, *others = asked.messages
        if self.shows_system and first["role"] != SYSTEM:
            given = asked.first_trained
            messages = [{"role": SYSTEM, "content": prompt}, *asked.messages]
            return replace(asked, messages=messages, first_trained=given and given + 1)
        text = f"{prompt}\n\n{first['content']}"
        return replace(asked, messages=[{**first, "content": text}, *others])

    @cached_property
    def shows_system(self) -> bool:
        """True if the chat template shows system prompts."""
        mark = "a system prompt"
        messages = [{"role": SYSTEM, "content": mark}, {"role": USER, "content": "a question"}]
        try:
            return mark in self.template.render(messages, None, "", answer_next=True)
        except UserError:
            return False

    def encode(self, row: Row) -> EncodedRow:
        """Encode a row of one text. Raises UserError with its place if it has nothing to train."""
        (encoded,) = self.encode_all(row)
        return encoded

    def _encode(self, content: Chat | Pair | Text, where: str) -> EncodedRow:
        if not isinstance(content, Text):
            content = self._ready.used.pop(id(content), None) or self._as_it_is_used(content, where)
        if isinstance(content, Chat):
            tokens, trained = self._encode_chat(content, where)
        elif isinstance(content, Pair):
            tokens, trained = self._encode_pair(content, where)
        else:
            tokens, trained = self._encode_text(content, where)
        trained[:1] = False  # nothing predicts the first token
        if not trained.any() or not has_answer(content):
            use = "score" if self.kind == "rated" else "train"
            raise UserError(
                f"{where}: no token to {use}; the row has no answer or no text{roles_in(content)}"
            )
        check_ids(tokens, self.vocabulary, self.tokenizer, where)
        return EncodedRow(tokens, trained)

    def _as_it_is_used(self, content: Pair | Chat, where: str) -> Chat | Pair:
        """A pair as a chat if there is a template, unless it has that template's tokens already;
        answers without the token that the template writes at their end."""
        if not self.tokenizer.has_chat_template:
            return content
        if isinstance(content, Chat):
            return self.answers.once(content, where)
        if chat := chat_of_transcript(content.prompt, content.completion):
            self.notes.add("prompts that are transcripts are the messages of a chat", where)
            return self.answers.once(chat, where)
        if self._name_tokens_of_template("prompts", content.prompt, where):
            return content
        return self.answers.once(pair_to_chat(content), where)

    def _name_tokens_of_template(self, what: str, text: str, where: str) -> bool:
        """Return whether a text has tokens of the chat template, after a note that says so."""
        token = self.template.wrote(text)
        if token:
            note = f"{what} with tokens of the chat template, such as {token}, are used as they are"
            self.notes.add(note, where)
        return bool(token)

    def _encode_question(self, question: Question, where: str) -> EncodedRow:
        """The tokens of a prompt up to where its answer begins."""
        chat = self._as_chat(question)
        with naming(where):
            if isinstance(chat, str):
                if self.tokenizer.has_chat_template:
                    self._name_tokens_of_template("prompts", chat, where)
                tokens = self._ids(chat, where, ends=False)
            elif not self.tokenizer.has_chat_template:
                raise UserError(
                    f"{where}: a chat, but the model's tokenizer has no chat template; use an "
                    "instruct model, or prompts that are text"
                )
            else:
                chat = self.answers.once(chat, where)
                text = self.template.render(chat.messages, chat.tools, where, answer_next=True)
                self.answers.check_shown(text, chat, False, where)
                tokens = tokenize_ids(self.backend, text, special=False)
        if len(tokens) < 2:
            raise UserError(f"{where}: prompt: has {counted(len(tokens), 'token')}; 2 are needed")
        check_ids(tokens, self.vocabulary, self.tokenizer, where)
        return EncodedRow(tokens, np.arange(len(tokens)) > 0)

    def _as_chat(self, question: Question) -> Chat | str:
        """The prompt as messages, if it is to be rendered by a chat template."""
        prompt = question.prompt
        if isinstance(prompt, str) and self.tokenizer.has_chat_template:
            if chat := chat_of_transcript(prompt):
                return Chat(chat.messages[: chat.first_trained])
            if self.template.wrote(prompt):
                return prompt
            return Chat([{"role": USER, "content": prompt}])
        return prompt

    def prompt_of(self, row: Row) -> SamplePrompt | None:
        """Return the prompt of a row and its answer; None if the row has no prompt."""
        content, is_good = row.content, True
        if isinstance(content, Preference):
            content = content.chosen
        elif isinstance(content, Labeled):
            is_good, content = content.good, content.answer
        elif isinstance(content, Scored):
            content = content.answer
        if isinstance(content, Question):
            return self._prompt_of_question(content, row.where)
        if isinstance(content, Pair | Chat):
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
            return str(answer["content"])
        text = self.template.render(chat.messages, chat.tools, where)
        start, end = self.answers.turn_span(text, chat, len(chat.messages) - 1, where) or (0, 0)
        text = text[start:end].rstrip()
        ends = (end for end in self.end_tokens if text.endswith(end))
        return text.removesuffix(max(ends, key=len, default=""))

    def expected_of(self, question: Question, where: str) -> str | None:
        """The expected answer of a question as the model is to write it; None without one."""
        expected = question.expected
        return self.expected(expected, where) if isinstance(expected, Chat) else expected

    def _prompt_of_question(self, question: Question, where: str) -> SamplePrompt:
        chat, expected = self._as_chat(question), self.expected_of(question, where) or ""
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
        has_end = len(ids) and ids[-1] in self.tokenizer.eos_token_ids
        if ends and not has_end and not text.rstrip().endswith(self.end_tokens or ("\0",)):
            return np.append(ids, self._end(where))
        return ids

    def _end(self, where: str) -> np.ndarray:
        end = self.tokenizer.eos_token_id
        if end is None:
            raise UserError(f"{where}: the model's tokenizer has no token that ends a text")
        return np.array([end], np.uint32)

    def _encode_text(self, content: Text, where: str) -> tuple[np.ndarray, np.ndarray]:
        if self.tokenizer.has_chat_template:
            self._name_tokens_of_template("texts", content.text, where)
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
        earlier = (message["role"] for message in chat.messages[: chat.first_trained])
        if self.kind == "answers" and ASSISTANT in earlier:
            self.notes.add("answers in a prompt or in history are not trained", where)
        text, tokens = self._ready.pop(chat) or self._rendered(chat, where)
        framed = self.answers.framed(text, chat)
        untrained = self.answers.check_shown(text, chat, framed is not None, where)
        if not self.masks_prompt:
            return tokens.ids, np.ones(len(tokens), bool)
        turns = [index for index in trained_turns(chat) if index not in untrained]
        if framed is not None:
            spans = [(s, self.answers.end(text, s, e)) for s, e in map(framed.__getitem__, turns)]
        else:
            spans = self.answers.spans(text, chat, turns, where)
        tokens = self._tokens_at([start for start, _ in spans], text, tokens, where)
        return tokens.ids, in_spans(tokens, spans, len(text))

    def _rendered(self, chat: Chat, where: str) -> tuple[str, Tokens]:
        text = self.template.render(chat.messages, chat.tools, where)
        return text, self._tokenize(text, where, special=False)

    def ahead(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, whose chats are rendered together, and tokenized while earlier rows are
        encoded."""
        rows, before, ready = iter(rows), list[Row](), ReadAhead()
        with ThreadPoolExecutor(1) as pool:
            tokens = pool.submit(dict[int, Tokens])
            while some := list(islice(rows, ROWS_AHEAD)):
                ready.tokens = tokens.result()  # templates' memory is limited: no thread may run
                following = self._rendered_together(some)
                tokens = pool.submit(self._tokenized_together, following.texts)
                yield from self._with(ready, before)
                before, ready = some, following
            ready.tokens = tokens.result()
            yield from self._with(ready, before)

    def _with(self, ready: ReadAhead, rows: list[Row]) -> Iterator[Row]:
        now = self._ready
        now.used, now.texts, now.tokens = ready.used, ready.texts, ready.tokens
        yield from rows

    def _rendered_together(self, rows: Iterable[Row]) -> ReadAhead:
        """Chats with their texts, of those that can be rendered."""
        ready, chats = ReadAhead(), []
        for row in rows if self.tokenizer.has_chat_template else ():
            for text in texts_of(row.content):
                if isinstance(text, Pair | Chat):
                    used = ready.used[id(text)] = self._as_it_is_used(text, row.where)
                    chats += [used] if isinstance(used, Chat) else []
        plain = [chat for chat in chats if not chat.tools]
        together = self.template.render_all([chat.messages for chat in plain]) if plain else None
        ready.texts = {id(chat): text for chat, text in zip(plain, together or (), strict=False)}
        for chat in chats:
            if id(chat) not in ready.texts:
                with contextlib.suppress(UserError):  # encoding the row will say it
                    text = self.template.render(chat.messages, chat.tools, "")
                    ready.texts[id(chat)] = text
        return ready

    def _tokenized_together(self, texts: dict[int, str]) -> dict[int, Tokens]:
        """The tokens of texts that are short."""
        short = {at: text for at, text in texts.items() if len(text) <= SIZES.window}
        found: list[Tokens] = []
        with contextlib.suppress(TypeError):
            for some in parts_of(short.values(), CHARACTERS_TOGETHER):
                found += tokenize_all(self.backend, some)
        return dict(zip(short, found, strict=False))

    def _tokens_at(self, borders: list[int], text: str, tokens: Tokens, where: str) -> Tokens:
        """The tokens of a text as generation has them: before a border, those of that part alone.

        It is cut only at borders where it would have others, in the middle of a token for example.
        """
        added = np.flatnonzero(self.is_added[np.minimum(tokens.ids, len(self.is_added) - 1)])
        cuts = [at for at in borders if not self._is_border(tokens, added, text, at, where)]
        if not cuts:
            return tokens
        if cuts[0] != borders[-1]:
            cut, starts, ends = cuts[0], tokens.starts, tokens.ends
            begin = int(starts[starts < cut].max(initial=0))
            end = int(ends[ends > cut].min(initial=len(text)))
            self.notes.add(
                "later answers are trained after other tokens than in generation, because an "
                "earlier one begins in the middle of a token; train one answer per row to avoid it",
                compared(where, f"{text[begin:cut]}|{text[cut:end]}", text[begin:end]),
            )
        found = []
        for first, past in pairwise([0, *cuts, len(text)]):
            part = (
                self._continue(text[first:past], where)
                if first
                else self._tokenize(text[:past], where, special=False)
            )
            found.append(part.moved(first))
        return joined_tokens(found)

    def _is_border(
        self, tokens: Tokens, added: np.ndarray, text: str, border: int, where: str
    ) -> bool:
        """Return whether the tokens before a border are those of the text before it. added: the
        indices of tokens at which the text is cut."""
        before = tokens.before(border)
        if before is None:
            return False
        count = int(added.searchsorted(before))
        first = int(added[count - 1]) + 1 if count else 0
        begin = tokens.end_of(first - 1) if first else 0
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

    def tokenized(self, text: str, where: str) -> Tokens:
        """The tokens of a text that a template rendered. Raises UserError."""
        return self._tokenize(text, where, special=False)

    @cached_property
    def added_tokens(self) -> tuple[str, ...]:
        """The texts that are a token wherever they stand, the longest first."""
        found = {each.content for each in self.backend.get_added_tokens_decoder().values()}
        return tuple(sorted((text for text in found if text.strip()), key=len, reverse=True))

    @cached_property
    def is_added(self) -> np.ndarray:
        """True where a text is cut at a token before its parts are tokenized, by id; the last entry
        is for all larger ids."""
        ids = list(self.backend.get_added_tokens_decoder())
        found = np.zeros(max(ids, default=0) + 2, bool)
        found[ids] = True
        return found


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
        return list(tokenizer.encode(text, add_special_tokens=special))
    backend.no_truncation()
    backend.no_padding()
    with naming(where):
        ids: list[int] = tokenize_ids(backend, text, special).tolist()
        return ids


def in_spans(tokens: Tokens, spans: Iterable[tuple[int, int]], length: int) -> np.ndarray:
    """(T,) bool: whether a token is in one of the spans of a text of `length` characters."""
    found = np.zeros(len(tokens), bool)
    for first, past in spans:
        begin, end = tokens.before(first), len(tokens) if past == length else tokens.before(past)
        if begin is not None and end is not None and tokens.encoding is not None:
            found[begin:end] = True
        else:
            starts, ends = token_spans(tokens.starts, tokens.ends, length)
            found |= (ends > first) & (starts < past)
    return found


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


def parts_of(texts: Iterable[str], most: int) -> Iterator[list[str]]:
    """The texts in lists of at most `most` characters, or of one text."""
    part, size = list[str](), 0
    for text in texts:
        if part and size + len(text) > most:
            yield part
            part, size = [], 0
        part.append(text)
        size += len(text)
    if part:
        yield part


def pair_to_chat(pair: Pair) -> Chat:
    return Chat(
        [
            {"role": "user", "content": pair.prompt},
            {"role": "assistant", "content": pair.completion},
        ]
    )


def end_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of a tokenizer's end-of-sequence tokens."""
    ids = sorted(tokenizer.eos_token_ids)
    return tuple(text for text in tokenizer.convert_ids_to_tokens(ids) if text) if ids else ()


def chat_of_transcript(prompt: str, completion: str = "") -> Chat | None:
    """The chat of a prompt that has the turns of Human and Assistant; None of any other."""
    if not (prompt.rstrip().endswith("Assistant:") and is_transcript(prompt)):
        return None
    asked = turns_of_transcript(prompt)[:-1]
    answer = {"role": ASSISTANT, "content": completion.strip()}
    return Chat([*asked, answer], first_trained=len(asked))


def roles_in(content: Chat | Pair | Text) -> str:
    """The roles of a chat, for an error about its answers; empty if one of them is the model's."""
    roles = {m["role"]: None for m in content.messages} if isinstance(content, Chat) else {}
    if not roles or ASSISTANT in roles:
        return ""
    return f"; its roles are {shortened(', '.join(roles))}, and that of an answer is {ASSISTANT}"


def has_answer(content: Chat | Pair | Text) -> bool:
    """Return whether a row has anything to learn other than the end of a turn."""
    if isinstance(content, Pair):
        return bool(content.completion.strip())
    if isinstance(content, Chat):
        turns = [content.messages[i] for i in trained_turns(content)]
        return any(
            turn["content"].strip() or turn.get("tool_calls") or reasoning_of(turn)
            for turn in turns
        )
    return bool(content.text.strip())
