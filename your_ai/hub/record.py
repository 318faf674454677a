"""A record of a model's files as they were downloaded, to check later that they are the same."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.gates.untrusted import INDEX_BYTES, is_hash, read_json
from your_ai.hub.check import AGAIN, check_model, has_tokenizer, model_file_fault

RECORD = ".your_ai.json"


@dataclass(frozen=True)
class RecordedFile:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FilesRecord:
    """Where a model came from, and its files."""

    repo: str
    asked: str
    """The revision that the user asked for: a branch, tag or commit."""
    revision: str
    """The commit."""
    files: dict[str, RecordedFile]


@dataclass(frozen=True)
class Verdict:
    """The result of checking a model's files."""

    faults: tuple[str, ...]
    """One line each; empty if the model is complete."""
    checked: str
    """What was checked, in words."""


def write_record(folder: Path, record: FilesRecord) -> None:
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> FilesRecord | None:
    """Return the record of a model; None if it has none. Raises UserError if it is damaged."""
    path = folder / RECORD
    if not path.is_file():
        return None
    content = read_json(path, "it lists the files", INDEX_BYTES)
    try:
        files = {name: RecordedFile(**entry) for name, entry in content.pop("files").items()}
        record = FilesRecord(files=files, **content)
        texts = (record.repo, record.asked, record.revision, *(f.sha256 for f in files.values()))
        sizes = [file.size_bytes for file in files.values()]
        sound = all(isinstance(text, str) and text.isprintable() for text in texts)
        sound = sound and all(type(size) is int and size >= 0 for size in sizes) and bool(files)
        sound = sound and all(model_file_fault(name) is None and name[0] != "." for name in files)
        sound = sound and all(is_hash(file.sha256) for file in files.values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: is damaged{AGAIN}")
    return record


def fault_of(folder: Path) -> str | None:
    """Return the first fault found without reading weights; None if the model looks complete."""
    try:
        record = read_record(folder)
        if record is None:
            check_model(folder)
            if not has_tokenizer(path.name for path in folder.iterdir()):
                return f"{folder}: has no tokenizer{AGAIN}"
            return None
    except UserError as error:
        return str(error)
    faults = (size_fault(folder, record, name) for name in record.files)
    return next((fault for fault in faults if fault is not None), None)


def size_fault(folder: Path, record: FilesRecord, name: str) -> str | None:
    """Say what is wrong with the size of a file; None if it is right."""
    path, expected = folder / name, record.files[name].size_bytes
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path}: is missing"
    return f"{path}: has {found} of {expected} bytes" if found != expected else None


def file_fault(folder: Path, record: FilesRecord, name: str) -> str | None:
    """Say what is wrong with a file; None if it is right. Reads the whole file."""
    fault = size_fault(folder, record, name)
    if fault is not None:
        return fault
    try:
        same = sha256(folder / name) == record.files[name].sha256
    except OSError as error:
        return f"{folder / name}: cannot be read ({error.strerror})"
    return None if same else f"{folder / name}: has changed since it was downloaded"


def verify(folder: Path) -> Verdict:
    """Compare every file of a model with its record, or with its hash in the Hugging Face cache.

    The cache names files by their hashes. Without a record or such a name, only sizes and headers
    are checked.
    """
    try:
        record = read_record(folder)
    except UserError as error:
        return Verdict((str(error),), "only the record")
    if record is not None:
        checked = (file_fault(folder, record, name) for name in sorted(record.files))
        return Verdict(tuple(fault for fault in checked if fault is not None), "every byte")
    looked = fault_of(folder)
    if looked is not None:
        return Verdict((looked,), "sizes and headers")
    hashes = {path: blob_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    if not all(hashes.values()):
        return Verdict((), f"sizes and headers; there is no {RECORD} to compare the bytes with")
    faults = [
        f"{path}: has changed since it was downloaded"
        for path, expected in hashes.items()
        if expected is not None and hash_like(path, expected) != expected
    ]
    return Verdict(tuple(faults), "every byte")


def blob_of(path: Path) -> str | None:
    """The hash in the name of a file in the Hugging Face cache; None for other files."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and is_hash(blob.name) else None


def hash_like(path: Path, expected: str) -> str:
    """Return a file's hash of the same kind as `expected`: sha256, or git's blob hash (40 digits).

    Raises OSError if the file cannot be read.
    """
    if len(expected) == 64:
        return sha256(path)
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
