"""`your_ai eval`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.commands.options import (
    JsonObject,
    echo_note,
    names_of_runs,
    run_or_newest,
    with_options,
)
from your_ai.config.requests import EvaluateRequest, ScoreRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, echo_json, open_console
from your_ai.gates.text import now_and_then

if TYPE_CHECKING:
    from your_ai.dashboard.run_comparison import ComparedRun
    from your_ai.run.folder import RunFolder


@with_options
def evaluate(request: EvaluateRequest, as_json: JsonObject = False) -> None:
    """Compare a run's adapter with its base model on rows that it was not trained on."""
    from your_ai import api
    from your_ai.evaluation import show
    from your_ai.evaluation.record import EvaluationNotKept

    name = run_or_newest(request.run)
    request = dataclasses.replace(request, run=name, on_note=echo_note)

    def report(measured: dict[str, Any]) -> None:
        if as_json:
            echo_json(measured, indent=2)
        else:
            open_console().print(show.evaluation_report(measured, api.load_run(name).name))

    try:
        with show.progress_bar(open_console(stderr=True)) as update:
            measured = api.evaluate(**vars(dataclasses.replace(request, on_progress=update)))
    except KeyboardInterrupt:
        echo_error("interrupted: nothing of this evaluation is kept")
        raise
    except EvaluationNotKept as error:
        report(error.measured)
        raise
    report(measured)


# `your_ai score`


@with_options
def score(request: ScoreRequest) -> None:
    """Score answers with a reward model: one JSON object per line, in the order of the rows.

    Each is the row with its reward; of a pair, with reward_chosen and reward_rejected.
    """
    from your_ai import api

    done = now_and_then(echo_error, lambda count: f"scored {count:,} rows")
    request = dataclasses.replace(request, run=run_or_newest(request.run), on_note=echo_note)
    rows = api.score(**vars(request))
    try:
        for count, row in enumerate(rows, 1):
            echo_json(row)
            done(count)
    except BrokenPipeError:  # the reader has seen enough
        raise typer.Exit(0) from None


# `your_ai compare`: runs side by side


def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            help="Two or more runs: their names in runs/, or folders.",
            metavar="RUN...",
            autocompletion=names_of_runs,
        ),
    ],
    html: Annotated[
        Path | None, typer.Option(help="Also write an HTML page to this file.", metavar="OUT")
    ] = None,
) -> None:
    """Compare runs: the settings that differ, curves, memory, speed, and their evaluations."""
    from your_ai.dashboard.run_comparison import notes, renderable
    from your_ai.run import folder as folders

    found = [folders.find(name) for name in runs]
    places = [folder.path.resolve() for folder in found]
    if len(found) < 2:
        raise UserError("give two runs or more; your_ai runs lists them")
    if len(set(places)) < len(places):
        twice = next(i for i, place in enumerate(places) if place in places[:i])
        raise UserError(f"{runs[twice]}: is given twice")
    compared = [read_run(folder) for folder in found]
    if html is not None:  # before the output, so that an error is the only line
        from your_ai.dashboard.run_comparison import write_comparison

        write_comparison(compared, html)
    console = open_console()
    console.print(renderable(compared, console.width))
    for note in notes(compared):
        echo_error(f"note: {note}")
    if html is not None:
        echo(html)


def read_run(folder: RunFolder) -> ComparedRun:
    """Read what can be read of a run."""
    from your_ai.dashboard.run_comparison import compared_run
    from your_ai.evaluation import record
    from your_ai.evaluation.show import adapter_values
    from your_ai.run import events
    from your_ai.run.folder import is_running
    from your_ai.session.run_list import row_of

    faults: list[str] = []
    records: list[events.Record] = []
    config = None
    try:
        config = folder.read_config()
    except UserError as error:
        faults.append(str(error))
    try:
        records, _ = events.tail(folder.events)
    except UserError as error:
        faults.append(str(error))
    row = row_of(folder)
    state = row.state if row is not None else "running" if is_running(folder) else "-"
    measures = adapter_values(record.read_evaluation(folder))
    return compared_run(folder.name, state, config, records, measures, "; ".join(faults))
