"""`your_ai merge`."""

from __future__ import annotations

import os
from typing import Annotated, Literal

import typer

from your_ai.commands.progress import layers_done
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error
from your_ai.gates.text import shortened


def merge(
    adapters: Annotated[
        list[str],
        typer.Argument(
            help="Runs, or folders of adapters, each with its weight; without weights, all count "
            "the same.",
            metavar="RUN[=WEIGHT]...",
        ),
    ],
    to: Annotated[
        str | None, typer.Option(help="Name of the new run; default: made of model and time.")
    ] = None,
    method: Annotated[
        Literal["linear", "ties"],
        typer.Option(
            help="linear: the weighted sum of the adapters. ties: their largest values, where "
            "they agree on the sign."
        ),
    ] = "linear",
    density: Annotated[
        float | None,
        typer.Option(help="The share of each adapter that ties keeps. [default: 0.5]"),
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of the result, which may lose a part; default: the sum of ranks."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Base model; default: the one that the first adapter names."),
    ] = None,
) -> None:
    """Merge LoRA adapters of one base model into a new run."""
    if density is not None and method != "ties":
        raise UserError(f"--density {density:g}: only works with --method ties")
    pairs = parse(adapters)
    from your_ai.export import merged_run

    request = merged_run.MergeRequest(
        adapters=pairs,
        method=method,
        density=merged_run.DENSITY if density is None else density,
        rank=rank,
    )
    merged = merged_run.merge(request, model, to, layers_done("merging"))
    if merged.relative_error > 0:
        echo_error(f"note: rank {merged.rank} loses {merged.relative_error:.2%} of the merge")
    run = merged.run
    echo(f"{run.path}: rank {merged.rank}; try it: your_ai generate {run.reference} --prompt ...")


def parse(adapters: list[str]) -> list[tuple[str, float]]:
    """The adapters and their weights, which are equal if none is given. Raises UserError."""
    pairs = [split(adapter) for adapter in adapters]
    weights = [weight for _, weight in pairs if weight is not None]
    if not weights:
        return [(name, 1 / len(pairs)) for name, _ in pairs]
    if len(weights) < len(pairs):
        without = next(name for name, weight in pairs if weight is None)
        raise UserError(f"{shortened(without)}: has no weight; give one to all adapters or to none")
    return [(name, weight) for name, weight in pairs if weight is not None]


def split(adapter: str) -> tuple[str, float | None]:
    """The name and the weight of `A=0.7`; a file or folder may have a name with =."""
    name, separator, number = adapter.rpartition("=")
    if not separator or os.path.exists(os.path.expanduser(adapter)):
        return adapter, None
    try:
        return name, float(number)
    except ValueError as error:
        label = shortened(adapter)
        raise UserError(f"{label}: expected a number after =, as in A=0.7") from error
