"""Download models from the hub file by file, check them, and move them into place when complete.

An unfinished download is in `.incomplete-NAME` next to the target folder: finished files under
their names, partial files in `parts/` under their hashes. The next download continues from there.
The target folder itself is either absent or complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import Empty, Queue
from typing import BinaryIO, Literal, TypeVar

from your_ai.config import DEMO
from your_ai.errors import UserError, named_errors
from your_ai.files import is_plain_file, sha256, sync
from your_ai.gates.text import counted, shown, size_text
from your_ai.gates.untrusted import read_json
from your_ai.hub import remote
from your_ai.hub.check import (
    AGAIN,
    RECORD,
    FilesRecord,
    RecordedFile,
    can_run,
    check_model,
    fault_of,
    file_fault,
    hash_like,
    model_file_fault,
    read_record,
    write_record,
)
from your_ai.hub.config_values import check_config_values
from your_ai.hub.find import cached_file, cached_model, models_root, repo_of
from your_ai.hub.remote import (
    Listing,
    RemoteFile,
    TooManyBytes,
    explain,
    is_passing,
    is_unreachable,
    reason_of,
)

INCOMPLETE = ".incomplete-"
PARTS = "parts"
LOCK = ".lock-"
ASKING_S = 9.0  # total time to get a repository's file list, over all attempts
LEAST_S = 1.0  # minimum time for one of these attempts
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0)  # between attempts that bring no bytes, before giving up
POLL_S = 0.2
MARGIN_PERCENT = 5  # free disk space required in addition, as a share of the download
FEW = 2  # attempts when another one is unlikely to succeed
T = TypeVar("T")
TRIES = 2  # attempts for a file whose hash is wrong


@dataclass(frozen=True, kw_only=True)
class DownloadProgress:
    """The state of a download.

    The counts are for the whole model, including files kept from an earlier download. They are 0
    until they are known.
    """

    name: str
    doing: Literal["asking", "waiting", "checking", "fetching"] = "asking"
    file: str = ""
    done_files: int = 0
    files: int = 0
    done_bytes: int = 0
    total_bytes: int = 0
    note: str = ""
    """A message to show once, or empty."""


def result_of(steps: Generator[DownloadProgress, None, T]) -> T:
    """Run a download, without showing its progress, and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result


def downloading(
    name: str, revision: str | None = None, to: str | Path | None = None
) -> Generator[DownloadProgress, None, Path]:
    """Download as `download` does, but yield progress. The generator returns the model's folder."""
    if name == DEMO:
        raise UserError(f"{name}: comes with your_ai; there is nothing to download")
    repo = repo_of(name, name)
    remote.check_endpoint()
    target = models_root() / repo.split("/")[1] if to is None else Path(to).expanduser()
    asked = revision or remote.DEFAULT_REVISION
    at = DownloadProgress(name=name)
    found = yield from faults_of(at, target, repo, revision)
    if found == ():
        yield replace(at, note=f"{repo} is complete in {target}; nothing to download")
        return target
    if to is None and not target.exists():
        cached = cached_model(repo, revision)
        if cached is not None:
            yield replace(at, note=f"{repo} is used from the Hugging Face cache: {cached}")
            return cached
    record = read_record(target) if found else None
    at_revision = record.revision if record is not None else asked
    listing = yield from ask(at, repo, at_revision, partial(remote.ask, repo))

    with open_lock(target) as lock:
        while not taken(lock):
            yield replace(at, doing="waiting")
            time.sleep(POLL_S)
        found = yield from faults_of(at, target, repo, revision)
        if found == ():
            yield replace(at, note=f"{repo} was downloaded by another process: {target}")
            return target
        if found:
            yield replace(at, note=f"{'; '.join(found)}; downloading again")
        folder = target.with_name(f"{INCOMPLETE}{target.name}")
        with named_errors(folder, "written"):
            unlink_links(folder, folder / PARTS)
            if found:
                if target.is_symlink():
                    raise UserError(f"{target}: is a link to a damaged model; remove the link")
                shutil.rmtree(folder, ignore_errors=True)
                os.rename(target, folder)
                unlink_links(folder / PARTS)
            (folder / PARTS).mkdir(parents=True, exist_ok=True)
        at = replace(at, files=len(listing.files), total_bytes=listing.size_bytes)
        at = yield from keep(at, listing, folder)
        check_room(at, listing, folder)
        for file in listing.files:
            if not place_in(folder, file.name).exists():
                at = yield from fetch(at, listing, file, folder, asked)
            if file.name == "config.json":
                check_type(listing, folder)
        yield replace(at, doing="checking", file="")
        with named_errors(folder, "written"):
            put(listing, folder, target, asked)
    files = counted(at.files, "file")
    note = f"{size_text(at.total_bytes)} in {files}, each checked by its hash: {target}"
    yield replace(at, note=note)
    return target


# Before


def faults_of(
    at: DownloadProgress, target: Path, repo: str, revision: str | None
) -> Generator[DownloadProgress, None, tuple[str, ...] | None]:
    """Return the faults of the model in `target`: () if complete, None if there is no model.

    Raises UserError if `target` has something else.
    """
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return None
    elsewhere = "choose another folder with --to"
    try:
        record = read_record(target)
    except UserError as error:
        damage = str(error).removesuffix(AGAIN)
        raise UserError(f"{damage}; move {target} away, or {elsewhere}") from error
    if record is None:
        fault = fault_of(target) if target.is_dir() else f"{target}: is a file"
        if fault is None and revision is None:
            return ()
        fault = (fault or f"{target}: already exists").removesuffix(AGAIN)
        raise UserError(f"{fault}; move it away, or {elsewhere}")
    if record.repo != repo:
        raise UserError(f"{target}: contains {record.repo}; {elsewhere}")
    if revision is not None and not (
        revision == record.asked or record.revision.startswith(revision)
    ):
        raise UserError(
            f"{target}: contains revision {record.revision[:12]}; remove it first with "
            f"`your_ai models rm {at.name}`, or {elsewhere}"
        )
    faults = []
    for name in record.files:
        yield replace(at, doing="checking", file=name)
        faults.append(file_fault(target, record, name))
    return tuple(fault for fault in faults if fault is not None)


@contextlib.contextmanager
def open_lock(target: Path) -> Iterator[BinaryIO]:
    """Open the lock file for downloads into `target`."""
    path = target.with_name(f"{LOCK}{target.name}")
    with named_errors(target, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    with open(descriptor, "ab") as file:
        yield file


def taken(lock: BinaryIO) -> bool:
    """Try to take a lock, until its file is closed. Returns whether it succeeded."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def ask(
    at: DownloadProgress, repo: str, asked: str, listed: Callable[[str], T]
) -> Generator[DownloadProgress, None, T]:
    """Get the file list of a repository within ASKING_S. Tries once if the hub is unreachable.

    listed: asks the hub at a revision.
    """
    until = time.monotonic() + ASKING_S
    for wait_s in (*WAITS_S, None):
        try:
            yield at
            return in_time(lambda: listed(asked), until - time.monotonic())
        except UserError as error:
            raise UserError(f"{at.name}: {error}") from error
        except Exception as error:  # of any class: errors of the HTTP library are not wrapped
            if wait_s is None or is_unreachable(error) or not is_passing(error):
                raise explain(error, at.name, repo, asked) from error
            if time.monotonic() + wait_s > until - LEAST_S:
                raise explain(error, at.name, repo, asked) from error
            yield replace(at, note=f"{reason_of(error)}; trying again in {wait_s:g} s")
            time.sleep(wait_s)
    raise AssertionError("the last wait is None")


def in_time(function: Callable[[], T], seconds: float) -> T:
    """Call the function in a thread and return its result. Abandon the thread on timeout.

    The timeout of the HTTP library applies to each read, so a server that sends a byte now and
    then never exceeds it. Raises UserError on timeout.
    """
    found: Queue[T | Exception] = Queue()

    def run() -> None:
        try:
            found.put(function())
        except Exception as error:  # raised in the waiting thread
            found.put(error)

    threading.Thread(target=run, name="asking", daemon=True).start()
    try:
        outcome = found.get(timeout=max(0.0, seconds))
    except Empty:
        raise UserError(f"the hub gave no answer within {ASKING_S:g} s; try again later") from None
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def keep(
    at: DownloadProgress, listing: Listing, folder: Path
) -> Generator[DownloadProgress, None, DownloadProgress]:
    """Count the files kept from an earlier download. Deletes files that differ from the hub's."""
    hashes = {file.hash for file in listing.files}
    names = {file.name for file in listing.files}
    with named_errors(folder, "written"):
        parts = (folder / PARTS).iterdir()
        drop(path for path in parts if path.name not in hashes or not is_plain_file(path))
        here = (path for path in folder.iterdir() if path.name != PARTS)
        drop(path for path in here if path.name not in names or not is_plain_file(path))
    kept = begun = 0
    for file in listing.files:
        path, part = place_in(folder, file.name), place_in(folder / PARTS, file.hash)
        if path.exists():
            yield replace(at, doing="checking", file=file.name)
            with named_errors(path, "written"):
                if (
                    path.stat().st_size == file.size_bytes
                    and hash_like(path, file.hash) == file.hash
                ):
                    kept += file.size_bytes
                    at = replace(at, done_files=at.done_files + 1)
                    continue
                drop([path])
        begun += part_size(part, file)
    if kept or begun:
        files = f"{at.done_files} of {counted(at.files, 'file')}"
        size = f"{size_text(kept + begun)} of {size_text(at.total_bytes)}"
        yield replace(at, done_bytes=kept + begun, note=f"kept from before: {files}, {size}")
    return replace(at, done_bytes=kept)


def place_in(folder: Path, name: str) -> Path:
    """The path of a downloaded file. Raises UserError for a name that no file of a model has."""
    if (fault := model_file_fault(name)) is not None:
        raise UserError(f"{folder}: '{shown(name)}' {fault}; refused")
    return folder / name


def unlink_links(*paths: Path) -> None:
    """Remove links that stand where download folders belong. Their targets stay."""
    for path in paths:
        if path.is_symlink():
            path.unlink()


def drop(paths: Iterable[Path]) -> None:
    for path in list(paths):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def part_size(part: Path, file: RemoteFile) -> int:
    """The number of bytes of a file that were downloaded so far."""
    try:
        size = part.stat().st_size
    except OSError:
        return 0
    return min(size, file.size_bytes)


def check_room(at: DownloadProgress, listing: Listing, folder: Path) -> None:
    """Raise UserError if the disk has too little space for the missing files."""
    here = at.done_bytes + sum(
        part_size(folder / PARTS / file.hash, file)
        for file in listing.files
        if not (folder / file.name).exists()
    )
    needed = (listing.size_bytes - here) * (100 + MARGIN_PERCENT) // 100
    free = shutil.disk_usage(folder).free
    if needed > free:
        if not here:
            shutil.rmtree(folder, ignore_errors=True)
        raise UserError(
            f"{at.name}: needs {size_text(needed)} of disk space, but {folder.parent} has "
            f"{size_text(free)} free; free some space, or choose another folder with --to"
        )


def check_type(listing: Listing, folder: Path) -> None:
    """Raise UserError and delete the download if the model cannot be used."""
    try:
        config = read_json(folder / "config.json", "a model has one")
        kind = config.get("model_type")
        if not isinstance(kind, str):
            raise UserError(f"{listing.repo}: has no model_type; is it a language model?")
        if not can_run(kind):
            text = shown(kind)
            raise UserError(f"{listing.repo}: has model_type {text}, which mlx-lm does not support")
        check_config_values(folder / "config.json", config)
    except UserError:
        shutil.rmtree(folder, ignore_errors=True)
        raise


# Fetching


def fetch(
    at: DownloadProgress, listing: Listing, file: RemoteFile, folder: Path, asked: str
) -> Generator[DownloadProgress, None, DownloadProgress]:
    """Download one file, across interruptions. Moves it into place once its hash is right."""
    part = place_in(folder / PARTS, file.hash)
    cached = None
    if listing.kind == "model":
        cached = cached_file(listing.repo, listing.revision, file.name)
    if cached is not None and not os.path.lexists(part):
        with named_errors(part, "written"):
            shutil.copyfile(cached, part)
    for tries in range(1, TRIES + 1):
        yield from fetch_part(
            replace(at, doing="fetching", file=file.name), listing, file, part, asked
        )
        done = at.done_bytes + file.size_bytes
        yield replace(at, doing="checking", file=file.name, done_bytes=done)
        with named_errors(part, "written"):
            if hash_like(part, file.hash) == file.hash:
                sync(part)
                (folder / file.name).parent.mkdir(exist_ok=True)
                os.replace(part, folder / file.name)
                break
            part.unlink()
        if tries < TRIES:
            yield replace(at, note=f"{file.name}: arrived damaged; downloading it again")
    else:
        raise UserError(
            f"{at.name}: {file.name} has another hash than the hub says; try again later: "
            f"your_ai download {at.name}"
        )
    return replace(at, doing="fetching", done_files=at.done_files + 1, done_bytes=done)


def fetch_part(
    at: DownloadProgress, listing: Listing, file: RemoteFile, part: Path, asked: str
) -> Iterator[DownloadProgress]:
    """Download the bytes of one file. Continues after interruptions while attempts bring bytes."""
    before, failures = at.done_bytes, 0
    while (here := part_size(part, file)) < file.size_bytes or not part.exists():
        try:
            yield replace(at, done_bytes=before + here)
            for done in remote.receive(listing, file, part):
                yield replace(at, done_bytes=before + done)
        except UserError as error:
            raise UserError(
                f"{error}; {how_to_continue(at.name, before + part_size(part, file))}"
            ) from error
        except Exception as error:  # of any class: errors of the HTTP library are not wrapped
            if not is_passing(error):
                raise explain(error, at.name, listing.repo, asked) from error
            now = part_size(part, file)
            failures = 0 if now > here else failures + 1
            never = isinstance(error, TooManyBytes) or (is_unreachable(error) and not now)
            if failures >= (FEW if never else len(WAITS_S)):
                raise UserError(
                    f"{at.name}: {reason_of(error)}, {failures} times in a row; "
                    f"{how_to_continue(at.name, before + now)}"
                ) from error
            wait_s = WAITS_S[failures]
            note = f"{file.name}: {reason_of(error)}; trying again in {wait_s:g} s"
            yield replace(at, done_bytes=before + now, note=note)
            time.sleep(wait_s)


def how_to_continue(name: str, kept_bytes: int) -> str:
    """Say how much of a stopped download is kept, and how to continue it."""
    return f"{size_text(kept_bytes)} are kept; continue with: your_ai download {name}"


# After


def put(listing: Listing, folder: Path, target: Path, asked: str) -> None:
    """Move the downloaded files to `target`. Raises UserError if the model is not complete."""
    try:
        check_model(folder)
    except UserError as error:
        fault = str(error).removesuffix(AGAIN)
        raise UserError(f"{listing.repo}: is not complete on the hub ({fault})") from error
    move(listing, folder, target, asked)


def move(listing: Listing, folder: Path, target: Path, asked: str) -> None:
    """Move the downloaded files to `target`, with a record of them. Raises OSError."""
    files = {
        file.name: RecordedFile(
            file.size_bytes, file.hash if len(file.hash) == 64 else sha256(folder / file.name)
        )
        for file in listing.files
    }
    record = FilesRecord(repo=listing.repo, asked=asked, revision=listing.revision, files=files)
    write_record(folder, record)
    shutil.rmtree(folder / PARTS)
    for path in (folder / RECORD, folder):
        sync(path)
    os.rename(folder, target)  # this also replaces an empty folder
    sync(target.parent)
