"""What the files of a model were when they came, kept beside them: is each still the same?"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.gates.foreign import INDEX_BYTES, is_hash, name_fault, read_json
from your_ai.hub.check import AGAIN, check_model, has_tokenizer

RECORD = ".your_ai.json"


@dataclass(frozen=True)
class RecordedFile:
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class FilesRecord:
    """Where a model came from. asked: the revision as the user named it; revision: the commit."""

    repo: str
    asked: str
    revision: str
    files: dict[str, RecordedFile]


@dataclass(frozen=True)
class Verdict:
    """faults: one line each, none for a whole model; checked: how far was looked, in words."""

    faults: tuple[str, ...]
    checked: str


def write_record(folder: Path, record: FilesRecord) -> None:
    (folder / RECORD).write_text(json.dumps(asdict(record), indent=1) + "\n", encoding="utf-8")


def read_record(folder: Path) -> FilesRecord | None:
    """The record of a model, None where it has none. Raises UserError for a damaged one."""
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
        sound = sound and all(name_fault(name) is None and name[0] != "." for name in files)
        sound = sound and all(is_hash(file.sha256) for file in files.values())
    except (KeyError, TypeError, AttributeError):
        sound = False
    if not sound:
        raise UserError(f"{path}: is damaged{AGAIN}")
    return record


def fault_of(folder: Path) -> str | None:
    """The first fault that shows without reading weights; None where the model looks whole."""
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
    """What is wrong with the size of one of the files."""
    path, expected = folder / name, record.files[name].size_bytes
    try:
        found = path.stat().st_size
    except OSError:
        return f"{path}: is missing"
    return f"{path}: has {found} of {expected} bytes" if found != expected else None


def file_fault(folder: Path, record: FilesRecord, name: str) -> str | None:
    """What is wrong with one of the files; reads all of it."""
    fault = size_fault(folder, record, name)
    if fault is not None:
        return fault
    try:
        same = sha256(folder / name) == record.files[name].sha256
    except OSError as error:
        return f"{folder / name}: cannot be read ({error.strerror})"
    return None if same else f"{folder / name}: is not what was fetched"


def verify(folder: Path) -> Verdict:
    """Every file of a model against its record, or against the names in the hub's cache.

    Those are its files' hashes. What has neither is looked at for sizes and headers alone.
    """
    try:
        record = read_record(folder)
    except UserError as error:
        return Verdict((str(error),), "the record alone")
    if record is not None:
        faults = [file_fault(folder, record, name) for name in sorted(record.files)]
        return Verdict(tuple(f for f in faults if f is not None), "every byte")
    looked = fault_of(folder)
    if looked is not None:
        return Verdict((looked,), "sizes and headers")
    hashes = {path: blob_of(path) for path in sorted(folder.iterdir()) if path.is_file()}
    if not all(hashes.values()):
        return Verdict((), f"sizes and headers: it has no {RECORD} to check its bytes against")
    faults = [
        f"{path}: is not what was fetched"
        for path, expected in hashes.items()
        if expected is not None and hash_like(path, expected) != expected
    ]
    return Verdict(tuple(faults), "every byte")


def blob_of(path: Path) -> str | None:
    """The hash that a file of the hub's cache is named by."""
    blob = path.resolve()
    return blob.name if blob.parent.name == "blobs" and is_hash(blob.name) else None


def hash_like(path: Path, expected: str) -> str:
    """A file's hash of the same kind: sha256, or git's of a blob, which has 40 digits.

    Raises OSError where the file cannot be read.
    """
    if len(expected) == 64:
        return sha256(path)
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
