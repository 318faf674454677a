"""Datasets of the Hugging Face hub, as `hf:OWNER/NAME[:CONFIG][@REVISION][#SPLIT[FROM:TO]]`.

Their files are downloaded like those of models: continued after interruptions, checked by their
hashes, and in place only when complete. In the folder they are named by their split, so the folder
is one that --data takes.
"""

from __future__ import annotations

import re
import time
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from your_ai.data.records import DOCUMENTS, SUFFIXES, without_compression
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened, shown, size_text
from your_ai.gates.untrusted import is_hash, path_fault
from your_ai.hub import download, remote
from your_ai.hub.check import RECORD, read_record, size_fault
from your_ai.hub.download import INCOMPLETE, PARTS, DownloadProgress
from your_ai.hub.find import PART, store
from your_ai.hub.remote import MOST_FILE_BYTES, Listing, RemoteFile

PREFIX = "hf:"
FORM = f"{PREFIX}OWNER/NAME[:CONFIG][@REVISION][#SPLIT[FROM:TO]]"
NAME = re.compile(
    rf"{PREFIX}(?P<repo>{PART}/{PART})(?::(?P<config>[\w.+-]{{1,100}}))?"
    r"(?:@(?P<revision>[\w./-]{1,100}))?(?:#(?P<rows>.*))?"
)
PLACE = r"-?[0-9]{1,12}"
ROWS = re.compile(
    rf"(?P<split>\w{{1,100}})"
    rf"(?:\[(?P<first>{PLACE})?:(?P<past>{PLACE})?\]"
    rf"|\[(?:(?P<first_percent>{PLACE})%)?:(?:(?P<past_percent>{PLACE})%)?\])?"
)
# The names of a split's files, up to a dash, underscore or dot: train-00000-of-00002.parquet.
SPLIT_NAMES = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test", "eval"),
}
PLAIN_PLACES = (".", "data")  # folders of a repository without configurations
CONVERTED = "refs/convert/parquet"  # the branch where the hub keeps every dataset as Parquet
MOST_FILES = 10_000


class MissingDataset(UserError):
    """The dataset is not on this machine, but can be downloaded."""


@dataclass(frozen=True)
class SplitRows:
    """Rows of a split: `train[:80%]`, `train[-100:]`, `train`."""

    split: str
    """train, valid or test."""
    first: int | None = None
    past: int | None = None
    """The first row and the one after the last; negative: from the end; None: all."""
    percent: bool = False
    """Whether both are in percent of the rows, rounded to the nearest row."""

    def bounds(self, count: int) -> tuple[int, int]:
        """The first row and the one after the last, of `count` rows."""

        def place(value: int | None, otherwise: int) -> int:
            if value is None:
                return otherwise
            row = round(value * count / 100) if self.percent else value
            return min(max(count + row, 0) if row < 0 else row, count)

        return place(self.first, 0), place(self.past, count)


@dataclass(frozen=True)
class DatasetName:
    """The dataset that `hf:...` names."""

    given: str
    repo: str
    config: str | None
    revision: str | None
    rows: SplitRows | None = None
    """Only these rows; None: every split."""

    @property
    def folder(self) -> Path:
        """The folder where its files are, or will be."""
        parts = [*self.repo.split("/"), *filter(None, [self.config])]
        name = "--".join(parts) + (f"@{self.revision}" if self.revision else "")
        return store() / "datasets" / name.replace("/", "--")


def parse_name(given: str) -> DatasetName:
    """Raises UserError if it is not of this form."""
    found = NAME.fullmatch(given)
    if found is None or ".." in given:
        raise UserError(f"--data {shortened(given)}: expected {FORM}")
    rows = None if found["rows"] is None else parse_rows(given, found["rows"])
    return DatasetName(given, found["repo"], found["config"], found["revision"], rows)


def parse_rows(given: str, text: str) -> SplitRows:
    """Parse `train[:80%]`. Raises UserError if it is not of this form."""
    found = ROWS.fullmatch(text)
    if found is None:
        raise UserError(f"--data {shortened(given)}: expected {FORM}, like #train[:80%]")
    split = next((s for s, names in SPLIT_NAMES.items() if found["split"] in names), None)
    if split is None:
        raise UserError(f"--data {shortened(given)}: the split is none of train, validation, test")
    places = found["first"], found["past"]
    percents = found["first_percent"], found["past_percent"]
    first, past = (None if p is None else int(p) for p in (percents if any(percents) else places))
    return SplitRows(split, first, past, any(percents))


def find_dataset(given: str) -> Path:
    """The folder of a dataset. Raises MissingDataset if it is not downloaded; uses no network."""
    name = parse_name(given)
    record = read_record(name.folder)
    if record is None:
        raise MissingDataset(
            f"--data {given}: is not on this machine; download it: your_ai download {given}"
        )
    faults = (size_fault(name.folder, record, file) for file in record.files)
    if fault := next(filter(None, faults), None):
        raise UserError(
            f"{fault}; delete the folder and download it again: your_ai download {given}"
        )
    return name.folder


def downloading(given: str) -> Generator[DownloadProgress, None, Path]:
    """Download a dataset unless it is here; yield progress, return its folder. Raises UserError."""
    name = parse_name(given)
    remote.check_endpoint()
    at, target = DownloadProgress(name=given), name.folder
    if (target / RECORD).exists():
        yield replace(at, note=f"{given} is complete in {find_dataset(given)}")
        return target
    listing = yield from ask(at, name)
    asked = name.revision or remote.DEFAULT_REVISION
    with download.open_lock(target) as lock:
        while not download.taken(lock):
            yield replace(at, doing="waiting")
            time.sleep(download.POLL_S)
        if (target / RECORD).exists():  # another process has downloaded it
            return target
        folder = target.with_name(f"{INCOMPLETE}{target.name}")
        with named_errors(folder, "written"):
            download.unlink_links(folder, folder / PARTS)
            (folder / PARTS).mkdir(parents=True, exist_ok=True)
        at = replace(at, files=len(listing.files), total_bytes=listing.size_bytes)
        at = yield from download.keep(at, listing, folder)
        download.check_room(at, listing, folder)
        for file in listing.files:
            if not download.place_in(folder, file.name).exists():
                at = yield from download.fetch(at, listing, file, folder, asked)
        with named_errors(folder, "written"):
            download.move(listing, folder, target, asked)
    size = size_text(listing.size_bytes)
    yield replace(
        at, note=f"{size} in {len(listing.files)} files, each checked by its hash: {target}"
    )
    return target


def remote_listing(given: str) -> Listing:
    """The files that would be downloaded. Raises UserError if the hub does not say."""
    return download.result_of(ask(DownloadProgress(name=given), parse_name(given)))


def ask(at: DownloadProgress, name: DatasetName) -> Generator[DownloadProgress, None, Listing]:
    """Get the list of the dataset's files: its own, or else those that the hub converted."""
    revision = name.revision or remote.DEFAULT_REVISION

    def listed(revision: str) -> Listing | None:
        content = remote.described(name.repo, revision, kind="dataset")
        return listing_of(name, content)

    found = yield from download.ask(at, name.repo, revision, listed)
    if found is None and name.revision is None:
        found = yield from download.ask(at, name.repo, CONVERTED, listed)
    if found is None:
        raise UserError(
            f"{name.given}: has no Parquet, JSON or CSV files; convert it and give the files"
        )
    return found


def listing_of(name: DatasetName, content: dict[str, Any]) -> Listing | None:
    """The files to download, named by their split; None if there are none in a known form.

    Raises UserError if the dataset has several configurations and none was chosen.
    """
    files: dict[str, RemoteFile] = {}
    for sibling in content["siblings"]:
        path = sibling.get("rfilename")
        if (fault := path_fault(path)) is not None:
            raise UserError(f"{name.repo}: has a file '{shown(path)}', which {fault}; refused")
        if form(path) is not None and not path.startswith("."):
            files[path] = file_of(name.repo, path, sibling)
    if len(files) > MOST_FILES:
        raise UserError(f"{name.repo}: has {len(files)} files of data; at most {MOST_FILES:,}")
    chosen = of_config(name, sorted(files))
    best = [path for path in chosen if form(path) == "parquet"] or chosen
    splits = {path: split_of(path) for path in best}
    if "train" not in splits.values():
        splits = {path: split or "train" for path, split in splits.items()}
    named = []
    for number, (path, split) in enumerate(splits.items()):
        if split is not None:
            ends = 1 + (without_compression(path) != path.lower())
            suffix = "".join(PurePosixPath(path).suffixes[-ends:])
            named.append(replace(files[path], name=f"{split}-{number:05}{suffix}", path=path))
    if not named:
        return None
    return Listing(repo=name.repo, revision=content["sha"], files=tuple(named), kind="dataset")


def form(path: str) -> str | None:
    """The form of a data file by its name; None for other files."""
    suffix = PurePosixPath(without_compression(path)).suffix
    found = SUFFIXES.get(suffix)
    return None if found in DOCUMENTS else found


def of_config(name: DatasetName, paths: list[str]) -> list[str]:
    """The files of the configuration that was chosen, or of the only one."""
    places: dict[str, list[str]] = {}
    for path in paths:
        folders = [part for part in path.split("/")[:-1] if split_named(part) is None]
        place = folders[-1] if folders else "."
        places.setdefault(place, []).append(path)
    if name.config is not None:
        if name.config in places:
            return places[name.config]
        begins = [
            p for p in paths if p.split("/")[-1].startswith((f"{name.config}-", f"{name.config}."))
        ]
        if begins:
            return begins
        raise UserError(f"{name.given}: has no configuration {name.config}{choices(name, places)}")
    plain = [path for place in PLAIN_PLACES for path in places.get(place, ())]
    if plain or not places:
        return plain
    if len(places) == 1 or "default" in places:
        return places.get("default") or next(iter(places.values()))
    raise UserError(f"{name.given}: has several configurations{choices(name, places)}")


def choices(name: DatasetName, places: dict[str, list[str]]) -> str:
    listed = shortened(", ".join(place for place in places if place not in PLAIN_PLACES))
    return f"; choose one of: {listed}" if listed else ""


def split_of(path: str) -> str | None:
    """The split that a file's name or one of its folders names; None if neither does."""
    *folders, file = path.split("/")
    for part in (file, *reversed(folders)):
        if (split := split_named(part)) is not None:
            return split
    return None


def split_named(part: str) -> str | None:
    begin = re.split(r"[-_.]", part.lower(), maxsplit=1)[0]
    return next((split for split, names in SPLIT_NAMES.items() if begin in names), None)


def file_of(repo: str, path: str, sibling: dict[str, Any]) -> RemoteFile:
    """A file of the hub's answer. Raises UserError if it is not fully described."""
    size_bytes, large = sibling.get("size"), sibling.get("lfs")
    hashed = large.get("sha256") if isinstance(large, dict) else sibling.get("blobId")
    if type(size_bytes) is not int or not 0 <= size_bytes <= MOST_FILE_BYTES or not is_hash(hashed):
        raise UserError(f"{repo}: {shown(path)}: the hub does not describe it; refused")
    if large is not None and len(str(hashed)) != 64:
        raise UserError(f"{repo}: {shown(path)}: has a hash '{shown(hashed)}'; refused")
    return RemoteFile(path, size_bytes, str(hashed))
