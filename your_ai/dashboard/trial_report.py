"""A tune as one HTML page: the trials as charts and a table. The page loads no other files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from your_ai.dashboard.charts import add_legend, draw, svg_figure
from your_ai.dashboard.report import require, template, write_atomically
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = {"finished": "o", "pruned": "x"}


def write_trial_report(rows: Sequence[TrialRow], name: str, preset: str, out: Path) -> None:
    """Write the page about the tune `name` to `out`, completely or not at all.

    preset: the text of best.yaml.
    Raises UserError if matplotlib or jinja2 is not installed, or if `out` cannot be written.
    """
    require("matplotlib", "jinja2")
    names = [setting for setting in HEADS if any(setting in row.settings for row in rows)]
    charts = [("trials", *svg_figure("trials", (9, 3.3), lambda c: draw_trials(c, rows)))]
    for setting in names:
        drawn = svg_figure(setting, (4.6, 2.6), lambda c, s=setting: draw_setting(c, rows, s))
        charts.append((setting, *drawn))
    filters = (measure_text, duration, value_text, peak_of_limit)
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


def draw_trials(canvas: Figure, rows: Sequence[TrialRow]) -> str:
    name = measure_name(rows)
    axes = canvas.add_subplot(xlabel="trial", ylabel=f"validation {name}")
    axes.locator_params("x", integer=True)
    mark(axes, [(row, row.number) for row in rows])
    finished = [row for row in rows if row.state == "finished" and row.measured is not None]
    better = min if name == "loss" else max
    best = itertools.accumulate((row.measured for row in finished), better)
    so_far = list(zip((row.number for row in finished), best, strict=True))
    draw(axes, so_far, "orange", 1.4, drawstyle="steps-post", label="best so far")
    add_legend(axes)
    return f"The validation {name} of each trial, and the best so far." if finished else ""


def draw_setting(canvas: Figure, rows: Sequence[TrialRow], setting: str) -> str:
    name = measure_name(rows)
    axes = canvas.add_subplot(xlabel=HEADS[setting], ylabel=f"validation {name}")
    known = [row for row in rows if setting in row.settings]
    if setting == "learning_rate":
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter("")
        mark(axes, [(row, row.settings[setting]) for row in known])
    else:
        values = sorted({row.settings[setting] for row in known}, key=order)
        mark(axes, [(row, values.index(row.settings[setting])) for row in known])
        axes.set_xticks(range(len(values)), [value_text(setting, value) for value in values])
        axes.set_xlim(-0.5, len(values) - 0.5)
    has_values = any(row.measured is not None for row in known)
    return f"Validation {name} by {HEADS[setting]}." if has_values else ""


def order(value: object) -> tuple[bool, float, str]:
    """Numbers by size, then words."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


def mark(axes: Axes, points: Sequence[tuple[TrialRow, float]]) -> None:
    """Mark trials with a value: the finished, the pruned, and the best in another color."""
    for state, marker in MARKERS.items():
        at = [(x, row.measured) for row, x in points if row.state == state]
        at = [(x, y) for x, y in at if y is not None]
        draw(axes, at, "blue", 0, marker=marker, markersize=5, label=state)
    best = [(x, row.measured) for row, x in points if row.is_best]
    draw(axes, best, "green", 0, marker="o", markersize=9, fillstyle="none", label="best")
    losses = [row.validation_loss for row, _ in points if row.validation_loss is not None]
    if losses and 0 < 10 * min(losses) < max(losses):
        axes.set(yscale="log", ylabel="validation loss (log scale)")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
