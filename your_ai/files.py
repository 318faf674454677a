"""Files that are complete or absent: checksums, syncing, folders renamed into place."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

TEMPORARY = ".tmp-"


def packaged(*parts: str) -> Path:
    """Path of a file that ships with your_ai: in the wheel, or at the top of a checkout."""
    here = Path(__file__).parent
    inside = here.joinpath("_packaged", *parts)
    return inside if inside.exists() else here.parent.joinpath(*parts)


def sha256(path: Path) -> str:
    """SHA-256 checksum of a file, as hex. Raises OSError if the file cannot be read."""
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync(path: Path) -> None:
    """Wait until a file or folder has been written to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` if the block ends without an error.

    The files are synced before the rename. An existing `target` is replaced.
    Raises OSError, also if the parent folder of `target` is missing.
    """
    temporary = Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{target.name}-", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)  # mkdtemp gives access to the owner only
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


def replace_text(path: Path, text: str) -> None:
    """Write a file that is whole or not there, over an existing one. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=f"{TEMPORARY}{path.name}-", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o644)  # mkstemp makes files that only their owner can read
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_plain_file(path: Path) -> bool:
    """Return whether a path is a file and not a link."""
    return path.is_file() and not path.is_symlink()


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read. Raises OSError also if it is not a regular file: a pipe would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return open(descriptor, "rb")


def open_to_append(path: Path) -> BinaryIO:
    """Open a file to read and append, unbuffered; create it if it is missing. Raises OSError."""
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a file", str(path))
    return open(descriptor, "a+b", buffering=0)


def read_text(path: Path, max_bytes: int, errors: str = "strict") -> str:
    """Read a small text file in UTF-8.

    Raises OSError also if it is not a regular file or has more than `max_bytes`, and
    UnicodeDecodeError if it is not UTF-8.
    """
    with open_regular(path) as file:
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise OSError(errno.EFBIG, f"has more than {max_bytes:,} bytes", str(path))
    return data.decode("utf-8", errors)


def read_at(file: int, size: int, offset: int) -> bytes:
    """Read `size` bytes at `offset`; fewer if the file ends earlier."""
    parts = []
    while size and (part := os.pread(file, size, offset)):
        parts.append(part)
        size, offset = size - len(part), offset + len(part)
    return b"".join(parts)


def remedy_of(error: OSError) -> str:
    """The first remedy for a file that cannot be written or read, for the text of an error."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "free some disk space"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "correct its permissions"
    return "check the disk"


def read_into(file: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer of bytes from `offset`; return how many there were before the file ended."""
    done = 0
    while done < len(buffer) and (count := os.preadv(file, [buffer[done:]], offset + done)):
        done += count
    return done


def write_at(file: int, data: memoryview, offset: int) -> None:
    """Write all of `data`. A nearly full disk accepts a part before it reports an error."""
    while data:
        written = os.pwrite(file, data, offset)
        data, offset = data[written:], offset + written


def write_all(file: int, line: bytes) -> None:
    """Append all of a line: a nearly full disk accepts a part before it reports an error."""
    rest = memoryview(line)
    while rest:
        rest = rest[os.write(file, rest) :]


def clean(folder: Path, older_than_s: float = 0.0) -> None:
    """Delete temporary files that a killed process left in `folder`.

    older_than_s: keep younger ones, since another process may still be writing them.
    """
    for path in folder.glob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than_s:
                shutil.rmtree(path, ignore_errors=True)
