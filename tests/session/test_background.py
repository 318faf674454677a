"""A run in the background is told to go on alone, and reports why it never began."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from tests.dashboard.frames import record, started
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run import child, events
from your_ai.run import folder as folders
from your_ai.run.folder import RunFolder
from your_ai.session import new_run

STARTED = events.to_line(record(started()))


@pytest.fixture
def begin(own_folder, monkeypatch):
    """A function that starts a shell script in place of the supervisor of a new run r."""

    monkeypatch.setattr(new_run, "LOCK_S", 0.1)  # the script takes no lock

    def start(script: str, new: bool = True, shell: str = "sh") -> new_run.BackgroundRun:
        config = TrainConfig(model="demo", data="demo", run="r")
        run = folders.create(config)
        monkeypatch.setattr(new_run, "supervisor_command", lambda *_: [shell, "-c", script])
        return new_run.start(run, config, new=new)

    return start


@pytest.mark.parametrize(("status", "new", "there"), [(2, True, False), (2, False, True),
                                                      (9, True, True)])  # fmt: skip
def test_run_that_never_began_raises_its_error(begin, status, new, there):
    words = "error: does not fit" if status == 2 else "killed"
    run = begin(f"echo {words}; exit {status}", new)
    with pytest.raises(UserError if status == 2 else child.Lost, match=words[-4:]):
        new_run.wait_until_begun(run, 30)
    assert run.folder.path.exists() == there


def test_waiting_ends_when_training_begins_or_the_time_is_over(begin):
    Path("line").write_text(STARTED)
    run = begin("while ! test -f go; do sleep 0.02; done; cat line >> runs/r/events.jsonl; sleep 9")
    try:
        assert not new_run.wait_until_begun(run, 0)
        Path("go").touch()
        began = time.monotonic()
        assert new_run.wait_until_begun(run, 60)
        assert time.monotonic() - began < 8
    finally:
        run.process.kill()


def test_run_is_released(begin):
    script = "import os, sys; sys.exit(40 + (os.read(int(sys.argv[2]), 2) == b'r'))"
    assert begin(script, shell=sys.executable).process.wait(60) == 41


def test_start_waits_for_the_lock(begin, monkeypatch):
    monkeypatch.setattr(new_run, "LOCK_S", 60)
    seen: list[RunFolder] = []
    monkeypatch.setattr(new_run, "is_running", lambda f: bool(seen.append(f)) or len(seen) > 3)
    begin("sleep 2")
    assert len(seen) == 4
