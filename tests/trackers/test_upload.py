"""The trackers' process, with packages that write down their calls."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.dashboard.frames import step
from tests.trackers import fakes
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run import events
from your_ai.run.events import Event
from your_ai.run.folder import RunFolder, create, locked
from your_ai.trackers import upload

PATIENCE_S = 20.0
FINISHED = events.Finished(step=2, reason="done", adapter="", seconds=1.0)


@pytest.fixture
def calls(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict]]:
    """What was called of a package, in processes that find the fakes first."""
    monkeypatch.setenv("PYTHONPATH", str(fakes.write(own_folder / "fakes")))
    monkeypatch.setenv("CALLS", str(own_folder / "calls"))
    return lambda *asked: fakes.calls(own_folder / "calls", *asked)


@pytest.fixture
def run(calls) -> RunFolder:
    return create(TrainConfig(data="rows.jsonl", run="r"))


@contextlib.contextmanager
def started(run: RunFolder, *names: str, pid: int | None = None) -> Iterator[subprocess.Popen]:
    process = upload.start(run, names, os.getpid() if pid is None else pid)
    assert process is not None
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tell(run: RunFolder, *told: Event) -> None:
    with contextlib.closing(events.EventLog(run.events)) as log:
        for event in told:
            log.write(event)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    return process.pid


def log_of(run: RunFolder) -> str:
    return (run.path / "trackers.log").read_text()


def wandb_steps(calls: Callable[..., list[dict]]) -> list[int]:
    return [fields["step"] for fields in calls("wandb", "log")]


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"--report-to wandbb: .*did you mean wandb\?"):
        upload.check(["wandbb"])


def test_a_missing_package_is_refused_with_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"tensorboardX .*pip install 'your_ai\[tensorboard\]'"):
        upload.check(["tensorboard"])


def test_a_folder_of_wandbs_files_is_not_its_package(own_folder, monkeypatch):
    (own_folder / "wandb").mkdir()
    monkeypatch.setattr(sys, "path", [str(own_folder)])
    with pytest.raises(UserError, match="not installed"):
        upload.check(["wandb"])


def test_packages_that_are_there_are_accepted(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(fakes.write(own_folder / "fakes")))
    upload.check(upload.NAMES)


def test_without_names_there_is_no_process(run):
    assert upload.start(run, (), os.getpid()) is None
    assert upload.finish(None) is None
    assert not (run.path / "trackers.log").exists()


def test_a_process_that_cannot_be_started_is_noted(run, monkeypatch):
    monkeypatch.setattr(sys, "executable", "./none")
    assert upload.start(run, ["wandb"], os.getpid()) is None
    assert "the trackers cannot be started (No such file" in log_of(run)


def test_a_log_that_cannot_be_written_starts_nothing(run):
    (run.path / "trackers.log").mkdir()
    assert upload.start(run, ["wandb"], os.getpid()) is None


def test_each_tracker_has_the_whole_run(run, calls):
    with started(run, *upload.NAMES) as process, locked(run):
        tell(run, step(1), step(2), FINISHED)
        assert upload.finish(process) is None
    assert wandb_steps(calls) == [1, 2]
    assert [fields["step"] for fields in calls("swanlab", "log")] == [1, 2]
    losses = [f for f in calls("tensorboardX", "log") if f["name"] == "train/loss"]
    assert [(f["step"], f["value"]) for f in losses] == [(1, 1.25), (2, 1.25)]
    assert calls("wandb", "finish") == [{"exit_code": 0}]


def test_events_are_sent_while_the_run_goes_on(run, calls):
    with started(run, "wandb"), locked(run):
        for number in (1, 2):
            tell(run, step(number))
            until(lambda: wandb_steps(calls)[-1:] == [number])  # noqa: B023 (called here)


def test_a_word_to_finish_is_heeded_however_early(run, calls):
    tell(run, step(1), FINISHED)
    with started(run, "wandb") as process:
        assert upload.finish(process) is None
    assert wandb_steps(calls) == [1]


def test_a_resumed_run_goes_on_as_the_same_one(run, calls):
    for told in ([step(1), step(2)], [step(2), step(3), FINISHED]):
        with started(run, "wandb") as process:
            tell(run, *told)
            assert upload.finish(process) is None
    assert wandb_steps(calls) == [1, 2, 3]
    first, second = (fields["id"] for fields in calls("wandb", "init"))
    assert first == second


def test_two_runs_are_two(run, calls):
    for folder in (run, create(TrainConfig(data="rows.jsonl", run="s"))):
        tell(folder, step(1), FINISHED)
        with started(folder, "wandb") as process:
            upload.finish(process)
    assert len({fields["id"] for fields in calls("wandb", "init")}) == 2


def test_a_tracker_that_hangs_holds_back_no_other(run, calls, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:hang")
    with started(run, "wandb", "swanlab") as process, locked(run):
        tell(run, step(1))
        until(lambda: calls("swanlab", "log"))
        tell(run, FINISHED)
        before = time.monotonic()
        told = upload.finish(process, patience_s=1.0)
        assert time.monotonic() - before < 5
        assert "still sending" in told
        assert "runs/r/trackers.log" in told
        until(lambda: calls("swanlab", "finish"))
        assert process.poll() is None


def test_a_tracker_that_hangs_is_left_in_the_end(run, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:hang")
    tell(run, step(1), FINISHED)
    code = "from your_ai.trackers import upload; upload.LAST_S = 1; upload.main()"
    command = [sys.executable, "-c", code, str(run.path), "wandb"]
    done = subprocess.run(command, timeout=PATIENCE_S, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "wandb: was not done in 1 s; later: python -m your_ai.trackers.upload runs/r wandb"
        in done.stdout
    )


@pytest.mark.parametrize("fault", ["wandb:init", "wandb:log"])
def test_a_tracker_that_raises_holds_back_no_other(run, calls, monkeypatch, fault):
    monkeypatch.setenv("FAULTS", fault)
    with started(run, "wandb", "swanlab") as process:
        tell(run, step(1), FINISHED)
        told = upload.finish(process)
    assert told == "not all was sent to the trackers; runs/r/trackers.log says why"
    assert "wandb: OSError: wandb is away, at" in log_of(run)
    assert calls("swanlab", "finish") == [{"state": "success", "error": None}]


def test_what_was_not_sent_can_be_sent_later(run, calls, monkeypatch):
    tell(run, step(1), FINISHED)
    command = [sys.executable, "-m", "your_ai.trackers.upload", str(run.path), "wandb"]
    for fault, status in (("wandb:init", 1), ("", 0)):
        monkeypatch.setenv("FAULTS", fault)
        assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == status
    assert wandb_steps(calls) == [1]


def test_a_package_that_wants_to_exit_is_tried_again(run, calls, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:first")
    with started(run, "wandb") as process, locked(run):
        tell(run, step(1))
        until(lambda: calls("wandb", "log"))
        assert upload.finish(process) is None
    assert "wandb: SystemExit: 3; next try in 1 s" in log_of(run)


def test_a_package_that_is_gone_is_told_in_the_log(run, own_folder):
    (own_folder / "fakes" / "wandb.py").write_text("import nothing_of_this_name")
    tell(run, step(1), FINISHED)
    with started(run, "wandb") as process:
        assert "trackers.log" in (upload.finish(process) or "")
    assert "wandb: ModuleNotFoundError: No module named 'nothing_of_this_name'" in log_of(run)


def test_it_ends_with_a_finished_run_although_its_supervisor_lives(run, calls):
    with started(run, "wandb") as process:
        with locked(run):
            tell(run, step(1))
            until(lambda: calls("wandb", "log"))
            tell(run, FINISHED)
        assert process.wait(PATIENCE_S) == 0
    assert calls("wandb", "finish") == [{"exit_code": 0}]


def test_it_goes_on_between_two_processes_of_the_run(run, calls):
    """Where nobody holds the lock, and the end of an earlier time is in the events."""
    tell(run, step(1), FINISHED)
    with started(run, "wandb") as process:
        until(lambda: calls("wandb", "log"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)


def test_it_ends_when_the_supervisor_died_without_a_word(run, calls):
    tell(run, step(1))
    with started(run, "wandb", pid=gone()) as process:
        assert process.wait(PATIENCE_S) == 0
    assert calls("wandb", "finish") == [{"exit_code": 1}]


def test_it_goes_on_while_the_training_process_outlives_the_supervisor(run, calls):
    with started(run, "wandb", pid=gone()) as process:
        with locked(run):
            tell(run, step(1))
            until(lambda: calls("wandb", "log"))
            time.sleep(3 * upload.LOOK_S)
            assert process.poll() is None
        assert process.wait(PATIENCE_S) == 0


def test_it_ends_when_the_folder_vanishes(run, calls):
    with started(run, "wandb", "tensorboard") as process:
        tell(run, step(1))
        until(lambda: calls("wandb", "log"))
        run.path.rename(run.path.with_name("gone"))  # at once; file by file, it may write between
        assert process.wait(PATIENCE_S) == 0
        assert upload.finish(process) is None
    assert not run.path.exists()


def test_one_process_at_a_time_sends(run, calls):
    with locked(run, upload.LOCK), started(run, "wandb") as process:
        tell(run, step(1), FINISHED)
        until(lambda: "is working on this run" in log_of(run))
        assert calls("wandb") == []
        assert process.poll() is None


def test_a_damaged_state_is_begun_anew(run, calls):
    (run.path / "trackers.json").write_text('{"id": 3, "wan')
    tell(run, step(1), FINISHED)
    with started(run, "wandb") as process:
        assert upload.finish(process) is None
    assert wandb_steps(calls) == [1]
    assert set(json.loads((run.path / "trackers.json").read_text())) == {"id", "wandb"}


def test_nothing_else_of_the_runs_folder_is_touched(run):
    tell(run, step(1), FINISHED)
    before = {path.name: path.read_bytes() for path in run.path.iterdir()}
    with started(run, *upload.NAMES) as process:
        upload.finish(process)
    now = {path.name: path for path in run.path.iterdir()}
    assert {name: now[name].read_bytes() for name in before} == before
    assert set(now) - set(before) == {"trackers.log", "trackers.json", "trackers.lock"}


def test_the_process_has_a_session_of_its_own(run, calls):
    with started(run, "wandb") as process:
        assert os.getsid(process.pid) == process.pid


def test_it_never_loads_mlx():
    code = (
        "import sys, your_ai.trackers.upload, your_ai.trackers.sending\n"
        "sys.exit(any(m in sys.modules for m in ('mlx', 'mlx_lm', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
