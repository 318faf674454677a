"""What a run does with the computer, with fake programs of macOS."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import events_of, is_alive, wait_until
from tests.programs import script
from your_ai.config import TrainConfig
from your_ai.errors import RunError
from your_ai.run import events, folder, host
from your_ai.run.folder import RunFolder
from your_ai.run.host import HostState
from your_ai.run.stopping import Interrupted
from your_ai.session import computer
from your_ai.session.computer import changes_text, is_news, looked_after, notified, with_known

FINISHED = events.Finished(step=1200, reason="done", adapter="a", seconds=3723.0)

# Like caffeinate -is -w PID: it ends after that process. It writes who it is and whom it watches.
CAFFEINATE = """
test "$1 $2" = "-is -w" || exit 1
touch "awake/$3.$$"
while :; do
    case $(ps -o stat= -p "$3") in "" | Z*) exit ;; esac
    sleep 0.05
done
"""

# A supervisor on a Mac, with training processes that do nothing until they are killed.
SUPERVISOR = """
import sys
from your_ai.run import host
from your_ai.session.supervisor import supervise_run

host.SYSTEM = "darwin"
train = "import os, pathlib, time; pathlib.Path('training', str(os.getpid())).touch()"
train += "; time.sleep(60)"
sys.exit(supervise_run("r", "", None, [], command=[sys.executable, "-c", train]))
"""


@pytest.fixture
def run(own_folder: Path) -> RunFolder:
    found = folder.create(TrainConfig(model="m", data="d", run="r"))
    events.write_event(found.events, events.Stage(text="loading m"))
    return found


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SYSTEM", "darwin")
    monkeypatch.setenv(host.WATCHDOG, "1")


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """The notifications that were shown."""
    found: list[tuple[str, str]] = []
    monkeypatch.setattr(host, "show_notification", lambda *texts: found.append(texts))
    return found


def trainers() -> set[int]:
    return {int(name) for name in os.listdir("training")}


def watched() -> set[int]:
    """The processes for which a caffeinate runs."""
    pairs = [[int(part) for part in name.split(".")] for name in os.listdir("awake")]
    return {process for process, caffeinate in pairs if is_alive(caffeinate)}


def test_mac_is_awake_while_any_process_of_the_run_lives(run, own_folder, monkeypatch):
    """Also after kill -9 of each of them, in the order that is hardest."""
    for place in ("awake", "training"):
        Path(place).mkdir()
    script(Path("bin"), "caffeinate", CAFFEINATE)
    monkeypatch.setenv("PATH", f"{own_folder / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with subprocess.Popen([sys.executable, "-c", SUPERVISOR]) as supervisor:
        try:
            wait_until(trainers)
            (first,) = trainers()
            wait_until(lambda: watched() == {supervisor.pid, first})

            os.kill(first, signal.SIGKILL)
            wait_until(lambda: trainers() > {first})
            (second,) = trainers() - {first}
            wait_until(lambda: watched() == {supervisor.pid, second})

            supervisor.kill()
            wait_until(lambda: watched() == {second})  # it may still have to save
        finally:
            supervisor.kill()
            for pid in trainers():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not watched())


@contextlib.contextmanager
def recorded(run: RunFolder, monkeypatch, *states: HostState) -> Iterator[None]:
    """Record these states, one after another, and then always the last."""
    left = list(states)
    monkeypatch.setattr(host, "read_state", lambda: left.pop(0) if len(left) > 1 else left[0])
    with computer.recorded_state(run, every_s=0.0):
        wait_until(lambda: len(left) == 1)
        time.sleep(3 * computer.STOP_S)
        yield


def test_battery_and_heat_are_written_when_they_change(run, mac, monkeypatch):
    monkeypatch.setattr(computer, "STOP_S", 0.02)
    states = [
        HostState(source="mains", percent=100, thermal="nominal"),
        HostState(source="battery", percent=63, thermal="nominal"),
        HostState(source="battery", percent=61, thermal="serious"),
        HostState(),  # a program failed once
        HostState(source="battery", percent=60, thermal="serious"),
        HostState(source="battery", percent=55, thermal="serious"),
        HostState(source="mains", percent=55, thermal="nominal"),
    ]
    with recorded(run, monkeypatch, *states):
        pass
    assert [event.text for event in events_of(run, events.Notice)] == [
        "on battery, 63%",
        "thermal pressure is serious; the computer slows down",
        "on mains power again",
        "thermal pressure is nominal again",
    ]
    assert events_of(run, events.Host) == [
        events.Host(source="battery", percent=63, thermal="nominal"),
        events.Host(source="battery", percent=61, thermal="serious"),
        events.Host(source="battery", percent=55, thermal="serious"),
        events.Host(source="mains", percent=55, thermal="nominal"),
    ]


def test_nothing_is_written_before_the_training_process_writes(run, mac, monkeypatch):
    """So that a run that never began leaves no events."""
    monkeypatch.setattr(computer, "STOP_S", 0.02)
    run.events.unlink()
    monkeypatch.setattr(host, "read_state", lambda: pytest.fail("was read"))
    with computer.recorded_state(run):
        time.sleep(0.1)
    assert not run.events.exists()


def test_program_that_hangs_does_not_delay_the_run(run, mac, monkeypatch):
    monkeypatch.setattr(host, "read_state", lambda: time.sleep(3.0) or HostState())
    began = time.monotonic()
    with computer.recorded_state(run):
        time.sleep(0.05)
    assert time.monotonic() - began < 2


def test_what_cannot_be_read_is_as_it_was():
    before = HostState(source="battery", percent=63, thermal="serious")
    assert with_known(before, HostState()) == before
    now = HostState(source="battery", percent=63, thermal="fair")
    assert with_known(before, HostState(thermal="fair")) == now


def test_desktop_on_mains_power_says_nothing():
    desktop = HostState(source="mains", thermal="nominal")
    assert changes_text(HostState(), desktop) == []
    assert not is_news(HostState(), desktop)
    assert not is_news(HostState(), with_known(HostState(), HostState()))


def test_battery_of_a_laptop_on_mains_power_is_not_news():
    charging = HostState(source="mains", percent=20)
    assert not is_news(charging, HostState(source="mains", percent=90))


def test_full_disk_does_not_end_the_watch(run, monkeypatch):
    monkeypatch.setattr(computer, "EventLog", Mock(side_effect=RunError("disk is full")))
    computer.write_state(run, HostState(), HostState(source="battery"))


def write(run: RunFolder, *written: events.Event) -> None:
    for event in written:
        events.write_event(run.events, event)


def test_detached_run_notifies_when_it_has_finished(run, shown):
    with notified(run, True, lambda: True):
        write(run, FINISHED, events.Notice(text="later"))
    assert shown == [("your_ai", "Run r finished: 1,200 steps in 1:02:03")]


def test_long_run_notifies_of_its_error(run, shown, monkeypatch):
    monkeypatch.setattr(computer, "LONG_S", 0.0)
    with pytest.raises(RunError), notified(run, True):
        raise RunError("runs/r: gave up")
    with pytest.raises(ZeroDivisionError), notified(run, True):
        raise ZeroDivisionError("of ours")
    texts = [text for _, text in shown]
    assert texts == ["Run r failed: runs/r: gave up", "Run r failed: ZeroDivisionError"]


def test_short_run_in_the_foreground_does_not_notify(run, shown):
    with notified(run, True):
        write(run, FINISHED)
    assert shown == []


def test_user_can_turn_notifications_off(run, shown):
    config = TrainConfig(model="m", data="d", notify=False)
    for settings, quiet in ((config, False), (TrainConfig(model="m", data="d"), True)):
        with looked_after(run, settings, quiet, lambda: True):
            write(run, FINISHED)
    assert shown == []


def test_run_that_the_user_stopped_does_not_notify(run, shown):
    stopped = events.Finished(step=3, reason="stopped by Ctrl-C", adapter="", seconds=1.0)
    with notified(run, True, lambda: True):
        write(run, FINISHED, stopped)
    with pytest.raises(Interrupted), notified(run, True, lambda: True):
        raise Interrupted(signal.SIGINT)
    assert shown == []
