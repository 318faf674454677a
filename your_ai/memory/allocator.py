"""Return freed memory that MLX and the C library keep. Imports mlx; safe in any thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator

import mlx.core as mx

from your_ai.memory import probe

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
LARGE_BYTES = 256 << 10
CACHE_SHARE = 0.5
TIGHT = 0.5  # share of the limit; above it, glibc must return freed buffers immediately


def return_freed_buffers() -> None:
    """Make glibc return large buffers to the system as soon as they are freed.

    By default glibc raises its threshold whenever a large buffer is freed, and keeps buffers
    below it: processes used up to twice the memory that MLX counted. This costs up to a quarter
    of the time of a step. Does nothing on macOS.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            glibc = ctypes.CDLL("libc.so.6")
            glibc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            glibc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def free(collect: bool = True) -> None:
    """Return memory that neither Python nor MLX uses any more.

    collect: also collect reference cycles, which takes a tenth of a second.
    """
    if collect:
        gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def keep_nothing() -> None:
    """Return all freed memory, and from now on whatever is freed, until `set_limits` is called."""
    return_freed_buffers()
    mx.set_cache_limit(0)
    free(collect=False)


def set_limits(limit_bytes: int, needed_bytes: int, beside_bytes: int) -> None:
    """Set MLX's memory limit and cache limit from the limit of the process.

    needed_bytes: memory that the plan needs, of the whole process.
    beside_bytes: memory of the process outside MLX's buffers.

    Above its memory limit MLX waits for running work before it allocates. The cache of freed
    buffers may use CACHE_SHARE of the memory that the plan leaves free. If the plan needs most
    of the limit, glibc keeps no freed buffers either.
    """
    if needed_bytes > TIGHT * limit_bytes:
        return_freed_buffers()
    mx.set_memory_limit(max(1, limit_bytes - beside_bytes))
    mx.set_cache_limit(int(max(0, limit_bytes - needed_bytes) * CACHE_SHARE))


@contextlib.contextmanager
def wired(limit_bytes: int) -> Iterator[bool]:
    """Meanwhile, MLX's buffers stay in RAM, up to the limit of the process and at most as much as
    Metal recommends. Yields whether this device can do so; before macOS 15, Metal ignores it.
    """
    working_set = probe.working_set_bytes()
    if working_set is None:
        yield False
        return
    before = mx.set_wired_limit(min(limit_bytes, working_set))
    try:
        yield True
    finally:
        mx.set_wired_limit(before)
