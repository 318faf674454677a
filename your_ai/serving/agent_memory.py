"""Memory for several runs of one folder: the sum of their limits stays within the machine's.

A run may use its whole limit at any time, so a run without --max-memory leaves nothing to a
second one. Does not import mlx.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from your_ai.dashboard.state import ViewState, fold_all
from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.memory.limit import GB, MachineMemory, detect
from your_ai.run import events
from your_ai.run.folder import RunFolder

LEAST_GB = 0.1  # that is worth a try


@dataclass(frozen=True)
class MemoryUser:
    """A run or an evaluation that works now."""

    name: str
    limit_bytes: int | None
    """What it may use at most; None if it is not known yet."""
    held_bytes: int = 0
    """What it uses now."""


def memory_user(folder: RunFolder) -> MemoryUser:
    """What a run in progress may use, by its events and settings: of all its processes."""
    state, config = fold_all(ViewState(), events.tail(folder.events)[0]), folder.read_config()
    held = (0 if state.gauges is None else state.gauges.process_bytes or 0) * config.processes
    if state.limit is not None:
        return MemoryUser(folder.name, state.limit.limit_bytes * config.processes, held)
    gb = config.max_memory
    limit = None if gb is None else int(gb * GB) * config.processes
    return MemoryUser(folder.name, limit, held)


def share_gb(
    machine: MachineMemory,
    others: Iterable[MemoryUser],
    asked_gb: float | None,
    processes: int = 1,
) -> float | None:
    """The limit in GB for each of so many more processes; None: what `train` finds by itself.

    asked_gb: the limit that was asked for. Raises UserError if the others leave too little.
    """
    others = list(others)
    if not others:
        return asked_gb
    held = sum(other.held_bytes for other in others)
    available = machine.available_bytes
    empty = replace(machine, available_bytes=None if available is None else available + held)
    capacity = detect(empty).limit_bytes
    taken = [capacity if o.limit_bytes is None else o.limit_bytes for o in others]
    left_gb = math.floor((capacity - sum(taken)) / processes / GB * 100) / 100
    if left_gb >= (LEAST_GB if asked_gb is None else asked_gb):
        return left_gb if asked_gb is None else asked_gb
    using = ", ".join(
        f"{other.name} may use {size_text(limit)}"
        for other, limit in zip(others, taken, strict=True)
    )
    each = f" for each of {processes} processes" if processes > 1 else ""
    wanted = "" if asked_gb is None else f", and this needs {asked_gb:g} GB{each}"
    raise UserError(
        f"not enough memory: {using} of the {size_text(capacity)} that are there{wanted}; wait for "
        "it, stop it, or start both with a smaller max_memory"
    )
