"""How much memory the training process may hold -> Limit, with the reason in words.

No mlx here: a Machine is read by memory.probe, or recorded. GB are 10**9 bytes
(macOS calls 2**30 bytes of memory a GB: its 24 GB are 25.8 here).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from your_ai.errors import UserError

GB = 10**9
MARGIN_PERCENT = 5  # gauges lag behind a step, and what is free now changes
# What is never given away, even where a raised iogpu.wired_limit_mb would. It is less than
# macOS keeps back itself with any amount of memory, so it cuts no working set that is its own.
SYSTEM_SHARE = 16  # a sixteenth of the RAM,
SYSTEM_BYTES = 2 * GB  # or this much where that is more,
SYSTEM_MOST = 4  # but no more than a quarter of the RAM


@dataclass(frozen=True, kw_only=True)
class MachineMemory:
    """What a limit is found from, in bytes; None where it does not apply or cannot be read.

    working_set: what Metal recommends that a process uses at most, which the user can
    change with iogpu.wired_limit_mb; available: what the system, and the container, could
    give now; held: what this process holds already; container: the least limit around this
    process, and what is used in it, without file cache that can be dropped.
    """

    ram_bytes: int
    working_set_bytes: int | None = None
    available_bytes: int | None = None
    held_bytes: int = 0
    container_bytes: int | None = None
    container_used_bytes: int | None = None


@dataclass(frozen=True)
class MemoryLimit:
    """The most that the process may hold, why so much, and what the user should know."""

    limit_bytes: int
    reason: str
    notices: tuple[str, ...] = ()


class Bound(NamedTuple):
    """Something that the process cannot, or should not, hold more than."""

    size_bytes: int
    text: str


def find_limit(machine: MachineMemory, max_memory_gb: float | None, force: bool) -> MemoryLimit:
    """What the user asked for, or else what the machine can give."""
    if max_memory_gb is None:
        return detect(machine)
    return requested(machine, max_memory_gb, force)


def detect(machine: MachineMemory) -> MemoryLimit:
    """The least of all bounds, less the margin; at least 1 byte."""
    *_, least = found = sorted(bounds(machine), reverse=True)
    limit_bytes = max(1, least.size_bytes * (100 - MARGIN_PERCENT) // 100)
    named = [bound.text for bound in found[-2:]]  # the least, and what it would be without it
    reason = ", ".join([*named, f"less {MARGIN_PERCENT}% margin"])
    if machine.available_bytes is not None:
        return MemoryLimit(limit_bytes, reason)
    return MemoryLimit(limit_bytes, reason, ("how much memory is free now cannot be read",))


def requested(machine: MachineMemory, max_memory_gb: float, force: bool) -> MemoryLimit:
    """What the user asked for, as it is.

    Raises UserError for more than the machine, or the container, has, unless `force`.
    """
    asked = f"--max-memory {max_memory_gb:g}"
    limit_bytes = max(1, int(max_memory_gb * GB))
    most, where = machine.ram_bytes, "machine"
    if machine.container_bytes is not None and machine.container_bytes < most:
        most, where = machine.container_bytes, "container"
    if limit_bytes > most:
        most_gb = f"{math.floor(most / GB * 100) / 100:g}"  # must not be too much itself
        if not force:
            raise UserError(
                f"{asked}: this {where} has {most_gb} GB of memory; "
                f"give at most {most_gb}, or --force"
            )
        notice = f"{asked}: this {where} has only {most_gb} GB of memory; it may be ended for it"
        return MemoryLimit(limit_bytes, f"{asked} --force", (notice,))
    passed = [bound.text for bound in bounds(machine) if limit_bytes > bound.size_bytes]
    if not passed:
        return MemoryLimit(limit_bytes, asked)
    notice = f"{asked} is more than {' and '.join(passed)}; the machine may swap, or end the run"
    return MemoryLimit(limit_bytes, asked, (notice,))


def text(limit: MemoryLimit) -> str:
    """`limit 21.3 GB: 24.0 GB recommended working set, 22.4 GB free now, less 5% margin`."""
    return f"limit {roughly(limit.limit_bytes)}: {limit.reason}"


def bounds(machine: MachineMemory) -> list[Bound]:
    """Every bound that is known; that of the RAM always is."""
    system = system_bytes(machine.ram_bytes)
    room = machine.ram_bytes - system
    found = [
        Bound(room, f"{roughly(machine.ram_bytes)} RAM without {roughly(system)} for the system")
    ]
    if machine.working_set_bytes is not None:
        size = machine.working_set_bytes
        found.append(Bound(size, f"{roughly(size)} recommended working set"))
    if machine.available_bytes is not None:
        size = machine.available_bytes + machine.held_bytes
        held = "" if roughly(size) == roughly(machine.available_bytes) else " or held already"
        found.append(Bound(size, f"{roughly(size)} free now{held}"))
    if machine.container_bytes is not None:
        others = max(0, (machine.container_used_bytes or 0) - machine.held_bytes)
        size = max(0, machine.container_bytes - others)
        beside = f" without {roughly(others)} that others use" if others else ""
        found.append(Bound(size, f"{roughly(machine.container_bytes)} container limit{beside}"))
    return found


def system_bytes(ram_bytes: int) -> int:
    """What the system needs at least of so much memory."""
    return max(ram_bytes // SYSTEM_SHARE, min(SYSTEM_BYTES, ram_bytes // SYSTEM_MOST))


def roughly(size_bytes: int) -> str:
    """`21.3 GB`; with two decimals under 1 GB."""
    size_gb = size_bytes / GB
    return f"{size_gb:.1f} GB" if size_gb >= 1 else f"{size_gb:.2f} GB"
