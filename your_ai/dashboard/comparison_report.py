"""Runs side by side as one HTML page. The page loads no other files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from your_ai.dashboard.chart_page import chart_html
from your_ai.dashboard.charts import Chart, Curve, Panel
from your_ai.dashboard.history import thinned
from your_ai.dashboard.report import template, write_atomically
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

COLORS = ("blue", "orange", "green", "red", "ink", "muted")
DASHES = ((), (7, 4), (2, 3), (8, 3, 2, 3))  # in this order once all colors are used


def write_comparison(runs: Sequence[ComparedRun], out: Path) -> None:
    """Write the page about `runs` to `out`, completely or not at all.

    Raises UserError if `out` cannot be written.
    """
    sections = {
        "Settings that differ": differing(runs),
        "Results": results(runs),
        "Evaluation, with the adapter": measured(runs),
    }
    charts = {
        f"curve-{number}": comparison_chart(runs, name)
        for number, name in enumerate(shared_curves(runs))
    }
    page = template("comparison.html.j2", chart_html).render(
        names=[run.name for run in runs],
        sections=sections,
        charts=charts,
        notes=list(notes(runs)),
    )
    write_atomically(out, printable(page).encode())


def comparison_chart(runs: Sequence[ComparedRun], name: str) -> Chart:
    """A chart with a curve of each run."""
    looks = itertools.cycle(itertools.product(DASHES, COLORS))
    curves = []
    for number, (run, (dashes, color)) in enumerate(zip(runs, looks, strict=False), start=1):
        label = f"{number} {shortened(printable(run.name, one_line=True), LONGEST_NAME)}"
        points = thinned(run.curves.get(name, []))
        curves.append(Curve(points=points, color=color, dashes=dashes, label=label))
        if name == VALIDATION:
            curves.append(Curve(points=points, color=color, look="dots", width=5))
    what = "" if name == VALIDATION else ", running mean"
    panel = Panel(name=name, curves=curves)
    return Chart(title=name, caption=f"{name} by step{what}.", panels=[panel], x_name="step")
