"""Folds events into a ViewState. Pure: the same events give the same state."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from your_ai.dashboard.measures import FoldedAction, RunningMean, is_better, with_action
from your_ai.dashboard.metric_table import JUDGE, REWARD, is_rewarded, phase_seconds
from your_ai.gates.text import size_text
from your_ai.run import events
from your_ai.run.events import Record

SMOOTH_OVER = 10  # steps
SERIES_POINTS = 512
KEPT = 8  # number of latest actions, and of latest notices
KEPT_MEANS = 16  # number of latest checkpoints whose running means are kept
STARTING, TRAINING, FINISHING, PAUSED = "starting", "training", "finishing", "paused"
GETTING_ON = (events.Started, events.Step, events.Skipped, events.Continued)
# Actions after which the model is loaded again.
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
    at: tuple[float, ...] = ()
    """The step of the last value in each point; 0 if values have none."""

    def add(self, value: float, at: float = 0) -> Series:
        values, every, count, ats = self.values, self.every, self.last_count, self.at
        if values and count < every:
            merged = self._merged(values[-1], count, value)
            return Series(self.highest, (*values[:-1], merged), every, count + 1, (*ats[:-1], at))
        if len(values) == SERIES_POINTS:
            pairs = zip(values[::2], values[1::2], strict=True)
            values, every = tuple(self._merged(a, 1, b) for a, b in pairs), 2 * every
            ats = ats[1::2]
        return Series(self.highest, (*values, value), every, 1, (*ats, at))

    def until(self, step: float) -> Series:
        """Without the points after a step, which a run that restarted there has lost."""
        kept = sum(at <= step for at in self.at)
        if kept == len(self.at):
            return self
        return Series(self.highest, self.values[:kept], self.every, self.every, self.at[:kept])

    @property
    def points(self) -> list[tuple[float, float]]:
        return list(zip(self.at, self.values, strict=True))

    def _merged(self, point: float, count: int, value: float) -> float:
        return max(point, value) if self.highest else point + (value - point) / (count + 1)


@dataclass(frozen=True)
class Pace:
    """The time that passes beside the steps: validations, checkpoints, actions on memory."""

    began_at: float | None = None
    """Time of the first step of this process."""
    last_at: float = 0.0
    steps: int = 0
    """Number of steps after it."""
    worked_s: float = 0.0
    """Time of these steps, and of pauses."""

    def after(self, now: float, seconds: float) -> Pace:
        if self.began_at is None:
            return Pace(now, now)
        return Pace(self.began_at, now, self.steps + 1, self.worked_s + seconds)

    def paused(self, seconds: float) -> Pace:
        return replace(self, worked_s=self.worked_s + seconds)

    @property
    def beside_s(self) -> float:
        """Mean time beside a step."""
        if self.began_at is None or not self.steps:
            return 0.0
        beside = (self.last_at - self.began_at - self.worked_s) / self.steps
        return beside if 0 <= beside < math.inf else 0.0


@dataclass(frozen=True)
class ViewState:
    """Everything that a view shows of a run. Times are in seconds since 1970."""

    doing: str = STARTING
    """What the run does now, in words."""
    doing_at: float | None = None
    """Time when it began that."""
    began_at: float | None = None
    """Time of the first event."""
    last_at: float | None = None
    """Time of the last event."""
    away_s: float = 0.0
    """Time between the ends of the run and the times when it was resumed."""
    loaded: bool = False
    """Whether the training process is ready for its steps."""
    stepped: bool = False
    """Whether the training process has done a step since it loaded."""
    stopping: bool = False
    """Whether a signal asked the run to stop."""
    at: int = 0
    """Number of steps that are done, those without a change included."""
    steps: int = 0
    host: events.Host | None = None
    """Power and heat of the computer, if they were written."""
    stepped_at: float | None = None
    """Time when training last made progress."""
    ranks: events.Ranks | None = None
    """The processes of the run in the last step, if there are several."""
    waiting: events.Waiting | None = None
    """The last word about a wait for memory."""
    limit: events.Limit | None = None
    planned: events.Planned | None = None
    replanned: str = ""
    """Why the plan is no longer the first one."""
    started: events.Started | None = None
    step: events.Step | None = None
    generated: events.Step | None = None
    """The last step that generated what it trained, if steps do."""
    steps_seen: int = 0
    """Number of steps in the means of throughput and time."""
    loss_mean: RunningMean = field(default=RunningMean())
    reward_mean: RunningMean = field(default=RunningMean(highest=True))
    """Of the mean reward of each step, if the run trains on rewards."""
    means_at: Mapping[int, tuple[RunningMean, RunningMean]] = field(default_factory=dict)
    """`loss_mean` and `reward_mean` at the latest checkpoints, by their steps."""
    tokens_per_s: float | None = None
    """Running mean of the throughput."""
    step_s: float | None = None
    """Running mean of the time per step."""
    pace: Pace = Pace()
    losses: Series = Series()
    rewards: Series = Series()
    """The mean reward of each step, if the run trains on rewards."""
    judged: Mapping[str, float] = field(default_factory=dict)
    """Sums of what the judge did, by the name of the metric."""
    gauges: events.Gauges | events.Step | None = None
    """The latest event with gauges."""
    highest_bytes: int | None = None
    """Peak memory of the process, in all of the run."""
    now_highest_bytes: int | None = None
    """Peak memory since the run was started or resumed last."""
    memory: Series = field(default=Series(highest=True))
    swap_began_bytes: int | None = None
    """Swap in use when the run began."""
    actions: tuple[FoldedAction, ...] = ()
    """What the governor did, in the order of the latest action of a line."""
    notices: tuple[str, ...] = ()
    deaths: tuple[events.Died, ...] = ()
    gave_up: bool = False
    """Whether the training process died and is not restarted."""
    paused: bool = False
    first_loss: float | None = None
    """Mean loss of the first steps."""
    first_validation: events.Validation | None = None
    validation: events.Validation | None = None
    validations: Series = Series()
    """The loss of each validation, or its reward."""
    bests: tuple[events.Validation, ...] = ()
    """Each validation that was the best so far."""
    skipped: events.Skipped | None = None
    checkpoint: events.Checkpoint | None = None
    samples_before: events.Samples | None = None
    """Answers to held-out prompts before training."""
    samples_after: events.Samples | None = None
    rollout: events.Rollout | None = None
    match_before: events.ExactMatch | None = None
    """Exact match on held-out prompts before training."""
    match_after: events.ExactMatch | None = None
    finished: events.Finished | None = None

    @property
    def on_rewards(self) -> bool:
        """Return whether the run trains on rewards."""
        return self.step is not None and is_rewarded(self.step.metrics)

    @property
    def best_validation(self) -> events.Validation | None:
        """The best validation so far, by --best-metric."""
        return self.bests[-1] if self.bests else None

    @property
    def best_loss(self) -> float | None:
        """Lowest running mean of the loss so far; None if the run trains on rewards."""
        return None if self.on_rewards else self.loss_mean.best

    @property
    def is_waiting(self) -> bool:
        """Return whether the run waits for memory that other runs use."""
        return is_waiting(self)

    @property
    def is_training(self) -> bool:
        """Return whether the run is in a step, and not in a phase with a name of its own."""
        return self.doing == TRAINING

    @property
    def doing_text(self) -> str:
        """Return what the run is doing, in a few words."""
        if self.paused:
            return "paused"
        if not self.stopping:
            return self.doing
        return "stopping after this step" if self.is_training else f"stopping: {self.doing}"

    @property
    def worked_s(self) -> float:
        """Time from the first event to the last, without the time between its resumes."""
        if self.began_at is None or self.last_at is None:
            return 0.0
        return max(0.0, self.last_at - self.began_at - self.away_s)

    @property
    def took_s(self) -> float:
        """Return how long a finished run took, with the processes before it was resumed."""
        return max(self.worked_s, 0.0 if self.finished is None else self.finished.seconds)

    @property
    def seconds_left(self) -> float | None:
        """Estimated time for the rest of the steps, after the last one.

        None if it is unknown, or if the run does not go on to them now.
        """
        left = self.steps - self.at
        is_over = self.finished is not None or self.gave_up
        if is_over or self.paused or self.stopping or not self.loaded:
            return None
        if self.step_s is None or left <= 0:
            return None
        return left * (self.step_s + self.pace.beside_s)

    def seconds_left_at(self, now: float) -> float | None:
        """`seconds_left`, counted down while a step lasts; at least a second."""
        left = self.seconds_left
        if left is None:
            return None
        passed = 0.0
        if self.stepped_at is not None and self.is_training and math.isfinite(now):
            passed = min(max(0.0, now - self.stepped_at), left / (self.steps - self.at))
        return max(1.0, left - passed)

    @property
    def barely_learned(self) -> bool:
        """Say whether neither validation loss nor training loss, or no reward, has moved."""
        first, last, best = self.first_validation, self.validation, self.best_validation
        if first is None or last is None or best is None or first.step == last.step:
            return False
        return (
            is_close(first.loss, last.loss, BARELY)
            and is_close(first.loss, best.loss, BARELY)
            # Most may have been learned before the first validation.
            and (
                last.reward is not None
                or is_close(self.first_loss, self.loss_mean.value, BARELY_TRAINED)
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


# What does not outlive the end of a run: notes, warnings, memory, and why the plan changed. A
# resumed run writes again what still holds.
FORGOTTEN: dict[str, Any] = {
    **dict.fromkeys(("notices", "actions", "deaths"), ()),
    **dict.fromkeys(("gauges", "now_highest_bytes", "swap_began_bytes", "host", "skipped")),
    **dict.fromkeys(("limit", "planned", "finished", "step_s", "tokens_per_s")),
    **dict.fromkeys(("gave_up", "paused", "stopping", "stepped", "loaded"), False),
    "replanned": "",
}


def fold(state: ViewState, record: Record) -> ViewState:
    """Return the state after one more event."""
    return fold_all(state, [record])


def fold_all(state: ViewState, records: Iterable[Record]) -> ViewState:
    """Return the state after more events; an event with a field of a wrong type is skipped."""
    found: Any = SimpleNamespace(**vars(state))  # one copy, not one per event
    for record in records:
        event = record.event
        if found.began_at is None:
            found.began_at = record.time
        before, found.last_at = found.last_at or record.time, record.time
        if (anew := begins_anew(found, event)) or is_waiting(found):
            found.away_s += max(0.0, record.time - before)
        if anew:
            vars(found).update(FORGOTTEN)
        if isinstance(event, GETTING_ON):
            found.stepped_at = record.time
        with contextlib.suppress(TypeError, ValueError, ArithmeticError):
            changes = changes_of(found, event)
            if isinstance(event, events.Step):
                changes["pace"] = found.pace.after(record.time, event.seconds)
            vars(found).update(changes)
        doing = doing_after(found, event)
        if doing != found.doing:
            found.doing, found.doing_at = doing, record.time
    return ViewState(**vars(found))


def resumed(state: ViewState, now: float) -> ViewState:
    """The state of a run that is about to be resumed: nothing of its last end is left."""
    away_s = state.away_s + max(0.0, now - (state.last_at or now))
    return replace(state, **FORGOTTEN, doing=STARTING, doing_at=now, last_at=now, away_s=away_s)


def is_waiting(state: ViewState) -> bool:
    return state.waiting is not None and state.doing == state.waiting.text


def begins_anew(state: ViewState, event: events.Event) -> bool:
    """Return whether an event is the first one of a run that was started again by the user.

    A run that was killed wrote no end. It loads again though it was in its steps, and nothing
    said why: neither its supervisor nor its governor.
    """
    if not isinstance(event, events.Stage | events.Waiting):
        return False
    return (
        state.finished is not None
        or state.gave_up
        or (state.loaded and (state.stepped or state.stopping))
    )


def doing_after(state: ViewState, event: events.Event) -> str:
    """Return what the run does after an event that is folded in."""
    match event:
        case events.Stage() | events.Phase():
            return event.text
        case events.Waiting():
            return event.text or STARTING
        case events.Paused():
            return PAUSED
        case events.Died():
            return "died" if event.level is None else "restarting"
        case events.Finished():
            return "finished" if event.reason == "done" else "stopped"
        case events.Action() if event.kind in REPLANS:
            return "restarting" if event.kind == "restart" else "changing the memory plan"
        case events.Rollout() | events.Limit() | events.Planned():
            return state.doing
        case _ if isinstance(event, events.BESIDE_THE_WORK) or not state.loaded:
            return state.doing
    if state.steps and state.at >= state.steps:
        return FINISHING
    return TRAINING if state.stepped else "preparing the first step"


LATEST = {
    events.Waiting: "waiting",
    events.Limit: "limit",
    events.Planned: "planned",
    events.Host: "host",
    events.Rollout: "rollout",
}  # of these events, the latest is kept in this field
FLAGS: dict[type[events.Event], dict[str, Any]] = {
    events.Stage: {"finished": None, "paused": False, "gave_up": False},
    events.Stopping: {"stopping": True},
    events.Paused: {"paused": True},
}  # what these change


def changes_of(state: ViewState, event: events.Event) -> dict[str, Any]:
    kind = type(event)
    if kind in LATEST:
        return {LATEST[kind]: event}
    if kind in AFTER:
        return AFTER[kind](state, event)
    match event:
        case events.Notice():
            others = tuple(text for text in state.notices if text != event.text)
            return {"notices": (*others, event.text)[-KEPT:]}
        case events.Action():
            actions = with_action(state.actions, event)[-KEPT:]
            gone = {"loaded": False, "gauges": None, "replanned": event.cause}
            return {"actions": actions} | (gone if event.kind in REPLANS else {})
        case events.Checkpoint():
            means = {**state.means_at, event.step: (state.loss_mean, state.reward_mean)}
            return {"checkpoint": event, "means_at": dict(list(means.items())[-KEPT_MEANS:])}
        case events.Gauges():
            return with_gauges(state, event, event.process_bytes)
        case events.Died():
            deaths, gave_up = (*state.deaths, event), event.level is None
            gone = {"loaded": False, "gauges": None, "paused": False}
            return {"deaths": deaths, "replanned": event.reason, "gave_up": gave_up, **gone}
        case events.Ranks() if all(isinstance(host, str) for host in event.hosts):
            return {"ranks": event}
        case events.Continued():
            return {"paused": False, "pace": state.pace.paused(event.seconds)}
        case events.Skipped():
            return {"skipped": event, "at": event.step, "stepped": True}
        case events.Samples():
            return {"samples_before" if event.when == "before" else "samples_after": event}
        case events.ExactMatch():
            return {"match_before" if event.when == "before" else "match_after": event}
        case events.Finished():
            return {"finished": event, "paused": False, "stopping": False}
    return FLAGS.get(kind, {})


def after_start(state: ViewState, event: events.Started) -> dict[str, Any]:
    """A training process is ready for its steps: those after its checkpoint are lost."""
    at = event.step
    found: dict[str, Any] = {
        **dict.fromkeys(("tokens_per_s", "step_s", "finished")),
        "steps_seen": 0,
        "pace": Pace(),
        "started": event,
        "loaded": True,
        "at": at,
        "steps": event.steps,
        "stepped": False,
        "paused": False,
        "stopping": False,
        "losses": state.losses.until(at),
        "rewards": state.rewards.until(at),
        "validations": state.validations.until(at),
    }
    if at < state.at:
        means = state.means_at.get(at, (RunningMean(), RunningMean(highest=True)))
        found["loss_mean"], found["reward_mean"] = means
    for name in ("step", "generated", "validation", "first_validation", "rollout"):
        lost = getattr(state, name)
        if lost is not None and lost.step > at:
            found[name] = None
    if state.skipped is not None and state.skipped.step > at:
        found["skipped"] = None
    found["bests"] = tuple(each for each in state.bests if each.step <= at)
    points, last = found["validations"].points, state.validation
    if points and last is not None and last.step > at:
        step, value = points[-1]
        is_loss = last.reward is None
        found["validation"] = replace(
            last, step=int(step), loss=value if is_loss else -value, best=False,
            metrics={} if is_loss else {"reward": value},
        )  # fmt: skip
    return found


def after_step(state: ViewState, step: events.Step) -> dict[str, Any]:
    seen = state.steps_seen + 1
    speed = step.tokens / max(step.seconds, 1e-9)
    rewards: dict[str, Any] = {}
    if REWARD in step.metrics:
        reward = float(step.metrics[REWARD])
        rewards["rewards"] = state.rewards.add(reward, step.step)
        rewards["reward_mean"] = state.reward_mean.add(reward, step.step)
    return {
        **rewards,
        **({"generated": step} if phase_seconds(step) else {}),
        **with_judge(state, step.metrics),
        **with_gauges(state, step, step.highest_bytes or step.process_bytes),
        "step": step,
        "at": step.step,
        "steps": step.steps,
        "loaded": True,
        "stepped": True,
        "steps_seen": seen,
        "loss_mean": state.loss_mean.add(step.loss, step.step),
        "first_loss": state.first_loss
        if step.step > SMOOTH_OVER
        else smooth(state.first_loss, step.loss, step.step),
        "losses": state.losses.add(step.loss, step.step),
        "tokens_per_s": smooth(state.tokens_per_s, speed, seen),
        "step_s": smooth(state.step_s, step.seconds, seen),
    }


def after_validation(state: ViewState, event: events.Validation) -> dict[str, Any]:
    known = state.bests[-1] if state.bests else None  # of a copy without properties
    best = {"bests": (*state.bests, event)} if is_better(event, known) else {}
    first = state.first_validation or event
    judged = with_judge(state, event.metrics)
    value = event.loss if event.reward is None else event.reward
    curve = state.validations.add(value, event.step)
    return {"validation": event, "first_validation": first, "validations": curve, **judged, **best}


AFTER: dict[type[events.Event], Callable[[ViewState, Any], dict[str, Any]]] = {
    events.Started: after_start,
    events.Step: after_step,
    events.Validation: after_validation,
}


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
        changes["now_highest_bytes"] = max(held_bytes, state.now_highest_bytes or 0)
        changes["memory"] = state.memory.add(held_bytes)
    return changes


def smooth(mean: float | None, value: float, seen: int) -> float:
    """Update a running mean: a plain mean of the first values, then an exponential mean."""
    if mean is None or not math.isfinite(mean):
        return value
    return mean + (value - mean) / min(seen, SMOOTH_OVER)


def is_close(before: float | None, after: float | None, share: float) -> bool:
    """Return whether a loss changed by less than this share of it; False if one is not known."""
    if before is None or after is None:
        return False
    return abs(before - after) < share * abs(before)
