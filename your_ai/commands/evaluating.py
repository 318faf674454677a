"""`your_ai eval`."""

from __future__ import annotations

from typing import Annotated

import typer

from your_ai.commands.options import CHECKPOINT, MODEL, RUN, open_noted
from your_ai.errors import RunError, UserError, explain
from your_ai.gates.console import echo_error, echo_json, open_console


def evaluate(
    run: Annotated[str, RUN],
    data: Annotated[
        str | None,
        typer.Option(
            help="A .jsonl file, or a folder with test.jsonl or valid.jsonl; default: the run's "
            "own data."
        ),
    ] = None,
    metric: Annotated[
        str | None,
        typer.Option(
            help="Your own metric, as module:function, called with answer, expected and row; "
            "answers are generated for it.",
        ),
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="Memory limit of this process, in GB.", min=0.0)
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="Rows per batch, if they fit; default: the run's.", min=1)
    ] = None,
    resamples: Annotated[
        int, typer.Option(help="Bootstrap resamples for the intervals.", min=1, max=100_000)
    ] = 2000,
    confidence: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.", min=0)] = 0,
    worst: Annotated[int, typer.Option(help="Number of worst rows to list.", min=0)] = 5,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            help="Maximum tokens per answer for --metric; default: twice the expected answer's, "
            "plus 128.",
            min=1,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
) -> None:
    """Compare a run's adapter with its base model on rows that it was not trained on."""
    if not 0 < confidence < 1:
        raise UserError(f"--confidence {confidence:g}: must be above 0 and below 1")

    from your_ai.evaluation import record, rows, show, summary
    from your_ai.evaluation.compare import Request, compare
    from your_ai.evaluation.custom_metric import load_metric

    trained = open_noted(run, checkpoint, model)
    path = rows.choose_file(data, trained.config)
    request = Request(
        batch_size=batch_size or trained.config.batch_size,
        max_memory_gb=max_memory,
        metric=None if metric is None else load_metric(metric),
        max_tokens=max_tokens,
    )
    echo_error(f"evaluating on {path}")
    steps = compare(trained, path, request)
    try:
        found = show.follow(steps, open_console(stderr=True))
    except KeyboardInterrupt:
        echo_error("interrupted: nothing of this evaluation is kept")
        raise
    except (RuntimeError, MemoryError) as error:
        if type(error) not in (RuntimeError, MemoryError):  # others are Python's, and our fault
            raise
        raise RunError(f"{trained.folder.path}: {explain(str(error) or 'MemoryError')}") from error
    for text in summary.notes(found):
        echo_error(f"note: {text}")
    settings = summary.SummarySettings(
        resamples=resamples, confidence=confidence, seed=seed, worst=worst
    )
    measured = summary.summarize(trained, found, settings)
    try:
        record.write(trained.folder, measured)
    finally:  # what was found is shown also where it cannot be kept
        if as_json:
            echo_json(measured, indent=2)
        else:
            open_console().print(show.report(measured, trained.folder.name))
