"""Runs side by side as one HTML page. The page loads no other files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from your_ai.dashboard.charts import add_legend, draw, svg_figure
from your_ai.dashboard.history import thinned
from your_ai.dashboard.report import require, template, write_atomically
from your_ai.dashboard.run_comparison import (
    LONGEST_NAME,
    VALIDATION,
    ComparedRun,
    differing,
    measured,
    notes,
    results,
    shared_curves,
)
from your_ai.gates.text import printable, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = ("blue", "orange", "green", "red", "ink", "muted")
LINES = ("-", "--", ":", "-.")  # in this order once all colors are used
LEGEND_COLUMNS = 4


def write_comparison(runs: Sequence[ComparedRun], out: Path) -> None:
    """Write the page about `runs` to `out`, completely or not at all.

    Raises UserError if matplotlib or jinja2 is not installed, or if `out` cannot be written.
    """
    require("matplotlib", "jinja2")
    sections = {
        "Settings that differ": differing(runs),
        "Results": results(runs),
        "Evaluation, with the adapter": measured(runs),
    }
    charts = []
    for number, name in enumerate(shared_curves(runs)):
        key = f"curve-{number}"
        drawn = svg_figure(key, (9, 3.3), lambda canvas, n=name: draw_curves(canvas, runs, n))
        charts.append((key, *drawn))
    page = template("comparison.html.j2").render(
        names=[run.name for run in runs],
        sections=sections,
        charts=charts,
        notes=list(notes(runs)),
    )
    write_atomically(out, printable(page).encode())


def draw_curves(canvas: Figure, runs: Sequence[ComparedRun], name: str) -> str:
    """Draw a curve of each run; return the caption."""
    axes = canvas.add_subplot(xlabel="step", ylabel=name)
    axes.locator_params("x", integer=True)
    looks = itertools.cycle(itertools.product(LINES, COLORS))
    marker = {"marker": "o", "markersize": 3} if name == VALIDATION else {}
    for number, (run, (line, color)) in enumerate(zip(runs, looks, strict=False), start=1):
        label = f"{number} {shortened(printable(run.name, one_line=True), LONGEST_NAME)}"
        points = thinned(run.curves.get(name, []))
        draw(axes, points, color, 1.4, linestyle=line, label=label, **marker)
    add_legend(axes)
    legend = axes.get_legend()
    if legend is not None and len(runs) > LEGEND_COLUMNS:
        rows = -(-len(runs) // LEGEND_COLUMNS)
        canvas.set_size_inches(9, 3.3 + 0.2 * rows)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=LEGEND_COLUMNS)
    what = "" if name == VALIDATION else ", running mean"
    return f"{name} by step{what}."
