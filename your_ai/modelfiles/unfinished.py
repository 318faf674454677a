"""A folder that is filled beside its target until it is whole, by one process at a time.

Work that was cut off goes on there. What is finished is recorded with its checksum, and with
a key of all that the result depends on; a folder of another key is begun anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.files import sha256, sync
from your_ai.gates.foreign import JSON_BYTES, is_hash, name_fault, parse_json, read_bytes
from your_ai.memory.plan import rounded_up
from your_ai.memory.sample import in_gb

OTHER_BYTES = 50_000_000  # on the disk, of a tokenizer and the like
WAIT_S = 0.5


@dataclass(frozen=True)
class Work:
    """Where `target` is made: `.TARGET.DOING/`, which becomes it.

    doing: what is done, as users are told: `quantizing`. record_name: of the file that keeps
    the checksums, in the folder and then in the target.
    """

    target: Path
    doing: str
    record_name: str

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}.{self.doing}")

    @property
    def record(self) -> Path:
        return self.folder / self.record_name

    @property
    def replaced(self) -> Path:
        """Where the target that was there lies while the new one takes its place."""
        return self.target.with_name(f".{self.target.name}.{self.doing}-replaced")

    @property
    def written_bytes(self) -> int:
        """Of the shards that are there, whole or not."""
        return sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))


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


def read_record(path: Path) -> dict[str, Any]:
    """The record of a folder that is, or becomes, a model; empty where there is none."""
    try:
        record = parse_json(read_bytes(path, JSON_BYTES))
        shards = record["shards"]
        if all(name_fault(name) is None and is_hash(sha) for name, sha in shards.items()):
            return record
    except (OSError, ValueError, LookupError, TypeError, AttributeError, UserError):
        pass
    return {"shards": {}}


def write_record(path: Path, record: dict[str, Any]) -> None:
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)


def finished_shards(path: Path, key: str) -> dict[str, str]:
    """The shards beside a record that are there and whole, with their sha256.

    All else in that folder is deleted, but the record.
    """
    work, record = path.parent, read_record(path)
    found = record["shards"] if record.get("key") == key else {}
    whole = {n: s for n, s in found.items() if is_own(work / n) and sha256(work / n) == s}
    kept = {*whole, path.name} if whole else set()
    for other in work.iterdir():
        if other.is_dir() and not other.is_symlink():
            shutil.rmtree(other)
        elif other.name not in kept:
            other.unlink()
    return whole


def is_own(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


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


def left_behind(work: Work) -> str:
    """What to tell who has interrupted it."""
    if not read_record(work.record)["shards"]:
        return f"{work.target}: stopped; the same command begins again"
    size = in_gb(work.written_bytes)
    return f"{work.target}: stopped; the same command goes on from {size}, or remove {work.folder}"
