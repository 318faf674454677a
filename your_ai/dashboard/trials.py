"""The trials of a tune as lines and a table. Pure: uses no terminal."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from your_ai.dashboard.chart_page import chart_html
from your_ai.dashboard.charts import Chart, Curve, Look, Panel
from your_ai.dashboard.history import Points
from your_ai.dashboard.metric_table import plain
from your_ai.dashboard.report import template, write_page
from your_ai.dashboard.state import ViewState
from your_ai.dashboard.view import (
    duration,
    or_unknown,
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
        """Return what a tune makes lower: the validation loss, or the negative reward."""
        return self.validation_loss if self.reward is None else 0.0 - self.reward

    @property
    def measured(self) -> float | None:
        """The validation loss or the reward."""
        return self.validation_loss if self.reward is None else self.reward


def best_trial(rows: Sequence[TrialRow]) -> TrialRow | None:
    """The finished trial with the lowest loss, or the highest reward; None if there is none.

    Of equals it is the first.
    """
    finished = [row for row in rows if row.state == "finished" and row.value is not None]
    return min(finished, key=lambda row: (row.value, row.number), default=None)


def measure_name(rows: Sequence[TrialRow]) -> str:
    """Return what the validations of a tune measured: loss or reward."""
    return "loss" if all(row.reward is None for row in rows) else "reward"


def measure_text(row: TrialRow) -> str:
    """The validation loss or the reward of a trial."""
    if row.reward is not None:
        return plain(row.reward)
    return or_unknown(row.validation_loss, loss_text)


def with_best(rows: Sequence[TrialRow]) -> list[TrialRow]:
    """The rows, of which the best is marked."""
    best = best_trial(rows)
    number = None if best is None else best.number
    return [dataclasses.replace(row, is_best=row.number == number) for row in rows]


def searched_text(name: str, value: Any) -> str:
    """Format a setting: `2.1e-04`, `16`, `all`."""
    if name == "learning_rate" and isinstance(value, float):
        return f"{value:.2e}"
    return printable(value, one_line=True)


def settings_text(settings: dict[str, Any]) -> str:
    """Format settings as `learning rate 2.10e-04, rank 16`; the first trial has the defaults."""
    return ", ".join(f"{HEADS[name]} {searched_text(name, v)}" for name, v in settings.items())


def trial_line(row: TrialRow) -> str:
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
                or_unknown(row.settings.get(name), partial(searched_text, name)) for row in rows
            ]
    columns["step"] = [f"{or_unknown(row.step, str)}/{or_unknown(row.steps, str)}" for row in rows]
    columns["time"] = [or_unknown(row.seconds, duration) for row in rows]
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
    """Return what a trial is doing now, as one line."""
    parts = [f"trial {number:03}", settings_text(dict(settings)) or "the default settings"]
    parts.append(
        state.doing if state.step is None else f"step {state.step.step}/{state.step.steps}"
    )
    last, best = state.validation, state.best_validation
    if last is not None and best is not None:
        parts.append(f"{validation_name(last)} {validation_text(best, best.loss)}")
    return ": ".join(parts[:2]) + "; " + ", ".join(parts[2:])


# A tune as one HTML page: the trials as charts and a table. The page loads no other files


LOOKS: dict[str, tuple[Look, str, float]] = {
    "finished": ("dots", "blue", 6),
    "pruned": ("squares", "muted", 5),
}
WIDE_RANGED = 10  # losses that differ by this factor need a logarithmic axis


def write_trial_report(rows: Sequence[TrialRow], name: str, preset: str, out: Path) -> None:
    """Write the page about the tune `name` to `out`, completely or not at all.

    preset: the text of best.yaml.
    Raises UserError if `out` cannot be written.
    """
    names = [setting for setting in HEADS if any(setting in row.settings for row in rows)]
    page = template("trials.html.j2", measure_text, chart_html).render(
        name=name,
        rows=by_loss(rows),
        columns=columns_of(by_loss(rows)),
        to_the_left=TO_THE_LEFT,
        best=best_trial(rows),
        first=next((row for row in rows if row.number == 0), None),
        measured=f"validation {measure_name(rows)}",
        charts={"trials": trials_chart(rows)} | {n: setting_chart(rows, n) for n in names},
        preset=preset,
    )
    write_page(out, printable(page))


def trials_chart(rows: Sequence[TrialRow]) -> Chart | None:
    """The trials in their order, and the best so far; None if none has finished."""
    name = measure_name(rows)
    better = min if name == "loss" else max
    finished = measured_points([(row, row.number) for row in rows if row.state == "finished"])
    if not finished:
        return None
    so_far: Points = list(
        itertools.accumulate(finished, lambda best, new: (new[0], better(best[1], new[1])))
    )
    return Chart(
        title="Trials",
        caption=f"The validation {name} of each trial, and the best so far.",
        panels=[
            measure_panel(
                [(row, row.number) for row in rows],
                [Curve(points=so_far, color="orange", look="steps", label="best so far")],
            )
        ],
        x_name="trial",
    )


def setting_chart(rows: Sequence[TrialRow], setting: str) -> Chart | None:
    """Return what the trials measured, by a setting; None if no trial measured anything."""
    known = [row for row in rows if setting in row.settings]
    if not any(row.measured is not None for row in known):
        return None
    title, is_rate = HEADS[setting], setting == "learning_rate"
    values = sorted({row.settings[setting] for row in known}, key=lambda v: (isinstance(v, str), v))
    places = values if is_rate else range(len(values))
    place_of = dict(zip(values, places, strict=True))
    ticks = [(place, searched_text(setting, value)) for value, place in place_of.items()]
    return Chart(
        title=title,
        caption=f"Validation {measure_name(rows)} by {title}.",
        panels=[measure_panel([(row, place_of[row.settings[setting]]) for row in known])],
        x_name=title,
        x_is_log=is_rate,
        x_ticks=[] if is_rate else ticks,
        x_range=None if is_rate else (-0.5, len(values) - 0.5),
    )


def measured_points(points: Sequence[tuple[TrialRow, float]]) -> Points:
    """Return what the trials measured, at their place on the x axis."""
    return [(x, row.measured) for row, x in points if row.measured is not None]


def measure_panel(points: Sequence[tuple[TrialRow, float]], curves: Sequence[Curve] = ()) -> Panel:
    """Mark trials with a value: the finished, the pruned, and the best in another color."""
    best = measured_points([(row, x) for row, x in points if row.is_best])
    found = [*curves, Curve(points=best, color="green", look="dots", width=12, label="best")]
    for state, (look, color, width) in LOOKS.items():
        at = measured_points([(row, x) for row, x in points if row.state == state])
        found.append(Curve(points=at, color=color, look=look, width=width, label=state))
    losses = [row.validation_loss for row, _ in points if row.validation_loss is not None]
    is_log = bool(losses) and 0 < WIDE_RANGED * min(losses) < max(losses)
    name = measure_name([row for row, _ in points])
    return Panel(name=f"validation {name}", curves=found, is_log=is_log)
