"""What a run does with the computer: keep it awake, record power and heat, notify at the end."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator

from your_ai.config import TrainConfig
from your_ai.dashboard.view import duration
from your_ai.errors import RunError, UserError
from your_ai.gates.text import counted
from your_ai.run import events, host
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder
from your_ai.run.host import HostState

READ_EVERY_S = 20.0
PERCENT_STEP = 5  # a smaller change of the charge is not written
LONG_S = 60.0  # the end of a shorter run that is not detached needs no notification
STOP_S = 0.2


@contextlib.contextmanager
def looked_after(
    folder: RunFolder,
    config: TrainConfig,
    quiet: bool = False,
    is_detached: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Keep the computer awake while the block runs, record its state, and notify at the end.

    quiet: no notification.
    is_detached: whether nobody sees the run.
    """
    host.relax_gpu_watchdog()
    with (
        notified(folder, config.notify and not quiet, is_detached),
        host.kept_awake(os.getpid(), not config.allow_sleep),
        recorded_state(folder),
    ):
        yield


@contextlib.contextmanager
def notified(
    folder: RunFolder, wanted: bool, is_detached: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Show a notification when the block ends with a finished run or an error.

    There is none for a run that was stopped, and none for a short one that is not detached.
    """
    began = time.monotonic()
    text = ""
    try:
        yield
        text = finished_text(folder)
    except Exception as error:
        is_ours = isinstance(error, UserError | RunError)
        text = f"failed: {error if is_ours else type(error).__name__}"
        raise
    finally:
        if wanted and text and (is_detached() or time.monotonic() - began >= LONG_S):
            host.show_notification("your_ai", f"Run {folder.name} {text}")


def finished_text(folder: RunFolder) -> str:
    """Say how much a finished run did; empty for one that was stopped."""
    with contextlib.suppress(UserError):
        kinds = (events.Finished, events.Died, events.Started)
        records, _ = events.tail(folder.events, 0, kinds)
        end = records[-1].event if records else None
        if isinstance(end, events.Finished) and end.reason == "done":
            return f"finished: {counted(end.step, 'step')} in {duration(end.seconds)}"
    return ""


@contextlib.contextmanager
def recorded_state(folder: RunFolder, every_s: float = READ_EVERY_S) -> Iterator[None]:
    """Write power and heat of a Mac to the events while the block runs, when they change.

    They are read in a thread, so that a program that hangs delays nothing.
    """
    if not host.is_mac():
        yield
        return

    over = threading.Event()

    def watch() -> None:
        written = HostState()
        while not over.is_set():
            if has_events(folder):  # its first event is of the training process
                found = with_known(written, host.read_state())
                if is_news(written, found) and not over.is_set():
                    write_state(folder, written, found)
                    written = found
                over.wait(every_s)
            over.wait(STOP_S)

    thread = threading.Thread(target=watch, name="computer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(STOP_S)  # it may wait for a program; it writes nothing any more


def has_events(folder: RunFolder) -> bool:
    try:
        return folder.events.stat().st_size > 0
    except OSError:
        return False


def with_known(before: HostState, now: HostState) -> HostState:
    """The state now; of what could not be read, that before."""
    return HostState(
        source=now.source or before.source,
        percent=now.percent if now.source else before.percent,
        thermal=now.thermal or before.thermal,
    )


def is_news(before: HostState, now: HostState) -> bool:
    """Return whether a state differs enough from the one written before to be written."""
    moved = abs((now.percent or 0) - (before.percent or 0)) >= PERCENT_STEP
    return bool(changes_text(before, now)) or (now.source in ("battery", "UPS") and moved)


def write_state(folder: RunFolder, before: HostState, now: HostState) -> None:
    state = events.Host(source=now.source or "", percent=now.percent, thermal=now.thermal or "")
    with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
        log.write(state)
        for text in changes_text(before, now):
            log.write(events.Notice(text=text))


def changes_text(before: HostState, now: HostState) -> list[str]:
    """Say what changed, in words. Mains power and no heat at the start say nothing."""
    found = []
    if now.source in ("battery", "UPS") and now.source != before.source:
        charge = "" if now.percent is None else f", {now.percent}%"
        found.append(f"on {now.source}{charge}")
    elif now.source == "mains" and before.source in ("battery", "UPS"):
        found.append("on mains power again")
    if now.thermal not in (None, "nominal", before.thermal):
        slower = "" if now.thermal == "fair" else "; the computer slows down"
        found.append(f"thermal pressure is {now.thermal}{slower}")
    elif now.thermal == "nominal" and before.thermal not in (None, "nominal"):
        found.append("thermal pressure is nominal again")
    return found
