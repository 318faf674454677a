"""`your_ai export` and `your_ai import`: adapters and models to and from other tools."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from your_ai.commands.options import (
    CHECKPOINT,
    MODEL,
    NEWEST,
    open_trained_with_note,
    run_or_newest,
)
from your_ai.commands.progress import show_bytes
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, open_console

if TYPE_CHECKING:
    from your_ai.nets.saved_adapter import Trained

Format = Literal["mlx", "peft", "gguf", "hf"]
DTYPES = {
    "hf": ("float32", "bfloat16", "float16"),
    "gguf": ("f32", "f16", "bf16", "q8_0"),
}
DEFAULT_KIND = "f16"
FIXED = {"hf": "fused always", "mlx": "the adapter", "peft": "the adapter"}


def export(
    run: Annotated[str | None, NEWEST] = None,
    *,
    to: Annotated[
        Format,
        typer.Option(
            help="mlx or peft: the adapter for mlx-lm or PEFT; gguf: the adapter or the fused "
            "model for llama.cpp; hf: the fused model for transformers."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Output path; default: made of RUN and the format.")
    ] = None,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="With --to gguf: export the fused model, not the adapter."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of a fused model. hf: float32, bfloat16, float16; gguf: f32, f16, "
            "bf16, q8_0."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing model or adapter.")
    ] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    max_memory: Annotated[
        float | None,
        typer.Option(help="Memory limit in GB, when a fused model is exported.", min=0.0),
    ] = None,
) -> None:
    """Export a run's adapter or fused model to another tool."""
    check_options(to, fused, dtype, max_memory)
    from your_ai.export.fused_folder import spare_the_run
    from your_ai.modelfiles.targets import check_target
    from your_ai.run.folder import find

    name = run_or_newest(run)
    target = default_target(find(name).name, to, fused, dtype) if out is None else out
    check_target(target, force, is_file=to == "gguf")
    trained = open_trained_with_note(name, checkpoint, model)
    spare_the_run(trained, trained.base, target)
    write(trained, target, to, fused, dtype, max_memory, force)
    echo(target)


def check_options(to: str, fused: bool, dtype: str | None, max_memory: float | None) -> None:
    """Raise UserError for options that do not apply to the format."""
    if fused and to != "gguf":
        raise UserError(f"--fused only works with --to gguf; --to {to} is {FIXED[to]}")
    is_model = to == "hf" or fused
    for option, given in (("--dtype", dtype), ("--max-memory", max_memory)):
        if given is not None and not is_model:
            raise UserError(f"{option} needs a fused model; --to {to} writes only the adapter")
    if dtype is not None and dtype not in DTYPES[to]:
        raise UserError(f"--dtype {dtype}: --to {to} takes {', '.join(DTYPES[to])}")


def default_target(name: str, to: str, fused: bool, dtype: str | None) -> Path:
    if to != "gguf":
        return Path(f"{name}-{to}")
    return Path(f"{name}-{dtype or DEFAULT_KIND}.gguf" if fused else f"{name}-lora.gguf")


def write(
    trained: Trained,
    target: Path,
    to: str,
    fused: bool,
    dtype: str | None,
    max_memory: float | None,
    force: bool,
) -> None:
    if to == "mlx":
        from your_ai.export import mlxlm

        mlxlm.write(trained, target)
    elif to == "peft":
        from your_ai.export import peft

        peft.write(trained, target)
    elif to == "hf":
        from your_ai.export import huggingface

        steps = huggingface.write(trained, target, dtype or "auto", max_memory, force)
        try:
            show_bytes("exporting", steps, open_console())
        except KeyboardInterrupt:
            echo_error(huggingface.interrupted_message(target))
            raise
    elif fused:
        from your_ai.export import gguf

        kind = dtype or DEFAULT_KIND
        steps = gguf.write_model(trained, target, kind, max_memory)
        show_bytes("exporting", steps, open_console())
    else:
        from your_ai.export import gguf

        gguf.write_adapter(trained, target)


def import_adapter(
    source: Annotated[
        Path,
        typer.Argument(help="The folder of an adapter from PEFT or mlx-lm.", metavar="FOLDER"),
    ],
    model: Annotated[
        str | None,
        typer.Option(help="Base model; default: the one named in the adapter."),
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run; default: made of model and time.")
    ] = None,
) -> None:
    """Import an adapter that another tool trained, as a run."""
    from your_ai.export import importing

    folder = importing.import_adapter(source, model, run)
    echo(f"{folder.path}; try it: your_ai generate {folder.reference} --prompt ...")
