"""`your_ai export` and `your_ai import`: adapters and models to and from other tools."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from your_ai.commands.options import echo_note, opened, run_or_newest, show_bytes, with_options
from your_ai.config import flag
from your_ai.config.requests import ExportRequest, PushRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo, echo_error, open_console
from your_ai.gates.untrusted import read_json

if TYPE_CHECKING:
    from your_ai.export.gguf_quantize import Way
    from your_ai.modelfiles.shards import WriteProgress
    from your_ai.nets.saved_adapter import Trained
    from your_ai.publish.contents import Contents


DEFAULT_KIND = "f16"


@with_options
def export(request: ExportRequest) -> None:
    """Export a run's adapter or fused model to another tool."""
    from your_ai.export.fused_weights import spare_the_run
    from your_ai.modelfiles.targets import check_target
    from your_ai.run.folder import find

    name = run_or_newest(request.run)
    folder_name = find(name).name
    if request.out is not None:
        target = request.out
    elif request.to == "lmstudio":
        from your_ai.export import lmstudio

        target = lmstudio.default_folder(folder_name)
    else:
        target = default_target(folder_name, request)
    check_target(target, request.force, is_file=request.to == "gguf")
    trained = opened(dataclasses.replace(request, run=name))
    spare_the_run(trained, trained.base, target)
    for line in write(trained, target, request):
        echo(line)


def default_target(name: str, request: ExportRequest) -> Path:
    if request.to != "gguf":
        return Path(f"{name}-{request.to}")
    return Path(f"{name}-{request.kind or DEFAULT_KIND}.gguf" if request.fused else
                f"{name}-lora.gguf")  # fmt: skip


def write(trained: Trained, target: Path, request: ExportRequest) -> list[str]:
    """Write the export; return the lines to print: the path first."""
    dtype, max_memory, force = request.kind, request.max_memory, request.force
    if request.to == "mlx":
        from your_ai.export import mlxlm

        mlxlm.write(trained, target)
    elif request.to == "peft":
        from your_ai.export import peft

        peft.write(trained, target)
    elif request.to == "hf":
        from your_ai.export import huggingface

        steps = huggingface.write(trained, target, dtype or "auto", max_memory, force)
        show_resumable(steps, lambda: huggingface.work_of(target).interrupted_message)
    elif request.to == "ollama":
        return write_for_ollama(trained, target, request)
    elif request.to == "lmstudio":
        from your_ai.export import lmstudio

        write_for_lm_studio(trained, target, request)
        return [str(target), lmstudio.next_step(target)]
    elif request.fused:
        from your_ai.export import gguf_quantize

        kind = dtype or DEFAULT_KIND
        way = chosen_way(trained, kind, request)
        steps = gguf_quantize.write_model(trained, target, kind, way, max_memory)
        show_bytes("exporting", steps, open_console())
    else:
        from your_ai.export import gguf_convert

        script = chosen_script(trained, request, gguf_convert.OF_ADAPTERS)
        show_bytes("exporting", gguf_convert.write_adapter(trained, target, script), open_console())
    if request.to in ("mlx", "peft", "gguf") and not request.fused and rounds_again(trained):
        echo_note(
            f"--init {trained.config.init} adjusted the quantized weights, which the adapter for "
            "the published base leaves out; fuse is exact"
        )
    return [str(target)]


def rounds_again(trained: Trained) -> bool:
    """Return whether the run's own base weights are quantized, and so are others than the base's
    and a product of the first adapter."""
    config = trained.folder.base / "config.json"
    return trained.is_adjusted and "quantization" in read_json(config, "a model has one")


def write_for_ollama(trained: Trained, target: Path, request: ExportRequest) -> list[str]:
    from your_ai.export import ollama

    export = ollama.decide(
        trained,
        request.kind,
        DEFAULT_KIND,
        request.llama_quantize,
        request.adapter_for,
        request.converter,
        request.llama_cpp,
    )
    for note in export.notes:
        echo_note(note)
    if export.way is not None:
        tell_way(export.kind, export.way)
    steps = ollama.write(trained, target, export, request.max_memory, request.force)
    show_bytes("exporting", steps, open_console())
    return [str(target), *ollama.next_commands(trained, target)]


def write_for_lm_studio(trained: Trained, target: Path, request: ExportRequest) -> None:
    from your_ai.export import fused_weights, gguf_folder, lmstudio
    from your_ai.nets.saved_adapter import check_generates

    check_generates(trained.adapter)
    kind = request.kind or lmstudio.default_form(DEFAULT_KIND)
    if kind == lmstudio.MLX:
        steps = fused_weights.fuse(
            trained, target, max_memory_gb=request.max_memory, force=request.force
        )
        show_resumable(steps, lambda: fused_weights.work_of(target).interrupted_message)
        return
    name = gguf_folder.model_file(trained.folder.name, kind)
    way = chosen_way(trained, kind, request)
    steps = gguf_folder.write_model(
        trained, target, name, kind, way, request.max_memory, request.force
    )
    show_bytes("exporting", steps, open_console())


def chosen_way(trained: Trained, kind: str, request: ExportRequest) -> Way:
    """Choose how the GGUF file is made; a line on stderr says it where there is a choice."""
    from your_ai.export import gguf, gguf_convert, gguf_quantize

    gguf.require_library()
    script = chosen_script(trained, request, gguf_convert.OF_MODELS)
    way = gguf_quantize.way_of(kind, request.llama_quantize, script)
    tell_way(kind, way)
    return way


def chosen_script(trained: Trained, request: ExportRequest, name: str) -> Path | None:
    from your_ai.export import gguf_convert

    return gguf_convert.script_for(trained.base, request.converter, request.llama_cpp, name)


def tell_way(kind: str, way: Way) -> None:
    for text in way.texts(kind):
        echo_error(text)


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
        str | None, typer.Option(help="Base model; default: the one named in the adapter.")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="Name of the run; default: made of model and time.")
    ] = None,
) -> None:
    """Import an adapter that another tool trained, as a run."""
    from your_ai.export import untrained_run

    folder = untrained_run.import_adapter(source, model, run, on_note=echo_note)
    echo(f"{folder.path}; try it: your_ai generate {folder.reference} --prompt ...")


# `your_ai push`


@with_options
def push(request: PushRequest) -> None:
    """Push a run's adapter to the Hugging Face Hub, with a model card; never data or samples."""
    from your_ai.publish import push as pushing

    run, repo = request.run, request.repo
    pushing.check_repo(repo, repo)
    if not request.dry_run:
        pushing.check_token(repo)
    contents = gather(request)
    if request.dry_run:
        from your_ai.publish.contents import write

        for note in contents.notes:
            echo_note(note)
        echo(write(contents))
        return
    given = {flag(n): getattr(request, n) for n in ("checkpoint", "model", "revision", "message")}
    options = [part for name, value in given.items() if value for part in (name, value)]
    again = shlex.join(["your_ai", "push", run, repo, *options, *["--public"] * request.public])
    done = pushing.push(
        contents, repo, again,
        public=request.public, revision=request.revision, message=request.message,
    )  # fmt: skip
    for note in done.notes:
        echo_note(note)
    seen = "private" if done.private else "public: everyone can see it"
    new = "" if done.changed else "; nothing had changed"
    echo(f"pushed to {done.url} ({seen}){new}")


def gather(request: PushRequest) -> Contents:
    """Return the files to push. Raises UserError if there are none."""
    from your_ai.publish.contents import is_folder, of_folder, of_run

    run = request.run
    if is_folder(run):
        for name in ("checkpoint", "model"):
            if (value := getattr(request, name)) is not None:
                raise UserError(
                    f"{flag(name)} {value}: only works with a run, and {run} is a folder"
                )
        return of_folder(Path(run), request.repo)
    return of_run(opened(request), request.repo)
