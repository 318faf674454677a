"""`your_ai score`."""

from __future__ import annotations

from typing import Annotated

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
from your_ai.gates.console import echo_error, echo_json
from your_ai.gates.text import now_and_then


def score(
    run: Annotated[str | None, NEWEST] = None,
    file: Annotated[
        str,
        typer.Argument(
            help="File with rows in any form that --data takes; - is standard input, with a JSON "
            "object per line.",
            metavar="FILE",
        ),
    ] = "-",
    columns: Annotated[list[str] | None, COLUMNS] = None,
    too_long: Annotated[
        str,
        typer.Option(
            help="What to do with a row that is longer than the run's --max-seq-length: error or "
            "truncate."
        ),
    ] = "error",
    batch_size: Annotated[int, typer.Option(help="Rows per batch, if they fit.", min=1)] = 8,
    max_memory: Annotated[float | None, MAX_MEMORY] = None,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
) -> None:
    """Score answers with a reward model: one JSON object per line, in the order of the rows.

    Each is the row with its reward; of a pair, with reward_chosen and reward_rejected.
    """
    from your_ai import api

    done = now_and_then(echo_error, lambda count: f"scored {count:,} rows")
    rows = api.score(
        run_or_newest(run),
        file,
        columns=columns_of(columns),
        too_long=too_long,
        batch_size=batch_size,
        max_memory=max_memory,
        checkpoint=checkpoint,
        model=model,
        on_note=lambda text: echo_error(f"note: {text}"),
    )
    try:
        for count, row in enumerate(rows, 1):
            echo_json(row)
            done(count)
    except BrokenPipeError:  # the reader has seen enough
        raise typer.Exit(0) from None
