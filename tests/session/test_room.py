"""Several runs at once get limits whose sum the machine has, or wait for each other."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import events_of, wait_until
from tests.dashboard import frames
from your_ai.config import TrainConfig
from your_ai.errors import Interrupted, UserError
from your_ai.memory.limit import GB, MachineMemory, detect
from your_ai.run import events
from your_ai.run.events import Finished, Started, Waiting
from your_ai.run.folder import SUPERVISOR_LOCK, RunFolder, create, is_running, locked, owner
from your_ai.session import room, run_list
from your_ai.session.room import (
    MemoryUser,
    memory_user,
    share_gb,
    starting,
    trial_share_gb,
    wait_for_room,
)

FREE = MachineMemory(ram_bytes=32 * GB, available_bytes=24 * GB)
CAPACITY_GB = detect(FREE).limit_bytes / GB


def user(limit_gb: float | None, held_gb: float = 0) -> MemoryUser:
    limit = None if limit_gb is None else int(limit_gb * GB)
    return MemoryUser("r1", limit, int(held_gb * GB))


def machine(held_gb: float) -> MachineMemory:
    """The same machine while others hold memory of it."""
    return MachineMemory(ram_bytes=32 * GB, available_bytes=int((24 - held_gb) * GB))


def test_first_run_gets_what_it_asks_for():
    assert share_gb(FREE, [], None) is None
    assert share_gb(FREE, [], 100) == 100  # train itself says what is wrong with it


@pytest.mark.parametrize("held_gb", [0, 3, 8])
def test_second_run_gets_what_is_left_whatever_the_first_holds_yet(held_gb):
    found = share_gb(machine(held_gb), [user(8, held_gb)], None)
    assert found == pytest.approx(CAPACITY_GB - 8, abs=0.02)
    assert found <= CAPACITY_GB - 8 + 1e-6


def test_sum_of_limits_stays_within_the_machine():
    most = int(CAPACITY_GB - 8)
    assert share_gb(FREE, [user(4), user(4)], most) == most
    with pytest.raises(UserError, match=r"r1 may use 8\.00 GB of the .* this needs 40 GB"):
        share_gb(FREE, [user(8)], 40)


def test_each_process_of_a_run_has_the_limit(own_folder):
    most = int(CAPACITY_GB / 3)
    assert share_gb(FREE, [user(most)], most, processes=2) == most
    with pytest.raises(UserError, match=r"this needs \d+ GB for each of 3 processes"):
        share_gb(FREE, [user(most)], most, processes=3)
    assert share_gb(FREE, [user(8)], None, 2) == pytest.approx((CAPACITY_GB - 8) / 2, abs=0.02)
    config = TrainConfig(data="d", run="r", processes=3, max_memory=2.0)
    assert memory_user(create(config), {}).limit_bytes == 6 * GB


def test_run_whose_limit_is_the_machine_leaves_nothing():
    for others in ([user(None)], [user(CAPACITY_GB)]):
        for asked in (None, 0.5):
            with pytest.raises(UserError, match="not enough memory: r1 may use"):
                share_gb(FREE, others, asked)


@given(
    st.lists(st.tuples(st.none() | st.floats(0.01, 24), st.floats(0, 4)), max_size=4),
    st.floats(0.5, 24),
)
def test_a_trial_has_at_least_half_of_what_is_free(users, free_gb):
    """Also where runs leave a little less than all: what is left may be too little to be of use."""
    here = MachineMemory(ram_bytes=32 * GB, available_bytes=int(free_gb * GB))
    free = detect(here).limit_bytes / GB
    found = trial_share_gb(here, [user(*each) for each in users])
    assert free / 2 <= found <= free
    if not users:
        assert found == free


# Runs that wait, in this process


def new_run(name: str, max_memory: float | None = None, **settings: object) -> RunFolder:
    return create(TrainConfig(data="d", run=name, max_memory=max_memory, wait=True, **settings))


def write(run: RunFolder, *written: events.Event) -> None:
    for event in written:
        events.write_event(run.events, event)


def working(name: str, max_memory: float | None) -> contextlib.AbstractContextManager[None]:
    return locked(new_run(name, max_memory), SUPERVISOR_LOCK)


@pytest.fixture
def free(own_folder, monkeypatch):
    monkeypatch.setattr(room, "memory_here", lambda: FREE)
    monkeypatch.setattr(room, "LOOK_S", 0.05)


def begins(run: RunFolder, config: TrainConfig | None = None) -> bool:
    """Whether a run begins without a wait; else its wait is ended by a signal."""
    received: list[int] = []

    def stop_when_it_waits() -> None:
        wait_until(lambda: over.is_set() or events_of(run, Waiting))
        received.append(signal.SIGINT)

    over = threading.Event()
    thread = threading.Thread(target=stop_when_it_waits)
    thread.start()
    try:
        wait_for_room(run, config or run.read_config(), received)
        return True
    except Interrupted:
        return False
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("other_gb", "gb", "processes", "at_once"),
    [
        (8, 8, 1, True),
        (12, 12, 1, False),
        (12, 6, 2, False),
        (8, 6, 2, True),
        (4, None, 1, False),  # it may use all that is there
        (None, 1, 1, False),
        (8, 100, 1, True),  # never fits, which training says
        (8, 20, 2, True),
    ],
)
def test_run_waits_if_the_sum_is_too_large(free, other_gb, gb, processes, at_once):
    with working("a", other_gb):
        assert begins(new_run("r", gb, processes=processes)) == at_once


def test_nobody_waits_for_runs_that_ended_or_came_later(free):
    with working("a", 20):
        pass
    with working("b", 20):
        later = Waiting(text="waiting", since=time.time() + 60, pid=os.getpid(), needed_bytes=GB)
        write(RunFolder(Path("runs/b")), later)
        assert begins(new_run("r", 20))


def test_run_resumed_with_new_settings_counts_with_these(free):
    with working("a", 2):
        a = RunFolder(Path("runs/a"))
        over = Waiting(text="", since=0.0, pid=os.getpid(), needed_bytes=20 * GB)
        write(a, over)
        assert not begins(new_run("r", 8))
        write(a, replace(over, pid=1))  # of an earlier process, whatever it said
        assert begins(new_run("s", 8))


def test_nothing_begins_while_another_process_starts_a_run(free):
    run, received = new_run("r", 8), list[int]()
    threading.Timer(0.3, received.append, [signal.SIGINT]).start()
    with starting(Path.cwd()), pytest.raises(Interrupted):  # as `mcp` does
        wait_for_room(run, run.read_config(), received)
    assert begins(run)


START = frames.started()
DONE = Finished(step=9, reason="done", adapter="runs/r/adapter", seconds=1.0)


@pytest.mark.parametrize(
    ("before", "state"),
    [((), "stopped"), ((START,), "stopped"), ((START, DONE), "finished")],
)
def test_stop_while_a_run_waits_leaves_it_as_it_was(free, before, state):
    run = new_run("r", 20)
    write(run, *before)
    with working("a", 20):
        assert not begins(run)
    (row,) = (row for row in run_list.run_rows() if row.name == "r")
    assert row.state == state


def test_waiting_run_says_for_whom(free):
    run, received, rows = new_run("r", 20), list[int](), list[run_list.RunRow]()

    def look() -> None:
        wait_until(lambda: events_of(run, Waiting))
        rows.extend(row for row in run_list.run_rows() if row.name == "r")
        received.append(signal.SIGTERM)

    thread = threading.Thread(target=look)
    thread.start()
    others = working("a", 4), working("b", 10)
    with others[0], others[1], locked(run, SUPERVISOR_LOCK), pytest.raises(Interrupted):
        wait_for_room(run, run.read_config(), received)
    thread.join()
    (row,) = rows
    assert row.state == "waiting"
    (waited,) = events_of(run, Waiting)
    assert waited.text == f"waiting for the memory of a, b (14.00 GB of {CAPACITY_GB:.2f} GB)"
    assert events_of(run, Finished)[-1].reason == "stopped by SIGTERM"


# Supervisors in processes of their own, with a training process that ends when it is told to


SUPERVISOR = """
import sys, time
from pathlib import Path
from your_ai.memory.limit import GB, MachineMemory
from your_ai.run.stopping import recorded_signals
from your_ai.session import room
from your_ai.session.supervisor import supervise_run

room.memory_here = lambda: MachineMemory(ram_bytes=32 * GB, available_bytes=24 * GB)
room.LOOK_S = 0.05
while not Path("go").exists():
    time.sleep(0.001)
with recorded_signals() as received:
    child = [sys.executable, "child.py"]
    sys.exit(supervise_run(sys.argv[1], "", None, received, True, command=child))
"""
CHILD = """
import sys, time
from pathlib import Path
from your_ai.run import events
from your_ai.run.child import watch_parent
from your_ai.run.folder import RunFolder, locked

run = RunFolder(Path(sys.argv[1]))
watch_parent(int(sys.argv[sys.argv.index("--parent-fd") + 1]))
with locked(run):
    events.write_event(run.events, events.Stage(text="loading"))
    events.write_event(run.events, events.Started(
        step=0, steps=9, steps_per_epoch=9, model="m", rows=1, trainable_parameters=1,
        dtype="float32", plan="",
    ))
    while not Path(f"end-{run.name}").exists():
        time.sleep(0.01)
    events.write_event(run.events, events.Finished(
        step=9, reason="done", adapter="x", seconds=1.0
    ))
"""


@pytest.fixture
def supervise(own_folder) -> Iterator[object]:
    """A function that starts the supervisor of a new run that needs 14 GB of the 22.8 there are."""
    Path("supervisor.py").write_text(SUPERVISOR)
    Path("child.py").write_text(CHILD)
    with contextlib.ExitStack() as stack:

        def start(name: str) -> tuple[RunFolder, subprocess.Popen[bytes]]:
            run = new_run(name, 14, notify=False)
            command = [sys.executable, "supervisor.py", str(run.path)]
            process = subprocess.Popen(command)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return run, process

        yield start


def waits_for(run: RunFolder) -> str:
    """The runs that a run waits for; empty if it does not wait."""
    text = (events_of(run, Waiting) or [None])[-1]
    return text.text.removeprefix("waiting for the memory of ").partition(" (")[0] if text else ""


def test_runs_train_in_order_also_after_others_are_killed(supervise):
    Path("go").touch()
    found = {}
    for name, others in (("a", ""), ("b", "a"), ("c", "a, b"), ("d", "a, b, c")):
        found[name] = supervise(name)
        run, _ = found[name]
        if others:
            wait_until(lambda run=run, others=others: waits_for(run) == others)
        else:
            wait_until(lambda run=run: events_of(run, Started))
    (a, first), (b, second), (c, third), (d, fourth) = found.values()
    second.kill()  # a run that waits blocks nobody
    wait_until(lambda: waits_for(c) == "a")
    first.kill()  # its training process saves and ends
    wait_until(lambda: events_of(c, Started))
    assert owner(a) is None
    assert waits_for(d) in ("a, c", "c")
    assert not events_of(d, Started) + events_of(b, Started)
    Path("end-c").touch()
    assert third.wait(60) == 0
    wait_until(lambda: events_of(d, Started))
    Path("end-d").touch()
    assert fourth.wait(60) == 0
    assert not any(map(is_running, (a, b, c, d)))


def test_runs_that_begin_at_the_same_instant_train_one_after_another(supervise):
    names = ("a", "b", "c", "d")
    for name in names:
        Path(f"end-{name}").touch()  # each ends at once
    found = [supervise(name) for name in names]
    time.sleep(3)  # until all are loaded
    Path("go").touch()
    assert [process.wait(60) for _, process in found] == [0] * 4
    lives = []
    for run, _ in found:
        lines = [json.loads(line) for line in run.events.read_text().splitlines()]
        times = {line["event"]: line["time"] for line in lines}
        lives.append((times["stage"], times["finished"]))
    lives.sort()
    assert all(ended <= began for (_, ended), (began, _) in itertools.pairwise(lives))
