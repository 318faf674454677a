"""`your_ai eval`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from your_ai.commands.options import (
    CHECKPOINT,
    COLUMNS,
    MAX_MEMORY,
    MODEL,
    NEWEST,
    columns_of,
    run_or_newest,
)
from your_ai.gates.console import echo_error, echo_json, open_console


def evaluate(
    run: Annotated[str | None, NEWEST] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="A file of rows in any form, or a folder with test or valid rows; default: the "
            "run's own data."
        ),
    ] = None,
    columns: Annotated[list[str] | None, COLUMNS] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Your own metric, as module:function, called with answer, expected and row; "
            "answers are generated for it.",
        ),
    ] = None,
    max_memory: Annotated[float | None, MAX_MEMORY] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per batch, if they fit; default: the run's.", min=1)
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Bootstrap resamples for the intervals.", min=1, max=100_000)
    ] = 2000,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    worst: Annotated[
        int,
        typer.Option(
            help="Number of worst rows to list, with the answers of base and adapter.",
            min=0,
        ),
    ] = 3,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per answer; default for --metric: twice the expected answer's, "
            "plus 128.",
            min=1,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
) -> None:
    """Compare a run's adapter with its base model on rows that it was not trained on."""
    from your_ai import api
    from your_ai.evaluation import show
    from your_ai.evaluation.record import EvaluationNotKept

    name = run_or_newest(run)

    def report(measured: dict[str, Any]) -> None:
        if as_json:
            echo_json(measured, indent=2)
        else:
            open_console().print(show.report(measured, api.load_run(name).name))

    try:
        with show.progress_bar(open_console(stderr=True)) as update:
            measured = api.evaluate(
                name,
                data,
                columns=columns_of(columns),
                metric=metric,
                batch_size=batch_size,
                max_memory=max_memory,
                max_tokens=max_tokens,
                resamples=resamples,
                confidence=confidence,
                seed=seed,
                worst=worst,
                checkpoint=checkpoint,
                model=model,
                on_progress=update,
                on_note=lambda text: echo_error(f"note: {text}"),
            )
    except KeyboardInterrupt:
        echo_error("interrupted: nothing of this evaluation is kept")
        raise
    except EvaluationNotKept as error:
        report(error.measured)
        raise
    report(measured)
