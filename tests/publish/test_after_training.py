"""The push after a run, from the process that started the run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from tests.conftest import notices_of
from your_ai.errors import RunError
from your_ai.publish import after_training as after
from your_ai.run.child import USER
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import recorded_signals

REPO = "someone/mine"
NOTES = """
print("note: a note")
print("pushed to somewhere (private)")
"""


@pytest.fixture
def run(own_folder):
    (own_folder / "runs" / "r").mkdir(parents=True)
    return RunFolder(own_folder / "runs" / "r")


@pytest.fixture
def child(monkeypatch):
    """Run the test's code instead of a push; gives the list of commands that were asked for."""
    asked = []
    push_status = after.push_status

    def pretend(code):
        def fake_push_status(command, log, received):
            asked.append(command)
            return push_status([sys.executable, "-c", code], log, received)

        monkeypatch.setattr(after, "push_status", fake_push_status)
        return asked

    return pretend


def test_notes_of_the_push_become_notices(run, child):
    asked = child(NOTES)
    after.push_finished(run, REPO, [])
    assert asked[0][-4:] == ["your_ai", "push", str(run.path), REPO]
    assert notices_of(run) == [f"pushing to {REPO}", "a note", "pushed to somewhere (private)"]


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (f"import sys; print('error: no right'); sys.exit({USER})", "no right; push it with: "),
        ("import sys; sys.exit(7)", "ended with status 7"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_a_failed_push_says_what_to_do(run, child, code, word):
    child(code)
    with pytest.raises(RunError) as caught:
        after.push_finished(run, REPO, [])
    assert word in str(caught.value)
    assert f"your_ai push {run.path} {REPO}" in str(caught.value)
    assert notices_of(run)[-1] == str(caught.value)


def test_the_command_is_not_repeated_in_the_message(run, child):
    again = f"your_ai push {run.path} {REPO}"
    child(f"import sys; print('error: cut; do it again: {again}'); sys.exit(1)")
    with pytest.raises(RunError) as caught:
        after.push_finished(run, REPO, [])
    assert str(caught.value).count(again) == 1


def test_a_log_that_cannot_be_written_is_an_error(run, child):
    child(NOTES)
    (run.path / "process.log").mkdir()
    with pytest.raises(RunError, match=r"process.log: cannot be written.*push it with: your_ai"):
        after.push_finished(run, REPO, [])


def test_a_signal_ends_the_push(run, child):
    child("import time; time.sleep(60)")
    with recorded_signals() as received:
        kill = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
        kill.start()
        start = time.monotonic()
        with pytest.raises(RunError, match="not pushed: stopped; push it with: your_ai push"):
            after.push_finished(run, REPO, received)
    assert time.monotonic() - start < 20


def test_a_push_that_ignores_signals_is_killed(run, monkeypatch):
    monkeypatch.setattr(after, "PATIENCE_S", 0.2)
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
    with (run.path / "log").open("wb") as log:
        start = time.monotonic()
        assert after.push_status([sys.executable, "-c", deaf], log, [15]) is None
    assert time.monotonic() - start < 20


def test_a_run_whose_events_cannot_be_written_is_still_pushed(run, child, monkeypatch):
    def full(*_: object) -> None:
        raise RunError("No space left on device")

    child(NOTES)
    monkeypatch.setattr(after, "EventLog", full)
    after.push_finished(run, REPO, [])
