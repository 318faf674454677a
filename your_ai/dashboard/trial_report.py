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
    TrialRow,
    best_of,
    by_loss,
    measure_name,
    measure_text,
    peak_of_limit,
    value_text,
)
from your_ai.dashboard.view import duration
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
    charts = {"trials": trials_chart(rows)}
    charts |= {setting: setting_chart(rows, setting) for setting in names}
    filters = (measure_text, duration, value_text, peak_of_limit, chart_html)
    page = template("trials.html.j2", *filters).render(
        name=name,
        rows=by_loss(rows),
        best=best_of(rows),
        first=next((row for row in rows if row.number == 0), None),
        measured=f"validation {measure_name(rows)}",
        settings=names,
        heads=HEADS,
        charts=charts,
        preset=preset,
    )
    write_atomically(out, printable(page).encode())


def trials_chart(rows: Sequence[TrialRow]) -> Chart | None:
    """The trials in their order, and the best so far; None if none has finished."""
    name = measure_name(rows)
    finished = [row for row in rows if row.state == "finished" and row.measured is not None]
    better = min if name == "loss" else max
    best = itertools.accumulate((row.measured for row in finished), better)
    so_far: Points = list(zip((row.number for row in finished), best, strict=True))
    steps = Curve(points=so_far, color="orange", look="steps", label="best so far")
    text = f"The validation {name} of each trial, and the best so far."
    panel = measure_panel(rows, [(row, row.number) for row in rows], [steps])
    return Chart(title="Trials", caption=text, panels=[panel], x_name="trial") if finished else None


def setting_chart(rows: Sequence[TrialRow], setting: str) -> Chart | None:
    """What the trials measured, by a setting; None if no trial measured anything."""
    known = [row for row in rows if setting in row.settings]
    if not any(row.measured is not None for row in known):
        return None
    values = sorted({row.settings[setting] for row in known}, key=order)
    is_rate = setting == "learning_rate"
    places = [
        row.settings[setting] if is_rate else values.index(row.settings[setting]) for row in known
    ]
    ticks = [(place, value_text(setting, value)) for place, value in enumerate(values)]
    return Chart(
        title=HEADS[setting],
        caption=f"Validation {measure_name(rows)} by {HEADS[setting]}.",
        panels=[measure_panel(rows, list(zip(known, places, strict=True)))],
        x_name=HEADS[setting],
        x_is_log=is_rate,
        x_ticks=[] if is_rate else ticks,
        x_range=None if is_rate else (-0.5, len(values) - 0.5),
        is_wide=False,
    )


def order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


def measure_panel(
    rows: Sequence[TrialRow], points: Sequence[tuple[TrialRow, float]], curves: Sequence[Curve] = ()
) -> Panel:
    """Mark trials with a value: the finished, the pruned, and the best in another color."""
    best: Points = [
        (x, row.measured) for row, x in points if row.is_best and row.measured is not None
    ]
    found = [*curves, Curve(points=best, color="green", look="dots", width=12, label="best")]
    for state, (look, color, width) in LOOKS.items():
        at: Points = [
            (x, row.measured)
            for row, x in points
            if row.state == state and row.measured is not None
        ]
        found.append(Curve(points=at, color=color, look=look, width=width, label=state))
    losses = [row.validation_loss for row, _ in points if row.validation_loss is not None]
    is_log = bool(losses) and 0 < WIDE_RANGED * min(losses) < max(losses)
    return Panel(name=f"validation {measure_name(rows)}", curves=found, is_log=is_log)
