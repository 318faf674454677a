"""The data files in a folder, and which of them are training, validation and test rows."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from your_ai.data.hub_datasets import SPLIT_NAMES, split_named, split_of
from your_ai.data.records import SUFFIXES, suffix_of, without_compression
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened
from your_ai.gates.untrusted import read_json

SPLITS = ("train", "valid", "test")
# `save_to_disk` of the package datasets writes these; STATE lists the files of one split.
STATE = "state.json"
ABOUT_DATASETS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", STATE)
ABOUT = ("readme", "license")  # texts about the files in a folder
NUMBER = re.compile(r"\d+")


def data_files(folder: Path) -> list[Path]:
    """The data files below a folder, in order of their names; hidden ones do not count."""
    with named_errors(folder, "read"):
        found = [
            Path(place, name)
            for place, folders, names in os.walk(folder)
            for name in names
            if not any(part.startswith(".") for part in Path(place, name).relative_to(folder).parts)
        ]
    named = sorted(path for path in found if suffix_of(path) in SUFFIXES)
    for path in named:
        if path.is_symlink() and not path.exists():
            raise UserError(f"{path}: is a link to a file that does not exist; remove it")
    caches = {path for state in found if state.name == STATE for path in unlisted(state)}
    return [
        path
        for path in named
        if path.is_file() and path.name not in ABOUT_DATASETS and path not in caches
    ]


def unlisted(state: Path) -> list[Path]:
    """The Arrow files beside a STATE that are no part of the dataset: caches of `map`."""
    try:
        listed = read_json(state, "").get("_data_files")
    except UserError:  # of something else
        return []
    if not isinstance(listed, list) or not all(isinstance(part, dict) for part in listed):
        return []
    names = {part.get("filename") for part in listed}
    return [path for path in state.parent.glob("*.arrow") if path.name not in names]


def splits_in(folder: Path, files: Sequence[Path]) -> dict[str, tuple[Path, ...]]:
    """Those of a folder's data files that are read, by split.

    If training files lie at the top, subfolders are not read; else the name of a file tells its
    split, or that of its folder. A file whose whole name is that of a split, such as
    `train.jsonl`, excludes `train_old.jsonl` beside it.
    """
    top = [file for file in files if file.parent == folder]
    has_train = any(split_named(file.name) == "train" for file in top)
    named = {file: split_in(folder, file) for file in (top if has_train else files)}
    if (folder / STATE).is_file() and not any(named.values()):
        named = {file: "train" for file in files if suffix_of(file) == ".arrow"}
    whole = {(file.parent, name) for file, name in named.items() if name and is_whole(file, name)}
    splits: dict[str, tuple[Path, ...]] = dict.fromkeys(SPLITS, ())
    for file, name in named.items():
        if name and (is_whole(file, name) or (file.parent, name) not in whole):
            splits[name] += (file,)
    return {split: found for split, found in splits.items() if found}


def split_in(folder: Path, file: Path) -> str | None:
    """The split that a file's name, or that of a folder it is in, says; None if neither does."""
    if split_named(file.name) is None and file.stem.lower() in ABOUT:
        return None
    return split_of(file.relative_to(folder).as_posix())


def is_whole(file: Path, split: str) -> bool:
    """Return whether a file's name is that of the split and nothing else."""
    return Path(without_compression(file.name)).stem in SPLIT_NAMES[split]


def notes_on(
    folder: Path, files: Sequence[Path], splits: dict[str, tuple[Path, ...]]
) -> tuple[str, ...]:
    """Say which files are read and which not, if the names of a folder's files leave that open."""
    notes = []
    for split, read in splits.items():
        parts = {(file.parent, NUMBER.sub("", file.name)) for file in read}
        if len(parts) > 1:
            notes.append(f"{split}: {listed(folder, read)} are read together")
    used = {file for read in splits.values() for file in read}
    left = [file for file in files if file not in used and split_in(folder, file) is not None]
    if left and "train" in splits:
        notes.append(
            f"{folder.name or folder}: {listed(folder, left)} not read, beside "
            f"{listed(folder, splits['train'])}; name files with --data A,B to use them"
        )
    return tuple(notes)


def listed(folder: Path, files: Sequence[Path]) -> str:
    """The paths of files in a folder."""
    return shortened(", ".join(file.relative_to(folder).as_posix() for file in files))
