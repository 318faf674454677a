"""Folds events into a ViewState. Pure: the same events give the same state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from your_ai.dashboard.metric_table import JUDGE, REWARD, is_rewarded, phase_seconds
from your_ai.gates.text import size_text
from your_ai.run import events
from your_ai.run.events import Record

SMOOTH_OVER = 10  # steps
SERIES_POINTS = 512
KEPT = 8  # number of latest actions, and of latest notices
GETTING_ON = (events.Started, events.Step, events.Skipped, events.Continued)
REPLANS = ("smaller_plan", "larger_plan", "restart", "measured")
SWAP_GROWTH_BYTES = 500_000_000  # growth since the run began that is worth a warning
WARNING_PRESSURE = 2
BARELY, BARELY_TRAINED = 0.01, 0.05  # a smaller change of the losses is not worth a run


@dataclass(frozen=True)
class Series:
    """A curve of any length in at most SERIES_POINTS points."""

    highest: bool = False
    """Whether a point is the highest of its values, or else their mean."""
    values: tuple[float, ...] = ()
    """The points."""
    every: int = 1
    """Number of consecutive values in each point."""
    last_count: int = 0
    """Number of values in the last point so far."""

    def add(self, value: float) -> Series:
        values, every, count = self.values, self.every, self.last_count
        if values and count < every:
            merged = self._merged(values[-1], count, value)
            return Series(self.highest, (*values[:-1], merged), every, count + 1)
        if len(values) == SERIES_POINTS:
            pairs = zip(values[::2], values[1::2], strict=True)
            values, every = tuple(self._merged(a, 1, b) for a, b in pairs), 2 * every
        return Series(self.highest, (*values, value), every, 1)

    def _merged(self, point: float, count: int, value: float) -> float:
        return max(point, value) if self.highest else point + (value - point) / (count + 1)


@dataclass(frozen=True)
class ViewState:
    """Everything that a view shows of a run. Times are in seconds since 1970."""

    stage: str = "starting"
    began_at: float | None = None
    """Time of the first event."""
    last_at: float | None = None
    """Time of the last event."""
    phase: str = ""
    """What the run does between two steps, if that may take long."""
    host: events.Host | None = None
    """Power and heat of the computer, if they were written."""
    stage_at: float | None = None
    """Time when the current stage began."""
    stepped_at: float | None = None
    """Time when training last made progress."""
    limit: events.Limit | None = None
    planned: events.Planned | None = None
    replanned: str = ""
    """Why the plan is no longer the first one."""
    started: events.Started | None = None
    step: events.Step | None = None
    generated: events.Step | None = None
    """The last step that generated what it trained, if steps do."""
    steps_seen: int = 0
    """Number of steps in the running means."""
    smooth_loss: float | None = None
    """Running mean of the loss."""
    best_loss: float | None = None
    """Lowest running mean of the loss so far; None if the run trains on rewards."""
    tokens_per_s: float | None = None
    """Running mean of the throughput."""
    step_s: float | None = None
    """Running mean of the time per step."""
    losses: Series = Series()
    rewards: Series = Series()
    """The mean reward of each step, if the run trains on rewards."""
    smooth_reward: float | None = None
    """Running mean of the reward."""
    best_smooth_reward: float | None = None
    """Highest running mean of the reward so far."""
    judged: Mapping[str, float] = field(default_factory=dict)
    """Sums of what the judge did, by the name of the metric."""
    gauges: events.Gauges | events.Step | None = None
    """The latest event with gauges."""
    highest_bytes: int | None = None
    """Peak memory of the process."""
    memory: Series = field(default=Series(highest=True))
    swap_began_bytes: int | None = None
    """Swap in use when the run began."""
    actions: tuple[events.Action, ...] = ()
    notices: tuple[str, ...] = ()
    deaths: tuple[events.Died, ...] = ()
    gave_up: bool = False
    """Whether the training process died and is not restarted."""
    paused: bool = False
    first_loss: float | None = None
    """Mean loss of the first steps."""
    first_validation: events.Validation | None = None
    validation: events.Validation | None = None
    best_validation: float | None = None
    best_step: int | None = None
    """The step of `best_validation`."""
    best_checked: events.Validation | None = None
    """The best validation by --best-metric."""
    skipped: events.Skipped | None = None
    checkpoint: events.Checkpoint | None = None
    samples_before: events.Samples | None = None
    """Answers to held-out prompts before training."""
    samples_after: events.Samples | None = None
    match_before: events.ExactMatch | None = None
    """Exact match on held-out prompts before training."""
    match_after: events.ExactMatch | None = None
    finished: events.Finished | None = None

    @property
    def seconds_left(self) -> float | None:
        if self.step is None or self.step_s is None:
            return None
        return (self.step.steps - self.step.step) * self.step_s

    @property
    def barely_learned(self) -> bool:
        """Whether neither the validation loss nor the training loss has moved; or the reward."""
        first, last = self.first_validation, self.validation
        if first is None or last is None or first.step == last.step:
            return False
        return (
            is_close(first.loss, last.loss, BARELY)
            and is_close(first.loss, self.best_validation, BARELY)
            # Most may have been learned before the first validation.
            and (
                last.reward is not None
                or is_close(self.first_loss, self.smooth_loss, BARELY_TRAINED)
            )
        )

    @property
    def warnings(self) -> tuple[str, ...]:
        """Problems of the machine or the run that the user should know about now."""
        found = []
        if self.gauges is not None and (self.gauges.pressure or 0) >= WARNING_PRESSURE:
            critical = (self.gauges.pressure or 0) > WARNING_PRESSURE
            found.append(f"memory pressure: {'critical' if critical else 'warning'}")
        if self.gauges is not None and self.gauges.swap_bytes is not None:
            grown = self.gauges.swap_bytes - (self.swap_began_bytes or 0)
            if grown >= SWAP_GROWTH_BYTES:
                found.append(f"swap has grown by {size_text(grown)}")
        if self.host is not None and self.finished is None and not self.gave_up:
            found += host_warnings(self.host)
        if self.skipped is not None:
            skipped = self.skipped
            found.append(f"skipped steps: {skipped.total}, last: {skipped.step}")
        if self.deaths:
            times = f"{len(self.deaths)} times" if len(self.deaths) > 1 else "once"
            found.append(f"died {times}: {self.deaths[-1].reason}")
        return tuple(found)


def host_warnings(host: events.Host) -> list[str]:
    """Power and heat, if they are worth a warning."""
    found = []
    if host.source in ("battery", "UPS"):
        found.append(f"on {host.source}" + ("" if host.percent is None else f", {host.percent}%"))
    if host.thermal not in ("", "nominal"):
        found.append(f"thermal pressure: {host.thermal}")
    return found


def fold(state: ViewState, record: Record) -> ViewState:
    """Return the state after one more event."""
    return fold_all(state, [record])


def fold_all(state: ViewState, records: Iterable[Record]) -> ViewState:
    """Return the state after more events; an event with a field of a wrong type is skipped."""
    found: Any = SimpleNamespace(**vars(state))  # one copy, not one per event
    for record in records:
        if found.began_at is None:
            found.began_at = record.time
        found.last_at = record.time
        if isinstance(record.event, events.Stage):
            found.stage_at = record.time
        elif isinstance(record.event, GETTING_ON):
            found.stepped_at = record.time
        if not isinstance(record.event, events.BESIDE_THE_WORK):
            found.phase = ""
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):
            vars(found).update(changes_of(found, record.event))
    return ViewState(**vars(found))


def changes_of(state: ViewState, event: events.Event) -> dict[str, Any]:
    match event:
        case events.Step():
            return after_step(state, event)
        case events.Gauges():
            return with_gauges(state, event, event.process_bytes)
        case events.Stage():
            return {"stage": event.text, "finished": None, "paused": False, "gave_up": False}
        case events.Notice():
            return {"notices": (*state.notices, event.text)[-KEPT:]}
        case events.Limit():
            return {"limit": event}
        case events.Planned():
            return {"planned": event}
        case events.Action():
            why = event.cause if event.kind in REPLANS else state.replanned
            return {"actions": (*state.actions, event)[-KEPT:], "replanned": why}
        case events.Died():
            deaths, gave_up = (*state.deaths, event), event.level is None
            return {"deaths": deaths, "replanned": event.reason, "gave_up": gave_up}
        case events.Started():
            means = ("smooth_loss", "smooth_reward", "tokens_per_s", "step_s")
            fresh = dict.fromkeys((*means, "finished"))
            return {**fresh, "steps_seen": 0, "started": event, "stage": "training"}
        case events.Host():
            return {"host": event}
        case events.Phase():
            return {"phase": event.text}
        case events.Paused():
            return {"paused": True}
        case events.Continued():
            return {"paused": False}
        case events.Validation():
            return after_validation(state, event)
        case events.Skipped():
            return {"skipped": event}
        case events.Checkpoint():
            return {"checkpoint": event}
        case events.Samples():
            return {"samples_before" if event.when == "before" else "samples_after": event}
        case events.ExactMatch():
            return {"match_before" if event.when == "before" else "match_after": event}
        case events.Finished():
            return {"finished": event}
    return {}


def after_step(state: ViewState, step: events.Step) -> dict[str, Any]:
    seen = state.steps_seen + 1
    speed = step.tokens / max(step.seconds, 1e-9)
    smooth_loss = smooth(state.smooth_loss, step.loss, seen)
    rewards, on_rewards = {}, is_rewarded(step.metrics)
    if REWARD in step.metrics:
        reward = float(step.metrics[REWARD])
        rewards["rewards"] = state.rewards.add(reward)
        mean = rewards["smooth_reward"] = smooth(state.smooth_reward, reward, seen)
        best = state.best_smooth_reward
        if math.isfinite(mean) and (best is None or mean > best):
            rewards["best_smooth_reward"] = mean
    return {
        **rewards,
        **({"generated": step} if phase_seconds(step) else {}),
        **with_judge(state, step.metrics),
        **with_gauges(state, step, step.highest_bytes or step.process_bytes),
        "step": step,
        "stage": "training",
        "steps_seen": seen,
        "smooth_loss": smooth_loss,
        "best_loss": None if on_rewards else least(state.best_loss, smooth_loss),
        "first_loss": smooth_loss if step.step <= SMOOTH_OVER else state.first_loss,
        "losses": state.losses.add(step.loss),
        "tokens_per_s": smooth(state.tokens_per_s, speed, seen),
        "step_s": smooth(state.step_s, step.seconds, seen),
    }


def after_validation(state: ViewState, event: events.Validation) -> dict[str, Any]:
    best, lowest = {}, state.best_validation
    if math.isfinite(event.loss) and (lowest is None or event.loss < lowest):
        best = {"best_validation": event.loss, "best_step": event.step}
    if event.best:
        best["best_checked"] = event
    first = state.first_validation or event
    judged = with_judge(state, event.metrics)
    return {"validation": event, "first_validation": first, **judged, **best}


def with_judge(state: ViewState, metrics: Mapping[str, float]) -> dict[str, Any]:
    found = {name: value for name, value in metrics.items() if name.startswith(JUDGE)}
    if not found:
        return {}
    sums = {name: state.judged.get(name, 0.0) + value for name, value in found.items()}
    return {"judged": {**state.judged, **sums}}


def with_gauges(
    state: ViewState, gauges: events.Gauges | events.Step, held_bytes: int | None
) -> dict[str, Any]:
    swap = gauges.swap_bytes if state.swap_began_bytes is None else state.swap_began_bytes
    changes: dict[str, Any] = {"gauges": gauges, "swap_began_bytes": swap}
    if held_bytes is not None:
        changes["highest_bytes"] = max(held_bytes, state.highest_bytes or 0)
        changes["memory"] = state.memory.add(held_bytes)
    return changes


def smooth(mean: float | None, value: float, seen: int) -> float:
    """Update a running mean: a plain mean of the first values, then an exponential mean."""
    if mean is None or not math.isfinite(mean):
        return value
    return mean + (value - mean) / min(seen, SMOOTH_OVER)


def is_close(before: float | None, after: float | None, share: float) -> bool:
    """Whether a loss changed by less than this share of it; False if one is not known."""
    if before is None or after is None:
        return False
    return abs(before - after) < share * abs(before)


def least(a: float | None, b: float) -> float:
    return a if a is not None and a <= b else b
