"""Gauges -> MemorySample, in bytes: what MLX counts and what the process really holds."""

from __future__ import annotations

from dataclasses import dataclass

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
