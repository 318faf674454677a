"""Find out from outside that a training process no longer gets on. Uses no processes itself.

Progress is every event but those that a thread writes by itself, such as memory gauges. How long
the next one may take depends on what the process does: a step is compared with the steps before
it, and everything else has a fixed allowance.

Only time during which this process was looking counts, by a clock that does not run while the
computer sleeps. So neither a sleeping computer nor a stopped supervisor makes a stall.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from your_ai.config import TrainConfig
from your_ai.dashboard.view import duration
from your_ai.memory.governor import LARGE
from your_ai.run import events
from your_ai.run.events import Event

REMEMBERED = 50  # steps whose times are compared
AWAY_S = 30.0  # a jump of a clock by more was sleep, or this process was stopped

STARTING, ENDING = "starting", "ending"

Doing = Literal["other", "step", "paused"]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """The time that a training process may take until its next event that is progress."""

    steps: float = 10.0
    """Multiple of the median time of a step."""
    longest: float = 3.0
    """Multiple of the longest of the last steps, for rows of very different lengths."""
    least_s: float = 120.0
    """The shortest wait in a step."""
    other_s: float = 1800.0
    """Wait in everything else: loading, measuring, the first step of a process (which compiles),
    validating, saving, answering test prompts."""
    look_s: float = 1.0
    """Between two looks at the events."""
    dump_s: float = 5.0
    """Wait for the process to write its stack."""


def patience_of(config: TrainConfig) -> Patience:
    """The patience with a run. A judge that is away makes a step as long as its retries."""
    return Patience(least_s=Patience.other_s) if config.judge_model else Patience()


@dataclass
class StallWatch:
    """Observations of the training processes of a run, one after another."""

    patience: Patience = field(default_factory=Patience)
    doing: Doing = "other"
    """What the process does. In `other`, it has a fixed allowance."""
    what: str = STARTING
    """In words, if it is not a step."""
    stepped: bool = False
    """Whether the process has done a step since it loaded."""
    step: int = 0
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    saved: int = -1
    """Step of the newest checkpoint that was written."""
    stalls: int = 0
    """Stalls since then."""
    waited_s: float = 0.0
    """Time without progress, as far as this process was looking."""
    clock: tuple[float, float] | None = None
    """Monotonic and wall time of the last look, in seconds."""
    offset: int = 0
    """Bytes of the events file that were read."""
    told_of_debugger: bool = False

    def begin(self) -> None:
        """A new training process starts."""
        self.load(STARTING)
        self.waited_s, self.clock, self.told_of_debugger = 0.0, None, False

    def load(self, what: str) -> None:
        self.doing, self.what, self.stepped = "other", what, False

    def look(self, written: Sequence[Event], monotonic_s: float, wall_s: float) -> str:
        """Take in new events and the time; return what kept this process from looking, if so."""
        progress = [event for event in written if not isinstance(event, events.BESIDE_THE_WORK)]
        for event in progress:
            self.take(event)
        before, self.clock = self.clock or (monotonic_s, wall_s), (monotonic_s, wall_s)
        passed_s = max(0.0, monotonic_s - before[0])
        slept_s = wall_s - before[1] - passed_s
        is_away = passed_s > AWAY_S or slept_s > AWAY_S
        self.waited_s = 0.0 if progress or is_away else self.waited_s + passed_s
        if passed_s > AWAY_S:
            return (
                f"the supervisor did not run for {duration(passed_s)}: it was stopped, or the "
                "computer was too busy"
            )
        if slept_s > AWAY_S:
            return f"the computer slept for {duration(slept_s)}, or its clock was changed"
        return ""

    def take(self, event: Event) -> None:
        """Learn from an event that is progress."""
        match event:
            case events.Step() | events.Skipped():
                self.doing, self.step, self.stepped = "step", event.step, True
                if isinstance(event, events.Step) and 0 < event.seconds < math.inf:
                    self.step_seconds.append(event.seconds)
            case events.Validation() | events.Checkpoint() | events.Continued():
                if self.stepped and self.what != ENDING:
                    self.doing = "step"
                if isinstance(event, events.Checkpoint) and event.step > self.saved:
                    self.saved, self.stalls = event.step, 0
            case events.Paused():
                self.doing = "paused"
            case events.Phase(in_step=False):
                self.doing, self.what = "other", event.text
            case events.Started():
                self.load("in its first step")
                self.step = event.step
            case events.Stage() if self.doing == "other":
                self.what = event.text
            case events.Action() if event.kind in LARGE:
                self.load("loading")
            case events.Planned():
                self.load("loading")
            case events.Finished():
                self.doing, self.what = "other", ENDING

    @property
    def allowed_s(self) -> float:
        """Return how long there may be no progress now. Each stall in a row doubles it."""
        patience = self.patience
        if self.doing == "paused":
            return math.inf
        allowed_s = patience.other_s
        if self.doing == "step" and self.step_seconds:
            allowed_s = max(
                patience.least_s,
                patience.steps * median(self.step_seconds),
                patience.longest * max(self.step_seconds),
            )
        return allowed_s * 2.0**self.stalls

    @property
    def is_stalled(self) -> bool:
        return self.waited_s > self.allowed_s

    def describe(self) -> str:
        """Say in words what has not got on: `no progress for 2:05 after step 17`."""
        where = f"while {self.what}" if self.doing == "other" else f"after step {self.step}"
        usual = ""
        if self.doing == "step" and self.step_seconds:
            usual = f", where a step takes {median(self.step_seconds):.3g} s"
        return f"no progress for {duration(self.waited_s)} {where}{usual}"
