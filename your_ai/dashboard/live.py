"""Shows a run by following its event file, in a thread or from another process."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.live import Live

from your_ai.dashboard import view
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events

POLL_S = 0.25
REPORT_EVERY_S = 5.0  # between step lines where there is no terminal


class Follower:
    """Reads a run's new events and shows them: a live view on a terminal, else lines."""

    def __init__(self, path: Path, console: Console) -> None:
        self.path = path
        self.console = console
        self.state = ViewState()
        self.reported_at = 0.0
        self.failure: Exception | None = None
        records, self.offset = events.tail(path)  # what a resumed run did before
        for record in records:
            self.state = fold(self.state, record)
        self.live = Live(console=console, transient=True, auto_refresh=False)

    def catch_up(self) -> None:
        """Show what has happened since the last call. A screen that fails ends no run."""
        if self.failure is None:
            try:
                self._show_new()
            except Exception as error:  # a closed pipe, a lost terminal, a fault in a view
                self.failure = error

    def _show_new(self) -> None:
        records, self.offset = events.tail(self.path, self.offset)
        for record in records:
            self.state = fold(self.state, record)
            line = view.event_line(record.event, self.state)
            if line is not None and self._wants(record):
                self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        if self.live.is_started:
            self.live.update(view.progress(self.state), refresh=True)

    def leave(self, run: str) -> None:
        """Give the terminal back in mid-run; the process ends right after."""
        self.live.stop()
        self.console.print(view.leaving_text(run), markup=False, soft_wrap=True)

    def print_summary(self, run: str) -> None:
        for part in view.summary(self.state, run):
            self.console.print(part, markup=False, soft_wrap=isinstance(part, str))

    def _wants(self, record: events.Record) -> bool:
        event = record.event
        if not isinstance(event, events.Step):
            return not (self.live.is_started and isinstance(event, events.Stage))
        if self.live.is_started:
            return False
        edge = event.step in (1, event.steps)
        if not edge and record.time - self.reported_at < REPORT_EVERY_S:
            return False
        self.reported_at = record.time
        return True


@contextlib.contextmanager
def following(path: Path, console: Console) -> Iterator[Follower]:
    """Show the events that are appended to `path` while the block runs."""
    follower = Follower(path, console)
    done = threading.Event()

    def follow() -> None:
        while not done.wait(POLL_S):
            follower.catch_up()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    with contextlib.ExitStack() as stack:
        if console.is_terminal and not console.is_dumb_terminal:
            stack.enter_context(follower.live)
        thread.start()
        try:
            yield follower
        finally:
            done.set()
            thread.join()
            follower.catch_up()
