"""Shows a run as a live page on this machine. Does not import mlx, and writes nothing.

The page is the report's. This process reads the run's events and renders the page; the training
process knows nothing of it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from your_ai.config import TrainConfig
from your_ai.dashboard.history import HistoryReader, RunHistory, ending
from your_ai.dashboard.report import (
    Presence,
    RolloutSample,
    live_policy,
    parts_of,
    report_page,
)
from your_ai.errors import UserError
from your_ai.gates.console import echo
from your_ai.gates.text import printable, shortened
from your_ai.run import events
from your_ai.run.child import DONE
from your_ai.run.folder import RunFolder, is_running
from your_ai.run.stopping import recorded_signals
from your_ai.serving.live_pages import LivePage, listen
from your_ai.session.attach import GRACE_S
from your_ai.session.run_list import rollout_samples

POLL_S = 0.3
REST = 9  # rendering takes at most one part in ten of the time of a processor
SILENT_S = 20  # a time without events that is worth a word
SAMPLES_S = 5.0  # between two readings of completions


@dataclass
class LiveRun:
    """A run's folder, and what was read of it. What is deleted later stays here."""

    folder: RunFolder
    reader: HistoryReader = field(default_factory=HistoryReader)
    offset: int = 0
    """Bytes of the events file that were read."""
    identity: object = None
    """Of the events file; another file is that of a new run with the same name."""
    fault: str = ""
    """Why the events cannot be read or shown."""
    config: TrainConfig | None = None
    """None if the settings cannot be read."""
    config_text: str = ""
    config_changed_at: int = 0
    running_at: float = 0.0
    """When the run was last seen running."""
    samples: tuple[RolloutSample, ...] = ()
    samples_at: float = 0.0

    def read_events(self) -> None:
        try:
            status = os.stat(self.folder.events)
        except OSError:
            return
        identity = status.st_dev, status.st_ino
        if self.identity not in (None, identity) or status.st_size < self.offset:
            self.reader, self.offset, self.samples_at = HistoryReader(), 0, 0.0
        self.identity, self.fault = identity, ""
        try:
            records, self.offset = events.tail(self.folder.events, self.offset)
        except UserError as error:
            self.fault = str(error)
        else:
            self.reader.add(records)

    def read_settings(self) -> None:
        try:
            changed_at = os.stat(self.folder.config).st_mtime_ns
            if changed_at == self.config_changed_at:
                return
            self.config_changed_at, self.config = changed_at, None
            self.config_text = self.folder.config_text("replace")
            self.config = self.folder.read_config()
        except (OSError, UserError):
            return

    def read_samples(self, now: float) -> None:
        if now - self.samples_at >= SAMPLES_S:
            self.samples_at = now
            self.samples = tuple(rollout_samples(self.folder.path)) or self.samples

    def presence(self, now: float) -> Presence:
        """What is known of the run beyond its events."""
        if not self.folder.path.exists():
            return Presence(is_running=False, is_deleted=True)
        state = self.reader.state
        if is_running(self.folder):
            self.running_at = now
        has_ended = state.finished is not None or state.gave_up
        is_here = self.running_at == now or (not has_ended and now - self.running_at < GRACE_S)
        silent_s = int(max(0.0, now - (state.last_at or now))) // SILENT_S * SILENT_S
        return Presence(
            is_running=is_here,
            silent_s=silent_s if is_here else 0,
            resume=f"your_ai train --resume {self.folder.reference}",
        )


def refresh(run: LiveRun, page: LivePage, seen: object) -> object:
    """Publish the page if anything has changed since `seen`; return what is now seen."""
    now = time.time()
    run.read_events()
    run.read_settings()
    run.read_samples(now)
    presence = run.presence(now)
    found = run.identity, run.offset, run.config_changed_at, run.samples, run.fault, presence
    if found == seen:
        return seen
    try:
        text = page_of(run, presence, run.reader.past)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        presence = replace(presence, fault=f"its events cannot be shown ({first_line(error)})")
        text = page_of(run, presence, HistoryReader().past)
    page.publish(text, title_of(run, presence), parts_of(text))
    return found


def page_of(run: LiveRun, presence: Presence, past: RunHistory) -> str:
    presence = replace(presence, fault=presence.fault or run.fault)
    name = run.folder.name
    return report_page(past, name, run.config_text, run.config, run.samples, presence)


def title_of(run: LiveRun, presence: Presence) -> str:
    """The title of the page: how far the run is, and its name."""
    step, name = run.reader.state.step, printable(run.folder.name, one_line=True)
    if presence.is_running and step is not None and step.steps > 0:
        return f"{100 * step.step // step.steps}% {name}"
    word = "deleted" if presence.is_deleted else ending(run.reader.past)[0]
    return name if word == "open" else f"{name}: {word}"


def first_line(error: Exception) -> str:
    return shortened(printable(next(iter(str(error).splitlines()), type(error).__name__)))


def serve_page(folder: RunFolder, port: int | None) -> int:
    """Serve the page of a run until a signal; return the exit status.

    port: None for a free one. Raises UserError if the port cannot be used.
    """
    page, run = LivePage(), LiveRun(folder)
    with recorded_signals() as received:
        server = listen(port, page, live_policy())
        server.start()
        try:
            echo(f"{folder.name}: {server.url}")
            echo("Ctrl-C ends the page; the run goes on without it")
            sys.stdout.flush()
            follow(run, page, received)
        finally:
            server.stop()
    return DONE if received[0] == signal.SIGINT else 128 + received[0]


def follow(run: LiveRun, page: LivePage, received: Sequence[int]) -> None:
    """Keep the page up to date while somebody reads it, until there is a signal in `received`."""
    seen = refresh(run, page, None)  # while nobody waits for it yet
    due_at = 0.0
    while not received:
        asked = page.wait(POLL_S)
        began_at = time.monotonic()
        if began_at >= due_at and (asked > page.answered or page.has_audience):
            seen = refresh(run, page, seen)
            due_at = time.monotonic() + REST * (time.monotonic() - began_at)
        page.confirm(asked)
