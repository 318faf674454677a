"""A folder that is filled beside its target until it is whole, by one process at a time.

Work that was cut off goes on there. What is finished is recorded with its checksum, and with
a key of all that the result depends on; a folder of another key is begun anew.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.files import sha256, sync
from your_ai.memory.plan import rounded_up
from your_ai.memory.sample import in_gb

RECORD = "quantized.json"
OTHER_BYTES = 50_000_000  # on the disk, of a tokenizer and the like
WAIT_S = 0.5


def work_folder(target: Path) -> Path:
    """Where the result lies until it is whole."""
    return target.with_name(f".{target.name}.quantizing")


@contextlib.contextmanager
def locked(folder: Path, waits: bool, creates: bool = False) -> Iterator[None]:
    """Hold a folder, so that no other process works on it.

    waits: for the process that does. creates: the folder where there is none; one that is
    left empty is removed. Raises UserError where another process has it, OSError where it is
    not there or cannot be made.
    """
    descriptor = None
    while descriptor is None:
        if creates:
            folder.mkdir(exist_ok=True)
        descriptor = try_to_lock(folder)
        if descriptor is None and not waits:
            raise UserError(f"{folder}: another process is at work on it; wait for it, or stop it")
        if descriptor is None:
            time.sleep(WAIT_S)
    try:
        yield
    finally:
        if creates:
            with contextlib.suppress(OSError):
                folder.rmdir()
        os.close(descriptor)


def try_to_lock(folder: Path) -> int | None:
    """What holds the lock, to be closed; None where another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # a file system that knows no locks
        pass
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    os.close(descriptor)  # another process has just renamed or deleted it
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a folder that is, or becomes, quantized; empty where there is none."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        if isinstance(record, dict) and isinstance(record["shards"], dict):
            return record
    except (OSError, ValueError, LookupError, RecursionError):
        pass
    return {"shards": {}}


def write_record(folder: Path, record: dict[str, Any]) -> None:
    temporary = folder / f"{RECORD}.part"
    temporary.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, folder / RECORD)


def finished_shards(work: Path, key: str) -> dict[str, str]:
    """The shards that are there and whole, with their sha256; all else is deleted."""
    record = read_record(work)
    found = record["shards"] if record.get("key") == key else {}
    whole = {n: s for n, s in found.items() if (work / n).is_file() and sha256(work / n) == s}
    kept = {*whole, RECORD} if whole else set()
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in kept:
            path.unlink()
    return whole


def written_bytes(work: Path) -> int:
    """Of the shards that are there, whole or not."""
    return sum(path.stat().st_size for path in work.glob("model*.safetensors"))


def check_disk(target: Path, needed_bytes: int) -> None:
    """Raise UserError where so much more cannot be written beside `target`."""
    there = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed_bytes + OTHER_BYTES:
        # Rounded apart, so that what is needed is seen to be more than what is free.
        needs, free = needed_bytes + OTHER_BYTES, max(0, free - 5_000_000)
        raise UserError(
            f"{target}: needs {in_gb(rounded_up(needs))} on the disk, {in_gb(free)} are free; "
            "free some, or choose another place"
        )


def unwritable(target: Path, error: OSError) -> UserError:
    full = error.errno == errno.ENOSPC or "No space" in str(error)
    then = "free some disk; the same command then goes on" if full else "choose another place"
    return UserError(f"{target}: cannot be written ({error.strerror}); {then}")
