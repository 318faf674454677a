from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.dashboard.frames import step
from your_ai.config import TrainConfig
from your_ai.run import events
from your_ai.run.events import Event
from your_ai.run.folder import RunFolder, create
from your_ai.trackers import sending
from your_ai.trackers.rows import TrackerRow, UploadProgress
from your_ai.trackers.services import OPEN, About, Tracker

FINISHED = events.Finished(step=9, reason="done", adapter="", seconds=1.0)


class Service:
    """A tracker that keeps what it is sent; `fault` is called first, with what is asked."""

    def __init__(self, fault: Callable[[str], Any] = lambda asked: None) -> None:
        self.fault = fault
        self.opened: list[About] = []
        self.rows: list[TrackerRow] = []
        self.closed: list[str] = []

    def open(self, about: About) -> Tracker:
        self.opened.append(about)
        self.fault("open")
        return Tracker(figures=self.take, texts=self.take, close=self.close)

    def take(self, row: TrackerRow) -> None:
        self.fault("row")
        self.rows.append(row)

    def close(self, ended: str) -> None:
        self.fault("close")
        self.closed.append(ended)

    @property
    def steps(self) -> list[int]:
        return [row.step for row in self.rows]


class Over(threading.Event):
    """Set once the service has so many rows; nobody waits for it in earnest."""

    def __init__(self, service: Service, rows: int) -> None:
        super().__init__()
        self.service, self.rows = service, rows

    def is_set(self) -> bool:
        return len(self.service.rows) >= self.rows

    def wait(self, timeout: float | None = None) -> bool:
        return self.is_set()


@pytest.fixture
def run(own_folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(sending, "FIRST_RETRY_S", 0.0)
    return create(TrainConfig(data="rows.jsonl", run="r"))


def tell(run: RunFolder, *told: Event) -> None:
    with contextlib.closing(events.EventLog(run.events)) as log:
        for event in told:
            log.write(event)


def send(
    run: RunFolder, service: Service, progress: UploadProgress | None = None, rows: int = 0
) -> tuple[UploadProgress, bool]:
    """Send to a service that goes by wandb's name; how far that got, and whether to the end.

    rows: the run is over when the service has so many.
    """
    reached, done, over = {"wandb": progress or UploadProgress()}, set[str](), Over(service, rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OPEN, "wandb", service.open)
        sending.send(run, "wandb", "cafe", reached, over, done)
    return reached["wandb"], "wandb" in done


def failing(*at: int, asked: str = "row", error: BaseException | None = None) -> Service:
    """Fails at these times, from 1, of those that it is asked so."""
    times = 0

    def fault(what: str) -> None:
        nonlocal times
        times += what == asked
        if what == asked and times in at:
            raise error or OSError("away,\nfor now")

    return Service(fault)


def test_all_is_sent_and_closed(run):
    tell(run, step(1), step(2), FINISHED)
    service = Service()
    reached, done = send(run, service)
    assert done
    assert service.steps == [1, 2]
    assert service.closed == ["done"]
    assert reached.offset == run.events.stat().st_size


def test_the_tracker_is_told_of_the_run(run):
    tell(run, step(1))
    service = Service()
    send(run, service)
    [about] = service.opened
    assert (about.folder, about.name, about.identity) == (run.path.resolve(), "r", "cafe")
    assert about.config["lora_rank"] == 16


def test_a_run_that_never_began_opens_no_tracker(run):
    tell(run, events.Stage(text="loading"), events.Limit(limit_bytes=1, reason=""))
    service = Service()
    _, done = send(run, service)
    assert done
    assert not service.opened


def test_what_was_sent_before_is_not_sent_again(run):
    tell(run, step(1), step(2), FINISHED)
    reached, _ = send(run, Service())
    tell(run, step(2), step(3), FINISHED)  # as resumed from the checkpoint of step 1
    service = Service()
    send(run, service, reached)
    assert service.steps == [3]


@pytest.mark.parametrize("error", [None, SystemExit(1), KeyboardInterrupt()])
def test_a_tracker_that_raises_is_opened_anew_and_misses_nothing(run, error):
    tell(run, step(1), step(2), step(3), FINISHED)
    service = failing(2, 3, error=error)
    _, done = send(run, service, rows=3)
    assert done
    assert service.steps == [1, 2, 3]
    assert len(service.opened) == 3


def test_a_tracker_that_cannot_be_opened_is_tried_again(run):
    tell(run, step(1))
    service = failing(*range(1, sending.MAX_FAILURES), asked="open")
    _, done = send(run, service, rows=1)
    assert done
    assert service.steps == [1]


def test_a_tracker_is_given_up_after_failures_in_a_row(run):
    tell(run, step(1))
    service = failing(*range(1, 99), asked="open")
    _, done = send(run, service, rows=1)
    assert not done
    assert len(service.opened) == sending.MAX_FAILURES


def test_failures_with_rows_between_them_never_end_it(run):
    tell(run, *map(step, range(1, 99)))
    service = failing(*range(1, 198, 2))
    _, done = send(run, service, rows=98)
    assert done
    assert service.steps == list(range(1, 99))


def test_a_tracker_is_given_up_at_once_when_the_run_is_over(run):
    tell(run, step(1))
    service = failing(1)
    assert not send(run, service)[1]
    assert len(service.opened) == 1


def test_steps_that_were_taken_are_not_sent_again_after_giving_up(run):
    tell(run, step(1), step(2), step(3))
    service = failing(3)
    reached, _ = send(run, service)
    send(run, service, reached)
    assert service.steps == [1, 2, 3]


def test_a_tracker_that_cannot_be_closed_is_not_done(run):
    tell(run, step(1), FINISHED)
    assert not send(run, failing(1, asked="close"))[1]


def test_a_failure_is_one_line_that_says_what_follows(run, capsys):
    tell(run, step(1))
    send(run, failing(*range(1, 99)), rows=1)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sending.MAX_FAILURES
    assert all("wandb: OSError: away, for now; next try in 0 s" in line for line in lines[:-1])
    assert lines[-1].endswith("given up; later: python -m your_ai.trackers.upload runs/r wandb")


def test_a_folder_that_is_gone_ends_it(run):
    tell(run, step(1))
    run.path.rename("elsewhere")
    service = Service()
    assert not send(run, service, rows=1)[1]
    assert not run.path.exists()
