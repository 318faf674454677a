"""`your_ai fuse`."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from your_ai.commands.options import (
    JsonObject,
    echo_note,
    layers_done,
    opened,
    show_bytes,
    with_options,
)
from your_ai.config.requests import FuseRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, echo_json, open_console
from your_ai.gates.text import counted, loss_text, shortened

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.export.fuse_difference import Difference
    from your_ai.nets.saved_adapter import Trained


@with_options
def fuse(request: FuseRequest, as_json: JsonObject = False) -> None:
    """Fuse a run's adapter into its base model, and measure the difference."""

    from your_ai.export import fused_weights as folder

    trained = opened(request)
    out = Path(f"{trained.folder.name}-fused") if request.out is None else request.out
    console = open_console(stderr=True)
    steps = folder.fuse(trained, out, request.to, request.dtype, request.max_memory, request.force)
    try:
        show_bytes("fusing", steps, console)
    except KeyboardInterrupt:
        echo_error(folder.work_of(out).interrupted_message)
        raise
    found = measured(trained, out, request, console) if request.measure else None
    if as_json:
        values = None if found is None else dataclasses.asdict(found) | {"erased": found.erased}
        echo_json({"target": str(out), "difference": values})
        return
    echo(out)
    if found is not None:
        for line in lines_of(found):
            echo(line)


def measured(
    trained: Trained, out: Path, request: FuseRequest, console: Console
) -> Difference | None:
    """Measure the difference between the fused model, which is complete, and base + adapter.

    Returns None, after a note on stderr, if it cannot be measured.
    """
    from your_ai.export.fuse_difference import difference

    try:
        with console.status("measuring the difference"):
            found = difference(trained, out, request.max_memory)
    except KeyboardInterrupt:
        echo_error(f"{out}: is complete; only the measurement was stopped")
        raise
    except UserError as error:
        echo_note(f"the difference was not measured ({error})")
        return None
    if found.erased:
        echo_error(f"warning: {warning_of(found, out, request.to)}")
    return found


def warning_of(found: Difference, out: Path, to: str) -> str:
    """Return the warning for a difference with `erased`; `to`: the `--to` of the fused model."""
    from your_ai.export.fuse_difference import LEAST_KEPT
    from your_ai.hub.check import check_model

    what = f"fusing changes the logits by {found.mean:.2g}, the adapter by {found.effect:.2g}"
    if found.kept < LEAST_KEPT:
        what = f"fusing erased the adapter: {max(0, found.kept):.0%} of its effect is left"
    if check_model(out).get("quantization") is None:
        return f"{what}; give --dtype float32"
    return f"{what}; give {'' if to in ('auto', '8') else '--to 8 or '}--to dequantized"


def lines_of(found: Difference) -> list[str]:
    return [
        f"{found.file}: {counted(found.rows, 'row')}, {counted(found.positions, 'position')}",
        f"loss: {loss_text(found.base_loss)} base, {loss_text(found.adapted_loss)} base + adapter, "
        f"{loss_text(found.fused_loss)} fused",
        f"logits: changed by {found.effect:.2g} in training, {found.mean:.2g} in fusing (at most "
        f"{found.largest:.2g}); {found.kept:.1%} of the trained change is kept",
        f"most likely token: the same at {found.agreement:.1%} of the positions",
    ]


# `your_ai merge`


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
        float | None, typer.Option(help="The share of each adapter that ties keeps. [default: 0.5]")
    ] = None,
    rank: Annotated[
        int | None,
        typer.Option(help="Rank of the result, which may lose a part; default: the sum of ranks."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Base model; default: the one that the first adapter names.")
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
        echo_note(f"rank {merged.rank} loses {merged.relative_error:.2%} of the merge")
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
