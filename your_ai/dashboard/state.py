"""Events -> ViewState. Pure: the same events give the same state."""

from __future__ import annotations

from dataclasses import dataclass, replace

from your_ai.run import events
from your_ai.run.events import Record

SMOOTH_OVER = 10  # steps


@dataclass(frozen=True)
class ViewState:
    """All that a view shows of a run.

    smooth_loss, tokens_per_s and step_s are exponential means over `steps_seen` steps;
    before and after are of the held-out prompts.
    """

    stage: str = "starting"
    started: events.Started | None = None
    step: events.Step | None = None
    steps_seen: int = 0
    smooth_loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None
    validation: events.Validation | None = None
    skipped: events.Skipped | None = None
    samples_before: events.Samples | None = None
    samples_after: events.Samples | None = None
    match_before: events.ExactMatch | None = None
    match_after: events.ExactMatch | None = None
    finished: events.Finished | None = None

    @property
    def seconds_left(self) -> float | None:
        if self.step is None or self.step_s is None:
            return None
        return (self.step.steps - self.step.step) * self.step_s


def fold(state: ViewState, record: Record) -> ViewState:
    """The state after one more event."""
    event = record.event
    match event:
        case events.Stage():
            return replace(state, stage=event.text, finished=None)
        case events.Started():
            fresh = replace(state, steps_seen=0, smooth_loss=None, tokens_per_s=None, step_s=None)
            return replace(fresh, started=event, stage="training", finished=None)
        case events.Step():
            seen = state.steps_seen + 1
            speed = event.tokens / max(event.seconds, 1e-9)
            return replace(
                state,
                step=event,
                stage="training",
                steps_seen=seen,
                smooth_loss=smooth(state.smooth_loss, event.loss, seen),
                tokens_per_s=smooth(state.tokens_per_s, speed, seen),
                step_s=smooth(state.step_s, event.seconds, seen),
            )
        case events.Validation():
            return replace(state, validation=event)
        case events.Skipped():
            return replace(state, skipped=event)
        case events.Samples(when="before"):
            return replace(state, samples_before=event)
        case events.Samples():
            return replace(state, samples_after=event)
        case events.ExactMatch(when="before"):
            return replace(state, match_before=event)
        case events.ExactMatch():
            return replace(state, match_after=event)
        case events.Finished():
            return replace(state, finished=event)
    return state


def smooth(mean: float | None, value: float, seen: int) -> float:
    """The plain mean of the first values, then an exponential one."""
    if mean is None:
        return value
    return mean + (value - mean) / min(seen, SMOOTH_OVER)
