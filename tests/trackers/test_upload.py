"""The process of a tracker, with fake packages that record their calls."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import wait_until
from tests.dashboard.frames import step
from tests.trackers import fakes
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run import events
from your_ai.run.events import Event
from your_ai.run.folder import RunFolder, create, locked
from your_ai.trackers import upload
from your_ai.trackers.upload import OPEN, Tracker, TrackerRow

PATIENCE_S = 20.0
FINISHED = events.Finished(step=2, reason="done", adapter="", seconds=1.0)
SEND = [sys.executable, "-m", "your_ai.trackers.upload"]


def log_events(run: RunFolder, *logged: Event) -> None:
    with contextlib.closing(events.EventLog(run.events)) as log:
        for event in logged:
            log.write(event)


# Before training


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"--report-to wandbb: .*did you mean wandb\?"):
        upload.check_trackers(["wandbb"])


def test_a_missing_package_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboardX .*pip install '\.\[tensorboard\]'"):
        upload.check_trackers(["tensorboard"])


def test_a_folder_named_wandb_is_not_the_package(own_folder, monkeypatch):
    (own_folder / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(own_folder)])
    with pytest.raises(UserError, match="not installed"):
        upload.check_trackers(["wandb"])


def test_installed_packages_are_accepted(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(fakes.write(own_folder / "fakes")))
    upload.check_trackers(upload.NAMES)


# Sending, in this process


class Service:
    """A tracker that keeps its rows; `fault` is called first, with the name of the call."""

    def __init__(self, fault: Callable[[str], Any] = lambda call: None) -> None:
        self.fault = fault
        self.opened: list[str] = []
        self.rows: list[TrackerRow] = []
        self.closed: list[str] = []

    def open(self, folder: RunFolder, identity: str) -> Tracker:
        self.opened.append(identity)
        self.fault("open")
        return Tracker(log=self.log, close=self.close)

    def log(self, row: TrackerRow) -> None:
        self.fault("log")
        self.rows.append(row)

    def close(self, ended: str) -> None:
        self.fault("close")
        self.closed.append(ended)

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


class Over(threading.Event):
    """Set as soon as the service has a number of rows; nothing waits for it."""

    def __init__(self, service: Service, rows: int) -> None:
        super().__init__()
        self.service, self.rows = service, rows

    def is_set(self) -> bool:
        return len(self.service.rows) >= self.rows

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


@pytest.fixture
def calls(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict]]:
    """The calls of a package, in processes that find the fakes first."""
    monkeypatch.setenv("PYTHONPATH", str(fakes.write(own_folder / "fakes")))
    monkeypatch.setenv("CALLS", str(own_folder / "calls"))
    return lambda *asked: fakes.calls(own_folder / "calls", *asked)


@pytest.fixture
def run(calls) -> RunFolder:
    return create(TrainConfig(data="rows.jsonl", run="r"))


def send(run: RunFolder, service: Service, rows: int = 0) -> bool:
    """Send to a service under the name of wandb.

    rows: the run is over as soon as the service has this many.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPEN, "wandb", service.open)
        return upload.send(run, "wandb", Over(service, rows))


def failing(*times: int, call: str = "log", error: BaseException | None = None) -> Service:
    """A service that raises at these calls, counted from 1."""
    count = 0

    def fault(name: str) -> None:
        nonlocal count
        count += name == call
        if name == call and count in times:
            raise error or OSError("away,\nfor now")

    return Service(fault)


def test_a_run_that_never_began_opens_no_tracker(run):
    log_events(run, events.Stage(text="loading"), events.Limit(limit_bytes=1, reason=""))
    service = Service()
    assert send(run, service)
    assert not service.opened
    assert not upload.state_of(run, "wandb").exists()


def test_no_step_is_sent_twice_after_a_resume(run):
    log_events(run, step(1), step(2), FINISHED)
    first, second = Service(), Service()
    send(run, first)
    log_events(run, step(2), step(3), FINISHED)  # as resumed from the checkpoint of step 1
    send(run, second)
    assert second.steps == [3]
    assert second.opened == first.opened


@pytest.mark.parametrize("error", [None, SystemExit(1), KeyboardInterrupt()])
def test_a_tracker_that_raises_is_opened_again_and_misses_nothing(run, error):
    log_events(run, step(1), step(2), step(3), FINISHED)
    service = failing(2, 3, error=error)
    assert send(run, service, rows=3)
    assert service.steps == [1, 2, 3]
    assert len(service.opened) == 3
    assert len(set(service.opened)) == 1


def test_a_tracker_that_cannot_be_opened_is_tried_again(run):
    log_events(run, step(1))
    service = failing(1, 2, call="open")
    assert send(run, service, rows=1)
    assert service.steps == [1]


def test_a_failure_after_the_end_of_the_run_is_the_last(run):
    log_events(run, step(1))
    service = failing(1)
    assert not send(run, service)
    assert len(service.opened) == 1


def test_rows_sent_before_a_failure_are_not_sent_again_later(run):
    log_events(run, step(1), step(2), step(3))
    service = failing(3)
    assert not send(run, service)
    assert send(run, service)
    assert service.steps == [1, 2, 3]


def test_a_tracker_that_cannot_be_closed_counts_as_failed(run):
    log_events(run, step(1), FINISHED)
    assert not send(run, failing(1, call="close"))


def test_a_failure_is_one_line_that_says_what_comes_next(run, capsys):
    log_events(run, step(1))
    send(run, failing(1), rows=1)
    send(run, failing(1, call="close"))
    assert "wandb: OSError: away, for now; next try in 300 s" in capsys.readouterr().out
    log_events(run, step(2))
    send(run, failing(1))
    assert capsys.readouterr().out.endswith(
        "wandb: OSError: away, for now; send the rest later: "
        "python -m your_ai.trackers.upload runs/r wandb\n"
    )


def test_sending_ends_when_the_folder_is_gone(run):
    log_events(run, step(1))
    run.path.rename("elsewhere")
    service = Service()
    send(run, service, rows=1)
    assert not service.opened
    assert not run.path.exists()


@pytest.mark.parametrize("text", ['{"id": 3, "wan', "[]", '{"id": "a"}', '{"id": 1, "events": []}'])
def test_a_damaged_state_file_is_replaced(run, text):
    upload.state_of(run, "wandb").write_text(text)
    log_events(run, step(1), FINISHED)
    service = Service()
    assert send(run, service)
    assert service.steps == [1]
    state = json.loads(upload.state_of(run, "wandb").read_text())
    assert state == {"id": service.opened[0], "events": 1}


# The process


def send_whole(run: RunFolder, *names: str) -> None:
    """Log and send a run of one step, from its beginning to its end."""
    with upload.tracked(run, names):
        log_events(run, step(1), FINISHED)


@contextlib.contextmanager
def started(run: RunFolder, *names: str) -> Iterator[list[subprocess.Popen]]:
    processes = [upload.start(run, name) for name in names]
    assert None not in processes
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def log_of(run: RunFolder) -> str:
    return (run.path / "trackers.log").read_text()


def wandb_steps(calls: Callable[..., list[dict]]) -> list[int]:
    return [fields["step"] for fields in calls("wandb", "log")]


def test_without_names_there_is_no_process(run):
    with upload.tracked(run, ()):
        pass
    assert not (run.path / "trackers.log").exists()


def test_the_log_says_if_a_process_cannot_be_started(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "./none")
    assert upload.start(run, "wandb") is None
    assert "wandb: cannot be started (No such file" in log_of(run)


def test_without_a_writable_log_nothing_is_started(run):
    (run.path / "trackers.log").mkdir()
    assert upload.start(run, "wandb") is None


def test_each_tracker_gets_the_whole_run(run, calls):
    with locked(run), upload.tracked(run, upload.NAMES):
        log_events(run, step(1), step(2), FINISHED)
    assert wandb_steps(calls) == [1, 2]
    assert [fields["step"] for fields in calls("swanlab", "log")] == [1, 2]
    losses = [f for f in calls("tensorboardX", "log") if f["name"] == "train/loss"]
    assert [(f["step"], f["value"]) for f in losses] == [(1, 1.25), (2, 1.25)]
    assert calls("wandb", "finish") == [{"exit_code": 0}]
    assert not any(isinstance(r.event, events.Notice) for r in events.tail(run.events)[0])


def test_events_are_sent_while_the_run_continues(run, calls):
    with started(run, "wandb"), locked(run):
        for number in (1, 2):
            log_events(run, step(number))
            wait_until(lambda: wandb_steps(calls)[-1:] == [number])  # noqa: B023 (called run)


def test_a_run_that_ends_at_once_is_sent(run, calls):
    log_events(run, step(1), FINISHED)
    with started(run, "wandb") as processes:
        assert upload.finish(run, processes) is None
    assert wandb_steps(calls) == [1]


def test_two_runs_have_different_ids(run, calls):
    for folder in (run, create(TrainConfig(data="rows.jsonl", run="s"))):
        send_whole(folder, "wandb")
    assert len({fields["WANDB_RUN_ID"] for fields in calls("wandb", "init")}) == 2


def test_a_tracker_that_hangs_delays_neither_the_run_nor_another_tracker(run, calls, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:hang")
    with started(run, "wandb", "swanlab") as processes, locked(run):
        log_events(run, step(1))
        wait_until(lambda: calls("swanlab", "log"))
        log_events(run, FINISHED)
        before = time.monotonic()
        fault = upload.finish(run, processes, patience_s=1.0)
        assert time.monotonic() - before < 5
        assert "still sending" in fault
        assert "runs/r/trackers.log" in fault
        wait_until(lambda: calls("swanlab", "finish"))
        assert processes[0].poll() is None


def test_a_signal_ends_the_wait_for_a_tracker(run, calls, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:hang")
    received: list[int] = []
    log_events(run, step(1), FINISHED)
    with started(run, "wandb") as processes:
        threading.Timer(0.5, received.append, [signal.SIGINT]).start()
        assert "still sending" in upload.finish(run, processes, PATIENCE_S, received)
        assert received


def test_a_tracker_that_hangs_is_stopped_in_the_end(run, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:hang")
    log_events(run, step(1), FINISHED)
    code = "from your_ai.trackers import upload; upload.LAST_S = 1; upload.main()"
    command = [sys.executable, "-c", code, str(run.path), "wandb"]
    done = subprocess.run(command, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "wandb: did not finish in 1 s; send the rest later: python -m" in done.stdout


@pytest.mark.parametrize("fault", ["wandb:init", "wandb:log"])
def test_a_notice_says_that_a_tracker_failed(run, calls, monkeypatch, fault):
    monkeypatch.setenv("FAULTS", fault)
    send_whole(run, "wandb", "swanlab")
    [notice] = [r.event for r in events.tail(run.events)[0] if isinstance(r.event, events.Notice)]
    assert notice.text == "not everything was sent to the trackers; runs/r/trackers.log says why"
    assert "wandb: OSError: wandb is away, at" in log_of(run)
    assert calls("swanlab", "finish") == [{"state": "success", "error": None}]


def test_the_rest_can_be_sent_later(run, calls, monkeypatch):
    log_events(run, step(1), FINISHED)
    for fault, status in (("wandb:init", 1), ("", 0)):
        monkeypatch.setenv("FAULTS", fault)
        done = subprocess.run([*SEND, str(run.path), "wandb"], check=False, capture_output=True)
        assert done.returncode == status
    assert wandb_steps(calls) == [1]


def test_the_log_says_if_a_package_cannot_be_imported(run, own_folder):
    (own_folder / "fakes" / "wandb.py").write_text("import nothing_of_this_name")
    send_whole(run, "wandb")
    assert "wandb: ModuleNotFoundError: No module named 'nothing_of_this_name'" in log_of(run)


def test_it_waits_between_two_training_processes(run, calls):
    """The supervisor lives, the run's lock is free, and an earlier end is in the events."""
    log_events(run, step(1), FINISHED)
    with started(run, "wandb") as [process]:
        wait_until(lambda: calls("wandb", "log"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)


def test_it_ends_if_the_supervisor_was_killed(run, calls):
    log_events(run, step(1))
    with started(run, "wandb") as [process]:
        process.stdin.close()  # the system does this for a killed process
        assert process.wait(PATIENCE_S) == 0
    assert calls("wandb", "finish") == [{"exit_code": 1}]


def test_it_continues_while_training_survives_the_supervisor(run, calls):
    with started(run, "wandb") as [process]:
        with locked(run):
            process.stdin.close()
            log_events(run, step(1))
            wait_until(lambda: calls("wandb", "log"))
            time.sleep(1.5)
            assert process.poll() is None
        assert process.wait(PATIENCE_S) == 0


def test_it_ends_if_the_folder_is_gone(run, calls):
    with started(run, "wandb", "tensorboard") as processes:
        log_events(run, step(1))
        wait_until(lambda: calls("wandb", "log") and calls("tensorboardX", "log"))
        run.path.rename(run.path.with_name("gone"))
        assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]
        assert upload.finish(run, processes) is None
    assert not run.path.exists()


def test_only_one_process_sends_to_a_tracker(run, calls):
    with (run.path / "trackers-wandb.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with started(run, "wandb") as processes:
            log_events(run, step(1), FINISHED)
            wait_until(lambda: "another process is sending" in log_of(run))
            assert calls("wandb") == []
            fcntl.flock(lock, fcntl.LOCK_UN)
            assert upload.finish(run, processes) is None
    assert wandb_steps(calls) == [1]


def test_other_files_of_the_run_stay_as_they_are(run):
    log_events(run, step(1), FINISHED)
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with upload.tracked(run, upload.NAMES):
        pass
    now = {path.name: path for path in run.path.iterdir()}
    assert {name: now[name].read_bytes() for name in before} == before
    states = {f"trackers-{name}.{end}" for name in upload.NAMES for end in ("json", "lock")}
    assert set(now) - set(before) == {"trackers.log", *states}


def test_the_process_has_a_session_of_its_own(run, calls):
    """So that Ctrl-C in the terminal does not reach it."""
    with started(run, "wandb") as [process]:
        assert os.getsid(process.pid) == process.pid


def test_a_package_cannot_read_from_the_supervisor(run, own_folder, calls):
    (own_folder / "fakes" / "wandb.py").write_text("import sys\nassert sys.stdin.read() == ''")
    log_events(run, step(1))
    with started(run, "wandb"):
        wait_until(lambda: "has no attribute" in log_of(run))
