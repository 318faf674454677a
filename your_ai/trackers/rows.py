"""Events -> what trackers are sent. Pure: the same events give the same rows."""

from __future__ import annotations

from dataclasses import dataclass, replace

from your_ai.run import events
from your_ai.run.events import Event

GB = 1e9
SAMPLES = ("prompt", "answer", "expected")


@dataclass(frozen=True)
class StepFigures:
    """Numbers of a step; memory in GB (1e9 bytes)."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True)
class Texts:
    """A table of a step."""

    step: int
    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


TrackerRow = StepFigures | Texts


@dataclass(frozen=True, kw_only=True)
class UploadProgress:
    """How far a tracker has got: all that going on from there needs.

    offset: in events.jsonl, in bytes; step and validated: the highest steps whose figures
    were sent, of training and of validation; actions and freed_bytes: of the governor since
    the run began; limit_bytes: that holds now; ended: how the run ended, empty while it
    goes on.
    """

    offset: int = 0
    step: int = 0
    validated: int = 0
    actions: int = 0
    freed_bytes: int = 0
    limit_bytes: int | None = None
    ended: str = ""


def after(progress: UploadProgress, event: Event) -> tuple[UploadProgress, TrackerRow | None]:
    """The progress after one more event, and what is sent for it.

    A step that is done again, since the run went on from a checkpoint, is not sent again:
    trackers want steps that grow, and its figures are those that they have.
    """
    match event:
        case events.Step() if event.step > progress.step:
            return replace(progress, step=event.step), StepFigures(
                event.step, of_step(progress, event)
            )
        case events.Validation() if event.step > progress.validated:
            values = {"validation/loss": event.loss}
            return replace(progress, validated=event.step), StepFigures(event.step, values)
        case events.ExactMatch():
            share = event.correct / max(1, event.rows)
            return progress, StepFigures(at(event.when, progress), {"test/exact_match": share})
        case events.Samples():
            rows = zip(event.prompts, event.answers, event.expected, strict=False)
            texts = tuple(tuple(map(str, row)) for row in rows)
            step, name = at(event.when, progress), f"samples/{event.when}"
            return progress, Texts(step, name, SAMPLES, texts)
        case events.Limit():
            return replace(progress, limit_bytes=event.limit_bytes), None
        case events.Action():
            freed = max(0, event.before_bytes - event.after_bytes)
            total = progress.freed_bytes + freed
            return replace(progress, actions=progress.actions + 1, freed_bytes=total), None
        case events.Started():
            return replace(progress, ended=""), None
        case events.Died(level=None):
            return replace(progress, ended=event.reason), None
        case events.Finished():
            return replace(progress, ended=event.reason), None
    return progress, None


def of_step(progress: UploadProgress, step: events.Step) -> dict[str, float]:
    sizes = {
        "active": step.active_bytes,
        "cache": step.cache_bytes,
        "process": step.process_bytes,
        "highest": step.highest_bytes,
        "limit": progress.limit_bytes,
    }
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/tokens_per_s": step.tokens / max(step.seconds, 1e-9),
        "train/step_s": step.seconds,
        "train/epoch": step.epoch,
        **{f"train/{name}": value for name, value in step.metrics.items()},
        **{f"memory/{name}_gb": size / GB for name, size in sizes.items() if size is not None},
        "governor/actions": progress.actions,
        "governor/freed_gb": progress.freed_bytes / GB,
    }


def at(when: str, progress: UploadProgress) -> int:
    """The step that what was measured before or after the training belongs to."""
    return 0 if when == "before" else progress.step
