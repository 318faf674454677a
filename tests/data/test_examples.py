"""Encoded rows on disk: long rows, and when a file is encoded again."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import chat, write_rows
from your_ai.data import examples
from your_ai.data.encode import EncodedRow, Encoder
from your_ai.data.examples import Examples, RowCounts, fit, load_examples
from your_ai.data.lines import ROW_LIMIT, RowLimit
from your_ai.data.notes import Notes
from your_ai.data.rows import Row
from your_ai.errors import UserError
from your_ai.files import sha256

CACHE = Path("cache")
WHERE = "train.jsonl:1"


@dataclass
class Plain:
    """Encodes text rows of numbers: `5 6 +7 +8` is four tokens, and the last two are trained."""

    mask_prompt: bool = True
    vocabulary: int | None = None
    limit: RowLimit = ROW_LIMIT
    kind: str = "answers"
    notes: Notes = field(default_factory=Notes)
    encoded: list[str] = field(default_factory=list)

    def ahead(self, rows: Iterable[Row]) -> Iterable[Row]:
        return rows

    def encode_all(self, row: Row) -> list[EncodedRow]:
        return [self.encode(row)]

    def encode(self, row: Row) -> EncodedRow:
        self.encoded.append(row.where)
        words = row.content.text.split()
        if "bad" in words:
            raise UserError(f"{row.where}: a bad row")
        tokens = np.array([int(word) for word in words], np.uint32)
        return EncodedRow(tokens, np.array([word.startswith("+") for word in words]))


class Refusing(Plain):
    """An encoder that must not be called."""

    def encode_all(self, row: Row) -> list[EncodedRow]:
        raise AssertionError(f"{row.where} was encoded again")


def load(encoder: Any, *texts: str, name: str = "train.jsonl", **changes: Any) -> Examples:
    """Write a file of text rows and load its examples. Without texts, the file is not changed."""
    path = Path(name)
    if texts:
        write_rows(path, [{"text": text} for text in texts])
    options = {"tokenizer_sha256": "t", "max_seq_length": 8, "too_long": "error", "cache": CACHE}
    return load_examples(path, encoder, **{**options, **changes})


def folders(cache: Path = CACHE) -> list[Path]:
    return sorted((cache / "examples").glob("*"))


def lists_of(loaded: Examples) -> list[tuple[list[int], list[bool]]]:
    return [
        (e.tokens.tolist(), e.trained.tolist()) for e in (loaded[i] for i in range(len(loaded)))
    ]


SHORT = ("1 2 +3", "4 +5", "6 +7 8 +9")


# Loaded examples


def test_loaded_examples_are_the_encoded_rows():
    assert lists_of(load(Plain(), *SHORT)) == [
        ([1, 2, 3], [False, False, True]),
        ([4, 5], [False, True]),
        ([6, 7, 8, 9], [False, True, False, True]),
    ]
    loaded = load(Plain(), *SHORT)
    assert loaded.lengths.tolist() == [3, 2, 4]
    assert loaded.tally == RowCounts(rows=3, examples=3, tokens=9, trained_tokens=4)
    assert all(isinstance(array, np.memmap) for array in (loaded.tokens, loaded.trained))


def test_each_piece_of_a_row_has_its_weight():
    rows = [("1 +2", 0), ("1 +2", 0.5), ("1 +2", 3), ("1 +2 +3 +4 +5", 0.25)]
    write_rows(Path("train.jsonl"), [{"text": text, "weight": weight} for text, weight in rows])
    found = load(Plain(), max_seq_length=3, too_long="split").weights.tolist()
    assert found == [0.0, 0.5, 3.0, 0.25, 0.25]


def test_a_file_may_mix_row_formats(demo_tokenizer):
    path = write_rows(
        Path("mixed.jsonl"),
        [
            chat("hi", "ok"),
            {"prompt": "hi", "completion": "ok"},
            {"instruction": "hi", "output": "ok"},
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ok"}]},
        ],
    )
    loaded = load_examples(path, Encoder(demo_tokenizer), "t", 64, "error", CACHE)
    assert len({tuple(example) for example, _ in lists_of(loaded)}) == 1


# The cache


def test_a_second_load_uses_the_cache():
    write_rows(Path("train.jsonl"), [{"text": "1 +2 +3", "weight": 0.5}])
    first = load(Plain(), max_seq_length=2, too_long="truncate")
    again = load(Refusing(), max_seq_length=2, too_long="truncate")
    assert lists_of(again) == lists_of(first)
    assert (again.tally, again.weights.tolist()) == (first.tally, first.weights.tolist())


def test_a_copy_of_the_file_uses_the_cache():
    load(Plain(), *SHORT)
    shutil.copy("train.jsonl", "copy.jsonl")
    assert lists_of(load(Refusing(), name="copy.jsonl")) == lists_of(load(Refusing()))


@pytest.mark.parametrize(
    ("mask_prompt", "version", "change"),
    [
        (True, 0, {"max_seq_length": 9}),
        (True, 0, {"too_long": "split"}),
        (True, 0, {"tokenizer_sha256": "u"}),
        (False, 0, {}),
        (True, 1, {}),
    ],
)
def test_a_changed_setting_or_format_of_the_cache_encodes_again(
    monkeypatch, mask_prompt, version, change
):
    load(Plain(), *SHORT)
    monkeypatch.setattr(examples, "FORMAT", examples.FORMAT + version)
    encoder = Plain(mask_prompt=mask_prompt)
    load(encoder, **change)
    assert len(encoder.encoded) == 3


def test_a_changed_file_is_encoded_again():
    load(Plain(), *SHORT)
    assert lists_of(load(Plain(), "1 2 +4", *SHORT[1:]))[0][0] == [1, 2, 4]


@pytest.mark.parametrize("bad", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_bad_row_leaves_no_cache_and_without_it_the_file_is_loaded(bad):
    texts = [*SHORT[:bad], "bad", *SHORT[bad:]]
    with pytest.raises(UserError, match=f"^train.jsonl:{bad + 1}: a bad row"):
        load(Plain(), *texts)
    assert folders() == []
    assert len(load(Plain(), *SHORT)) == 3


def test_a_line_that_is_not_json_leaves_no_cache():
    write_rows(Path("train.jsonl"), [{"text": "1 +2"}, "no JSON"])
    with pytest.raises(UserError, match=r"^train\.jsonl:2: is not valid JSON"):
        load(Plain())
    assert folders() == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path: Path) -> None:
    path.write_bytes(b"")


def scramble(path: Path) -> None:
    path.write_bytes(b"\xff" * path.stat().st_size)


FILES = ("tokens.bin", "trained.bin", "starts.npy", "weights.npy", "tally.json")
DAMAGE = [
    (name, harm)
    for name in FILES
    for harm in (cut, grow, empty, scramble, Path.unlink)
    # Not detected: bytes that are valid tokens, and arrays with trailing bytes.
    if not (harm is scramble and name.endswith(".bin"))
    and not (harm is grow and name.endswith(".npy"))
]


@pytest.mark.parametrize(
    ("name", "harm"), DAMAGE, ids=[f"{harm.__name__}-{name}" for name, harm in DAMAGE]
)
def test_a_damaged_cache_is_rebuilt(name, harm):
    first = load(Plain(), *SHORT)
    expected = (lists_of(first), first.weights.tolist(), first.tally)
    (folder,) = folders()
    harm(folder / name)
    again = load(Plain())
    assert (lists_of(again), again.weights.tolist(), again.tally) == expected


@pytest.mark.parametrize("weights", [2, 4])
def test_a_cache_with_inconsistent_files_or_a_wrong_tally_is_rebuilt_and_used(weights):
    load(Plain(), *SHORT)
    (folder,) = folders()
    np.save(folder / "weights.npy", np.ones(weights, np.float32))
    assert len(load(Plain())) == 3
    (folder / "tally.json").write_text('{"rows": 1, "tokens": 4}')
    assert load(Plain()).tally.rows == 3
    assert len(load(Refusing())) == 3


def save(name: str, array: np.ndarray) -> Callable[[Path], object]:
    return lambda folder: np.save(folder / name, array)


FORGED = {
    "a first row that does not start at 0": save("starts.npy", np.array([1, 3, 6, 8])),
    "rows of negative length": save("starts.npy", np.array([0, 7, 3, 8])),
    "an empty row": save("starts.npy", np.array([0, 3, 3, 8])),
    "starts of another type": save("starts.npy", np.array([0.0, 3.0, 6.0, 8.0])),
    "starts of two dimensions": save("starts.npy", np.array([[0, 3], [6, 8]])),
    "objects": lambda folder: np.save(folder / "starts.npy", np.array([None]), allow_pickle=True),
    "weights that are not numbers": save("weights.npy", np.full(3, np.nan, np.float32)),
    "weights below 0": save("weights.npy", np.full(3, -1, np.float32)),
    "a first token that is trained": lambda folder: (folder / "trained.bin").write_bytes(b"\1" * 8),
    "neither true nor false": lambda folder: (folder / "trained.bin").write_bytes(b"\0\2" * 4),
    "counts that are not numbers": lambda folder: change_tally(folder, rows="3"),
    "counts below 0": lambda folder: change_tally(folder, dropped=-1),
}


def change_tally(folder: Path, **counts: Any) -> None:
    content = json.loads((folder / "tally.json").read_text())
    content["tally"] |= counts
    (folder / "tally.json").write_text(json.dumps(content))


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_cache_is_rebuilt(name):
    """Its checksums are right: anybody who can write to the cache can compute them."""
    first = lists_of(load(Plain(), "1 2 +3", "4 5 +6", "7 +8"))
    (folder,) = folders()
    FORGED[name](folder)
    content = json.loads((folder / "tally.json").read_text())
    content["sha256"] = {name: sha256(folder / name) for name in examples.ARRAYS}
    (folder / "tally.json").write_text(json.dumps(content))
    assert examples.open_examples(folder) is None
    assert lists_of(load(Plain())) == first


def test_cached_tokens_outside_the_vocabulary_are_encoded_again():
    load(Plain(), "1 2 +9")
    assert len(load(Refusing(vocabulary=10))) == 1
    encoder = Plain(vocabulary=9)
    load(encoder)
    assert encoder.encoded


def test_a_cache_that_cannot_be_written_is_reported():
    CACHE.write_text("a file, not a folder")
    with pytest.raises(UserError, match=r"^cache/examples: cannot write tokenized rows .*YOUR_AI_"):
        load(Plain(), *SHORT)


def age(path: Path, days: float) -> None:
    then = path.stat().st_mtime - days * 86400
    os.utime(path, (then, then))


@pytest.mark.parametrize("is_used", [False, True])
def test_a_cache_unused_for_a_month_is_deleted(is_used):
    load(Plain(), *SHORT)
    (old,) = folders()
    age(old, days=31)
    if is_used:
        load(Refusing())
    load(Plain(), "1 +2", name="other.jsonl")
    assert old.exists() == is_used


# Rows that are too long


def sequence(length: int, trained: list[bool] | None = None) -> EncodedRow:
    """Tokens 0, 1, 2, ... By default all except the first are trained."""
    trained = [False] + [True] * (length - 1) if trained is None else trained
    return EncodedRow(np.arange(length, dtype=np.uint32), np.array(trained, bool))


def test_a_row_of_the_maximum_length_is_kept_whole():
    assert [outcome for _, outcome in fit(sequence(8), 8, "error", WHERE)] == ["whole"]


def test_the_error_names_a_row_that_is_too_long():
    with pytest.raises(UserError, match=r"^train\.jsonl:2: 9 tokens, more than --max-seq-length 8"):
        load(Plain(), "1 +2", " ".join(f"+{i}" for i in range(9)))


def test_truncation_keeps_the_beginning_of_a_row():
    ((piece, outcome),) = fit(sequence(20), 8, "truncate", WHERE)
    assert (piece.tokens.tolist(), outcome) == (list(range(8)), "truncated")


LONG = st.integers(2, 40).flatmap(
    lambda n: st.lists(st.booleans(), min_size=n, max_size=n).map(
        lambda trained: sequence(n, [False, *trained[1:]])
    )
)
WINDOWS = st.integers(2, 12)


@given(example=LONG, window=WINDOWS)
def test_split_trains_each_target_once(example, window):
    trained = [
        int(token)
        for piece, _ in fit(example, window, "split", WHERE)
        if piece is not None
        for token in piece.tokens[piece.trained]
    ]
    assert trained == np.flatnonzero(example.trained).tolist()


@given(example=LONG, window=WINDOWS)
def test_split_predicts_each_target_from_the_token_before(example, window):
    for piece, _ in fit(example, window, "split", WHERE):
        if piece is not None:
            at = np.flatnonzero(piece.trained)
            np.testing.assert_array_equal(piece.tokens[at - 1] + 1, piece.tokens[at])


@given(example=LONG, window=WINDOWS, too_long=st.sampled_from(["truncate", "split"]))
def test_pieces_fit_and_have_a_target_that_is_not_their_first_token(example, window, too_long):
    pieces, outcomes = zip(*fit(example, window, too_long, WHERE), strict=True)
    for piece in pieces:
        if piece is not None:
            assert 2 <= len(piece.tokens) <= window
            assert not piece.trained[0]
            assert piece.trained.any() or len(example.tokens) <= window
    # Each row is counted once.
    assert [outcome == "more" for outcome in outcomes] == [False] + [True] * (len(outcomes) - 1)


def test_splitting_does_not_change_the_row():
    example = sequence(20)
    list(fit(example, 8, "split", WHERE))
    assert example.trained.tolist() == [False] + [True] * 19


LONG_ROWS = (
    "1 +2 +3",  # whole
    "1 2 3 4 5 +6",  # the beginning has nothing to train
    "1 +2 3 4 5 6 +7",  # the middle has nothing to train
    "1 +2 +3 +4 +5 +6 +7",
)


# The pieces are tokens 1-3, 3-5 and 5-7. Of the second row only the last piece has a target, of the
# third row the first and the last.
TALLIES = {
    "truncate": RowCounts(4, 3, truncated=3, dropped=1, tokens=9, trained_tokens=2 + 1 + 2),
    "split": RowCounts(
        4, 7, split=3, dropped=3, tokens=3 + 2 + 6 + 9, trained_tokens=2 + 1 + 2 + 6
    ),
}


@pytest.mark.parametrize("too_long", TALLIES)
def test_the_tally_counts_truncated_and_split_rows(too_long):
    loaded = load(Plain(), *LONG_ROWS, max_seq_length=3, too_long=too_long)
    assert loaded.tally == TALLIES[too_long]


@pytest.mark.parametrize("time", ["first", "from the cache"])
def test_a_file_with_only_dropped_rows_is_refused(time):
    options = {"max_seq_length": 4, "too_long": "truncate"}
    encoder = Plain()
    if time != "first":
        with pytest.raises(UserError):
            load(encoder, "1 2 3 4 +5", **options)
        encoder = Refusing()
    with pytest.raises(UserError, match=r"^train\.jsonl: no row .*--max-seq-length 4; raise it"):
        load(encoder, "1 2 3 4 +5", **options)


@given(
    rows=st.lists(st.lists(st.booleans(), min_size=1, max_size=20), min_size=1, max_size=6),
    window=WINDOWS,
    too_long=st.sampled_from(["truncate", "split"]),
)
def test_the_tally_matches_the_examples(tmp_path_factory, rows, window, too_long):
    folder = tmp_path_factory.mktemp("tally")
    texts = ["1 " + " ".join("+2" if on else "2" for on in [*row, True]) for row in rows]
    path = write_rows(folder / "train.jsonl", [{"text": text} for text in [*texts, "1 +2"]])
    loaded = load_examples(path, Plain(), "t", window, too_long, folder / "cache")
    tally = loaded.tally
    assert (tally.rows, tally.examples, tally.tokens, tally.trained_tokens) == (
        len(rows) + 1,
        len(loaded),
        int(loaded.lengths.sum()),
        sum(int(loaded[i].trained.sum()) for i in range(len(loaded))),
    )


# Memory

MANY = 30_000


def test_encoding_many_rows_keeps_few_objects_alive():
    """Each encoded row has at least five objects."""
    tokens, trained = np.arange(4, dtype=np.uint32), np.array([False, False, True, True])
    blocks: list[int] = []

    class Copying:
        mask_prompt, vocabulary, limit, kind = True, None, ROW_LIMIT, "answers"
        notes, ahead = Notes(), staticmethod(iter)
        asked = 0

        def encode_all(self, row: Row) -> list[EncodedRow]:
            if self.asked % 5_000 == 0:
                blocks.append(sys.getallocatedblocks())
            self.asked += 1
            return [EncodedRow(tokens.copy(), trained.copy())]

    Path("train.jsonl").write_bytes(b'{"text": "1", "weight": 0.5}\n' * MANY)
    assert len(load(Copying())) == MANY
    assert (max(blocks) - blocks[0]) / MANY < 2
