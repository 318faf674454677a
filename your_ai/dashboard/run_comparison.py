"""Runs side by side: the settings that differ, results, and curves. Pure functions of events.

`evaluation.compare` is something else: it measures a base and its adapter on rows.

Losses of different objectives are different functions, so they are put side by side only where all
runs have one objective; metrics only where all runs that took a step have them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from your_ai.config import TrainConfig
from your_ai.dashboard.chart_page import chart_html
from your_ai.dashboard.charts import Chart, Curve, Panel, metric_points
from your_ai.dashboard.history import (
    Points,
    RunHistory,
    finite,
    losses,
    read_history,
    smoothed,
    thinned,
)
from your_ai.dashboard.metric_table import REWARD, is_charted, plain
from your_ai.dashboard.page import MEETING, drawn_together
from your_ai.dashboard.report import template, write_page
from your_ai.dashboard.view import duration, validation_text
from your_ai.gates.text import counted, loss_text, printable, shortened, size_text
from your_ai.run.events import Record

UNKNOWN = "-"
NOT_COMPARED = ("run",)  # settings that differ always
LONGEST_NAME, LONGEST_VALUE = 24, 60  # characters in a table
GAP, LEAST_COLUMN = 2, 12  # characters
LOSS, VALIDATION = "loss", "validation loss"
PLOT_ROWS = 9
DIFFERING = "Settings that differ"
MARKS = "123456789"  # of the runs in a plot; the tenth and later runs are only in the tables
WITH_LOSSES = ("last loss", "best running mean", "best validation")


@dataclass(frozen=True, kw_only=True)
class ComparedRun:
    """A run in the comparison; what is not known is missing."""

    name: str
    state: str
    """As in the list of runs."""
    objective: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    figures: Mapping[str, str] = field(default_factory=dict)
    """Results by their labels."""
    curves: Mapping[str, Points] = field(default_factory=dict)
    """LOSS, VALIDATION and the metrics of the objective, by step."""
    measures: Mapping[str, str] = field(default_factory=dict)
    """Of the run's last evaluation, by their labels."""
    fault: str = ""
    """Why a part of the run cannot be read."""


def compared_run(
    name: str,
    state: str,
    config: TrainConfig | None,
    records: Sequence[Record],
    measures: Mapping[str, str],
    fault: str = "",
) -> ComparedRun:
    """Read a run for the comparison. config: None if it cannot be read."""
    try:
        past = read_history(records)
        figures, curves = figures_of(past), curves_of(past)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        fault, figures, curves = fault or "its events have values of a wrong type", {}, {}
    if not records and not fault:
        fault = "it has no events"
    return ComparedRun(
        name=name,
        state=state,
        objective="" if config is None else config.objective,
        settings={} if config is None else settings_as_text(config),
        figures=figures,
        curves=curves,
        measures=measures,
        fault=fault,
    )


def settings_as_text(config: TrainConfig) -> dict[str, str]:
    """The settings that the run's objective uses, as text."""
    return {
        name: setting_text(value)
        for name, value in dataclasses.asdict(config).items()
        if name not in NOT_COMPARED and config.uses(name)
    }


def setting_text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or UNKNOWN
    if isinstance(value, float):
        return f"{value:g}"
    return UNKNOWN if value in (None, "") else str(value)


def figures_of(past: RunHistory) -> dict[str, str]:
    """The results of a run, by their labels."""
    state, steps, found = past.state, past.steps, {}
    if steps:
        last = steps[-1]
        found["step"] = f"{last.step:,} of {last.steps:,}"
        found["last loss"] = loss_text(last.loss)
        if state.best_loss is not None:
            found["best running mean"] = loss_text(state.best_loss)
    if (best := state.best_validation) is not None:
        text = f"{validation_text(best, best.loss)} at step {best.step:,}"
        found["best reward" if best.reward is not None else "best validation"] = text
    rewards = metric_points(past, REWARD)
    if rewards:
        found["last reward"] = plain(rewards[-1][1])
    if state.reward_mean.best is not None:
        found["best mean reward"] = plain(state.reward_mean.best)
    if state.highest_bytes is not None:
        found["peak memory"] = size_text(state.highest_bytes)
    if state.limit is not None:
        found["memory limit"] = size_text(state.limit.limit_bytes)
    if steps:
        seconds = sum(step.seconds for step in steps)
        tokens = sum(step.tokens for step in steps)
        found["seconds per step"] = f"{seconds / len(steps):.3g}"
        found["time in steps"] = duration(seconds)
        found["tokens"] = f"{tokens:,}"
        found["trained tokens"] = f"{sum(step.trained_tokens for step in steps):,}"
        found["tokens per second"] = f"{tokens / max(seconds, 1e-9):,.0f}"
    return found


def curves_of(past: RunHistory) -> dict[str, Points]:
    """The curves of a run by step: the running mean of the loss, validation, and metrics."""
    names = list(dict.fromkeys(name for step in past.steps for name in step.metrics))
    checked = [value for value in finite(past.validations) if value.reward is None]
    found = {LOSS: smoothed(losses(past))}
    found[VALIDATION] = [(value.step, value.loss) for value in checked]
    for name in names:
        if is_charted(name) or name == REWARD:
            found[name] = smoothed(metric_points(past, name))
    return {name: points for name, points in found.items() if points}


# What is compared


def one_objective(runs: Sequence[ComparedRun]) -> bool:
    return len({run.objective for run in runs if run.objective}) <= 1


def differing(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The settings that differ, with the value of each run; runs without settings are left out."""
    known = [run for run in runs if run.settings]
    names = list(dict.fromkeys(name for run in known for name in run.settings))
    return {
        name: [run.settings.get(name, UNKNOWN) for run in runs]
        for name in names
        if len({run.settings.get(name) for run in known}) > 1
    }


def results(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """The state and the results of each run."""
    names = list(dict.fromkeys(name for run in runs for name in run.figures))
    hidden = () if one_objective(runs) else WITH_LOSSES
    table = {"state": [run.state for run in runs]}
    for name in names:
        if name not in hidden:
            table[name] = [run.figures.get(name, UNKNOWN) for run in runs]
    return table


def evaluated(runs: Sequence[ComparedRun]) -> dict[str, list[str]]:
    """Return what the last evaluation of each run measured."""
    names = list(dict.fromkeys(name for run in runs for name in run.measures))
    return {name: [run.measures.get(name, UNKNOWN) for run in runs] for name in names}


def sections_of(runs: Sequence[ComparedRun]) -> dict[str, dict[str, list[str]]]:
    return {
        DIFFERING: differing(runs),
        "Results": results(runs),
        "Evaluation (with the adapter)": evaluated(runs),
    }


def shared_curves(runs: Sequence[ComparedRun]) -> list[str]:
    drawn = [run for run in runs if run.curves]
    names = list(dict.fromkeys(name for run in drawn for name in run.curves))
    same = one_objective(runs)
    return [
        name
        for name in names
        if (same if name in (LOSS, VALIDATION) else all(name in run.curves for run in drawn))
    ]


def notes(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """One line for each run that is not whole, and for what is not compared."""
    if not one_objective(runs):
        names = ", ".join(dict.fromkeys(run.objective for run in runs if run.objective))
        yield f"the objectives differ ({names}): losses are not compared, only metrics of all runs"
    for run in runs:
        if run.fault:
            yield f"{run.name}: {run.fault}"


# In a terminal


def renderable(runs: Sequence[ComparedRun], width: int) -> RenderableType:
    """The comparison in `width` characters; runs that do not fit are in further tables."""
    parts: list[RenderableType] = []
    sections = sections_of(runs)
    for title, rows in sections.items():
        if rows:
            parts += [Text(title, "bold"), *tables(runs, rows, width), ""]
    if not sections[DIFFERING] and sum(bool(run.settings) for run in runs) > 1:
        parts += [Text("No setting differs."), ""]
    for name in shared_curves(runs):
        if name in (LOSS, VALIDATION, REWARD):
            parts += [*plot(name, runs, width), ""]
    return Group(*parts[:-1])


def tables(
    runs: Sequence[ComparedRun], rows: Mapping[str, Sequence[str]], width: int
) -> Iterator[Table]:
    """Tables with a column for each run, as many in each as fit."""
    first = max(map(len, rows))
    room = max(LEAST_COLUMN, width - first - GAP)
    together = max(1, min(len(runs), room // (LEAST_COLUMN + GAP)))
    for start in range(0, len(runs), together):
        shown = range(start, min(start + together, len(runs)))
        most = max(LEAST_COLUMN, room // len(shown) - GAP)
        drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
        drawn.add_column("", no_wrap=True)
        for index in shown:
            name = shortened(f"{index + 1} {one_line(runs[index].name)}", min(LONGEST_NAME, most))
            drawn.add_column(Text(name), max_width=most, overflow="fold")
        for label, values in rows.items():
            cells = (one_line(shortened(values[index], LONGEST_VALUE)) for index in shown)
            drawn.add_row(Text(label), *map(Text, cells))
        yield drawn


def one_line(text: str) -> str:
    return printable(text, one_line=True)


def plot(name: str, runs: Sequence[ComparedRun], width: int) -> Iterator[RenderableType]:
    """The curves of the first runs over each other, in characters: each has its run's number."""
    curves = {
        mark: [(x, y) for x, y in run.curves.get(name, ()) if math.isfinite(y)]
        for mark, run in zip(MARKS, runs, strict=False)
    }
    points = [point for curve in curves.values() for point in curve]
    if not points:
        return
    low, high = min(y for _, y in points), max(y for _, y in points)
    last = max(x for x, _ in points)
    labels = [loss_text(high), loss_text(low)]
    margin = max(map(len, labels)) + 1
    columns = max(8, width - margin - 2)
    grid = drawn_together(curves, (0, last), (low, high), columns, PLOT_ROWS)
    meet = f" ({MEETING} = several runs)" if any(MEETING in cells for cells in grid) else ""
    yield Text(f"{name} by step{meet}", "bold")
    for index, cells in enumerate(grid):
        label = {0: labels[0], PLOT_ROWS - 1: labels[1]}.get(index, "")
        yield Text(f"{label:>{margin - 1}} |{cells}".rstrip())
    yield Text(f"{'':>{margin}}0{f'{last:,.0f}':>{columns}}")
    missing = len(runs) - len(MARKS)
    if missing > 0:
        yield Text(f"{counted(missing, 'run')} more: see --html")


# Runs side by side as one HTML page. The page loads no other files


COLORS = ("blue", "orange", "green", "red", "ink", "muted")
DASHES = ((), (7, 4), (2, 3), (8, 3, 2, 3))  # in this order once all colors are used


def write_comparison(runs: Sequence[ComparedRun], out: Path) -> None:
    """Write the page about `runs` to `out`, completely or not at all.

    Raises UserError if `out` cannot be written.
    """
    charts = {
        f"curve-{number}": comparison_chart(runs, name)
        for number, name in enumerate(shared_curves(runs))
    }
    page = template("comparison.html.j2", chart_html).render(
        names=[run.name for run in runs],
        sections=sections_of(runs),
        charts=charts,
        notes=list(notes(runs)),
    )
    write_page(out, printable(page))


def comparison_chart(runs: Sequence[ComparedRun], name: str) -> Chart:
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
