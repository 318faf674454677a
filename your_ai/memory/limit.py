"""The memory limit of the training process, with its reason in words.

No mlx here: memory.probe reads a MachineMemory, and tests use recorded ones. A GB is 10**9
bytes (macOS calls 2**30 bytes a GB: its 24 GB are 25.8 here).
"""

from __future__ import annotations

import math
import platform
from dataclasses import dataclass
from typing import NamedTuple

import psutil

from your_ai.errors import UserError
from your_ai.gates.text import size_text

GB, GIB = 10**9, 1 << 30
CARD = "on the card"  # the place of memory
# The lowest share of RAM that macOS recommends for a process. Newer versions allow a tenth more.
WORKING_SET_SHARE, LARGE_WORKING_SET_SHARE, LARGE_RAM_BYTES = 2 / 3, 3 / 4, 33 * GIB
MARGIN_PERCENT = 5  # gauges lag behind a step, and free memory changes
HEADROOM = 0.0025  # the guard ends a process this share of the limit below it,
HEADROOM_BYTES = 4_000_000  # or this many bytes below it, if that is more
VARIES_BYTES = 2_000_000  # difference in memory between two starts of the same process
# Reserved for the system, even if a raised iogpu.wired_limit_mb allows more. macOS itself
# reserves more than this with any amount of RAM, so its default working set is not reduced.
SYSTEM_SHARE = 16  # a sixteenth of the RAM,
SYSTEM_BYTES = 2 * GB  # or this much if that is more,
SYSTEM_MOST = 4  # but at most a quarter of the RAM


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """The memory of a machine, in bytes. None if a value does not apply or cannot be read."""

    ram_bytes: int
    working_set_bytes: int | None = None
    """The maximum that Metal recommends for a process (see iogpu.wired_limit_mb)."""
    available_bytes: int | None = None
    """Memory that the system and the container can provide now."""
    held_bytes: int = 0
    """Memory that this process already uses."""
    container_bytes: int | None = None
    """The smallest container limit around this process."""
    container_used_bytes: int | None = None
    """Memory in use in that container, without file cache that can be dropped."""
    place: str = "RAM"
    """Where it is: in the system's memory, or on a card that has its own."""


@dataclass(frozen=True)
class MemoryLimit:
    """The maximum memory of the process, the reason for it, and notices for the user."""

    limit_bytes: int
    reason: str
    notices: tuple[str, ...] = ()


class Bound(NamedTuple):
    """One upper bound on the memory of the process, and its description."""

    size_bytes: int
    text: str


def usual_working_set(ram_bytes: int) -> int:
    """The maximum that macOS recommends for a process, at least, on a Mac with this RAM."""
    is_large = ram_bytes >= LARGE_RAM_BYTES
    return int((LARGE_WORKING_SET_SHARE if is_large else WORKING_SET_SHARE) * ram_bytes)


def memory_here() -> MachineMemory:
    """The memory of this machine, with the limit for a process that macOS usually has."""
    memory = psutil.virtual_memory()
    is_mac = platform.system() == "Darwin"
    return MachineMemory(
        ram_bytes=memory.total,
        working_set_bytes=usual_working_set(memory.total) if is_mac else None,
        available_bytes=memory.available,
    )


def idle_mac(memory_gb: float) -> MachineMemory:
    """The memory of an idle Mac sold with this many GB, each 2**30 bytes. Raises UserError."""
    if not (math.isfinite(memory_gb) and memory_gb > 0):
        raise UserError(
            f"--memory {memory_gb:g}: must be a number above 0, e.g. 16 for a 16 GB Mac"
        )
    ram = int(memory_gb * GIB)
    return MachineMemory(
        ram_bytes=ram, working_set_bytes=usual_working_set(ram), available_bytes=ram
    )


def find_limit(
    machine: MachineMemory, max_memory_gb: float | None, force: bool, processes: int = 1
) -> MemoryLimit:
    """The limit that the user requested, or else one from the machine's memory.

    processes: of the run on this machine, which all have this limit.
    """
    if max_memory_gb is None:
        limit = detect(machine)
        if processes == 1:
            return limit
        reason = f"{limit.reason}, for each of {processes} processes"
        return MemoryLimit(max(1, limit.limit_bytes // processes), reason, limit.notices)
    asked = requested(machine, max_memory_gb, force)
    if processes * asked.limit_bytes > machine.ram_bytes and not force:
        most_gb = f"{math.floor(machine.ram_bytes / processes / GB * 100) / 100:g}"
        raise UserError(
            f"--max-memory {max_memory_gb:g}: {processes} processes share the memory of this "
            f"machine; use at most {most_gb}, or --force"
        )
    return asked


def detect(machine: MachineMemory) -> MemoryLimit:
    """The smallest bound minus the margin; at least 1 byte."""
    *_, least = found = sorted(bounds(machine), reverse=True)
    limit_bytes = max(1, least.size_bytes * (100 - MARGIN_PERCENT) // 100)
    named = [bound.text for bound in found[-2:]]  # the smallest bound, after the second smallest
    reason = ", ".join([*named, f"less {MARGIN_PERCENT}% margin"])
    if machine.available_bytes is not None:
        return MemoryLimit(limit_bytes, reason)
    return MemoryLimit(limit_bytes, reason, ("the amount of free memory cannot be read",))


def requested(machine: MachineMemory, max_memory_gb: float, force: bool) -> MemoryLimit:
    """The limit that the user requested, without a margin.

    Raises UserError if it is no such number, or if the machine or the container has less memory,
    unless `force` is set.
    """
    asked = f"--max-memory {max_memory_gb:g}"
    if not 0 < max_memory_gb < math.inf:
        raise UserError(f"{asked}: must be a number of GB above 0")
    limit_bytes = max(1, int(max_memory_gb * GB))
    most, where = machine.ram_bytes, "machine"
    if machine.container_bytes is not None and machine.container_bytes < most:
        most, where = machine.container_bytes, "container"
    if limit_bytes > most:
        most_gb = f"{math.floor(most / GB * 100) / 100:g}"  # rounded down, so that it is accepted
        if not force:
            raise UserError(
                f"{asked}: this {where} has {most_gb} GB of memory; "
                f"use at most {most_gb}, or --force"
            )
        notice = f"{asked}: this {where} has only {most_gb} GB of memory; it may kill the run"
        return MemoryLimit(limit_bytes, f"{asked} --force", (notice,))
    passed = [bound.text for bound in bounds(machine) if limit_bytes > bound.size_bytes]
    if not passed:
        return MemoryLimit(limit_bytes, asked)
    notice = f"{asked} is more than {' and '.join(passed)}; the machine may swap or kill the run"
    return MemoryLimit(limit_bytes, asked, (notice,))


def text(limit: MemoryLimit) -> str:
    """`limit 21.3 GB: 24.0 GB recommended working set, 22.4 GB free now, less 5% margin`."""
    return f"limit {roughly(limit.limit_bytes)}: {limit.reason}"


def bounds(machine: MachineMemory) -> list[Bound]:
    """All known bounds; the bound of the RAM is always known."""
    system = system_bytes(machine.ram_bytes)
    room = machine.ram_bytes - system
    whole = f"{roughly(machine.ram_bytes)} {machine.place}"
    found = [Bound(room, f"{whole} minus {roughly(system)} for the system")]
    if machine.working_set_bytes is not None:
        size = machine.working_set_bytes
        found.append(Bound(size, f"{roughly(size)} recommended working set"))
    if machine.available_bytes is not None:
        size = machine.available_bytes + machine.held_bytes
        held = "" if roughly(size) == roughly(machine.available_bytes) else " or already in use"
        found.append(Bound(size, f"{roughly(size)} free now{held}"))
    if machine.container_bytes is not None:
        others = max(0, (machine.container_used_bytes or 0) - machine.held_bytes)
        size = max(0, machine.container_bytes - others)
        beside = f" minus {roughly(others)} used by others" if others else ""
        found.append(Bound(size, f"{roughly(machine.container_bytes)} container limit{beside}"))
    return found


def system_bytes(ram_bytes: int) -> int:
    """Memory reserved for the system on a machine with `ram_bytes`."""
    return max(ram_bytes // SYSTEM_SHARE, min(SYSTEM_BYTES, ram_bytes // SYSTEM_MOST))


def roughly(size_bytes: int) -> str:
    """`21.3 GB`, or in smaller units below 1 GB."""
    return size_text(size_bytes, decimals=1)


def headroom_bytes(limit_bytes: int) -> int:
    """The distance below its limit at which a process is ended. Plans leave this room."""
    return max(HEADROOM_BYTES, int(HEADROOM * limit_bytes))


def with_headroom(process_bytes: int) -> int:
    """The least limit under which a process of this size is not ended."""
    return max(process_bytes + HEADROOM_BYTES, math.ceil(process_bytes / (1 - HEADROOM)))


def rounded_up(size_bytes: int) -> int:
    """Round up to what `in_gb` prints, so that the printed limit is enough the next time."""
    size_bytes += VARIES_BYTES
    unit = 100_000 if size_bytes < GB else 10_000_000
    return -(-size_bytes // unit) * unit
