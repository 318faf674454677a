"""Shows a run by following its event file, in a thread or from another process."""

from __future__ import annotations

import contextlib
import io
import os
import select
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from rich.console import Console, ConsoleDimensions
from rich.live import Live
from rich.text import Text

from your_ai.dashboard import view
from your_ai.dashboard.screen import screen
from your_ai.dashboard.state import ViewState, fold, fold_all, resumed
from your_ai.gates.console import echo_error, open_console, write_json_lines
from your_ai.run import events
from your_ai.run.events import Record

# A run's screen in the output of a notebook cell


WIDTH, HEIGHT = 100, 30  # size of a frame, in characters
HTML = (
    '<pre style="white-space: pre; overflow-x: auto; line-height: 1.25; '
    'font-family: ui-monospace, Menlo, Consolas, monospace">{code}</pre>'
)


class NotebookScreen:
    """Shows one frame after another in the same place, without flicker. The last frame stays.

    Has the part of the interface of `rich.live.Live` that the dashboard uses.
    """

    def __init__(self) -> None:
        self.is_started = False
        self._shown: Any = None

    def start(self) -> None:
        self.is_started = True

    def stop(self) -> None:
        self.is_started = False

    def update(self, frame: Text, refresh: bool = True) -> None:
        from IPython.display import HTML as AsHTML
        from IPython.display import display

        drawn = AsHTML(as_html(frame))
        if self._shown is None:
            self._shown = display(drawn, display_id=True)
        else:
            self._shown.update(drawn)


def as_html(frame: Text) -> str:
    """Return a frame as an HTML element, escaped, with inline styles."""
    console = open_console(record=True, width=WIDTH, file=io.StringIO(), force_jupyter=False)
    console.print(frame)
    return console.export_html(inline_styles=True, code_format=HTML)


POLL_S = 0.25
CLOCK_S = 1.0  # between two drawings without new events
REPORT_EVERY_S = 5.0  # between the lines of steps
PHASE_AFTER_S = 5.0  # a phase that has lasted so long has a line
CHECKPOINT_KEY, PAUSE_KEY, CONTINUE_KEY = "c checkpoint", "p pause", "p continue"
KEYS_GAP = "   "
Style = Literal["screen", "notebook", "lines", "json"]


def style_for(console: Console, as_json: bool = False) -> Style:
    if as_json:
        return "json"
    if console.is_jupyter:
        return "notebook"
    can_draw = console.is_terminal and not console.is_dumb_terminal
    return "screen" if can_draw and in_foreground(console.file) else "lines"


def in_foreground(file: IO[str]) -> bool:
    """Return whether this process may draw: a background job would draw over the shell."""
    try:
        return os.tcgetpgrp(file.fileno()) == os.getpgrp()
    except (OSError, ValueError):  # not this process's terminal: no shell draws there
        return True


LAST_LINES = 24  # of the screen of a run that is over


class Follower:
    """Reads a run's new events and shows them as a screen, as lines, or as JSON.

    In a notebook the screen is drawn in the output of the cell. A display that fails does not
    end the run.

    begun: whether training has begun since the start of the display.
    resumes: whether the run is being started again, so that its last end is over.
    failure: the error that ended the display, if any.
    """

    def __init__(
        self,
        path: Path,
        console: Console,
        style: Style = "lines",
        keys: str = "",
        from_start: bool = False,
        resumes: bool = False,
    ) -> None:
        self.path = path
        self.console = console
        self.style = style
        self.keys = keys
        self.state = ViewState()
        self.begun = False
        self.failure: Exception | None = None
        self.offset = 0
        self.reported_at = 0.0
        self.shown_at = 0.0
        self.phase: events.Phase | None = None
        self.told_phases: set[str] = set()
        self.drawn_at = 0.0
        self.drawn_size: object = None
        self.unicode = (console.encoding or "").lower().startswith("utf")
        self.live: Live | NotebookScreen = NotebookScreen()
        if style != "notebook":
            self.live = Live(
                console=console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
                vertical_overflow="crop",
            )
        if not from_start:
            records, self.offset = events.tail(path)  # events before the resume
            self.state = fold_all(self.state, records)
            if resumes and records:
                self.state = resumed(self.state, time.time())

    @property
    def name(self) -> str:
        return self.path.parent.name

    @property
    def is_cut_off(self) -> bool:
        """Return whether the file that was read, or the folder it is awaited in, is gone."""
        return not self.path.exists() and (self.offset > 0 or not self.path.parent.exists())

    def open(self) -> None:
        """Take the terminal, if the style is a screen."""
        drawn = self.style in ("screen", "notebook")
        if drawn and self.failure is None and not self.live.is_started:
            self.drawn_size = None
            with self._watched():
                self.live.start()

    def close(self) -> None:
        """Restore the terminal."""
        self.live.stop()

    def catch_up(self, at_once: bool = False) -> None:
        """Show the events since the last call; at most every POLL_S seconds unless `at_once`."""
        if time.monotonic() - self.shown_at < POLL_S and not at_once:
            return
        with self._watched():
            if self.path.exists() and self.path.stat().st_size < self.offset:
                self.state, self.offset = ViewState(), 0  # a new run with the same name
            records, self.offset = events.tail(self.path, self.offset)
            self._show(records, time.time())
        self.shown_at = time.monotonic()

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """End the display on an error: a closed pipe, a lost terminal, a bug in a view."""
        try:
            yield
        except (Exception, SystemExit) as error:  # rich raises SystemExit for a closed pipe
            closed = BrokenPipeError("its output was closed")
            self.failure = closed if isinstance(error, SystemExit) else error
            with contextlib.suppress(Exception):
                self.close()

    def show(self, records: list[Record], now: float) -> None:
        """Show events as they look at `now`, in seconds since 1970."""
        with self._watched():
            self._show(records, now)

    def _show(self, records: list[Record], now: float) -> None:
        if self.failure is not None:
            return
        self.begun |= any(isinstance(record.event, events.Started) for record in records)
        if self.style == "lines":
            for record in records:
                self.state = fold(self.state, record)
                self._print_line(record)
            self._print_phase(now)
        else:
            self.state = fold_all(self.state, records)
        if self.style == "json" and records:
            write_json_lines(map(events.to_line, records), self.console.file)
        if self.live.is_started and in_foreground(self.console.file):
            self._draw(now, bool(records))

    def _draw(self, now: float, is_new: bool) -> None:
        size = self.console.size
        if self.style == "notebook":
            size = ConsoleDimensions(WIDTH, HEIGHT)
        if not is_new and size == self.drawn_size and abs(now - self.drawn_at) < CLOCK_S:
            return
        self.drawn_at, self.drawn_size = now, size
        keys = keys_now(self.keys, self.state)
        frame = screen(
            self.state, self.name, size.width, size.height, now, unicode=self.unicode, keys=keys
        )
        self.live.update(frame, refresh=True)

    def _print_line(self, record: Record) -> None:
        event = record.event
        if isinstance(event, events.Phase):
            self.phase = event
        elif isinstance(event, events.Step | events.Skipped | events.Stage):
            self.told_phases.clear()
        line = view.event_line(event, self.state)
        if line is not None and self._wants(record):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _print_phase(self, now: float) -> None:
        """Print a phase that lasts long, once in each step."""
        phase, state = self.phase, self.state
        if phase is None or phase.text != state.doing or state.doing_at is None:
            return
        line = f"{phase.text} ..."
        if state.steps:
            line = f"step {state.at + phase.in_step}/{state.steps}: {line}"
        if now - state.doing_at >= PHASE_AFTER_S and line not in self.told_phases:
            self.told_phases.add(line)
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _wants(self, record: Record) -> bool:
        event = record.event
        if not isinstance(event, events.Step):
            return True
        edge = event.step in (1, event.steps)
        if not edge and record.time - self.reported_at < REPORT_EVERY_S:
            return False
        self.reported_at = record.time
        return True

    def report_failure(self) -> None:
        if self.failure is not None:
            reason = f"{type(self.failure).__name__}: {self.failure}"
            echo_error(f"note: the display failed, but not the run ({reason})")

    def print_screen(self) -> None:
        """Print the last screen of a run that is over, above its summary."""
        if self.style == "json" or self.failure is not None:
            return
        width, now = self.console.width, self.state.last_at or time.time()
        frame = screen(self.state, self.name, width, LAST_LINES, now, unicode=self.unicode)
        self.console.print(frame)

    def print_summary(self, run: str) -> None:
        if self.style == "json" or isinstance(self.failure, BrokenPipeError):
            return
        for part in view.summary(self.state, run, events_shown=self.style == "lines"):
            self.console.print(part, markup=False, soft_wrap=isinstance(part, str))

    def leave(self, run: str) -> None:
        """Restore the terminal during a run; the process ends right after this."""
        self.close()
        if self.style != "json":
            how = f"continue from the last checkpoint: your_ai train --resume {run}"
            self.console.print(f"stopped immediately; {how}", markup=False, soft_wrap=True)


def keys_now(keys: str, state: ViewState) -> str:
    """The help for those keys that do something in this state."""
    if state.finished is None and not state.gave_up:
        return keys.replace(PAUSE_KEY, CONTINUE_KEY) if state.paused else keys
    gone = (CHECKPOINT_KEY, PAUSE_KEY)
    return KEYS_GAP.join(key for key in keys.split(KEYS_GAP) if key not in gone)


@contextlib.contextmanager
def following(follower: Follower) -> Iterator[Follower]:
    """Show the events that are appended while the block runs, in a thread."""
    done = threading.Event()

    def follow() -> None:
        while not done.wait(POLL_S):
            follower.catch_up()

    thread = threading.Thread(target=follow, name="display", daemon=True)
    follower.open()
    thread.start()
    try:
        yield follower
    finally:
        done.set()
        thread.join()
        follower.catch_up(at_once=True)
        follower.close()


# Reads single keys from a terminal, and restores the terminal's settings afterwards


@dataclass
class Keyboard:
    """Reads the keys that are pressed on a terminal.

    Ctrl-C stays a signal. The terminal is read and changed only while this process is in the
    foreground: a shell stops a background job that does either.
    """

    fd: int | None = None
    """The terminal; None if there is none, and then no keys are read."""
    before: list[Any] = field(default_factory=list)
    """The terminal's settings to restore; empty while they are unchanged."""

    @property
    def terminal(self) -> int | None:
        """The terminal, if this process is in its foreground, else None."""
        with contextlib.suppress(OSError):  # the terminal is closed
            if self.fd is not None and os.tcgetpgrp(self.fd) == os.getpgrp():
                return self.fd
        return None

    @property
    def were_taken(self) -> bool:
        """Say whether a shell has restored the terminal, as it does when it stops a job."""
        fd = self.terminal
        if not self.before or fd is None:
            return False
        try:
            return bool(termios.tcgetattr(fd)[3] & termios.ICANON)
        except termios.error:
            return False

    def take(self) -> None:
        """Receive keys one by one, without echo."""
        fd = self.terminal
        if fd is not None and not self.before:
            with contextlib.suppress(termios.error):
                self.before = termios.tcgetattr(fd)
                tty.setcbreak(fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        fd = self.terminal
        if self.before and fd is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, self.before)
        self.before = []

    def read(self, timeout_s: float) -> str:
        """Return the keys pressed within `timeout_s` seconds; without a terminal, only wait."""
        fd = self.terminal
        if not self.before or fd is None:
            time.sleep(timeout_s)
            return ""
        try:
            ready, _, _ = select.select([fd], [], [], timeout_s)
            data = os.read(fd, 64) if ready else b""
        except OSError:
            return ""
        if ready and not data:  # the terminal is closed, and would always be ready
            self.fd = None
        return data.decode(errors="replace")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Yield the keyboard of standard input; its keys are taken when something is drawn."""
    try:
        fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    except (ValueError, AttributeError):  # stdin is closed or missing
        fd = None
    keys = Keyboard(fd)
    try:
        yield keys
    finally:
        keys.give_back()
