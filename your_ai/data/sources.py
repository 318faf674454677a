"""What --data and --valid name -> one JSONL file for each split.

A folder or file of JSON lines is used as it is. Everything else (other forms, several files,
--columns, --prompt-template, validation rows to hold out) is written once as JSON lines, each row
checked and with the place that it came from, into the store's cache, under a name made of the
content of all files and of the settings. So a run that resumes finds the same rows or notices that
they changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from your_ai.config import AUTO, DEMO_DATA, FIELDS, FOLDER, NONE, REWARD, TrainConfig, flag
from your_ai.data.columns import Layout, layout_of
from your_ai.data.examples import delete_unused, unwritable
from your_ai.data.folders import SPLITS, data_files, notes_on, splits_in
from your_ai.data.hub_datasets import PREFIX, SplitRows, find_dataset, parse_name, split_named
from your_ai.data.lines import ORIGIN, RowLimit, read_first_row
from your_ai.data.preferences import form_of_rated, of_one_form, parser_of
from your_ai.data.records import (
    DOCUMENTS,
    SUFFIXES,
    form_of,
    is_compressed,
    read_records,
    suffix_of,
)
from your_ai.data.rows import ParseRow, read_rows
from your_ai.errors import UserError, named_errors
from your_ai.files import atomic_folder, packaged, read_text, sha256
from your_ai.gates.paths import missing_text
from your_ai.gates.text import counted, shortened

HELD_OUT_SHARE, LEAST_HELD_OUT, MOST_HELD_OUT = 0.02, 20, 500  # of the rows; rows
ROWS_PER_HELD_OUT = 2  # with fewer rows than this for each, none is held out
MOST_SHARE = 100.0
FORMAT = 3  # increase it when rows are converted differently, so that old copies are not used
ABOUT = "about.json"
ABOUT_BYTES = 1 << 20
HASH_BYTES = 8
STDIN = "-"
LINE_PLACE = re.compile(r"(.*):(\d+)", re.DOTALL)
Progress = Callable[[str, int], None]  # (file, rows done)


@dataclass(frozen=True)
class Source:
    """Files that --data names together."""

    splits: dict[str, tuple[Path, ...]]
    """The files of each split."""
    folder: Path
    """What their names are relative to, so that rows do not depend on where it is."""
    share: float = 1.0
    """How often each training row is used in an epoch."""
    rows: SplitRows | None = None
    """Only these rows of the files, if not None."""
    notes: tuple[str, ...] = ()
    """Which files of a folder are read, where its names leave that open."""


@dataclass(frozen=True)
class Splits:
    """The JSONL file of each split: train, and where there is one valid and test."""

    files: dict[str, Path]
    notes: tuple[str, ...] = ()
    """What the user should know: columns that were guessed, rows that were held out."""
    origins: dict[str, Path] = field(default_factory=dict)
    """The files of prompts whose answers a teacher wrote, by split."""
    are_passages: bool = False
    """Whether all rows are passages of documents."""

    def checksums(self) -> dict[str, str]:
        """The checksums of what is trained or validated, by name."""
        named = {path.name: path for split, path in self.files.items() if split != "test"}
        named |= {f"prompts of {path.name}": path for path in self.origins.values()}
        return {name: sha256(path) for name, path in named.items()}


def find_splits(
    config: TrainConfig, *, to_train: bool = True, progress: Progress = lambda *_: None
) -> Splits:
    """Find the rows of a run; convert them first if they are not JSON lines in a known format.

    to_train: there must be training rows, of which some may be held out.
    Raises UserError if there is no training data, for a row that cannot be used, and for columns
    or a template that do not fit the rows.
    """
    layout = layout_of(config.columns, config.prompt_template, config.row_kind)
    sources = all_sources(config, to_train)
    holds_out = to_train and config.valid == "" and not any("valid" in s.splits for s in sources)
    limit = RowLimit(config.max_row_bytes)
    if (plain := plain_files(sources, layout, limit)) is not None and not holds_out:
        found = Splits(plain)
    else:
        found = converted(sources, layout, config, holds_out, limit, progress)
    notes = [note for source in sources for note in source.notes]
    return replace(found, notes=(*notes, *found.notes), are_passages=are_documents(sources))


def all_sources(config: TrainConfig, to_train: bool = True) -> list[Source]:
    """The sources that --data and --valid name. Raises UserError."""
    sources = sources_of(config.data, to_train)
    if config.valid not in ("", FOLDER):
        sources = [replace(s, splits=without(s.splits, "valid")) for s in sources]
    if config.valid not in ("", FOLDER, NONE):
        sources += validation_sources(config.valid)
    return sources


def source_files(config: TrainConfig) -> list[Path]:
    """The files that --data and --valid name, as they are named, before they are converted."""
    if config.data in DEMO_DATA:  # installed with your_ai
        return []
    return files_in(all_sources(config))


def files_in(sources: Iterable[Source]) -> list[Path]:
    """The files of sources, each once."""
    found = [path for s in sources for files in s.splits.values() for path in files]
    return list(dict.fromkeys(found))


def are_documents(sources: Iterable[Source]) -> bool:
    """Return whether all rows are passages of documents."""
    return all(form_of(path) in DOCUMENTS for path in files_in(sources))


def checked_settings(
    config: TrainConfig, every_row: bool, progress: Progress = lambda *_: None
) -> TrainConfig:
    """The settings with data that can be read again: standard input is kept in a file.

    every_row: check rows also if they need not be converted, as before a model is downloaded.
    Raises UserError for data, columns or a template that cannot be used.
    """
    if config.data == STDIN:
        from your_ai.hub.find import store

        config = replace(config, data=str(save_stdin(store())))
    if STDIN in (config.valid, config.prompt_template):
        raise UserError("-: only --data reads standard input; give a file")
    splits = find_splits(config, progress=progress)
    config = decided_by_rows(config, splits)
    limit = RowLimit(config.max_row_bytes)
    for path in splits.files.values() if every_row else ():
        for count, _ in enumerate(read_rows(path, limit, parser_of(config.row_kind))):
            progress(path.name, count)
    return config


def decided_by_rows(config: TrainConfig, splits: Splits) -> TrainConfig:
    """The settings with those that depend on what the rows are. Raises UserError if they differ
    from what was chosen."""
    if config.too_long == AUTO:
        asks = config.samples_completions or config.answers_from_teacher or config.teacher_prompt
        can_split = splits.are_passages and not asks  # rows that ask stay whole
        config = replace(config, too_long="split" if can_split else "error")
    return with_reward_loss(config, splits)


def with_reward_loss(config: TrainConfig, splits: Splits) -> TrainConfig:
    """The settings with the loss of a reward model, which is that of its first row.

    Raises UserError if another was chosen, or a best metric that it does not have.
    """
    if config.objective != REWARD or "train" not in splits.files:
        return config
    limit, parse = RowLimit(config.max_row_bytes), parser_of(config.row_kind)
    paths = [splits.files[name] for name in SPLITS if name in splits.files]
    rows = (next(read_rows(path, limit, parse), None) for path in paths)
    firsts = list(of_one_form(filter(None, rows)))  # one form in all splits
    if not firsts:
        return config
    row, found = firsts[0], form_of_rated(firsts[0])
    if config.reward_loss not in (AUTO, found):
        raise UserError(
            f"--reward-loss {config.reward_loss}: the rows are {found} ({row.where}); use "
            f"{found} or auto"
        )
    for name in ("best_metric", "center_rewards") if found == "scores" else ():
        if getattr(config, name) != FIELDS[name].default:
            raise UserError(f"{flag(name)}: only for pairs; the rows have scores ({row.where})")
    return replace(config, reward_loss=found)


def plain_files(sources: list[Source], layout: Layout, limit: RowLimit) -> dict[str, Path] | None:
    """The file of each split if all are used as they are; None if they are to be converted."""
    if len(sources) > 1 or layout.columns or layout.render_prompt is not None:
        return None
    if sources[0].share != 1 or sources[0].rows is not None:
        return None
    for files in sources[0].splits.values():
        is_plain = len(files) == 1 and form_of(files[0]) == "jsonl" and not is_compressed(files[0])
        if not is_plain:
            return None
        if not layout.is_known(read_first_row(files[0], limit)):
            return None
    return {split: files[0] for split, files in sources[0].splits.items()}


def without(splits: dict[str, tuple[Path, ...]], name: str) -> dict[str, tuple[Path, ...]]:
    return {split: files for split, files in splits.items() if split != name}


# What --data names


def sources_of(data: str, to_train: bool = True) -> list[Source]:
    """The sources of --data, separated by commas, each with =SHARE. Raises UserError.

    to_train: each must have training rows.
    """
    found = []
    for name, share in names_in(data).items():
        source = source_of(name, f"--data {shortened(name)}", to_train)
        found.append(replace(source, share=share))
    return found


def names_in(data: str) -> dict[str, float]:
    """The parts of --data, and how often each one's rows are used. Raises UserError."""
    if not data.strip():
        raise UserError("--data: is empty; give a file or a folder")
    if data in DEMO_DATA or exists(data):
        return {data: 1.0}
    found: dict[str, float] = {}
    for part in data.split(","):
        name, share = part.strip(), 1.0
        before, separator, number = name.rpartition("=")
        if separator and not exists(name):
            with contextlib.suppress(ValueError):
                name, share = before, float(number)
        label = f"--data {shortened(data)}"
        if not name:
            raise UserError(f"{label}: names nothing between two commas")
        if not 0 < share <= MOST_SHARE:
            raise UserError(
                f"{label}: {share:g} times the rows of {shortened(name)}; use a number above 0, up "
                f"to {MOST_SHARE:g}"
            )
        found[name] = found.get(name, 0.0) + share
    return found


def exists(name: str) -> bool:
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def is_file(name: str) -> bool:
    return name not in DEMO_DATA and exists(name) and Path(name).expanduser().is_file()


def source_of(name: str, label: str, to_train: bool) -> Source:
    """The files of one part of --data: a file, a folder of splits, or a folder of texts."""
    if name in DEMO_DATA:
        path = packaged("models", "demo", DEMO_DATA[name])
    else:
        if is_dataset(name) and (rows := parse_name(name).rows) is not None:
            return part_of_dataset(name, rows, "train" if to_train else rows.split, label)
        path = find_dataset(name) if is_dataset(name) else find_path(name, label)
    if path.is_file():
        return Source({"train": (path,)}, path.parent)
    files = data_files(path)
    splits = splits_in(path, files)
    if "train" in splits or (splits and not to_train):
        return Source(splits, path, notes=notes_on(path, files, splits))
    texts = tuple(file for file in files if SUFFIXES[suffix_of(file)] in DOCUMENTS)
    if texts and not any(split_named(file.name) for file in files):
        return Source({"train": texts}, path)
    raise UserError(
        f"{label}: the folder has no train.jsonl (or train.csv, train.parquet ...), and no "
        "documents (.txt, .md, .html, .pdf, .docx, .epub)"
    )


def is_dataset(name: str) -> bool:
    """Return whether a part of --data or --valid names a dataset of the hub."""
    return name.startswith(PREFIX) and not exists(name)


def part_of_dataset(name: str, rows: SplitRows, split: str, label: str) -> Source:
    """Rows of a dataset of the hub, to be used as `split`."""
    folder = find_dataset(name)
    files = tuple(f for f in data_files(folder) if split_named(f.name) == rows.split)
    if not files:
        raise UserError(f"{label}: the dataset has no {rows.split} split")
    return Source({split: files}, folder, rows=rows)


def validation_sources(name: str) -> list[Source]:
    """The files of --valid: a file, all data files in a folder, or rows of datasets of the hub."""
    label = f"--valid {shortened(name)}"
    if is_dataset(name):
        parts = [(part.strip(), parse_name(part.strip()).rows) for part in name.split(",")]
        return [
            part_of_dataset(part, rows or SplitRows("valid"), "valid", label)
            for part, rows in parts
        ]
    path = find_path(name, label)
    if path.is_file():
        return [Source({"valid": (path,)}, path.parent)]
    if files := tuple(data_files(path)):
        splits = {"valid": files}
        return [Source(splits, path, notes=notes_on(path, files, splits))]
    raise UserError(f"{label}: the folder has no data; give a file")


def find_path(name: str, label: str) -> Path:
    """The file or folder with this name. Raises UserError for anything else."""
    try:
        path = Path(name).expanduser()
        path.stat()
    except FileNotFoundError as error:
        raise UserError(f"{label}: {missing_text(name, known=DEMO_DATA)}") from error
    except OSError as error:
        raise UserError(f"{label}: cannot be read ({error.strerror})") from error
    except (RuntimeError, ValueError) as error:  # no such user's home; a null character
        raise UserError(f"{label}: is not a path ({error})") from error
    if not path.is_file() and not path.is_dir():
        raise UserError(f"{label}: is not a regular file; give a data file or a folder")
    return path


def save_stdin(folder: Path, file: BinaryIO | None = None) -> Path:
    """Keep what standard input has, so that the run can be resumed. Returns the file.

    Raises UserError if there is nothing, or it cannot be written.
    """
    file = sys.stdin.buffer if file is None else file
    place = folder / "stdin"
    digest = hashlib.sha256()
    partial = place / f".tmp-{os.getpid()}"
    try:
        place.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as target:
            while block := file.read(1 << 20):
                digest.update(block)
                target.write(block)
            size = target.tell()
        if not size:
            raise UserError("--data -: standard input is empty")
        path = place / f"{digest.hexdigest()[:32]}.data"
        partial.replace(path)
        return path
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({error.strerror})") from error
    finally:
        partial.unlink(missing_ok=True)


# Conversion


def converted(
    sources: list[Source],
    layout: Layout,
    config: TrainConfig,
    holds_out: bool,
    limit: RowLimit,
    progress: Progress,
) -> Splits:
    """Write the rows as JSON lines into the cache, unless they are there already."""
    from your_ai.hub.find import store

    folder = store() / "cache" / "data" / key_of(sources, config, holds_out)
    if (there := read_converted(folder)) is not None:
        return there
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        delete_unused(folder.parent)
        with atomic_folder(folder) as temporary:
            parse = parser_of(config.row_kind)
            notes = convert(sources, layout, holds_out, limit, parse, temporary, progress)
            names = [s for s in SPLITS if (temporary / f"{s}.jsonl").exists()]
            sums = {name: sha256(temporary / f"{name}.jsonl") for name in names}
            (temporary / ABOUT).write_text(json.dumps({"notes": notes, "sha256": sums}))
    except OSError as error:
        if (there := read_converted(folder)) is not None:
            return there  # another process has written the same rows in the meantime
        raise unwritable(folder.parent, "the rows", error) from error
    there = read_converted(folder)
    if there is None:
        raise UserError(f"{folder}: the rows cannot be read back; delete the folder")
    return there


def read_converted(folder: Path) -> Splits | None:
    """The rows that were converted before; None if they are missing or damaged."""
    try:
        about = json.loads(read_text(folder / ABOUT, ABOUT_BYTES))
        files = {name: folder / f"{name}.jsonl" for name in about["sha256"]}
        if any(checksum(files[name]) != about["sha256"][name] for name in files):
            return None
        os.utime(folder)  # marks it as used, for `delete_unused`
        return Splits(files, tuple(map(str, about["notes"])))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def key_of(sources: list[Source], config: TrainConfig, holds_out: bool) -> str:
    """A name for the rows: equal for the same content and settings."""
    template = config.prompt_template and checksum(Path(config.prompt_template).expanduser())
    content: list[Any] = [FORMAT, list(config.columns), template, holds_out]
    if config.row_kind != "answers":
        content.append(config.row_kind)
    for source in sources:
        files = {
            split: [
                (form_of(path), os.path.relpath(path, source.folder), checksum(path))
                for path in paths
            ]
            for split, paths in source.splits.items()
        }
        rows = [] if source.rows is None else [astuple(source.rows)]
        content.append([source.share, files, *rows])
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]


def checksum(path: Path) -> str:
    """The sha256 of a file, computed again only if it has changed. Raises UserError."""
    with named_errors(path, "read"):
        status = path.stat()
        return known_checksum(path, status.st_size, status.st_mtime_ns, status.st_ino)


@lru_cache(maxsize=256)
def known_checksum(path: Path, *_: int) -> str:
    return sha256(path)


def convert(
    sources: list[Source],
    layout: Layout,
    holds_out: bool,
    limit: RowLimit,
    parse: ParseRow,
    folder: Path,
    progress: Progress,
) -> list[str]:
    """Write the rows of all splits below `folder`; return notes for the user."""
    hashes, shares = array("Q"), array("d")
    for split in SPLITS:
        used = [source for source in sources if source.splits.get(split)]
        if not used:
            continue
        with (folder / f"{split}.jsonl").open("wb") as file:
            for source in used:
                for line, hashed in rows_in(source, split, layout, limit, parse, progress):
                    file.write(line)
                    if split == "train":
                        hashes.append(hashed)
                        shares.append(source.share)
    if layout.columns and layout.unused:
        wanted = " and ".join(layout.columns.values())
        raise UserError(f"--columns: no row has {shortened(wanted)}; all have a known format")
    notes = layout.notes()
    count = held_out_count(len(hashes)) if holds_out else 0
    if holds_out:
        notes.append(held_out_note(count, len(hashes)))
    if count or any(share != 1 for share in shares):
        divide(folder, np.array(hashes), np.array(shares), count)
    return notes


def rows_in(
    source: Source,
    split: str,
    layout: Layout,
    limit: RowLimit,
    parse: ParseRow,
    progress: Progress,
) -> Iterator[tuple[bytes, int]]:
    """Yield each row of a split as a JSON line with its place, and the hash of its content.

    Raises UserError for a row that is in no known format.
    """
    records = records_in(source, split, limit, progress)
    for path, where, record in asked_in(records) if layout.asks_texts else records:
        row = layout.row_of(record, where)
        parsed = parse(row, where)
        digest = hashlib.blake2b(
            json.dumps(asdict(parsed.content), sort_keys=True).encode(), digest_size=HASH_BYTES
        )
        row[ORIGIN] = os.path.relpath(path, source.folder) + where.removeprefix(str(path))
        text = json.dumps(row, ensure_ascii=False, default=str)
        try:
            line = text.encode()
        except UnicodeEncodeError:  # half of a character; the encoder says so
            line = json.dumps(row, default=str).encode()
        yield line + b"\n", int.from_bytes(digest.digest(), "little")


def asked_in(
    records: Iterator[tuple[Path, str, dict[str, Any]]],
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """The records with texts of documents as prompts: of .txt each line, of others each row."""
    for path, where, record in records:
        if SUFFIXES.get(suffix_of(path)) not in DOCUMENTS or record.keys() != {"text"}:
            yield path, where, record
        elif suffix_of(path) == ".txt" and (place := LINE_PLACE.fullmatch(where)):
            for number, line in enumerate(record["text"].splitlines(), int(place[2])):
                yield path, f"{place[1]}:{number}", {"prompt": line.strip()}
        else:
            yield path, where, {"prompt": record["text"].strip()}


def records_in(
    source: Source, split: str, limit: RowLimit, progress: Progress
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    """Yield (file, place, record) of a split; only those that the source wants.

    Raises UserError if it wants none of them.
    """

    def every() -> Iterator[tuple[Path, str, dict[str, Any]]]:
        for path in source.splits[split]:
            for count, (where, record) in enumerate(read_records(path, limit)):
                progress(path.name, count)
                yield path, where, record

    if source.rows is None:
        yield from every()
        return
    count = sum(1 for _ in every())
    first, past = source.rows.bounds(count)
    if first >= past:
        has = f"{source.folder.name}: the {source.rows.split} split has {counted(count, 'row')}"
        raise UserError(f"{has}, none of them in the part that was named")
    yield from islice(every(), first, past)


def held_out_count(rows: int) -> int:
    """The number of training rows held out for validation."""
    count = min(MOST_HELD_OUT, max(LEAST_HELD_OUT, round(HELD_OUT_SHARE * rows)))
    return count if rows >= ROWS_PER_HELD_OUT * count else 0


def held_out_note(count: int, rows: int) -> str:
    if count:
        held_out = f"{count:,} of {counted(rows, 'row is', 'rows are')} held out for validation"
        return f"{held_out}; --valid none trains on all"
    few = counted(rows, "row is", "rows are")
    return f"no validation rows: {few} too few to hold some out; give --valid FILE"


def divide(folder: Path, hashes: np.ndarray, shares: np.ndarray, count: int) -> None:
    """Move rows with the lowest hashes from train to valid, and repeat rows by their share.

    Rows that are equal have the same hash, so they stay together. A fraction of a share keeps the
    rows whose hash says so.
    """
    highest = np.sort(hashes)[count - 1] if count else 0
    turned = (hashes * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(11)
    fraction = turned.astype(np.float64) / 2**53  # of each row, in [0, 1)
    copies = np.floor(shares) + (fraction < shares % 1)
    train, valid = folder / "train.jsonl", folder / "valid.jsonl"
    every = folder / "all.jsonl"
    train.rename(every)
    with contextlib.ExitStack() as stack:
        rows = stack.enter_context(every.open("rb"))
        kept = stack.enter_context(train.open("wb"))
        held = stack.enter_context(valid.open("wb")) if count else None
        for line, hashed, times in zip(rows, hashes, copies, strict=True):
            if held is not None and hashed <= highest:
                held.write(line)
            else:
                kept.write(line * int(times))
        if not kept.tell():
            raise UserError("--data: no training row is left; use a larger share")
    every.unlink()
