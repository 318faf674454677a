"""`your_ai train` and `your_ai plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from your_ai.commands.models import find_or_fetch
from your_ai.commands.options import option, with_settings
from your_ai.config import DEMO, TrainConfig, resolve, resumed
from your_ai.console import echo_error, echo_json, open_console
from your_ai.errors import RunError, UserError

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.run.folder import RunFolder

DEMO_NOTE = """\
The embedded demo: a small model learns to turn orders into JSON records.
A real model on your own data: your_ai train --model llama-8b --data my-data/"""


def train(
    config: str | None,
    resume: str | None,
    detach: bool | None,
    as_json: bool | None,
    yes: bool | None,
    **flags: Any,
) -> None:
    """Train LoRA adapters. Without a model and without data, trains the embedded demo."""
    from your_ai.run import folder as folders

    console = open_console()
    detach, as_json = bool(detach), bool(as_json)
    flags = {name: value for name, value in flags.items() if value is not None}
    if resume is not None:
        for other, given in (("--config", config is not None), ("--run", "run" in flags)):
            if given:
                raise UserError(f"--resume {resume}: goes without {other}; the run has its own")
        folder = folders.find(resume)
        folders.check_resumable(folder)
        settings = resumed(folder.read_config(), flags)
        check(settings, detach)
        find_or_fetch(settings.model, console, bool(yes))
    else:
        settings = resolve(flags, config)
        check(settings, detach)
        find_or_fetch(settings.model, console, bool(yes))
        folder = folders.create(settings)
        if settings.model == settings.data == DEMO and settings.exact_match and not as_json:
            console.print(DEMO_NOTE, markup=False)
    new = resume is None
    raise typer.Exit(train_and_show(folder, settings, console, new, detach, as_json))


def check(settings: TrainConfig, detach: bool) -> None:
    """Raises UserError for what would be found out only once a folder is there."""
    if detach and not settings.supervise:
        raise UserError("--detach: goes without --no-supervise, which trains in this process")
    if settings.report_to:
        from your_ai.trackers import upload

        upload.check(settings.report_to)
    if settings.push_to:
        from your_ai.publish.push import check_account

        if note := check_account(settings.push_to):
            echo_error(f"note: {note}")


def train_and_show(
    folder: RunFolder,
    settings: TrainConfig,
    console: Console,
    new: bool,
    detach: bool = False,
    as_json: bool = False,
) -> int:
    """Train and show the run's events; the exit status. A run that never began leaves nothing."""
    from your_ai.run.child import Lost
    from your_ai.run.folder import discard
    from your_ai.session import attach

    try:
        if settings.supervise:
            return attach.train(folder, settings, console, detach=detach, as_json=as_json)
        return train_here(folder, settings, console, as_json)
    except Lost:
        raise  # its folder says why
    except BaseException:
        if new and not folder.checkpoints.exists():  # the first is written before any step
            discard(folder)
        raise


def train_here(
    folder: RunFolder, settings: TrainConfig, console: Console, as_json: bool = False
) -> int:
    """Train in this process, as a debugger wants it; the exit status."""
    from your_ai.dashboard.live import Follower, following, style_for
    from your_ai.publish.after_training import push_finished
    from your_ai.run import requests
    from your_ai.run.exits import DONE
    from your_ai.run.folder import is_running
    from your_ai.run.stopping import noted_signals, stop_signals
    from your_ai.trackers.upload import tracked

    follower = Follower(folder.events, console, style_for(console, as_json))
    names = () if is_running(folder) else settings.report_to
    if not is_running(folder):
        requests.withdraw_all(folder)
    fault = None
    with following(follower):
        with tracked(folder, names), stop_signals() as stop:
            from your_ai.training.train import (
                train_until_done,  # mlx takes a second: shown as starting
            )

            stop.on_second = lambda: follower.leave(folder.reference)
            status = train_until_done(folder, settings, stop)
        if status == DONE and settings.push_to:
            with noted_signals() as received:
                try:
                    push_finished(folder, settings.push_to, received)
                except RunError as error:  # told below the summary
                    fault = error
    follower.report_failure()
    follower.print_summary(folder.reference)
    if fault is not None:
        raise fault
    return status


train.__signature__ = with_settings(  # type: ignore[attr-defined]
    option(
        "resume",
        "--resume",
        str | None,
        "Go on with this run from its last checkpoint.",
        metavar="RUN",
    ),
    option("detach", "--detach", bool | None, "Leave once training has begun; it goes on."),
    option("as_json", "--json", bool | None, "Events as JSON lines on stdout, for programs."),
    option("yes", "--yes", bool | None, "Fetch a model that is not here without asking."),
)


def plan(
    config: str | None,
    shape: str | None,
    bits: int | None,
    seq_len: int | None,
    as_json: bool | None,
    **flags: Any,
) -> None:
    """Show what a run would hold, by component, and the plan it would take; loads nothing."""
    flags = {name: value for name, value in flags.items() if value is not None}
    named = {"model": shape} if shape is not None else {}  # else the demo's preset is meant
    settings = resolve(flags | named, config, needs_data=False)
    from your_ai.hub.find import find_model
    from your_ai.training import preview
    from your_ai.training.prepare import planned_budget

    if shape is None:
        if bits is not None:
            raise UserError(f"--bits {bits}: is of a --shape; a model has its own")
        folder = find_model(settings.model)
    else:
        if "model" in flags:
            raise UserError(f"--shape {shape}: goes without --model")
        from your_ai.doctor.bench import weights_of

        dtype = "float32" if settings.dtype == "auto" else settings.dtype
        folder = weights_of(shape, None, 4 if bits is None else bits, dtype)
    budget = planned_budget(settings, folder, seq_len)
    if as_json:
        echo_json(preview.as_json(budget))
    else:
        open_console().print(preview.table(budget))


plan.__signature__ = with_settings(  # type: ignore[attr-defined]
    option(
        "shape",
        "--shape",
        str | None,
        "A shape of `bench` instead of a model, made on the spot.",
        metavar="NAME",
    ),
    option("bits", "--bits", int | None, "Bits the shape is quantized to: 4 or 8; 0 = not quantized."),
    option("seq_len", "--seq-len", int | None, "Tokens of every row, without looking at data."),
    option("as_json", "--json", bool | None, "Print one JSON object."),
)
