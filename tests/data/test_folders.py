"""Which files of a folder are read, and what is said of the others."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from tests.data.test_records import write_table
from your_ai.data.folders import data_files, notes_on, splits_in

FOLDER = Path("d")


def made(*names: str) -> list[Path]:
    """The data files of FOLDER with these files in it."""
    for name in names:
        path = FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    return data_files(FOLDER)


def read(*names: str) -> dict[str, list[str]]:
    splits = splits_in(FOLDER, made(*names))
    return {s: [f.relative_to(FOLDER).as_posix() for f in files] for s, files in splits.items()}


def said(*names: str) -> tuple[str, ...]:
    files = made(*names)
    return notes_on(FOLDER, files, splits_in(FOLDER, files))


LAYOUTS = {
    "backups beside a file": (
        ["train.jsonl", "train_old.jsonl", "train.csv.jsonl", "train-2.jsonl", "valid.jsonl"],
        {"train": ["train.jsonl"], "valid": ["valid.jsonl"]},
    ),
    "subfolders below training files": (
        ["train.jsonl", "raw/train.jsonl", "old/valid.jsonl", "test.csv"],
        {"train": ["train.jsonl"], "test": ["test.csv"]},
    ),
    "subfolders below numbered files": (
        ["train-00000-of-00001.parquet", "old/train.jsonl"],
        {"train": ["train-00000-of-00001.parquet"]},
    ),
    "compressed": (["train.jsonl.zst", "train_old.jsonl.zst"], {"train": ["train.jsonl.zst"]}),
    "folders of splits": (
        ["train/0000.parquet", "train/0001.parquet", "validation/0000.parquet", "README.md"],
        {
            "train": ["train/0000.parquet", "train/0001.parquet"],
            "valid": ["validation/0000.parquet"],
        },
    ),
    "a name and a folder that differ": (
        ["train/valid.jsonl", "train/a.jsonl"],
        {"train": ["train/a.jsonl"], "valid": ["train/valid.jsonl"]},
    ),
    "about the files": (["train/a.csv", "train/README.md"], {"train": ["train/a.csv"]}),
    "in a folder of another name": (
        ["data/train-0.csv", "data/train-1.csv", "data/test.csv"],
        {"train": ["data/train-0.csv", "data/train-1.csv"], "test": ["data/test.csv"]},
    ),
}


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_names_in_a_folder_tell_what_is_read(kind):
    names, wanted = LAYOUTS[kind]
    assert read(*names) == wanted


@pytest.mark.parametrize(
    "names",
    [
        ["train.jsonl", "valid.jsonl", "test.jsonl", "other.csv"],
        ["train-00000-of-00002.parquet", "train-00001-of-00002.parquet"],
        ["train/0000.parquet", "train/0001.parquet"],
    ],
)
def test_nothing_is_said_where_names_leave_nothing_open(names):
    assert said(*names) == ()


def test_files_that_are_not_read_are_named():
    assert said("train.jsonl", "train_old.jsonl", "raw/train.jsonl") == (
        "d: raw/train.jsonl, train_old.jsonl not read, beside train.jsonl; name files with --data "
        "A,B to use them",
    )


@pytest.mark.parametrize(
    "names",
    [["train.csv", "train.jsonl"], ["train-a.csv", "train-b.csv"], ["a/train.csv", "b/train.csv"]],
)
def test_files_that_are_read_together_are_named(names):
    assert said(*names) == (f"train: {', '.join(names)} are read together",)


def save_to_disk(folder: Path, rows: list[dict]) -> None:
    """As `Dataset.save_to_disk` of the package datasets does, with a cache of `map` beside it."""
    folder.mkdir(parents=True)
    for name in ("data-00000-of-00001.arrow", "cache-0123456789abcdef.arrow"):
        write_table(folder / name, pa.Table.from_pylist(rows))
    state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_folders_that_datasets_saved_are_read_without_their_caches():
    save_to_disk(FOLDER, [{"text": "a"}])
    assert read() == {"train": ["data-00000-of-00001.arrow"]}


def test_folders_of_splits_that_datasets_saved_are_read():
    for name in ("train", "validation", "test"):
        save_to_disk(FOLDER / name, [{"text": "a"}])
    (FOLDER / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "validation"]}))
    part = "data-00000-of-00001.arrow"
    assert read() == {
        "train": [f"train/{part}"],
        "valid": [f"validation/{part}"],
        "test": [f"test/{part}"],
    }
    assert said() == ()
