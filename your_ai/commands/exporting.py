"""`your_ai export` and `your_ai import`: adapters and models to and from other tools."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from your_ai.commands.options import (
    CHECKPOINT,
    MODEL,
    NEWEST,
    memory_option,
    open_trained_with_note,
    run_or_newest,
    show_bytes,
)
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, open_console

if TYPE_CHECKING:
    from your_ai.export.gguf_quantize import Way
    from your_ai.modelfiles.shards import WriteProgress
    from your_ai.nets.saved_adapter import Trained
    from your_ai.publish.contents import Contents


Format = Literal["mlx", "peft", "gguf", "hf", "ollama", "lmstudio"]
GGUF_KINDS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_k_m", "q5_k_m", "q6_k")
DTYPES = {
    "hf": ("float32", "bfloat16", "float16"),
    "gguf": GGUF_KINDS,
    "ollama": GGUF_KINDS,
    "lmstudio": (*GGUF_KINDS, "mlx"),
}
DEFAULT_KIND = "f16"
FIXED = {
    "hf": "fused always",
    "mlx": "the adapter",
    "peft": "the adapter",
    "ollama": "fused, unless you give --adapter-for",
    "lmstudio": "fused always",
}


def names_of_dtypes(incomplete: str) -> list[str]:
    """The types of all formats whose names start so, for the completion of a shell."""
    names = dict.fromkeys(name for names in DTYPES.values() for name in names)
    return [name for name in names if name.startswith(incomplete)]


@dataclass(frozen=True)
class ExportOptions:
    """The options of `your_ai export` that the formats use."""

    to: str
    fused: bool
    dtype: str | None
    llama_quantize: Path | None
    adapter_for: str | None
    max_memory: float | None
    force: bool

    @property
    def is_fused(self) -> bool:
        """Whether a whole model is written, not only the adapter."""
        if self.to == "ollama":
            return self.adapter_for is None
        return self.fused or self.to in ("hf", "lmstudio")


def export(
    run: Annotated[str | None, NEWEST] = None,
    *,
    to: Annotated[
        Format,
        typer.Option(
            help="mlx or peft: the adapter for mlx-lm or PEFT; gguf: the adapter or the fused "
            "model for llama.cpp; hf: the fused model for transformers; ollama: a folder for "
            "ollama create; lmstudio: the fused model, where LM Studio looks for it."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Output path; default: made of RUN and the format, or LM Studio's folder."
        ),
    ] = None,
    fused: Annotated[
        bool,
        typer.Option("--fused", help="With --to gguf: export the fused model, not the adapter."),
    ] = False,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Data type of a fused model. hf: float32, bfloat16, float16; gguf, ollama, "
            "lmstudio: f32, f16, bf16, q8_0, q4_0, and with llama-quantize q4_k_m, q5_k_m, q6_k; "
            "lmstudio: also mlx, the default on Apple silicon.",
            autocompletion=names_of_dtypes,
        ),
    ] = None,
    llama_quantize: Annotated[
        Path | None,
        typer.Option(help="llama.cpp's program llama-quantize; default: the one on PATH."),
    ] = None,
    adapter_for: Annotated[
        str | None,
        typer.Option(
            help="With --to ollama: write only the adapter, for this model of Ollama (or .gguf "
            "file), which must be the run's base.",
            metavar="NAME",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing model or adapter.")
    ] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    max_memory: Annotated[
        float | None, memory_option("Memory limit in GB, when a fused model is exported.")
    ] = None,
) -> None:
    """Export a run's adapter or fused model to another tool."""
    dtype = None if dtype is None else dtype.lower()  # llama.cpp writes Q4_K_M
    options = ExportOptions(to, fused, dtype, llama_quantize, adapter_for, max_memory, force)
    check_options(options)
    from your_ai.export.fused_weights import spare_the_run
    from your_ai.modelfiles.targets import check_target
    from your_ai.run.folder import find

    name = run_or_newest(run)
    folder_name = find(name).name
    if to == "lmstudio" and out is None:
        from your_ai.export import lmstudio

        target = lmstudio.default_folder(folder_name)
    else:
        target = default_target(folder_name, options) if out is None else out
    check_target(target, force, is_file=to == "gguf")
    trained = open_trained_with_note(name, checkpoint, model)
    spare_the_run(trained, trained.base, target)
    for line in write(trained, target, options):
        echo(line)


def check_options(options: ExportOptions) -> None:
    """Raise UserError for options that do not apply to the format."""
    to, dtype = options.to, options.dtype
    if options.fused and to != "gguf":
        raise UserError(f"--fused only works with --to gguf; --to {to} is {FIXED[to]}")
    if options.adapter_for is not None and to != "ollama":
        raise UserError(f"--adapter-for only works with --to ollama, not with --to {to}")
    given = {
        "--dtype": dtype,
        "--max-memory": options.max_memory,
        "--llama-quantize": options.llama_quantize,
    }
    for option, value in given.items():
        if value is not None and not options.is_fused:
            raise UserError(f"{option} needs a fused model; --to {to} writes only the adapter")
    if options.llama_quantize is not None and (to == "hf" or dtype in (None, "mlx")):
        raise UserError("--llama-quantize: also give a --dtype that it makes, such as q4_k_m")
    if dtype is not None and dtype not in DTYPES[to]:
        raise UserError(f"--dtype {dtype}: --to {to} takes {', '.join(DTYPES[to])}")


def default_target(name: str, options: ExportOptions) -> Path:
    if options.to != "gguf":
        return Path(f"{name}-{options.to}")
    return Path(f"{name}-{options.dtype or DEFAULT_KIND}.gguf" if options.fused else
                f"{name}-lora.gguf")  # fmt: skip


def write(trained: Trained, target: Path, options: ExportOptions) -> list[str]:
    """Write the export; return the lines to print: the path first."""
    dtype, max_memory, force = options.dtype, options.max_memory, options.force
    if options.to == "mlx":
        from your_ai.export import mlxlm

        mlxlm.write(trained, target)
    elif options.to == "peft":
        from your_ai.export import peft

        peft.write(trained, target)
    elif options.to == "hf":
        from your_ai.export import huggingface

        steps = huggingface.write(trained, target, dtype or "auto", max_memory, force)
        show_resumable(steps, lambda: huggingface.interrupted_message(target))
    elif options.to == "ollama":
        return write_for_ollama(trained, target, options)
    elif options.to == "lmstudio":
        from your_ai.export import lmstudio

        write_for_lm_studio(trained, target, options)
        return [str(target), lmstudio.next_step(target)]
    elif options.fused:
        from your_ai.export import gguf_quantize

        kind = dtype or DEFAULT_KIND
        way = chosen_way(kind, options)
        steps = gguf_quantize.write_model(trained, target, kind, way, max_memory)
        show_bytes("exporting", steps, open_console())
    else:
        from your_ai.export import gguf

        gguf.write_adapter(trained, target)
    return [str(target)]


def write_for_ollama(trained: Trained, target: Path, options: ExportOptions) -> list[str]:
    from your_ai.export import ollama

    export = ollama.decide(
        trained, options.dtype, DEFAULT_KIND, options.llama_quantize, options.adapter_for
    )
    for note in export.notes:
        echo_error(f"note: {note}")
    if export.way is not None:
        tell_way(export.kind, export.way)
    steps = ollama.write(trained, target, export, options.max_memory, options.force)
    show_bytes("exporting", steps, open_console())
    return [str(target), *ollama.next_commands(trained, target)]


def write_for_lm_studio(trained: Trained, target: Path, options: ExportOptions) -> None:
    from your_ai.export import fused_weights, gguf_folder, lmstudio
    from your_ai.nets.saved_adapter import check_generates

    check_generates(trained.adapter)
    kind = options.dtype or lmstudio.default_form(DEFAULT_KIND)
    if kind == lmstudio.MLX:
        steps = fused_weights.fuse(
            trained, target, max_memory_gb=options.max_memory, force=options.force
        )
        show_resumable(steps, lambda: fused_weights.interrupted_message(target))
        return
    name = gguf_folder.model_file(trained.folder.name, kind)
    way = chosen_way(kind, options)
    steps = gguf_folder.write_model(
        trained, target, name, kind, way, options.max_memory, options.force
    )
    show_bytes("exporting", steps, open_console())


def chosen_way(kind: str, options: ExportOptions) -> Way:
    """How the GGUF file is made; a line on stderr says it where there is a choice."""
    from your_ai.export import gguf, gguf_quantize

    gguf.require_library()
    way = gguf_quantize.way_of(kind, options.llama_quantize)
    tell_way(kind, way)
    return way


def tell_way(kind: str, way: Way) -> None:
    from your_ai.export.gguf_quantize import TOOL_KINDS

    if kind in TOOL_KINDS:
        echo_error(f"{kind}: {way.text}")


def show_resumable(steps: Iterator[WriteProgress], interrupted: Callable[[], str]) -> None:
    """Show the progress of an export that an interrupted command can continue."""
    try:
        show_bytes("exporting", steps, open_console())
    except KeyboardInterrupt:
        echo_error(interrupted())
        raise


def import_adapter(
    source: Annotated[
        Path,
        typer.Argument(help="The folder or file of a PEFT or mlx-lm adapter.", metavar="FOLDER"),
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
    from your_ai.export import untrained_run

    folder = untrained_run.import_adapter(
        source, model, run, on_note=lambda text: echo_error(f"note: {text}")
    )
    echo(f"{folder.path}; try it: your_ai generate {folder.reference} --prompt ...")


# `your_ai push`


def push(
    run: Annotated[
        str, typer.Argument(help="The run, or a folder that fuse or export wrote.", metavar="RUN")
    ],
    repo: Annotated[str, typer.Argument(help="The repo on the hub.", metavar="ORG/NAME")],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repo public; default: private.")
    ] = False,
    checkpoint: Annotated[str | None, CHECKPOINT] = None,
    model: Annotated[str | None, MODEL] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to; created if it does not exist.")
    ] = None,
    message: Annotated[str, typer.Option(help="Commit message.")] = "",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Push nothing; write the files to a new folder.")
    ] = False,
) -> None:
    """Push a run's adapter to the Hugging Face Hub, with a model card; never data or samples."""
    from your_ai.publish import push as pushing

    pushing.check_repo(repo, repo)
    if not dry_run:
        pushing.check_token(repo)
    contents = gather(run, repo, checkpoint, model)
    if dry_run:
        from your_ai.publish.contents import write

        for note in contents.notes:
            echo_error(f"note: {note}")
        echo(write(contents))
        return
    given = {
        "--checkpoint": checkpoint,
        "--model": model,
        "--revision": revision,
        "--message": message,
    }
    options = [part for name, value in given.items() if value for part in (name, value)]
    again = shlex.join(["your_ai", "push", run, repo, *options, *["--public"] * public])
    done = pushing.push(contents, repo, again, public=public, revision=revision, message=message)
    for note in done.notes:
        echo_error(f"note: {note}")
    seen = "private" if done.private else "public: everyone can see it"
    new = "" if done.changed else "; nothing had changed"
    echo(f"pushed to {done.url} ({seen}){new}")


def gather(run: str, repo: str, checkpoint: str | None, model: str | None) -> Contents:
    """Return the files to push. Raises UserError if there are none."""
    from your_ai.publish.contents import is_folder, of_folder, of_run

    if is_folder(run):
        for name, value in (("--checkpoint", checkpoint), ("--model", model)):
            if value is not None:
                raise UserError(f"{name} {value}: only works with a run, and {run} is a folder")
        return of_folder(Path(run), repo)

    trained = open_trained_with_note(run, checkpoint, model)
    return of_run(trained, repo)
