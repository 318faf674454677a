"""Rows as a user reads them: their text in parts, and which parts are trained.

With a tokenizer this is the text that the model sees. Without one, or where its template refuses
the row, the texts of the row are shown as they are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

import numpy as np

from your_ai.config import TrainConfig
from your_ai.data.answers import trained_turns
from your_ai.data.encode import EncodedRow, Encoder
from your_ai.data.examples import pieces_of
from your_ai.data.rows import Chat, Labeled, Pair, Preference, Question, Row, Scored, Text
from your_ai.errors import UserError

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
    tokens, trained = encoded.tokens[:DRAWN_TOKENS], encoded.trained[:DRAWN_TOKENS]
    edges = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
    parts = [
        (tokenizer.decode(tokens[begin:end].tolist()), bool(trained[begin]))
        for begin, end in pairwise(edges)
        if end > begin
    ]
    if len(encoded.tokens) > DRAWN_TOKENS:
        parts.append((f" ... {len(encoded.tokens) - DRAWN_TOKENS:,} more tokens", False))
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
