"""Pausing a run between two steps."""

from __future__ import annotations

import threading
import time

import pytest

from tests.conftest import events_of
from your_ai.run import events, requests
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training.pausing import pause


@pytest.fixture
def run(tmp_path):
    return RunFolder(tmp_path)


@pytest.fixture
def log(run):
    log = events.EventLog(run.events)
    yield log
    log.close()


def later(action) -> None:
    threading.Timer(0.3, action).start()


def test_run_without_a_pause_request_does_not_wait(run, log):
    pause(run, 1, log, Stop())
    assert events_of(run, events.Paused) == []


def test_pause_lasts_until_the_request_is_withdrawn(run, log):
    requests.ask(run, requests.PAUSE)
    began = time.monotonic()
    later(lambda: requests.withdraw(run, requests.PAUSE))
    pause(run, 3, log, Stop())
    assert time.monotonic() - began >= 0.3
    assert [event.step for event in events_of(run, events.Paused)] == [3]
    (continued,) = events_of(run, events.Continued)
    assert continued.seconds >= 0.29


@pytest.mark.parametrize("ends", ["signal", "deleted file"])
def test_a_stop_signal_or_deleting_the_request_file_ends_a_pause(run, log, ends):
    stop = Stop()
    requests.ask(run, requests.PAUSE)
    signal = lambda: setattr(stop, "received", 2)  # noqa: E731
    later(signal if ends == "signal" else (run.path / requests.PAUSE).unlink)
    pause(run, 3, log, stop)
    assert len(events_of(run, events.Continued)) == 1
