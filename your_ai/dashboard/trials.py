"""The trials of a tune as lines and a table. Pure: uses no terminal."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from your_ai.dashboard.metric_table import plain
from your_ai.dashboard.state import ViewState
from your_ai.dashboard.view import (
    duration,
    known,
    peak_of_limit,
    validation_name,
    validation_text,
)
from your_ai.gates.text import loss_text, printable

GAP = 2  # between columns
TO_THE_LEFT = ("trial", "state")
STYLES = {"pruned": "dim", "failed": "red"}
HEADS = {  # of the columns of settings
    "learning_rate": "rate",
    "lora_rank": "rank",
    "lora_layers": "layers",
    "lr_schedule": "schedule",
}


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial of a tune; unknown values are None."""

    number: int
    state: str
    """finished, pruned or failed."""
    validation_loss: float | None
    """The lowest of its run; None if its validations measured rewards."""
    reward: float | None = None
    """The highest mean reward of a validation of its run, if that is what was measured."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What was searched, by the name of the setting."""
    step: int | None = None
    """The last step, of `steps`."""
    steps: int | None = None
    seconds: float | None = None
    """Running time."""
    peak_bytes: int | None = None
    """Peak memory of the training process."""
    limit_bytes: int | None = None
    reason: str = ""
    """Why it failed or was pruned."""
    is_best: bool = False

    @property
    def value(self) -> float | None:
        """What a tune makes lower: the validation loss, or the negative reward."""
        return self.validation_loss if self.reward is None else 0.0 - self.reward

    @property
    def measured(self) -> float | None:
        """The validation loss or the reward."""
        return self.validation_loss if self.reward is None else self.reward


def best_of(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The finished trial with the lowest loss, or the highest reward; None if there is none.

    Of equals it is the first.
    """
    finished = [row for row in rows if row.state == "finished" and row.value is not None]
    return min(finished, key=lambda row: (row.value, row.number), default=None)


def measure_name(rows: Sequence[TrialRow]) -> str:
    """What the validations of a tune measured: loss or reward."""
    return "loss" if all(row.reward is None for row in rows) else "reward"


def measure_text(row: TrialRow) -> str:
    """The validation loss or the reward of a trial."""
    if row.reward is not None:
        return plain(row.reward)
    return known(row.validation_loss, loss_text)


def marked(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The rows, of which the best is marked."""
    best = best_of(rows)
    number = None if best is None else best.number
    return [dataclasses.replace(row, is_best=row.number == number) for row in rows]


def value_text(name: str, value: Any) -> str:
    """Format a setting: `2.1e-04`, `16`, `all`."""
    if name == "learning_rate" and isinstance(value, float):
        return f"{value:.2e}"
    return printable(value, one_line=True)


def settings_text(settings: dict[str, Any]) -> str:
    """Format settings as `learning rate 2.10e-04, rank 16`; the first trial has the defaults."""
    return ", ".join(f"{HEADS[name]} {value_text(name, v)}" for name, v in settings.items())


def line(row: TrialRow) -> str:
    """One line about a trial that has ended."""
    parts = [f"{row.state} ({row.reason})" if row.reason else row.state]
    if row.value is not None:
        best = " (the best so far)" if row.is_best else ""
        parts.append(f"validation {measure_name([row])} {measure_text(row)}{best}")
    if row.seconds is not None:
        parts.append(duration(row.seconds))
    if row.peak_bytes is not None:
        parts.append(f"peak {peak_of_limit(row.peak_bytes, row.limit_bytes)}")
    name = f"trial {row.number:03}" + (" (the default)" if row.number == 0 else "")
    return f"{name}: {settings_text(row.settings)}: {', '.join(parts)}"


def columns_of(rows: Sequence[TrialRow]) -> dict[str, list[str]]:
    """The cells of the trials by column, in the order of the rows."""
    columns = {
        "trial": [f"{row.number:03}" for row in rows],
        "state": ["best" if row.is_best else row.state for row in rows],
        measure_name(rows): [measure_text(row) for row in rows],
    }
    for name, head in HEADS.items():
        if any(name in row.settings for row in rows):
            columns[head] = [
                known(row.settings.get(name), partial(value_text, name)) for row in rows
            ]
    columns["step"] = [f"{known(row.step, str)}/{known(row.steps, str)}" for row in rows]
    columns["time"] = [known(row.seconds, duration) for row in rows]
    columns["peak of limit"] = [peak_of_limit(row.peak_bytes, row.limit_bytes) for row in rows]
    return columns


def trials_table(rows: Sequence[TrialRow], width: int = 80) -> Table:
    """A table of the trials, the best ones first, with the columns that fit into `width`."""
    ordered = by_loss(rows)
    columns = columns_of(ordered)
    for head in ("step", "time", "peak of limit"):
        if sum(GAP + max(map(len, [name, *cells])) for name, cells in columns.items()) > width:
            columns.pop(head)
    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for head in columns:
        drawn.add_column(head, justify="left" if head in TO_THE_LEFT else "right", no_wrap=True)
    for row, *cells in zip(ordered, *columns.values(), strict=True):
        style = "bold" if row.is_best else STYLES.get(row.state, "")
        drawn.add_row(*(Text(cell, style) for cell in cells))
    return drawn


def by_loss(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """Finished trials by their loss or reward, the best first, then pruned and failed ones."""
    order = {"finished": 0, "pruned": 1, "failed": 2}

    def key(row: TrialRow) -> tuple[int, float, int]:
        value = float("inf") if row.value is None else row.value
        return order.get(row.state, 2), value, row.number

    return sorted(rows, key=key)


def progress_text(number: int, settings: Mapping[str, Any], state: ViewState) -> str:
    """What a trial is doing now, as one line."""
    parts = [f"trial {number:03}", settings_text(dict(settings)) or "the default settings"]
    parts.append(
        state.doing if state.step is None else f"step {state.step.step}/{state.step.steps}"
    )
    last, best = state.validation, state.best_validation
    if last is not None and best is not None:
        parts.append(f"{validation_name(last)} {validation_text(best, best.loss)}")
    return ": ".join(parts[:2]) + "; " + ", ".join(parts[2:])
