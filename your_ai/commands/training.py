"""`your_ai train` and `your_ai plan`."""

from __future__ import annotations

import contextlib
import dataclasses
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.commands.models import fetch_datasets, find_or_fetch
from your_ai.commands.options import (
    DownloadsUnasked,
    FileOfSettings,
    JsonObject,
    echo_note,
    memory_option,
    names_of_runs,
    rows_read,
    with_options,
)
from your_ai.config import DEMO, TrainConfig, resumed
from your_ai.errors import UserError
from your_ai.gates.console import echo_json, open_console
from your_ai.session import new_run

if TYPE_CHECKING:
    from rich.console import Console

PREFERENCE = 'a small model learns to confirm orders with "We will send".'
DEMO_NOTES = {  # by --data
    "demo": "a small model learns to turn orders into JSON records.",
    "demo-pairs": PREFERENCE,
    "demo-labels": PREFERENCE,
    "demo-tools": "a small model learns to look a price up with a tool.",
}
DEMO_NOTE = """\
The embedded demo: {note}
A real model on your own data: your_ai train --model llama-8b --data my-data/"""


@with_options
def train(
    config: FileOfSettings = None,
    resume: Annotated[
        str | None,
        typer.Option(
            help="Continue this run from its last checkpoint.",
            metavar="RUN",
            autocompletion=names_of_runs,
        ),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="Leave when training has begun, or waits; the run continues."
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print events as JSON lines, for programs.")
    ] = False,
    yes: DownloadsUnasked = False,
    **flags: Any,
) -> None:
    """Train LoRA adapters. Without a model and without data, trains the embedded demo."""
    from your_ai.run import folder as folders
    from your_ai.session.finished import already_finished
    from your_ai.session.ranks import launched_rank

    console = open_console()
    if (rank := launched_rank()) is not None and flags.get("supervise", True):
        raise UserError("mlx.launch: give --no-supervise to train, or use --processes or --hosts")
    if rank:
        if resume is None:
            settings = new_run.resolve(flags, config, on_note=lambda _: None)
        else:
            settings = resumed(folders.find(resume).read_config(), flags)
        from your_ai.session.attach import train_as_rank

        raise typer.Exit(train_as_rank(settings))
    if resume is not None:
        for other, given in (("--config", config is not None), ("--run", "run" in flags)):
            if given:
                raise UserError(f"--resume {resume}: cannot be combined with {other}")
        folder = folders.find(resume)
        folders.check_resumable(folder)
        settings = resumed(folder.read_config(), flags)
        if done := already_finished(folder, settings):
            echo_note(done)
            raise typer.Exit()
    else:
        settings = new_run.resolve(flags, config, on_note=echo_note)
    fetch_data(settings, console, yes)
    settings = check(settings, detach)
    if yes and settings.adapter_kind.is_whole:
        settings = dataclasses.replace(settings, heavy_writes=True)
    find_or_fetch(settings.model, console, yes)
    new = resume is None
    if new:
        folder = new_run.create(settings, echo_note)
        if settings.model == DEMO and settings.data in DEMO_NOTES and not as_json:
            note = DEMO_NOTE.format(note=DEMO_NOTES[settings.data])
            console.print(note, markup=False)
    from your_ai.session import attach

    raise typer.Exit(
        attach.train_and_show(folder, settings, console, new=new, detach=detach, as_json=as_json)
    )


def fetch_data(settings: TrainConfig, console: Console, yes: bool) -> None:
    """Download the datasets in --data and --valid that are missing, after asking the user."""
    from your_ai.data.sources import is_dataset

    fetch_datasets(settings.data, console, yes)
    if is_dataset(settings.valid):
        fetch_datasets(settings.valid, console, yes)


def check(settings: TrainConfig, detach: bool) -> TrainConfig:
    """The settings, with data that can be read again.

    Raises UserError for problems that would otherwise be found after a model was downloaded or the
    folder of the run created.
    """
    if detach and not settings.supervise:
        raise UserError(
            "--detach: cannot be combined with --no-supervise, which trains in this process"
        )
    new_run.check_rewards(settings)
    if settings.report_to:
        from your_ai.trackers import upload

        upload.check_trackers(settings.report_to)
    if settings.push_to:
        from your_ai.publish.push import check_account

        if note := check_account(settings.push_to):
            echo_note(note)
    from your_ai.data.sources import checked_settings
    from your_ai.hub.find import is_local

    return checked_settings(settings, not is_local(settings.model), rows_read())


@with_options
def plan(
    config: FileOfSettings = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape from `bench`, made with random weights, instead of a model; large ones "
            "take gigabytes on the disk.",
            metavar="NAME",
        ),
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="Bits the shape is quantized to: 4 or 8; 0 = not quantized.")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Tokens in every row, instead of the data.")
    ] = None,
    memory: Annotated[
        float | None, memory_option("Plan for an idle Mac with this much RAM, in GB.")
    ] = None,
    front: Annotated[
        bool,
        typer.Option(
            "--front",
            help="Show all plans that no other beats in both memory and time, whatever the limit.",
        ),
    ] = False,
    longest: Annotated[
        bool,
        typer.Option(
            "--longest",
            help="Show the longest row that fits into --max-memory, or into 8, 16, 24, 32 and 64 "
            "GB.",
        ),
    ] = False,
    as_json: JsonObject = False,
    **flags: Any,
) -> None:
    """Show the plan and the memory of a run, by component, without loading the model."""
    named = {"model": shape} if shape is not None else {}  # without a model: the demo's preset
    settings = new_run.resolve(flags | named, config, needs_data=False, on_note=echo_note)
    from your_ai.training import preview

    max_memory = settings.max_memory
    if longest:
        if seq_len is not None:
            raise UserError(f"--longest: finds the length, so without --seq-len {seq_len}")
        seq_len = preview.SHORT_TOKENS
        if memory is not None:
            max_memory = preview.limit_of_mac_gb(memory, max_memory, settings.force)
        settings = dataclasses.replace(settings, max_memory=preview.ANY_GB, force=True)

    if shape is None:
        if bits is not None:
            raise UserError(f"--bits {bits}: only works with --shape")
        from your_ai.training.plan_without_files import planned_run

        plan_it = partial(planned_run, settings, seq_len, echo_note, memory, remembers=True)
    else:
        if "model" in flags:
            raise UserError(f"--shape {shape}: cannot be combined with --model")
        if memory is not None:
            raise UserError(f"--memory {memory:g}: cannot be combined with --shape")
        from your_ai.doctor.bench import weights_of
        from your_ai.training.planned import planned_budget

        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        folder = weights_of(shape, None, 4 if bits is None else bits, dtype, echo_note)
        plan_it = partial(planned_budget, settings, folder, seq_len, echo_note)
    console = open_console(stderr=True)
    with console.status("planning") if console.is_terminal else contextlib.nullcontext() as shown:
        budget = plan_it(on_measure=shown.update if shown is not None else lambda text: None)
    if longest:
        rows = preview.longest_shown(budget.workload, max_memory)
        if as_json:
            echo_json(preview.longest_as_json(budget.workload, rows))
        else:
            open_console().print(preview.longest_table(budget.workload, rows))
    elif as_json:
        echo_json(preview.front_json(budget) if front else preview.as_json(budget))
    else:
        open_console().print((preview.front_table if front else preview.table)(budget))
