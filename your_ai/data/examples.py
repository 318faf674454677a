"""Encoded rows on disk: tokenized once, then memory-mapped, so a million rows need no memory."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from your_ai.config import AUTO
from your_ai.data.encode import EncodedRow, Encoder, to_score
from your_ai.data.lines import RowLimit, checked_sha256, files_of_rows
from your_ai.data.notes import Notes, notes_from
from your_ai.data.preferences import Kind, of_one_form, parser_of, with_other_answers
from your_ai.data.rows import FLOAT32_MAX, Labeled, Preference, Row, Scored, read_rows
from your_ai.data.target_columns import CACHED, ColumnName, Columns
from your_ai.errors import UserError
from your_ai.files import atomic_folder, sha256
from your_ai.gates.text import counted

FORMAT = 8  # increase it when the encoding of rows changes, so that old caches are not used
KEEP_CACHE_DAYS = 30
ARRAYS = [
    "tokens.bin",
    "trained.bin",
    "starts.npy",
    "weights.npy",
    *(f"{name}.npy" for name in CACHED),
]
TALLY = "tally.json"
TALLY_BYTES = 1 << 16
BLOCK_BYTES = 1 << 20
REPLACING_TRIES = 5
# Kind of rows -> what can be done about a long one besides raising --max-seq-length; the default
# is `use --too-long truncate`.
WAYS = {"answers": "use --too-long truncate or split", "prompts": "leave this row out"}


@dataclass(frozen=True)
class RowCounts:
    """Counts of what happened to the rows of a file."""

    rows: int = 0
    examples: int = 0
    truncated: int = 0
    split: int = 0
    dropped: int = 0
    """Truncated rows and pieces of split rows that have no target left."""
    tokens: int = 0
    trained_tokens: int = 0

    def cut_text(self, limit: str) -> str:
        """Count the rows longer than a limit, and say what was done; empty if none were."""
        count = self.truncated + self.split
        if not count:
            return ""
        verb, done = "was" if count == 1 else "were", "truncated" if self.truncated else "split"
        rows = f"{count:,} of {counted(self.rows, 'row')}"
        return f"{rows} {verb} longer than {limit} and {verb} {done}"


@dataclass(frozen=True)
class Examples:
    """The encoded rows of one file: n examples with N tokens in total."""

    tokens: np.ndarray
    """(N,) uint32, the tokens of all examples, concatenated. Memory-mapped."""
    trained: np.ndarray
    """(N,) bool: whether each token is a target. Memory-mapped."""
    starts: np.ndarray
    """(n + 1,) int64: example i is [starts[i], starts[i + 1])."""
    weights: np.ndarray
    """(n,) float32."""
    tally: RowCounts
    columns: Columns = field(default_factory=dict)
    """(n,) or (N,) each, as of `COLUMNS`; a column is here only if all rows have it. "reference" is
    memory-mapped."""
    notes: Notes = field(default_factory=Notes)
    """What was noticed in the rows."""

    def with_columns(self, columns: Columns) -> Examples:
        """The examples with more columns."""
        return replace(self, columns={**self.columns, **columns})

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, index: int) -> EncodedRow:
        part = slice(self.starts[index], self.starts[index + 1])
        return EncodedRow(self.tokens[part], self.trained[part])

    @property
    def tokens_file(self) -> Path:
        """The file that the tokens are mapped from."""
        assert isinstance(self.tokens, np.memmap)
        return Path(str(self.tokens.filename))

    @property
    def prompt_lengths(self) -> np.ndarray:
        """(n,) the tokens of each example before its last answer; all, where no token is before."""
        places, starts = np.arange(len(self.trained)), self.starts[:-1]
        answers = np.maximum.accumulate(np.where(self.trained, places, 0))[self.starts[1:] - 1]
        ends = np.maximum.accumulate(np.where(self.trained, 0, places))[answers]
        return np.where(ends > starts, ends - starts + 1, self.lengths)

    @cached_property
    def lengths(self) -> np.ndarray:
        """(n,) the number of tokens of each example."""
        return np.diff(self.starts)


def load_examples(
    path: Path,
    encoder: Encoder,
    tokenizer_sha256: str,
    max_seq_length: int,
    too_long: str,
    cache: Path,
    watch: Callable[[Iterator[Row]], Iterator[Row]] = iter,
) -> Examples:
    """Return the examples of a JSONL file, from `cache` if it was encoded the same way before.

    encoder: also has the limit on the length of a row and the vocabulary size of the model.
    tokenizer_sha256: the hash of the files that decide what the tokenizer and template do.
    watch: receives the rows and passes them on, if they have to be read.
    Raises UserError for a bad row; then nothing is left in the cache.
    """
    content = checked_sha256(path, encoder.limit)
    fixed_on_resume = [
        FORMAT,
        content,
        tokenizer_sha256,
        encoder.mask_prompt,
        encoder.kind,
        max_seq_length,
        too_long,
    ]
    key = hashlib.sha256(json.dumps(fixed_on_resume).encode()).hexdigest()[:32]
    folder = cache / "examples" / key
    examples = open_examples(folder)
    if examples is None or not has_tokens(examples, encoder.vocabulary):
        rows = encoder.ahead(rows_of(path, encoder.kind, encoder.limit, watch))
        pieces = (
            piece for row in rows for piece in pieces_of(row, encoder, max_seq_length, too_long)
        )
        delete_unused(folder.parent)
        examples = write_examples(folder, pieces, encoder.notes)
    if len(examples) == 0:
        name = files_of_rows(path, encoder.limit)
        if encoder.kind == "labels" and not examples.tally.truncated:
            raise UserError(
                f"{name}: all answers are the same; --objective kto compares each with the answer "
                "of another row"
            )
        raise UserError(
            f"{name}: no row has an answer within --max-seq-length {max_seq_length}; raise it"
        )
    return examples


def rows_of(
    path: Path,
    kind: Kind,
    limit: RowLimit,
    watch: Callable[[Iterator[Row]], Iterator[Row]] = iter,
) -> Iterator[Row]:
    """The rows of a JSONL file as `pieces_of` takes them: labeled answers with those of other rows.

    watch: as in `load_examples`. Raises UserError for a bad row.
    """
    rows = watch(read_rows(path, limit, parser_of(kind)))
    rows = with_other_answers(rows) if kind == "labels" else rows
    return of_one_form(rows) if kind == "rated" else rows


def check_weights(split: str, path: Path, examples: Examples, limit: RowLimit) -> None:
    """Raise UserError if every row of a split has weight 0; path: its file."""
    if examples.weights.any():
        return
    rows, purpose = {
        "train": ("every row", "train"),
        "valid": ("every validation row", "measure"),
    }[split]
    name = files_of_rows(path, limit)
    raise UserError(f"{name}: {rows} has weight 0: there is nothing to {purpose}")


class Piece(NamedTuple):
    """A part of a row that fits, or what is left of one that does not."""

    example: EncodedRow | None
    """None if it has no target."""
    weight: float
    outcome: str
    """whole, truncated or split; more for every piece of a row but its first."""
    columns: Mapping[ColumnName, float] = {}
    """The values of its row in the columns that the row has."""


def pieces_of(row: Row, encoder: Encoder, max_seq_length: int, too_long: str) -> Iterator[Piece]:
    """The texts of a row as pieces; of a reward model, as it scores them."""
    content = row.content
    for piece in fitted_pieces(row, encoder, max_seq_length, too_long):
        if encoder.kind != "rated" or piece.example is None:
            yield piece
        elif isinstance(content, Preference | Scored):
            rating = content.margin if isinstance(content, Preference) else content.score
            yield piece._replace(example=to_score(piece.example), columns={"ratings": rating})


def fitted_pieces(
    row: Row, encoder: Encoder, max_seq_length: int, too_long: str
) -> Iterator[Piece]:
    """The texts of a row as pieces of at most `max_seq_length` tokens. Both texts of a group are
    kept, or neither.

    The answer of another row is shortened if necessary, which is no fault of this row.
    """
    columns: Mapping[ColumnName, float] = (
        {"labels": row.content.good} if isinstance(row.content, Labeled) else {}
    )
    fitted = partial(fit, ways=WAYS.get(encoder.kind, "use --too-long truncate"))
    first, *others = encoder.encode_all(row)
    if not others:
        for example, outcome in fitted(first, max_seq_length, too_long, row.where):
            yield Piece(example, row.weight, outcome, columns)
        return
    is_mismatched = isinstance(row.content, Labeled)
    group = [
        next(fitted(text, max_seq_length, how, row.where))  # texts of groups are never split
        for text, how in ((first, too_long), (others[0], "truncate" if is_mismatched else too_long))
    ]
    examples, outcomes = zip(*group, strict=True)
    outcome = outcomes[0] if is_mismatched else max(outcomes, key=("whole", "truncated").index)
    kept = all(example is not None for example in examples)
    if kept and np.array_equal(examples[0].tokens, examples[1].tokens):
        kept = False
        if outcome == "whole":  # or else what differs was cut off
            encoder.notes.add("answers that another row gives, too, are not trained", row.where)
    yield Piece(examples[0] if kept else None, row.weight, outcome, columns)
    if kept:
        yield Piece(examples[1], row.weight, "more", columns)


def fit(
    example: EncodedRow,
    max_seq_length: int,
    too_long: str,
    where: str,
    ways: str = WAYS["answers"],
) -> Iterator[tuple[EncodedRow | None, str]]:
    """Yield the example as pieces of at most `max_seq_length` tokens, each with what was done.

    Pieces of a split overlap by one token, the one that predicts the first target of the next
    piece, so each target is trained exactly once. A piece without a target is None.
    ways: what else the error for a long row says can be done.
    """
    tokens, trained = example.tokens, example.trained
    if len(tokens) <= max_seq_length:
        yield example, "whole"
        return
    if too_long in (AUTO, "error"):
        raise UserError(
            f"{where}: {counted(len(tokens), 'token')}, more than --max-seq-length "
            f"{max_seq_length}; raise it, or {ways}"
        )
    step = max_seq_length - 1
    starts = [0] if too_long == "truncate" else range(0, len(tokens) - 1, step)
    outcome = "truncated" if too_long == "truncate" else "split"
    for start in starts:
        piece = trained[start : start + max_seq_length].copy()
        piece[:1] = False
        kept = EncodedRow(tokens[start : start + max_seq_length], piece) if piece.any() else None
        yield kept, outcome if start == 0 else "more"


def write_examples(folder: Path, pieces: Iterator[Piece], notes: Notes | None = None) -> Examples:
    """Write the pieces to a temporary folder, rename it to `folder`, and open it.

    notes: what is noticed in the rows while they are read.
    """
    counts = dict.fromkeys(asdict(RowCounts()), 0)
    lengths, weights = array("q", [0]), array("f")
    columns = {name: array("d") for name in CACHED}
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with (
            atomic_folder(folder) as temporary,
            (temporary / "tokens.bin").open("wb") as tokens_file,
            (temporary / "trained.bin").open("wb") as trained_file,
        ):
            for piece, weight, outcome, values in pieces:
                counts["rows"] += outcome != "more"
                counts["truncated"] += outcome == "truncated"
                counts["split"] += outcome == "split"
                if piece is None:
                    counts["dropped"] += 1
                    continue
                tokens_file.write(piece.tokens.data)
                trained_file.write(piece.trained.data)
                lengths.append(len(piece.tokens))
                weights.append(weight)
                for name, value in values.items():
                    columns[name].append(value)
                counts["tokens"] += len(piece.tokens)
                counts["trained_tokens"] += int(piece.trained.sum())
            counts["examples"] = len(weights)
            np.save(temporary / "starts.npy", np.cumsum(np.frombuffer(lengths, np.int64)))
            np.save(temporary / "weights.npy", np.array(weights, np.float32))
            for name, column in CACHED.items():
                known = columns[name] if len(columns[name]) == len(weights) else ()
                np.save(temporary / f"{name}.npy", np.array(known, column.dtype))
            tokens_file.flush()
            trained_file.flush()
            sums = {name: sha256(temporary / name) for name in ARRAYS}
            noticed = (notes or Notes()).as_json()
            content = {"tally": counts, "sha256": sums, "notes": noticed}
            (temporary / TALLY).write_text(json.dumps(content))
    except OSError as error:
        if (theirs := wait_for_examples(folder)) is not None:
            return theirs  # another run has written the same rows in the meantime
        raise unwritable(folder.parent, "tokenized rows", error) from error
    examples = wait_for_examples(folder)
    if examples is None:
        raise UserError(f"{folder}: the tokenized rows cannot be read back; delete the folder")
    return examples


def unwritable(folder: Path, what: str, error: OSError) -> UserError:
    return UserError(
        f"{folder}: cannot write {what} there ({error.strerror}); free some space, or set "
        "YOUR_AI_HOME to another folder"
    )


def wait_for_examples(folder: Path) -> Examples | None:
    """Open the examples in a cache folder, even if another process is replacing it just now."""
    for _ in range(REPLACING_TRIES):
        examples = open_examples(folder)
        if examples is not None:
            return examples
        time.sleep(0.05)
    return None


def open_examples(folder: Path) -> Examples | None:
    """Open the examples in a cache folder; None if it is missing or damaged.

    The folder is not trusted, so all of its content is checked.
    """
    try:
        with (folder / TALLY).open("rb") as file:
            content = json.loads(file.read(TALLY_BYTES))
        tally, notes = RowCounts(**content["tally"]), notes_from(content["notes"])
        if not all(type(count) is int and count >= 0 for count in asdict(tally).values()):
            return None
        if content["sha256"] != {name: sha256(folder / name) for name in ARRAYS}:
            return None
        starts = read_array(folder / "starts.npy", np.int64)
        weights = read_array(folder / "weights.npy", np.float32)
        columns = {
            name: read_array(folder / f"{name}.npy", column.dtype)
            for name, column in CACHED.items()
        }
        total = int(starts[-1])
        tokens = map_array(folder / "tokens.bin", np.uint32, total)
        trained = map_array(folder / "trained.bin", np.bool_, total)
    except (OSError, EOFError, ValueError, TypeError, LookupError, RecursionError):
        return None
    if len(starts) != len(weights) + 1 or tally.tokens != total or starts[0] != 0:
        return None
    if (np.diff(starts) < 2).any():  # an example needs a target and a token that predicts it
        return None
    columns = {name: values for name, values in columns.items() if len(values)}
    if any(len(each) != len(weights) or not np.isfinite(each).all() for each in columns.values()):
        return None
    if not ((weights >= 0) & (weights <= FLOAT32_MAX)).all():
        return None
    if not can_be_trained(folder / "trained.bin", starts):
        return None
    with contextlib.suppress(OSError):
        os.utime(folder)  # marks it as used, for `delete_unused`
    return Examples(tokens, trained, starts, weights, tally, columns, notes)


def has_tokens(examples: Examples, vocabulary: int | None) -> bool:
    """Return whether all token ids in the examples are within the vocabulary size."""
    if vocabulary is None or not len(examples):
        return True
    return largest(examples.tokens_file, np.uint32) < vocabulary


def can_be_trained(path: Path, starts: np.ndarray) -> bool:
    """Return whether each byte of a file is 0 or 1, and 0 for the first token of each example."""
    with path.open("rb") as file:
        for block in blocks_of(file):
            values = np.frombuffer(block, np.uint8)
            begin = file.tell() - len(block)
            first = starts[slice(*np.searchsorted(starts, [begin, file.tell()]))]
            if values.max() > 1 or values[first - begin].any():
                return False
    return True


def largest(path: Path, dtype: Any) -> int:
    """The largest item of a file. Reads block by block, since mapped pages would stay in memory."""
    with path.open("rb") as file:
        found = (int(np.frombuffer(block, dtype).max()) for block in blocks_of(file))
        return max(found, default=0)


def blocks_of(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def read_array(path: Path, dtype: Any) -> np.ndarray:
    """Read a small one-dimensional array. Raises ValueError if the file has anything else."""
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)  # checks its size against the file
    if mapped.dtype != dtype or mapped.ndim != 1:
        raise ValueError(f"{path}: has dtype {mapped.dtype} and {mapped.ndim} dimensions")
    return np.array(mapped)


def map_array(path: Path, dtype: Any, size: int) -> np.ndarray:
    """Memory-map a file as an array of `size` items. Raises ValueError if its size differs."""
    if path.stat().st_size != size * np.dtype(dtype).itemsize:
        raise ValueError(f"{path}: wrong size")
    return np.memmap(path, dtype, mode="r") if size else np.zeros(0, dtype)


def delete_unused(folder: Path) -> None:
    """Delete tokenized rows (private data!) and leftovers unused for KEEP_CACHE_DAYS."""
    oldest = time.time() - KEEP_CACHE_DAYS * 86400
    for entry in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError):
            if entry.stat().st_mtime < oldest:
                shutil.rmtree(entry, ignore_errors=True)
