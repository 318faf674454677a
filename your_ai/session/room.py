"""Memory for several runs of one folder: the sum of their limits stays within the machine's.

`mcp` gives a new run what the others leave, and the supervisor of a run with --wait waits for it.
Nobody keeps a list: what runs may use is read from their folders, under a lock. Does not import
mlx.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from your_ai.config import TrainConfig
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.errors import Interrupted, UserError
from your_ai.gates.text import size_text
from your_ai.memory.limit import GB, MachineMemory, detect, find_limit, memory_here
from your_ai.run import events, requests
from your_ai.run.child import POLL_S
from your_ai.run.folder import RunFolder, is_running, owner
from your_ai.run.stopping import Stop
from your_ai.session.run_list import folders, last_of

LEAST_GB = 0.1  # that is worth a try
LOCK_WAIT_S = 120.0
LOOK_S = 1.0  # between two looks of a run that waits

Known = dict[Path, tuple[ViewState, int]]  # of runs: what was read of their events, to which byte


@dataclass(frozen=True)
class MemoryUser:
    """A run or an evaluation that works now, or waits for memory."""

    name: str
    limit_bytes: int | None
    """What it may use at most; None if it is not known yet."""
    held_bytes: int = 0
    """What it uses now."""
    since: float | None = None
    """Time when it began to wait, in seconds since 1970; None if it works."""


def memory_user(folder: RunFolder, known: Known) -> MemoryUser:
    """The memory that all processes of a run in progress may use, by its events and settings."""
    state, offset = known.get(folder.path, (ViewState(), 0))
    records, offset = events.tail(folder.events, offset)
    state = fold_all(state, records)
    known[folder.path] = state, offset
    config = folder.settings()
    processes = 1 if config is None else config.processes
    gb = None if config is None else config.max_memory
    limit = None if gb is None else int(gb * GB) * processes
    if state.limit is not None:
        limit = state.limit.limit_bytes * processes
    if (waiting := state.waiting) is not None and waiting.pid == owner(folder):
        if waiting.needed_bytes is not None:  # config.yaml does not have new settings yet
            limit = waiting.needed_bytes
        if waiting.text:
            return MemoryUser(folder.name, limit, since=waiting.since)
    held = (0 if state.gauges is None else state.gauges.process_bytes or 0) * processes
    return MemoryUser(folder.name, limit, held)


def running_users(runs: Path, known: Known, but: str = "") -> list[MemoryUser]:
    """The runs in `runs` that work or wait now, without the one called `but`."""
    running = [each for each in folders(runs) if each.name != but and is_running(each)]
    for path in known.keys() - {each.path for each in running}:
        del known[path]  # another run may take its name
    return [memory_user(each, known) for each in running]


def room_beside(machine: MachineMemory, others: Sequence[MemoryUser]) -> tuple[int, list[int]]:
    """The bytes that all may use together, and those that each of the others may."""
    held = sum(other.held_bytes for other in others)
    available = machine.available_bytes
    empty = replace(machine, available_bytes=None if available is None else available + held)
    capacity = detect(empty).limit_bytes
    return capacity, [capacity if o.limit_bytes is None else o.limit_bytes for o in others]


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
    capacity, taken = room_beside(machine, others)
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


def trial_gb(runs: Path) -> float:
    """The limit in GB for a process that a user waits for, beside the runs that work now."""
    return trial_share_gb(memory_here(), running_users(runs, {}))


def trial_share_gb(machine: MachineMemory, others: Iterable[MemoryUser]) -> float:
    """The limit that the others leave, but at least half of what they leave free now.

    They seldom grow after their first steps, and go on with less if they must.
    """
    free_gb = detect(machine).limit_bytes / GB
    try:
        share = share_gb(machine, others, None)
    except UserError:
        share = 0.0
    return free_gb if share is None else min(free_gb, max(share, free_gb / 2))


class Busy(UserError):
    """Another process has been starting a run for too long."""


@contextlib.contextmanager
def starting(folder: Path, wait_s: float = LOCK_WAIT_S) -> Iterator[None]:
    """Let one process at a time begin something in a folder. Raises Busy."""
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Busy(
                        f"{folder}: another call has been starting a run here for minutes; try "
                        "again"
                    ) from None
                time.sleep(POLL_S)
        yield
    finally:
        os.close(descriptor)


# A run that waits in its supervisor


NAMED = 3  # runs that a text names


def wait_for_room(folder: RunFolder, config: TrainConfig, received: Sequence[int]) -> None:
    """Wait until the runs beside this one leave it what it may use: --max-memory, or all.

    They are those that work, and those that began to wait before it. received: stop signals so
    far. Raises Interrupted for one of them.
    """
    try:
        find_limit(memory_here(), config.max_memory, config.force, config.processes)
    except UserError:
        return  # it never fits, as training says at once
    gb = config.max_memory
    needed = None if gb is None else int(gb * GB) * config.processes
    path = Path(os.path.abspath(folder.path))
    since, seen, known = time.time(), list[MemoryUser](), Known()

    def tell(text: str) -> None:
        told = events.Waiting(text=text, since=since, pid=os.getpid(), needed_bytes=needed)
        events.write_event(folder.events, told)

    while not received:
        with contextlib.suppress(Busy), starting(path.parent.parent, wait_s=0):
            users = running_users(path.parent, known, but=path.name)
            before = [u for u in users if u.since is None or (u.since, u.name) < (since, path.name)]
            capacity, taken = room_beside(memory_here(), before)
            if not before or (needed is not None and needed + sum(taken) <= capacity):
                if folder.events.exists():  # others must not take it for one that waits
                    tell("")
                return
            if seen != (seen := [replace(user, held_bytes=0) for user in before]):
                tell(wait_text(before, sum(taken), capacity))
        deadline = time.monotonic() + LOOK_S
        while not received and time.monotonic() < deadline:
            time.sleep(POLL_S)
    if seen:
        record_stop(folder, received[0])
    raise Interrupted(received[0])


def wait_text(before: Sequence[MemoryUser], taken_bytes: int, capacity_bytes: int) -> str:
    names = [user.name for user in sorted(before, key=lambda user: (user.since or 0.0, user.name))]
    more = [f"{len(names) - NAMED} more"] if len(names) > NAMED else []
    whole = size_text(capacity_bytes)
    taken = size_text(min(taken_bytes, capacity_bytes))
    return f"waiting for the memory of {', '.join(names[:NAMED] + more)} ({taken} of {whole})"


def record_stop(folder: RunFolder, number: int) -> None:
    """Record that a run was stopped before it began: as it had ended before, if it had."""
    records, _ = events.tail(folder.events)
    ended = last_of([record.event for record in records], events.Started, events.Finished)
    if not isinstance(ended, events.Finished):
        stop = Stop()
        stop.received = number
        asked = requests.withdraw(folder, requests.STOP)
        reason = "stopped on request" if asked else f"stopped by {stop.name}"
        step = fold_all(ViewState(), records).at
        ended = events.Finished(step=step, reason=reason, adapter="", seconds=0.0)
    events.write_event(folder.events, ended)
