"""Gauges -> MemorySample, in bytes: what MLX counts and what the process really holds."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import psutil


@dataclass(frozen=True)
class MemorySample:
    """active: live MLX buffers; peak: the most of them; cache: freed but kept by MLX;
    process: resident memory of the whole process."""

    active_bytes: int
    peak_bytes: int
    cache_bytes: int
    process_bytes: int


def read() -> MemorySample:
    active = mx.get_active_memory()
    return MemorySample(
        active_bytes=active,
        peak_bytes=max(active, mx.get_peak_memory()),
        cache_bytes=mx.get_cache_memory(),
        process_bytes=psutil.Process().memory_info().rss,
    )


def process_peak() -> int:
    """The most resident memory that this process has held, in bytes.

    Linux's ru_maxrss also counts what the process that started this one held.
    """
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
