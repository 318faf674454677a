"""What training would see of the data: counts, lengths, problems, and a few rows."""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import numpy as np

from your_ai.config import TrainConfig
from your_ai.data.answers import trained_turns
from your_ai.data.encode import EncodedRow, Encoder, has_answer, pair_to_chat
from your_ai.data.examples import pieces_of, rows_of
from your_ai.data.folders import SPLITS
from your_ai.data.lines import RowLimit
from your_ai.data.notes import Notes, not_used
from your_ai.data.rows import (
    Chat,
    Labeled,
    Pair,
    Preference,
    Question,
    Row,
    Scored,
    Text,
    texts_of,
    with_progress,
)
from your_ai.data.sources import Splits
from your_ai.errors import UserError

# Rows as a user reads them: their text in parts, and which parts are trained


DRAWN_TOKENS = 400  # of a row that is shown
DRAWN_CHARACTERS = 4 * DRAWN_TOKENS
SCORE = " (score)"  # where a reward model scores a text
CHOSEN, REJECTED, GOOD, BAD = "chosen", "rejected", "good", "bad"


@dataclass(frozen=True)
class DrawnRow:
    """A text of a row."""

    where: str
    parts: tuple[tuple[str, bool], ...]
    """(text, whether it is trained), in order; cut off after DRAWN_TOKENS."""
    answer: str = ""
    """Which answer it has: chosen, rejected, good or bad; empty for rows with only one kind."""
    problem: str = ""
    """Why training refuses it; empty if it does not."""
    encoded: EncodedRow | None = None
    """All of its tokens as they are trained; None if they are not known, or not trained."""


def draw_row(row: Row, encoder: Encoder | None, config: TrainConfig) -> list[DrawnRow]:
    """The texts of a row as training takes them: two for a pair, more for one that is split.

    encoder: None without a tokenizer.
    """
    contents = contents_of(row.content)
    problem = ""
    if encoder is not None:
        try:
            pieces = pieces_of(row, encoder, config.max_seq_length, config.too_long)
            kept = [piece.example for piece in pieces if piece.example is not None]
        except UserError as error:
            problem = str(error)
        else:
            if kept:
                answers = cycle(answer for answer, _ in contents)
                return [drawn_piece(row, e, encoder, next(answers)) for e in kept]
            problem = f"{row.where}: nothing is left to train"
    found = [(answer, plain_parts(content, config.mask_prompt)) for answer, content in contents]
    if problem:  # nothing of it is trained
        found = [(answer, tuple((text, False) for text, _ in parts)) for answer, parts in found]
    return [DrawnRow(row.where, parts, answer, problem) for answer, parts in found]


def drawn_piece(row: Row, encoded: EncodedRow, encoder: Encoder, answer: str) -> DrawnRow:
    if isinstance(row.content, Question):  # its tokens are read, and those of completions trained
        encoded = replace(encoded, trained=np.zeros_like(encoded.trained))
    parts = encoded_parts(encoded, encoder.tokenizer)
    if encoder.kind == "rated":  # the last token is only the place of the score
        text = replace(encoded, tokens=encoded.tokens[:-1], trained=encoded.trained[:-1])
        parts = (*encoded_parts(text, encoder.tokenizer), (SCORE, True))
    return DrawnRow(row.where, parts, answer, encoded=encoded)


def contents_of(content: Any) -> list[tuple[str, Any]]:
    """(which answer, the text that has it) of a row's content."""
    if isinstance(content, Preference):
        return [(CHOSEN, content.chosen), (REJECTED, content.rejected)]
    if isinstance(content, Labeled):
        found = [(GOOD if content.good else BAD, content.answer)]
        return found + ([("with another row's answer", content.other)] if content.other else [])
    return [("", content.answer if isinstance(content, Scored) else content)]


def encoded_parts(encoded: EncodedRow, tokenizer: Any) -> tuple[tuple[str, bool], ...]:
    """The tokens as text, in parts that are trained or not."""
    size, first = len(encoded.tokens), int(encoded.trained.argmax())
    spans = [(0, min(size, DRAWN_TOKENS))]
    if size > DRAWN_TOKENS and first > DRAWN_TOKENS // 2:  # what is trained is looked for
        again = max(first - DRAWN_TOKENS // 8, DRAWN_TOKENS // 4)
        spans = [(0, DRAWN_TOKENS // 4), (again, min(size, again + 3 * DRAWN_TOKENS // 4))]
    parts, shown = list[tuple[str, bool]](), 0
    for begin, end in [*spans, (size, size)]:
        if begin > shown:
            parts.append((f" ... {begin - shown:,} more tokens", False))
        shown = end
        changes = (np.flatnonzero(np.diff(encoded.trained[begin:end])) + begin + 1).tolist()
        parts += [
            (tokenizer.decode(encoded.tokens[at:past].tolist()), bool(encoded.trained[at]))
            for at, past in pairwise([begin, *changes, end])
            if past > at
        ]
    return tuple(parts)


def plain_parts(content: Any, mask_prompt: bool) -> tuple[tuple[str, bool], ...]:
    """The texts of a row without a template, in parts that are trained or not."""
    if isinstance(content, Question):
        content = content.prompt if isinstance(content.prompt, Chat) else Pair(content.prompt, "")
    parts: list[tuple[str, bool]] = []
    if isinstance(content, Text):
        parts.append((content.text, True))
    elif isinstance(content, Pair):
        parts += [(content.prompt, not mask_prompt)]
        parts += [("\n", False), (content.completion, True)] if content.completion else []
    else:
        trained = set(trained_turns(content))
        for number, message in enumerate(content.messages):
            others = {k: v for k, v in message.items() if k not in ("role", "content") and v}
            text = str(message.get("content") or "")
            text += json.dumps(others, ensure_ascii=False, default=str) if others else ""
            before = "\n" if number else ""
            parts.append((f"{before}{message.get('role')}: ", False))
            parts.append((text, number in trained or not mask_prompt))
    room, found = DRAWN_CHARACTERS, []
    for text, is_trained in parts:
        if text and room > 0:
            found.append((text[:room], is_trained))
        room -= len(text)
    if room < 0:
        found.append((f" ... {-room:,} more characters", False))
    return tuple(found)


KINDS = {
    "Chat": "chat",
    "Pair": "prompt + completion",
    "Text": "text",
    "Preference": "chosen + rejected",
    "Labeled": "answer + label",
    "Scored": "answer + score",
    "Question": "prompt",
}
QUANTILES = {"least": 0.0, "median": 0.5, "p95": 0.95, "most": 1.0}
BINS = 12  # at most, of a histogram


@dataclass
class SplitSurvey:
    """The rows of a split."""

    rows: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    duplicates: int = 0
    """Rows that are equal to one before them."""
    in_training: int = 0
    """Rows of another split that are also training rows."""
    empty: int = 0
    """Rows without an answer or a text."""
    refused: int = 0
    """Other rows that training would refuse."""
    problem: str = ""
    """Why training would refuse the first of the empty and refused rows."""
    too_long: int = 0
    """Rows with more than --max-seq-length tokens."""
    trained_tokens: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))
    """Of each row that can be encoded: its tokens, or characters without a tokenizer."""

    def quantiles(self) -> list[int]:
        """The least length, the median, the 95th percentile, and the largest; empty if no rows."""
        if not self.lengths:
            return []
        found = np.quantile(np.frombuffer(self.lengths, np.int64), list(QUANTILES.values()))
        return list(map(int, found))

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, below, rows) of lengths, in at most BINS bins whose width is a power of two."""
        if not self.lengths:
            return []
        lengths = np.frombuffer(self.lengths, np.int64)
        least, most = int(lengths.min()), int(lengths.max())
        width = 1
        while most // width - least // width >= BINS:
            width *= 2
        first = least // width
        counts = np.bincount(lengths // width - first)
        return [
            ((first + i) * width, (first + i + 1) * width, int(n)) for i, n in enumerate(counts)
        ]


@dataclass(frozen=True)
class Survey:
    """The findings that `your_ai data` shows."""

    splits: dict[str, SplitSurvey]
    drawn: tuple[DrawnRow, ...]
    notes: tuple[str, ...]
    unit: str
    """Of lengths: tokens, or characters without a tokenizer."""


def survey(
    found: Splits,
    config: TrainConfig,
    tokenizer: Any | None,
    draw: int,
    notes: Sequence[str] = (),
    progress: Callable[[str], object] = lambda _: None,
) -> Survey:
    """Read all rows once.

    tokenizer: of the model; None leaves out what needs one. draw: how many training rows to show,
    spread over the whole file; refused ones if there are no others. notes: on the tokenizer.
    progress: receives a line every few seconds.
    Raises UserError for a row that is in no known format.
    """
    limit = RowLimit(config.max_row_bytes)
    kind, encoder, noticed = config.row_kind, None, Notes()
    if tokenizer is not None:
        encoder = Encoder(tokenizer, config.mask_prompt, limit=limit, kind=kind, notes=noticed)
    splits: dict[str, SplitSurvey] = {}
    trained: set[bytes] = set()
    places: list[int] = []  # lines of training rows
    refused: list[int] = []
    for name in SPLITS:
        if name not in found.files:
            continue
        seen = trained if name == "train" else set()
        splits[name] = split = SplitSurvey()
        path = found.files[name]
        watch = partial(with_progress, path=path, limit=limit, write=progress)
        rows = rows_of(path, kind, limit, watch)
        for row in rows if encoder is None else encoder.ahead(rows):
            if encoder is None:
                for column in row.unused:
                    noticed.add(not_used(column), row.where)
            is_trained = count(split, row, encoder, config, seen, trained)
            if name == "train":
                (places if is_trained else refused).append(row.line)
    wanted = spread(places or refused, draw)
    shown = (r for r in rows_of(found.files["train"], kind, limit) if r.line in wanted)
    again = encoder and replace(encoder, notes=Notes())  # these rows were noticed before
    drawn = [text for row in islice(shown, len(wanted)) for text in draw_row(row, again, config)]
    unit = "characters" if encoder is None else "tokens"
    every = (*found.notes, *notes, *noticed.lines())
    return Survey(splits, tuple(drawn), every, unit)


def count(
    split: SplitSurvey,
    row: Row,
    encoder: Encoder | None,
    config: TrainConfig,
    seen: set[bytes],
    trained: set[bytes],
) -> bool:
    """Add a row to the counts; whether it can be trained."""
    content = row.content
    text = json.dumps(asdict(content), sort_keys=True)
    split.rows += 1
    split.kinds[KINDS[type(content).__name__]] += 1
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    split.duplicates += digest in seen
    split.in_training += seen is not trained and digest in trained
    seen.add(digest)
    texts = [content.answer] if isinstance(content, Labeled) else texts_of(content)
    asks = isinstance(content, Question)
    if not asks and not all(
        has_answer(pair_to_chat(t) if isinstance(t, Pair) else t) for t in texts
    ):
        split.empty += 1
        split.problem = split.problem or f"{row.where}: no answer or no text"
        return False
    if encoder is None:
        split.lengths.extend(map(characters_of, texts))
        return True
    try:
        pieces = [piece.example for piece in pieces_of(row, encoder, sys.maxsize, "error")]
    except UserError as error:
        split.refused += 1
        split.problem = split.problem or str(error)
        return False
    every = [encoded for encoded in pieces if encoded is not None]
    too_long = any(len(encoded.tokens) > config.max_seq_length for encoded in every)
    split.lengths.extend(len(encoded.tokens) for encoded in every)
    split.too_long += too_long
    split.trained_tokens += 0 if asks else sum(int(e.trained.sum()) for e in every)
    return bool(every) and not (too_long and config.too_long == "error")


def characters_of(content: Any) -> int:
    if isinstance(content, Question):
        content = content.prompt if isinstance(content.prompt, Chat) else Text(content.prompt)
    if isinstance(content, Pair):
        return len(content.prompt) + len(content.completion)
    if hasattr(content, "messages"):
        return sum(len(message["content"]) for message in content.messages)
    return len(content.text)


def spread(places: list[int], count: int) -> set[int]:
    """`count` of the places, at equal distances."""
    if not places or not count:
        return set()
    chosen = np.linspace(0, len(places) - 1, min(count, len(places))).round().astype(int)
    return {places[index] for index in chosen}


def as_json(found: Survey, config: TrainConfig) -> dict[str, Any]:
    """The survey for programs."""
    return {
        "unit": found.unit,
        "notes": list(found.notes),
        "max_seq_length": config.max_seq_length,
        "splits": {
            name: {
                "rows": split.rows,
                "kinds": dict(split.kinds),
                "duplicates": split.duplicates,
                "in_training": split.in_training,
                "empty": split.empty,
                "refused": split.refused,
                "problem": split.problem,
                "too_long": split.too_long,
                "lengths": dict(zip(QUANTILES, split.quantiles(), strict=False)),
                "histogram": split.histogram(),
                "total": sum(split.lengths),
                "trained_tokens": split.trained_tokens,
            }
            for name, split in found.splits.items()
        },
        "drawn": [
            {
                "where": row.where,
                "answer": row.answer,
                "problem": row.problem,
                "parts": [{"text": t, "trained": y} for t, y in row.parts],
                "tokens": [] if row.encoded is None else row.encoded.tokens.tolist(),
                "trained": [] if row.encoded is None else row.encoded.trained.tolist(),
            }
            for row in found.drawn
        ],
    }
