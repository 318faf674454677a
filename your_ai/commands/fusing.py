"""`your_ai fuse`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from your_ai.commands.options import (
    CHECKPOINT,
    MAX_MEMORY,
    MODEL,
    NEWEST,
    open_trained_with_note,
    run_or_newest,
)
from your_ai.commands.progress import show_bytes
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, echo_json, open_console
from your_ai.gates.text import counted, loss_text

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.export.fuse_difference import Difference
    from your_ai.nets.saved_adapter import Trained


def fuse(
    run: Annotated[str | None, NEWEST] = None,
    out: Annotated[
        Path | None,
        typer.Argument(help="The folder to write; default: RUN-fused.", metavar="OUT"),
    ] = None,
    to: Annotated[
        str,
        typer.Option(
            help="Precision of the adapted layers of a quantized base: 4, 5, 6 or 8 bits, same "
            "(unchanged), or auto (8 bits); other layers stay as they are. dequantized: the "
            "whole model without quantization."
        ),
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            help="Data type of weights that are not quantized: float32, bfloat16 or float16; auto "
            "is the base's."
        ),
    ] = "auto",
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    max_memory: Annotated[float | None, MAX_MEMORY] = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Replace an existing model when the new one is complete."),
    ] = False,
    measure: Annotated[
        bool, typer.Option(help="Compare the result with base + adapter on rows of the run.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fuse a run's adapter into its base model, and measure the difference."""

    from your_ai.export import fused_folder as folder

    trained = open_trained_with_note(run_or_newest(run), checkpoint, model)
    out = Path(f"{trained.folder.name}-fused") if out is None else out
    console = open_console(stderr=True)
    steps = folder.fuse(trained, out, to, dtype, max_memory, force)
    try:
        show_bytes("fusing", steps, console)
    except KeyboardInterrupt:
        echo_error(folder.interrupted_message(out))
        raise
    found = measured(trained, out, to, max_memory, console) if measure else None
    if as_json:
        values = None if found is None else dataclasses.asdict(found) | {"erased": found.erased}
        echo_json({"target": str(out), "difference": values})
        return
    echo(out)
    if found is not None:
        for line in lines_of(found):
            echo(line)


def measured(
    trained: Trained, out: Path, to: str, max_memory: float | None, console: Console
) -> Difference | None:
    """Measure the difference between the fused model, which is complete, and base + adapter.

    Returns None, after a note on stderr, if it cannot be measured.
    """
    from your_ai.export.fuse_difference import difference

    try:
        with console.status("measuring the difference"):
            found = difference(trained, out, max_memory)
    except KeyboardInterrupt:
        echo_error(f"{out}: is complete; only the measurement was stopped")
        raise
    except UserError as error:
        echo_error(f"note: the difference was not measured ({error})")
        return None
    if found.erased:
        echo_error(f"warning: {warning_of(found, out, to)}")
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
