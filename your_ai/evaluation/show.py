"""Show an evaluation in a terminal: its progress and its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from your_ai.evaluation.compare import EvaluationProgress
from your_ai.gates.text import counted, loss_text

SYSTEMS = ("base", "adapter", "difference")
WIDTHS = (21, 21, 24)  # of their cells in 80 columns; the interval of a wider one gets its own line
SHARES = ("exact_match",)  # shown in percent


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Callable[[EvaluationProgress], None]]:
    """Give a function that updates a progress bar; remove the bar at the end."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        task = bars.add_task("", total=None)
        doing = ""

        def update(at: EvaluationProgress) -> None:
            nonlocal doing
            if at.doing != doing:
                doing = at.doing
                bars.reset(task, description=doing)
            bars.update(task, completed=at.done, total=at.total or None)

        yield update


def report(found: dict[str, Any], run: str) -> RenderableType:
    """Render the object that `record` stores. run: the name of the run."""
    measured = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # to fit 80 columns
    measured.add_column("", min_width=len("exact match"))
    for system in SYSTEMS:
        measured.add_column(system, justify="right", no_wrap=True)
    for name, systems in found["measures"].items():
        label = name.replace("_", " ")
        if name == "metric":  # show the function's name, from module:function
            label = found["metric_name"].rpartition(":")[2]
        cells = [cell(name, system, systems[system]) for system in SYSTEMS]
        if any(len(text) > most for text, most in zip(cells, WIDTHS, strict=True)):
            cells = [text.replace(" [", "\n[") for text in cells]
        measured.add_row(Text(label), *map(Text, cells))
    step = "" if found["step"] is None else f", step {found['step']}"
    lines: list[RenderableType] = [
        Text(
            f"{run}{step}, on {found['data']}: {counted(found['rows'], 'row')}, "
            f"{counted(found['trained_tokens'], 'supervised token')}"
        ),
        "",
        measured,
        "",
        Text(
            f"In brackets: {100 * found['confidence']:g}% confidence intervals, from "
            f"{counted(found['resamples'], 'resample')} of the rows."
        ),
        *about_shares(found["measures"]),
        Text(
            f"With the adapter the loss is lower in {counted(found['better'], 'row')}, higher in "
            f"{found['worse']:,}, the same in {found['equal']:,}."
        ),
    ]
    return Group(*lines, *worst(found["worst"]))


def about_shares(measures: dict[str, Any]) -> list[Text]:
    if not any(name in SHARES for name in measures):
        return []
    return [Text("Those of the shares of base and adapter are Wilson intervals.")]


def cell(name: str, system: str, interval: dict[str, float | None]) -> str:
    """`0.412 [0.380, 0.445]`, or `41.2% [38.0, 44.5]`."""
    share = name in SHARES
    bounds = (interval["value"], interval["low"], interval["high"])
    value, low, high = map(percentage if share else number, bounds)
    sign = "+" if system == "difference" and (interval["value"] or 0) > 0 else ""
    return f"{sign}{value}{'%' if share else ''} [{low}, {high}]"


def percentage(share: float | None) -> str:
    return "?" if share is None else f"{100 * share:.1f}"


def number(value: float | None) -> str:
    """Format a loss, perplexity or metric in few characters: `12.34`, `0.412`, `0.000412`."""
    whole_digits = 1 if value is None else len(str(int(abs(value))))
    return loss_text(value, max(0, 4 - whole_digits))


def worst(rows: list[dict[str, Any]]) -> list[RenderableType]:
    """Render the worst rows, one below the other."""
    found: list[RenderableType] = []
    titles = {
        "loss": "Highest loss per token with the adapter:",
        "change": "Largest increase of the loss by the adapter:",
    }
    for kind, title in titles.items():
        chosen = [row for row in rows if kind in row["by"]]
        if not chosen:
            continue
        found += ["", Text(title)]
        for row in chosen:
            losses = f"{number(row['base_loss'])} -> {number(row['adapter_loss'])}"
            found.append(Text(f"  {row['where']}  loss {losses}"))
            texts = (("prompt", "prompt"), ("expected", "expected"), ("answer", "answered"))
            for key, label in texts:
                if row[key]:
                    text = f"    {label + ':':<10}{row[key]}"
                    found.append(Text(text, overflow="ellipsis", no_wrap=True))
    return found
