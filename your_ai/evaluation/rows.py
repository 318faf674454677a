"""The rows for an evaluation: choose their file, encode them as in training, keep their lines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from your_ai.config import TrainConfig
from your_ai.config.setting import LARGEST
from your_ai.data.batches import bucket_edges
from your_ai.data.encode import Encoder, SamplePrompt
from your_ai.data.examples import Examples, load_examples, pieces_of
from your_ai.data.lines import checked_sha256, decode_row, files_in, files_of_rows, read_lines
from your_ai.data.notes import Notes
from your_ai.data.preferences import parser_of
from your_ai.data.rows import (
    Chat,
    Labeled,
    Pair,
    Preference,
    Question,
    Row,
    Scored,
    Text,
    read_rows,
)
from your_ai.data.sources import find_splits, is_file
from your_ai.errors import UserError, named_errors
from your_ai.files import read_text
from your_ai.gates.text import counted
from your_ai.hub.find import store

PREFERRED = ("test", "valid")  # files of a data folder, in order of preference
DIGEST_BYTES = 16


@dataclass(frozen=True)
class EncodedRows:
    """n examples, and the row that each comes from.

    A bad answer is the rejected one of a pair, or one with the label false. All others are good,
    also those that have no label.
    """

    examples: Examples
    row_of: np.ndarray
    """(n,): indices into `EvaluationRows.lines`."""
    is_bad: np.ndarray
    """(n,) bool: whether the answer is bad."""

    @property
    def lengths(self) -> list[int]:
        """The sequence length of every bucket."""
        return [int(edge) for edge in bucket_edges(self.examples.lengths - 1)]

    @cached_property
    def target_counts(self) -> np.ndarray:
        """(n,): the number of trained tokens of each example."""
        examples = self.examples
        return np.add.reduceat(examples.trained, examples.starts[:-1], dtype=np.int64)

    def summed(self, values: np.ndarray, rows: int, bad: bool = False) -> np.ndarray:
        """Add up the values of the good (or the bad) answers, (n,), by row: (m,)."""
        wanted = self.is_bad == bad
        return np.bincount(self.row_of[wanted], values[wanted], minlength=rows)


@dataclass(frozen=True)
class EvaluationRows:
    """The m rows of a file that have something to measure."""

    path: Path
    sha256: str
    """Of the file."""
    lines: np.ndarray
    """(m,): the line number of each row in the file."""
    places: list[str]
    """The file and line that each row came from, for messages."""
    asks: np.ndarray
    """(m,) bool: whether the row asks for an answer and has a good one."""
    is_labeled: np.ndarray
    """(m,) bool: whether the answer of the row has a label."""
    trained: EncodedRows
    """The tokens that the run would train on; the loss of the good answers is measured."""
    answers: EncodedRows
    """The answers alone; they are compared for an exact match."""
    has_answer: np.ndarray
    """(m,) bool: whether the row has an answer in `answers`."""
    encoder: Encoder
    """The run's encoder."""

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def files(self) -> str:
        """The names of the user's files that the rows are from, for messages."""
        return files_in(self.where(row) for row in range(len(self)))

    def where(self, row: int) -> str:
        return self.places[row].rpartition("/")[2]

    @cached_property
    def trained_tokens(self) -> np.ndarray:
        """(m,): the number of trained tokens of each row, without those of a bad answer."""
        return self.trained.summed(self.trained.target_counts, len(self)).astype(np.int64)

    @cached_property
    def bad_tokens(self) -> np.ndarray:
        """(m,): the number of tokens of each row's bad answer, 0 if it has none."""
        counts = self.trained.target_counts
        return self.trained.summed(counts, len(self), bad=True).astype(np.int64)

    @property
    def is_pair(self) -> np.ndarray:
        """(m,) bool: whether the row has a good and a bad answer."""
        return (self.trained_tokens > 0) & (self.bad_tokens > 0)

    @property
    def has_preferences(self) -> bool:
        """Return whether any row says which answer is good or bad."""
        return bool((self.is_pair | self.is_labeled).any())

    @cached_property
    def weights(self) -> np.ndarray:
        """(m,) float64: the weight of a row's tokens in the loss."""
        found = np.zeros(len(self))
        found[self.trained.row_of] = self.trained.examples.weights
        return found

    def questions(
        self, chosen: Sequence[int] | None = None
    ) -> Iterator[tuple[int, Row, dict[str, Any], SamplePrompt]]:
        """The rows that ask for an answer, as `read` yields them, each with its prompt.

        chosen: the indices of the rows to look at; default: all.
        """
        places = range(len(self)) if chosen is None else chosen
        for place, row, content in self.read([place for place in places if self.asks[place]]):
            prompt = self.encoder.prompt_of(row)
            assert prompt is not None
            yield place, row, content, prompt

    def read(self, chosen: np.ndarray | Sequence[int]) -> Iterator[tuple[int, Row, dict[str, Any]]]:
        """Yield the rows with the indices `chosen` in file order: index, row, JSON object.

        Raises UserError if the file no longer has them.
        """
        wanted = {int(self.lines[place]): int(place) for place in chosen}
        if not self.path.exists():
            raise changed(self.path)
        for where, line in read_lines(self.path, self.encoder.limit):
            if (number := line_of(where)) in wanted:
                content, place = decode_row(line, where)
                yield wanted.pop(number), parser_of(self.encoder.kind)(content, place), content
        if wanted:
            raise changed(self.path)


def choose_file(given: str | None, config: TrainConfig) -> Path:
    """Choose the JSONL file of rows to measure: from --data, or else from the run's data.

    given: the value of --data; like the run's, its columns are those of the run. A folder's test
    rows are preferred to its validation rows. Raises UserError if there are no such rows.
    """
    data = config.data if given is None else given
    if not data:
        raise UserError("the run has no data; give a file with --data")
    if given is None:
        files = find_splits(config).files
    else:
        files = find_splits(replace(config, data=given, valid=""), to_train=False).files
    for name in PREFERRED:
        if name in files:
            return files[name]
    if given is not None and is_file(given):
        return files["train"]
    raise UserError(
        f"--data {data}: has no rows for a test or for validation; give a file of them with --data"
    )


def load_rows(
    path: Path, config: TrainConfig, encoder: Encoder, tokenizer_sha256: str
) -> EvaluationRows:
    """Load the rows of a file, encoded as in training. Raises UserError for a bad row.

    encoder: the run's encoder.
    """
    content = checked_sha256(path, encoder.limit)
    trained = load_cached(path, encoder, config, tokenizer_sha256)
    if not trained.weights.any():
        name = files_of_rows(path, encoder.limit)
        raise UserError(f"{name}: every row has weight 0: there is nothing to measure")
    of = origins(path, encoder, config, trained)
    kept, row_of = np.unique(of.row_of, return_inverse=True)  # the others have nothing to train
    found = answers = EncodedRows(trained, row_of, of.is_bad)
    answered = kept
    if not encoder.masks_prompt:
        try:
            masking = replace(encoder, mask_prompt=True)
            examples = load_cached(path, masking, config, tokenizer_sha256)
            masked = origins(path, masking, config, examples)
            answered = masked.row_of
            answers = EncodedRows(examples, np.searchsorted(kept, answered), masked.is_bad)
        except UserError:  # the template does not show where the answers are
            answered = kept[:0]
    asking = of.asks[kept]
    return EvaluationRows(
        path=path,
        sha256=content,
        lines=of.lines[kept],
        places=[of.places[row] for row in kept],
        asks=asking,
        is_labeled=of.is_labeled[kept],
        trained=found,
        answers=answers,
        has_answer=asking & np.isin(kept, answered),
        encoder=encoder,
    )


def load_cached(
    path: Path, encoder: Encoder, config: TrainConfig, tokenizer_sha256: str
) -> Examples:
    length, cache = config.max_seq_length, store() / "cache"
    return load_examples(path, encoder, tokenizer_sha256, length, config.too_long, cache)


MOST_PROMPT_BYTES = 4 << 20  # of --teacher-prompt


def teacher_prompt_of(config: TrainConfig) -> str:
    """The text of --teacher-prompt. Raises UserError if it cannot be read, or is empty."""
    place = Path(config.teacher_prompt).expanduser()
    try:
        with named_errors(place, "read"):
            text = read_text(place, MOST_PROMPT_BYTES)
    except UnicodeDecodeError as error:
        raise UserError(f"--teacher-prompt {config.teacher_prompt}: is not UTF-8 text") from error
    prompt = text.removeprefix("\ufeff").strip()  # a byte order mark
    if not prompt:
        raise UserError(f"--teacher-prompt {config.teacher_prompt}: is empty")
    return prompt


def seen_by_teacher(
    path: Path,
    config: TrainConfig,
    encoder: Encoder,
    tokenizer_sha256: str,
    examples: Examples | None,
) -> Examples:
    """The rows of a file with --teacher-prompt.

    examples: without it; None if only their prompts are used. Raises UserError if they have other
    answers with it.
    """
    option, prompt = f"--teacher-prompt {config.teacher_prompt}", teacher_prompt_of(config)

    def after_prompt(rows: Iterator[Row]) -> Iterator[Row]:
        return (encoder.after_prompt(row, prompt) for row in rows)

    seen = load_examples(
        path,
        replace(encoder, notes=Notes()),
        f"{tokenizer_sha256} after {hashlib.sha256(prompt.encode()).hexdigest()}",
        LARGEST,
        "error",
        store() / "cache",
        after_prompt,
    )
    if examples is None:
        return seen
    mine, theirs = (
        [each.tokens[each.trained], np.add.reduceat(each.trained, each.starts[:-1], dtype=int)]
        for each in (examples, seen)
    )
    if not all(map(np.array_equal, mine, theirs)):
        raise UserError(
            f"{option}: the chat template writes other answers after it, so that teacher and "
            "student cannot be compared; use other rows, or another prompt"
        )
    return seen


@dataclass(frozen=True)
class RowOrigins:
    """All rows of a file, and the n examples that were made from them."""

    lines: np.ndarray
    """The line number of each row."""
    places: list[str]
    """The file and line that each row came from, for messages."""
    asks: np.ndarray
    """bool: whether each row asks for an answer and has a good one."""
    is_labeled: np.ndarray
    """bool: whether the answer of each row has a label."""
    row_of: np.ndarray
    """(n,) the index of the row of each example."""
    is_bad: np.ndarray
    """(n,) bool, as in `EncodedRows`."""


def origins(path: Path, encoder: Encoder, config: TrainConfig, examples: Examples) -> RowOrigins:
    """Find the row that each example comes from.

    If some rows were split or dropped, all rows are encoded again to count their examples.
    Raises UserError if the examples do not come from this file.
    """
    whole = examples.tally.split == examples.tally.dropped == 0
    lines, places, asking, labeled, row_of, bad = [], [], [], [], [], []
    for place, row in enumerate(read_rows(path, encoder.limit, parser_of(encoder.kind))):
        lines.append(row.line)
        places.append(row.where)
        asking.append(asks(row))
        labeled.append(isinstance(row.content, Labeled))
        texts = are_bad(row)
        count = len(texts)
        if not whole:
            pieces = pieces_of(row, encoder, config.max_seq_length, config.too_long)
            count = sum(piece.example is not None for piece in pieces)
        row_of += [place] * count
        bad += (texts * count)[:count]
    if len(row_of) != len(examples):
        raise changed(path)
    return RowOrigins(
        np.array(lines), places, np.array(asking), np.array(labeled), np.array(row_of),
        np.array(bad, bool),
    )  # fmt: skip


def are_bad(row: Row) -> list[bool]:
    """Return whether each text of a row, in the order of `Encoder.encode_all`, is a bad answer."""
    if isinstance(row.content, Preference):
        return [False, True]
    return [isinstance(row.content, Labeled) and not row.content.good]


def line_of(where: str) -> int:
    """The number in `file:line`."""
    return int(where.rpartition(":")[2])


def changed(path: Path) -> UserError:
    return UserError(f"{path}: was changed while it was read; try again")


def asks(row: Row) -> bool:
    """Say whether a row asks for an answer and has a good one, as `Encoder.prompt_of` needs."""
    if isinstance(row.content, Labeled) and not row.content.good:
        return False
    content = answer_of(row)
    if isinstance(content, Chat):
        return bool(content.messages[-1]["role"] == "assistant")
    return not isinstance(content, Text)


def asked_and_expected(row: Row) -> tuple[str, str]:
    """The question of a row, as a person would type it, and the expected answer."""
    return asked_and_answered(answer_of(row))


def answer_of(row: Row) -> Chat | Pair | Text:
    """The answer of a row with its prompt: of a pair, the chosen one."""
    content = row.content
    assert not isinstance(content, Question)  # it has no answer
    if isinstance(content, Preference):
        return content.chosen
    return content.answer if isinstance(content, Labeled | Scored) else content


def rejected_answer(row: Row) -> str | None:
    """The rejected answer of a pair; None for other rows."""
    content = row.content
    return asked_and_answered(content.rejected)[1] if isinstance(content, Preference) else None


def asked_and_answered(content: Chat | Pair | Text) -> tuple[str, str]:
    """The question, as a person would type it, and the answer."""
    if isinstance(content, Text):
        return "", content.text
    if not isinstance(content, Chat):
        return content.prompt, content.completion
    *before, last = content.messages
    answer = last["content"] or json.dumps(last.get("tool_calls", ""), ensure_ascii=False)
    return before[-1]["content"] if before else "", answer


def cut_text(rows: EvaluationRows, config: TrainConfig) -> str:
    """The note about rows longer than the run's sequence length, or an empty text."""
    tally = rows.trained.examples.tally
    cut = tally.cut_text(f"the run's --max-seq-length {config.max_seq_length}")
    if not cut:
        return ""
    left_out = tally.rows - len(rows)
    rest = f"; {counted(left_out, 'has', 'have')} nothing left to measure" if left_out else ""
    return f"{rows.files}: {cut}{rest}"


def in_training_data(
    rows: EvaluationRows, config: TrainConfig, tokenizer_sha256: str
) -> int | None:
    """Count the rows that the run was trained on; None if its training rows cannot be read.

    Compares hashes of the encoded answers; of a pair, of the chosen one. Only one training row is
    in memory at a time.
    """
    if not config.data:
        return None
    try:
        path = find_splits(config).files["train"]
        as_trained = replace(rows.encoder, mask_prompt=config.mask_prompt, kind=config.row_kind)
        seen = load_cached(path, as_trained, config, tokenizer_sha256)
    except UserError:
        return None
    wanted: dict[bytes, list[int]] = {}
    texts = rows.trained
    is_rejected = texts.is_bad & ~rows.is_labeled[texts.row_of]
    for row, rejected, digest in zip(
        texts.row_of.tolist(), is_rejected.tolist(), digests(texts.examples), strict=True
    ):
        if not rejected:
            wanted.setdefault(digest, []).append(row)
    found = {row for digest in digests(seen) for row in wanted.pop(digest, ())}
    return len(found)


def digests(examples: Examples) -> Iterator[bytes]:
    """Yield a hash of the tokens of each example, in order.

    Reads the tokens from their file, because memory-mapped pages count as memory of the process.
    """
    width = examples.tokens.itemsize
    with open(examples.tokens_file, "rb") as file:
        for length in examples.lengths.tolist():
            tokens = file.read(width * length)
            yield hashlib.blake2b(tokens, digest_size=DIGEST_BYTES).digest()
