"""Gives a run's events to one tracker, which may be away, raise or hang."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import threading
import time
from collections import deque

from your_ai.gates.console import echo
from your_ai.run import events
from your_ai.run.folder import RunFolder
from your_ai.trackers.rows import StepFigures, TrackerRow, UploadProgress, after
from your_ai.trackers.services import OPEN, About, Tracker

POLL_S = 1.0
FIRST_RETRY_S = 1.0  # doubled each time
MAX_FAILURES = 10  # in a row: about 9 minutes, and what the tries themselves took
MESSAGE_CHARACTERS = 300


def send(
    folder: RunFolder,
    name: str,
    identity: str,
    progress: dict[str, UploadProgress],
    over: threading.Event,
    done: set[str],
) -> None:
    """Give each event to one tracker, until the run is over and all is given.

    Keeps progress[name], and adds the name to `done` at a good end. A tracker that raises is
    closed, and opened anew after a while for what it did not take; at the last failure, or
    the first once the run is over, it is given up. It is opened for the first row alone, so
    that a run that never began leaves no trace.
    """
    reached, failures = progress[name], 0
    tracker: Tracker | None = None
    waiting: deque[events.Record] = deque()
    offset = reached.offset
    while folder.path.exists():
        last = over.is_set()
        try:
            if not waiting:
                records, offset = events.tail(folder.events, offset)
                waiting.extend(records)
            while waiting:
                ahead, row = after(reached, waiting[0].event)
                if row is not None:
                    tracker = tracker or OPEN[name](about(folder, identity))
                    give(tracker, row)
                    failures = 0
                reached = ahead
                waiting.popleft()
            progress[name] = dataclasses.replace(reached, offset=offset)
            if last:
                if tracker is not None:
                    tracker.close(reached.ended)
                done.add(name)
                return
            over.wait(POLL_S)
        except BaseException as error:  # packages raise what they like, SystemExit included
            failures += 1
            taken = {"step": reached.step, "validated": reached.validated}
            progress[name] = dataclasses.replace(progress[name], **taken)
            lost = last or failures == MAX_FAILURES
            pause_s = FIRST_RETRY_S * 2 ** (failures - 1)
            then = f"given up; {again(folder, name)}" if lost else f"next try in {pause_s:.0f} s"
            say(f"{name}: {described(error)}; {then}")
            if tracker is not None:
                with contextlib.suppress(BaseException):
                    tracker.close(reached.ended)
                tracker = None
            if lost:
                return
            over.wait(pause_s)


def about(folder: RunFolder, identity: str) -> About:
    config = dataclasses.asdict(folder.read_config())
    return About(folder.path.resolve(), folder.name, identity, config)


def give(tracker: Tracker, row: TrackerRow) -> None:
    if isinstance(row, StepFigures):
        tracker.figures(row)
    else:
        tracker.texts(row)


def again(folder: RunFolder, name: str) -> str:
    """How to send what was not."""
    return f"later: python -m your_ai.trackers.upload {shlex.quote(str(folder.path))} {name}"


def described(error: BaseException) -> str:
    text = " ".join(str(error).split())[:MESSAGE_CHARACTERS]
    return f"{type(error).__name__}: {text}"


def line(text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"


def say(text: str) -> None:
    """One line into trackers.log, which this process' output is."""
    with contextlib.suppress(OSError, ValueError):
        echo(line(text), nl=False)
