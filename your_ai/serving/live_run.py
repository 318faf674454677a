"""A run as its live page shows it, drawn again when it has changed. Loads no MLX, and no server."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, field, replace

from your_ai.config import TrainConfig
from your_ai.dashboard.history import HistoryReader, RunHistory, ending, read_history
from your_ai.dashboard.report import Presence, RolloutSample, report_page
from your_ai.errors import UserError, first_line
from your_ai.gates.text import printable, shortened
from your_ai.run.events import EventsTail, skim
from your_ai.run.folder import RESTART_S, RunFolder, is_running
from your_ai.session.run_list import rollout_samples

SILENT_S = 20  # a time without events that is worth a word
SAMPLES_S = 5.0  # between two readings of completions
LONG_BYTES = 1 << 21  # an events file with more to read is drawn from a part of its lines at first
READ_S = 0.4  # the rest is read in parts of this time, ...
PARTS = 10  # ... and the page says after each such part of it how far that is
PART_BYTES = 1 << 19  # between two looks at the clock


@dataclass(frozen=True)
class DrawnRun:
    """A page about a run."""

    text: str
    title: str
    is_whole: bool = True
    """Whether all events were read for it."""


@dataclass
class LiveRun:
    """A run's folder, and what was read of it. What is deleted later stays here."""

    folder: RunFolder
    reader: HistoryReader = field(default_factory=HistoryReader)
    rest: EventsTail = field(init=False)
    """The part of the events file that is still to be read."""
    skimmed: RunHistory | None = None
    """The history from a part of the lines, until all are read."""
    unread: float = 0.0
    """Share of the events file that is still to be read."""
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
    drawn: object = None
    """What the last page was drawn from."""

    def __post_init__(self) -> None:
        self.rest = EventsTail(self.folder.events)

    def draw(self) -> DrawnRun | None:
        """The page about the run; None if nothing has changed since it was drawn last."""
        now = time.time()
        self.read_events()
        self.read_settings()
        if now - self.samples_at >= SAMPLES_S:
            self.samples_at = now
            self.samples = tuple(rollout_samples(self.folder.path)) or self.samples
        past = self.skimmed or self.reader.past
        presence = self.presence(now, past)
        found = (
            *(self.rest.identity, 0 if self.unread else self.rest.offset, self.config_changed_at),
            *(self.samples, self.fault, presence),
        )
        if found == self.drawn:
            return None
        self.drawn = found
        try:
            text = self.page(presence, past)
        except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
            presence = replace(
                presence,
                fault=f"its events cannot be shown ({shortened(printable(first_line(error)))})",
            )
            text = self.page(presence, HistoryReader().past)
        return DrawnRun(text, self.title(presence, past), not self.unread)

    def read_events(self) -> None:
        try:
            before, self.rest = self.rest, self.rest.followed()
            if self.rest is not before:
                self.reader, self.skimmed, self.samples_at = HistoryReader(), None, 0.0
            self.fault = ""
            size = os.stat(self.folder.events).st_size
            if self.rest.offset == 0 and self.skimmed is None and size > LONG_BYTES:
                part = read_history(skim(self.folder.events))
                self.skimmed, self.unread = replace(part, is_part=True), 1.0
                return
            until = time.monotonic() + READ_S
            while (at := self.rest.offset) < size and time.monotonic() < until:
                self.reader.add(self.rest.read(PART_BYTES))
                if self.rest.offset == at:  # a line that is not whole yet
                    size = at
            self.unread = math.ceil(PARTS * (1 - self.rest.offset / max(1, size))) / PARTS
        except UserError as error:
            self.fault, self.unread = str(error), 0.0
        except OSError:
            return
        if not self.unread:
            self.skimmed = None

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

    def presence(self, now: float, past: RunHistory) -> Presence:
        """Facts about the run beyond its events."""
        if not self.folder.path.exists():
            return Presence(is_running=False, is_deleted=True)
        state = past.state
        if is_running(self.folder):
            self.running_at = now
        has_ended = state.finished is not None or state.gave_up
        is_here = self.running_at == now or (not has_ended and now - self.running_at < RESTART_S)
        silent_s = int(max(0.0, now - (state.last_at or now))) // SILENT_S * SILENT_S
        return Presence(
            is_running=is_here,
            silent_s=silent_s if is_here else 0,
            unread=self.unread,
            resume=f"your_ai train --resume {self.folder.reference}",
        )

    def page(self, presence: Presence, past: RunHistory) -> str:
        presence = replace(presence, fault=presence.fault or self.fault)
        name, config = self.folder.name, self.config
        return report_page(past, name, self.config_text, config, self.samples, presence)

    def title(self, presence: Presence, past: RunHistory) -> str:
        """The title of the page: how far the run is, and its name."""
        step, name = past.state.step, printable(self.folder.name, one_line=True)
        if presence.is_running and step is not None and step.steps > 0:
            return f"{100 * step.step // step.steps}% {name}"
        word = "deleted" if presence.is_deleted else ending(past)[0]
        return name if word == "open" else f"{name}: {word}"
