"""The target of an output: no file of the user is replaced without permission, and nothing is half.

A result is made in a folder next to its target, by one process at a time, until it is complete.
Interrupted work continues there. A record has the checksum of each finished shard, and a key of
everything that the result depends on; a folder with a different key is started over.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.files import is_plain_file, sha256, sync
from your_ai.gates.text import size_text
from your_ai.gates.untrusted import JSON_BYTES, is_hash, name_fault, parse_json, read_bytes
from your_ai.hub.check import TEMPLATES
from your_ai.memory.limit import rounded_up

# The folder of a model or an adapter has one of these, weights, and only files of these kinds.
MARKS = ("config.json", "adapter_config.json")
WEIGHTS = ".safetensors"
MODELFILE = "Modelfile"  # Ollama's settings of a model
GGUF = ".gguf"  # a folder with one such file is a model too
GGUF_MAGIC = b"GGUF"
KINDS = (WEIGHTS, GGUF, MODELFILE, ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md",
         ".py", ".png", ".gitattributes")  # fmt: skip


def check_target(target: Path, force: bool, is_file: bool = False) -> None:
    """Raise UserError if a result cannot be written to `target`.

    force: a GGUF file may replace another, and a folder may replace a folder that contains only a
        model or an adapter. Nothing else is ever replaced.
    is_file: the result is a file, not a folder.
    """
    if not target.name or target.name in (".", ".."):
        raise UserError(f"{target}: give the name of a new file or folder")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: {target.absolute().parent} is not a folder; create it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UserError(f"{target}: cannot be written (Permission denied); choose another place")
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        raise UserError(f"{target}: is a link, which is never replaced; choose another name")
    if target.is_dir() == is_file:
        kind, other = ("folder", "file") if is_file else ("file", "folder")
        raise UserError(f"{target}: is a {kind}, the result is a {other}; choose another name")
    if target.is_dir() and not is_replaceable(target):
        raise UserError(
            f"{target}: contains files that do not belong to a model; choose another name"
        )
    if is_file and not is_gguf(target):
        raise UserError(f"{target}: is no GGUF file, which alone is replaced; choose another name")
    if not force:  # last, because --force would not help against the others
        raise UserError(f"{target}: exists; choose another name, or replace it with --force")


def is_gguf(file: Path) -> bool:
    """Return whether a file is one of llama.cpp's."""
    try:
        if not file.is_file():  # a device, or a pipe
            return False
        with file.open("rb") as opened:
            return opened.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def is_replaceable(folder: Path) -> bool:
    """Return whether a folder is empty, or contains a model or an adapter and nothing else."""
    found = list(folder.iterdir())
    marked = any((folder / name).is_file() for name in MARKS)
    weighty = any(path.suffix == WEIGHTS for path in found)
    inside = [path for path in found if path.name != TEMPLATES]
    inside += (folder / TEMPLATES).glob("*")
    known = all(path.is_file() and (path.suffix or path.name) in KINDS for path in inside)
    files = sum(path.suffix == GGUF for path in found)
    is_model = (marked and weighty and not files) or (files == 1 and not weighty)
    return not found or (is_model and known)


def write_error(target: Path, error: OSError, goes_on: bool = False) -> UserError:
    """The error for a target that cannot be written; goes_on: the same command can continue."""
    full = error.errno == errno.ENOSPC or "No space" in str(error)
    again = ", then run the same command to continue" if goes_on else ", then try again"
    then = f"free some disk space{again}" if full else "choose another place"
    return UserError(f"{target}: cannot be written ({error.strerror or error}); {then}")


# The folder next to a target


OTHER_BYTES = 50_000_000  # disk space for the tokenizer and other small files
WAIT_S = 0.5


@dataclass(frozen=True)
class Work:
    """Work in the folder `.TARGET.DOING/`, which is renamed to `target` when complete."""

    target: Path
    doing: str
    """The kind of work, as shown to users: `quantizing`."""
    record_name: str
    """The name of the file with the checksums, in the folder and later in the target."""

    @property
    def folder(self) -> Path:
        return self.target.with_name(f".{self.target.name}.{self.doing}")

    @property
    def record(self) -> Path:
        return self.folder / self.record_name

    @property
    def replaced(self) -> Path:
        """The temporary path of the old target while the new one is put in place."""
        return self.target.with_name(f".{self.target.name}.{self.doing}-replaced")

    @property
    def written_bytes(self) -> int:
        """Bytes of the shards written so far, complete or not."""
        return sum(path.stat().st_size for path in self.folder.glob("model*.safetensors"))

    @property
    def interrupted_message(self) -> str:
        """The message for a user who has interrupted the work."""
        if not read_record(self.record)["shards"]:
            return f"{self.target}: stopped; run the same command to start again"
        size = size_text(self.written_bytes)
        return (
            f"{self.target}: stopped; run the same command to continue from {size}, "
            f"or remove {self.folder}"
        )


@contextlib.contextmanager
def locked(folder: Path, waits: bool, creates: bool = False) -> Iterator[None]:
    """Lock a folder, so that no other process works on it.

    waits: wait for another process that has the lock.
    creates: create the folder if it is missing, and remove it afterwards if it is empty.

    Raises UserError if another process has the lock, OSError if the folder does not exist or
    cannot be created.
    """
    descriptor = None
    while descriptor is None:
        if creates:
            folder.mkdir(exist_ok=True)
        descriptor = try_to_lock(folder)
        if descriptor is None and not waits:
            raise UserError(f"{folder}: another process is working on it; wait for it or stop it")
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
    """Return a descriptor that holds the lock until closed; None if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:  # the file system does not support locks
        pass
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(folder)):
            return descriptor
    os.close(descriptor)  # another process has just renamed or deleted it
    return None


def read_record(path: Path) -> dict[str, Any]:
    """Read the record of a folder; an empty record if it is missing or damaged."""
    try:
        record: dict[str, Any] = parse_json(read_bytes(path, JSON_BYTES))
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
    """The complete shards next to a record, with their sha256.

    Deletes everything else in that folder, except the record.
    """
    work, record = path.parent, read_record(path)
    found = record["shards"] if record.get("key") == key else {}
    whole = {n: s for n, s in found.items() if is_plain_file(work / n) and sha256(work / n) == s}
    kept = {*whole, path.name} if whole else set()
    for other in work.iterdir():
        if other.is_dir() and not other.is_symlink():
            shutil.rmtree(other)
        elif other.name not in kept:
            other.unlink()
    return whole


def clear(folder: Path) -> None:
    """Delete the contents of a folder of ours."""
    with contextlib.suppress(FileNotFoundError):
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def check_disk(target: Path, needed_bytes: int) -> None:
    """Raise UserError if the disk of `target` has less than `needed_bytes` free."""
    there = next(path for path in target.absolute().parents if path.exists())
    free = shutil.disk_usage(there).free
    if free < needed_bytes + OTHER_BYTES:
        # One is rounded up and one down, so that the message shows needed > free.
        needs, free = needed_bytes + OTHER_BYTES, max(0, free - 5_000_000)
        raise UserError(
            f"{target}: needs {size_text(rounded_up(needs))} of disk space, only "
            f"{size_text(free)} free; free some, or choose another place"
        )
