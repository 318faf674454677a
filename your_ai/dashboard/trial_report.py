"""A tune as one HTML page: the trials as charts and a table. The page loads no other files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from your_ai.dashboard.chart_page import chart_html
from your_ai.dashboard.charts import Chart, Curve, Look, Panel
from your_ai.dashboard.history import Points
from your_ai.dashboard.report import template, write_atomically
from your_ai.dashboard.trials import (
    HEADS,
    TO_THE_LEFT,
    TrialRow,
    best_of,
    by_loss,
    columns_of,
    measure_name,
    measure_text,
    value_text,
)
from your_ai.gates.text import printable

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
        best=best_of(rows),
        first=next((row for row in rows if row.number == 0), None),
        measured=f"validation {measure_name(rows)}",
        charts={"trials": trials_chart(rows)} | {n: setting_chart(rows, n) for n in names},
        preset=preset,
    )
    write_atomically(out, printable(page).encode())


def trials_chart(rows: Sequence[TrialRow]) -> Chart | None:
    """The trials in their order, and the best so far; None if none has finished."""
    name = measure_name(rows)
    better = min if name == "loss" else max
    finished = measured([(row, row.number) for row in rows if row.state == "finished"])
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
    """What the trials measured, by a setting; None if no trial measured anything."""
    known = [row for row in rows if setting in row.settings]
    if not any(row.measured is not None for row in known):
        return None
    title, is_rate = HEADS[setting], setting == "learning_rate"
    values = sorted({row.settings[setting] for row in known}, key=lambda v: (isinstance(v, str), v))
    places = values if is_rate else range(len(values))
    place_of = dict(zip(values, places, strict=True))
    ticks = [(place, value_text(setting, value)) for value, place in place_of.items()]
    return Chart(
        title=title,
        caption=f"Validation {measure_name(rows)} by {title}.",
        panels=[measure_panel([(row, place_of[row.settings[setting]]) for row in known])],
        x_name=title,
        x_is_log=is_rate,
        x_ticks=[] if is_rate else ticks,
        x_range=None if is_rate else (-0.5, len(values) - 0.5),
    )


def measured(points: Sequence[tuple[TrialRow, float]]) -> Points:
    """What the trials measured, at their place on the x axis."""
    return [(x, row.measured) for row, x in points if row.measured is not None]


def measure_panel(points: Sequence[tuple[TrialRow, float]], curves: Sequence[Curve] = ()) -> Panel:
    """Mark trials with a value: the finished, the pruned, and the best in another color."""
    best = measured([(row, x) for row, x in points if row.is_best])
    found = [*curves, Curve(points=best, color="green", look="dots", width=12, label="best")]
    for state, (look, color, width) in LOOKS.items():
        at = measured([(row, x) for row, x in points if row.state == state])
        found.append(Curve(points=at, color=color, look=look, width=width, label=state))
    losses = [row.validation_loss for row, _ in points if row.validation_loss is not None]
    is_log = bool(losses) and 0 < WIDE_RANGED * min(losses) < max(losses)
    name = measure_name([row for row, _ in points])
    return Panel(name=f"validation {name}", curves=found, is_log=is_log)
