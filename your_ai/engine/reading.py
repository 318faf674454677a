"""Reading weights from files while a model runs: the time lost to it, and hints to the system."""

from __future__ import annotations

import contextlib
import os
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

F_RDADVISE = 44  # macOS: read a part of a file into the page cache, in the background
Part = tuple[int, int]  # (offset, bytes) in a file


class ReadClock:
    """The seconds in which a model waited for its weights."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time until the `with` block ends."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - began

    def take(self) -> float:
        """The seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def hint(file: Path, parts: Iterable[Part], platform: str = sys.platform) -> None:
    """Ask the system to read parts of a file into its page cache, and do not wait for it.

    That memory belongs to the system, not to this process. A file that cannot be opened is left
    to the read that follows.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            for offset, size in parts:
                if platform == "linux":
                    os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
                elif platform == "darwin":
                    advise_macos(descriptor, offset, size)
        finally:
            os.close(descriptor)


def advise_macos(descriptor: int, offset: int, size: int) -> None:
    """F_RDADVISE takes struct radvisory: off_t ra_offset, int ra_count."""
    import fcntl

    fcntl.fcntl(descriptor, F_RDADVISE, struct.pack("=qi4x", offset, min(size, 2**31 - 1)))
