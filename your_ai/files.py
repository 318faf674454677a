"""Files that are whole or not there: checksums, syncing, folders renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp-"


def sha256(path: Path) -> str:
    """The checksum of a file's bytes, as hex. Raises OSError where it cannot be read."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `target` if the block ends well.

    Its files are synced before the rename. A `target` that is there is replaced.
    Raises OSError, also where the folder it is to stand in is missing.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{target.name}-", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp is for its owner alone
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        if target.exists():
            old = temporary.with_name(temporary.name + ".old")
            os.rename(target, old)
            try:
                os.rename(temporary, target)
            except OSError:
                os.rename(old, target)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_at(file: int, size: int, offset: int) -> bytes:
    """`size` bytes from `offset` on; fewer where the file ends before."""
    parts = []
    while size and (part := os.pread(file, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def write_at(file: int, data: memoryview, offset: int) -> None:
    """All of `data`; a nearly full disk takes a part of it before it says that it is full."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def clean(folder: Path, older_than_s: float = 0.0) -> None:
    """Delete what a killed process left half-written in `folder`.

    older_than_s: spare what is younger, where others may be writing just now.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than_s:
                shutil.rmtree(path, ignore_errors=True)
