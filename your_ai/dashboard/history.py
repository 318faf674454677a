"""The events of a run as a report shows them: curves over steps and over time. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from your_ai.dashboard.measures import LARGEST, RunningMean
from your_ai.dashboard.state import REPLANS, ViewState, fold_all
from your_ai.run import events
from your_ai.run.events import Action, Died, Finished, Gauges, Planned, Skipped, Started, Step

BUCKETS = 600  # of a curve; two points are drawn for each bucket
AWAY_S = 60.0  # with no event for so long before a process loads, no process was running
DECISIVE = attrgetter("plan", "micro_tokens", "spill", "level")  # a plan with others is a new one
GAP = math.nan  # breaks a curve; the running mean restarts after it
Points = Sequence[tuple[float, ...]]  # x, then one or more y, the last of which is the highest


@dataclass(frozen=True)
class RunHistory:
    """The events of a run, with the time the run had been running."""

    state: ViewState
    timeline: Sequence[tuple[float, events.Event]]
    """Each event, with the running time in seconds at that event."""
    steps: Sequence[Step]
    """In order, without steps that were lost when the run restarted from a checkpoint."""
    validations: Sequence[events.Validation]
    """In order, without validations after a step that was lost."""
    is_part: bool = False
    """Whether events are missing, since all of them were not read yet."""

    def of(self, *kinds: type) -> list[tuple[float, Any]]:
        return [(seconds, event) for seconds, event in self.timeline if isinstance(event, kinds)]


class HistoryReader:
    """Reads the events of a run, also while they are written."""

    def __init__(self) -> None:
        self.state = ViewState()
        self.timeline: list[tuple[float, events.Event]] = []
        self.steps: dict[int, Step] = {}
        self.validations: dict[int, events.Validation] = {}
        self.seconds = 0.0
        self.last_at: float | None = None

    def add(self, records: Sequence[events.Record]) -> None:
        self.state = fold_all(self.state, records)
        for record in records:
            event = record.event
            passed = 0.0 if self.last_at is None else max(0.0, record.time - self.last_at)
            away = isinstance(event, events.Stage) and passed > AWAY_S
            self.seconds, self.last_at = self.seconds + (0.0 if away else passed), record.time
            self.timeline.append((self.seconds, event))
            if isinstance(event, Step):
                self.steps[event.step] = event
            elif isinstance(event, events.Validation):
                self.validations[event.step] = event
            elif isinstance(event, Started):  # steps after its checkpoint are lost
                first = event.step
                self.steps = {n: step for n, step in self.steps.items() if n <= first}
                kept = {n: value for n, value in self.validations.items() if n <= first}
                self.validations = kept

    @property
    def past(self) -> RunHistory:
        steps = [self.steps[n] for n in sorted(self.steps)]
        validations = [self.validations[n] for n in sorted(self.validations)]
        return RunHistory(self.state, self.timeline, steps, validations)


def read_history(records: Sequence[events.Record]) -> RunHistory:
    reader = HistoryReader()
    reader.add(records)
    return reader.past


def ending(past: RunHistory) -> tuple[str, str]:
    """Say how the run ended, as a word and as a sentence."""
    match past.of(events.Stage, Started, Step, Died, Finished)[-1:]:
        case [(_, Finished(reason="done"))]:
            return "finished", "finished"
        case [(_, Finished() as end)]:
            return "stopped", end.reason
        case [(_, Died(level=None) as death)]:
            return "died", f"died: {death.reason}"
    return "open", "no end recorded when this page was made: still running, or killed"


def plan_changes(past: RunHistory) -> Iterator[tuple[float, int, Planned, str]]:
    """Yield each change of plan: running time, last step before it, new plan, and reason."""
    step, last, cause = 0, None, "chosen at the start"
    for seconds, event in past.timeline:
        match event:
            case Action() if event.kind in REPLANS:
                cause = event.cause
            case Died():
                cause = event.reason
            case Started() | Step() | Skipped():
                step = event.step
            case Planned():
                if last is None or DECISIVE(event) != DECISIVE(last):
                    asked = last is not None and event.asked not in ("", last.asked)
                    resumed = f"asked for {event.asked}" if asked else "chosen when resumed"
                    yield seconds, step, event, cause or resumed
                last, cause = event, ""


def finite(recorded: Sequence[Any]) -> list[Any]:
    """Keep the steps or validations whose loss can be drawn."""
    return [event for event in recorded if abs(event.loss) < LARGEST]


def losses(past: RunHistory) -> Points:
    return [(step.step, step.loss) for step in finite(past.steps)]


def over_time(past: RunHistory, ys: Callable[[Step | Gauges], tuple[float, ...] | None]) -> Points:
    """Return running times with the values of `ys`, if not None; a gap where a process ended."""
    used = past.of(Step, Gauges, Died, Finished)
    points = ((t, (GAP,) * 3 if isinstance(e, Died | Finished) else ys(e)) for t, e in used)
    return [(seconds, *values) for seconds, values in points if values is not None]


def held(gauges: Step | Gauges) -> tuple[float, ...] | None:
    """Return bytes active in MLX, active and cached in MLX, and of the whole process."""
    if gauges.process_bytes is None and gauges.active_bytes is None:
        return None
    cached = (gauges.active_bytes or 0) + (gauges.cache_bytes or 0)
    return gauges.active_bytes or 0, cached, max(cached, gauges.process_bytes or 0)


def highest(gauges: Step | Gauges) -> tuple[float, ...] | None:
    value = gauges.highest_bytes if isinstance(gauges, Step) else None
    return None if value is None else (value,)


def speed(gauges: Step | Gauges) -> tuple[float, ...] | None:
    return (gauges.tokens / max(gauges.seconds, 1e-9),) if isinstance(gauges, Step) else None


def buckets(points: Points) -> list[Points]:
    size = max(1, len(points) // BUCKETS)
    return [points[start : start + size] for start in range(0, len(points), size)]


def smoothed(points: Points) -> Points:
    """Return the running mean, of buckets if there are many points. It starts again after a gap."""
    found, mean = [], RunningMean()
    for bucket in buckets(points):
        value = sum(point[1] for point in bucket) / len(bucket)
        mean = RunningMean() if math.isnan(value) else mean.add(value)
        found.append((bucket[-1][0], GAP if mean.value is None else mean.value))
    return found


def thinned(points: Points, *picks: Callable[..., tuple[float, int]]) -> Points:
    """Keep a few points of each bucket: its highest and lowest (or `picks`), and its first gap."""
    kept = []
    for bucket in buckets(points):
        gaps = [i for i, point in enumerate(bucket) if math.isnan(point[-1])]
        rest = [(point[-1], i) for i, point in enumerate(bucket) if not math.isnan(point[-1])]
        chosen = {*gaps[:1], *(pick(rest)[1] for pick in picks or (min, max) if rest)}
        kept += [bucket[i] for i in sorted(chosen)]
    return kept
