"""What MLX and the C library keep of freed memory, given back. Imports mlx; safe in any thread."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import sys

import mlx.core as mx

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
LARGE_BYTES = 256 << 10
CACHE_SHARE = 0.5
TIGHT = 0.5  # of the limit, from which on what is kept of freed memory matters


def give_back_at_once() -> None:
    """Let glibc return large buffers to the system when they are freed.

    It raises that threshold by itself whenever a large buffer is freed, and then keeps what
    is freed later: the process held up to twice what MLX counted. It costs up to a quarter of
    a step's time. Nothing to do on macOS.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):  # another C library
            glibc = ctypes.CDLL("libc.so.6")
            glibc.mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
            glibc.mallopt(M_TRIM_THRESHOLD, LARGE_BYTES)


def free(collect: bool = True) -> None:
    """Give back what neither Python nor MLX uses any more.

    collect: look for cycles as well, which takes a tenth of a second.
    """
    if collect:
        gc.collect()
    mx.clear_cache()
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)


def hold(limit_bytes: int, needed_bytes: int, beside_bytes: int) -> None:
    """Tell MLX of the limit of the process, which holds `beside_bytes` beside MLX's buffers.

    Above what is left MLX waits for work in flight before it allocates; what it may keep of
    freed buffers is a share of what the plan, which needs `needed_bytes`, leaves. Where that
    is little, the C library keeps nothing.
    """
    if needed_bytes > TIGHT * limit_bytes:
        give_back_at_once()
    mx.set_memory_limit(max(1, limit_bytes - beside_bytes))
    mx.set_cache_limit(int(max(0, limit_bytes - needed_bytes) * CACHE_SHARE))
