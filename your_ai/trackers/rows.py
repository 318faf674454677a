"""Events -> what trackers are sent. Pure: the same events give the same rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from your_ai.run import events
from your_ai.run.events import Event

GB = 1e9
PEAK_BYTES = "peak_bytes/"  # before the name of a phase, in the metrics of a step


@dataclass(frozen=True)
class TextTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TrackerRow:
    """What one event adds to a tracker."""

    step: int
    values: Mapping[str, float | TextTable]
    """By the name of the metric. Memory is in GB (1e9 bytes)."""


@dataclass(frozen=True, kw_only=True)
class UploadState:
    """What later rows need to know of earlier events."""

    step: int = 0
    """The highest training step."""
    validated: int = 0
    """The highest step with a validation."""
    actions: int = 0
    """Actions of the memory governor since the run began."""
    freed_bytes: int = 0
    """Bytes that these actions freed."""
    limit_bytes: int | None = None
    ended: str = ""
    """Why the run ended; empty while it continues."""


def after(past: UploadState, event: Event) -> tuple[UploadState, TrackerRow | None]:
    """What is known after one more event, and the row for it.

    A step that is repeated after a resume gives no row: trackers need increasing steps, and
    they have its metrics already.
    """
    row = None
    match event:
        case events.Step() if event.step > past.step:
            past = replace(past, step=event.step)
            row = TrackerRow(event.step, metrics_of(past, event))
        case events.Validation() if event.step > past.validated:
            past = replace(past, validated=event.step)
            metrics = {f"validation/{name}": value for name, value in event.metrics.items()}
            loss = {} if event.reward is not None else {"validation/loss": event.loss}
            row = TrackerRow(event.step, loss | metrics)
        case events.ExactMatch():
            share = event.correct / max(1, event.rows)
            values = {"test/exact_match": share}
            if event.reward is not None:
                values["test/reward"] = event.reward
            row = TrackerRow(step_at(event.when, past), values)
        case events.Samples():
            texts = zip(event.prompts, event.answers, event.expected, strict=False)
            rows = tuple(tuple(map(str, row)) for row in texts)
            table = TextTable(("prompt", "answer", "expected"), rows)
            row = TrackerRow(step_at(event.when, past), {f"samples/{event.when}": table})
        case events.Limit():
            past = replace(past, limit_bytes=event.limit_bytes)
        case events.Action():
            freed = past.freed_bytes + max(0, event.before_bytes - event.after_bytes)
            past = replace(past, actions=past.actions + 1, freed_bytes=freed)
        case events.Started():
            past = replace(past, ended="")
        case events.Died(level=None) | events.Finished():
            past = replace(past, ended=event.reason)
    return past, row


def metrics_of(past: UploadState, step: events.Step) -> dict[str, float | TextTable]:
    sizes = {
        "active": step.active_bytes,
        "cache": step.cache_bytes,
        "process": step.process_bytes,
        "highest": step.highest_bytes,
        "limit": past.limit_bytes,
    }
    metrics = {
        f"train/{name}": value
        for name, value in step.metrics.items()
        if not name.startswith(PEAK_BYTES)
    }
    peaks = {
        f"memory/peak_{name.removeprefix(PEAK_BYTES)}_gb": value / GB
        for name, value in step.metrics.items()
        if name.startswith(PEAK_BYTES)
    }
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/tokens_per_s": step.tokens / max(step.seconds, 1e-9),
        "train/step_s": step.seconds,
        "train/epoch": step.epoch,
        **({} if step.read_wait_s is None else {"train/read_wait_s": step.read_wait_s}),
        **metrics,
        **peaks,
        **{f"memory/{name}_gb": size / GB for name, size in sizes.items() if size is not None},
        "governor/actions": past.actions,
        "governor/freed_gb": past.freed_bytes / GB,
    }


def step_at(when: str, past: UploadState) -> int:
    """The step of a measurement `before` or `after` the training."""
    return 0 if when == "before" else past.step
