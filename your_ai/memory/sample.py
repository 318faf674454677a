"""What the gauges show at one moment. No mlx here: policies and fixtures are made of these."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class MemorySample:
    """In bytes, None where a gauge cannot be read.

    active: live MLX buffers; peak: the most of them since it was last reset; cache: freed
    but kept by MLX; process: what the system counts against this process (phys_footprint on
    macOS, resident memory on Linux); available: what the machine, or the container, could
    still give; swap: in use by the whole machine. pressure, as macOS has it: 1 normal,
    2 warning, 4 critical.
    """

    active_bytes: int | None = None
    peak_bytes: int | None = None
    cache_bytes: int | None = None
    process_bytes: int | None = None
    available_bytes: int | None = None
    swap_bytes: int | None = None
    pressure: int | None = None

    @property
    def unreadable(self) -> tuple[str, ...]:
        """The names of the gauges that cannot be read."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) is None)


def in_gb(size_bytes: float) -> str:
    """`21.34 GB`, of 10^9 bytes."""
    return f"{size_bytes / 1e9:.2f} GB"
