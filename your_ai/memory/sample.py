"""One reading of all memory gauges. No mlx here: policies and test fixtures use it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """One reading of all memory gauges, in bytes. None if a gauge cannot be read."""

    active_bytes: int | None = None
    """Live MLX buffers."""
    peak_bytes: int | None = None
    """The peak of live MLX buffers since the last reset."""
    cache_bytes: int | None = None
    """Freed buffers that MLX keeps."""
    process_bytes: int | None = None
    """Memory of this process: phys_footprint on macOS, resident memory on Linux."""
    available_bytes: int | None = None
    """Memory that the machine, or the container, can still provide."""
    swap_bytes: int | None = None
    """Swap in use by the whole machine."""
    pressure: int | None = None
    """Memory pressure as on macOS: 1 normal, 2 warning, 4 critical."""


def in_gb(size_bytes: float) -> str:
    """`21.34 GB`, also `0.1463 GB`: the unit of --max-memory, for a message that it answers.

    Everything else is formatted by gates.text.size_text.
    """
    gigabytes = size_bytes / 1e9
    return f"{gigabytes:.2f} GB" if gigabytes >= 1 else f"{gigabytes:.4g} GB"
