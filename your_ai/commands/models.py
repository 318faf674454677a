"""`your_ai download`, `models`, `quantize`, `recommend` and `doctor`: before a run."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from your_ai.commands.progress import show_bytes
from your_ai.errors import UserError
from your_ai.gates.console import confirm, echo, echo_error, echo_json, open_console

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.doctor.machine import MachineInfo

app = typer.Typer(name="models", help="List models, verify or remove them.")


def download(
    name: Annotated[str, typer.Argument(help="An alias, or an id of the hub.")],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; default: main.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Output folder; default: in models/.")] = None,
) -> None:
    """Download a model, checked against the hub's hashes. Resumes where it was interrupted."""
    fetch(name, open_console(), revision, to)


def fetch(name: str, console: Console, revision: str | None = None, to: Path | None = None) -> Path:
    from your_ai.hub import download as downloads
    from your_ai.hub import progress

    return progress.show(downloads.downloading(name, revision, to), console)


def find_or_fetch(name: str, console: Console, yes: bool) -> Path:
    """The folder of a model; one that is not here is fetched once the user has said so."""
    from your_ai.hub.find import Missing, find_model

    try:
        return find_model(name)
    except Missing as missing:
        if not yes:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise
            size = f", {missing.size_text}" if missing.size_text else ""
            if not confirm(f"{name} is not on this machine ({missing.repo}{size}); fetch it?"):
                raise
        return fetch(name, console)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON list.")] = False,
) -> None:
    """List local and known models, and what this machine can do with them."""
    if context.invoked_subcommand is not None:
        return
    from your_ai.doctor import model_list

    rows = model_list.rows()
    if as_json:
        echo_json(model_list.as_json(rows))
    else:
        console = open_console()
        console.print(model_list.table(rows, console.width))


@app.command()
def verify(
    name: Annotated[str, typer.Argument(help="A model that is here: its name, alias or folder.")],
) -> None:
    """Read a model's files and compare them with what the hub said of them."""
    from your_ai.hub.find import find_model, put_model, repo_of
    from your_ai.hub.record import verify as verify_folder

    put = None if Path(name).is_dir() else put_model(repo_of(name, name))
    folder = put or find_model(name)  # what is put may lack something: all of it is told
    verdict = verify_folder(folder)
    for fault in verdict.faults:
        echo(fault)
    if verdict.faults:
        raise UserError(f"{folder}: is not whole; fetch it again: your_ai download {name}")
    echo(f"{folder}: {verdict.checked}")


@app.command()
def rm(
    names: Annotated[list[str], typer.Argument(help="Models in models/.", metavar="NAME...")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Remove models, or what an interrupted download left behind."""
    from your_ai.dashboard.view import memory
    from your_ai.hub.local import remove_model

    if not yes and not confirm(f"remove {', '.join(names)}?"):
        echo("nothing was removed")
        raise typer.Exit(1)
    for name in names:
        echo(f"removed {name}, {memory(remove_model(name))}")


def quantize(
    source: Annotated[str, typer.Argument(help="A model: an alias, a folder, or an id.")],
    target: Annotated[Path, typer.Argument(help="The folder that is written.")],
    bits: Annotated[int, typer.Option(help="Bits per weight.")] = 4,
    group_size: Annotated[int, typer.Option(help="Quantization group size.")] = 64,
    max_memory: Annotated[
        float | None, typer.Option(help="Memory limit of this process, in GB.", min=0.0)
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a limit above the machine's memory.")
    ] = False,
) -> None:
    """Quantize a model shard by shard: the result of mlx_lm.convert, in little memory."""
    from your_ai.hub.find import find_model
    from your_ai.modelfiles import quantize

    steps = quantize.quantize(find_model(source), target, bits, group_size, max_memory, force)
    try:
        show_bytes("quantizing", steps, open_console())
    except KeyboardInterrupt:
        echo_error(quantize.left_behind(target))
        raise
    echo(target)


def recommend(
    memory: Annotated[
        float | None,
        typer.Option(help="Plan for another machine with this much RAM, in GB.", min=0.0),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Show every model that fits, not only the best.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Recommend models that train on this machine, with the command for each; best first."""
    from your_ai.doctor import recommend as recommending
    from your_ai.doctor.machine import read_machine

    if memory is None:
        room = recommending.room_here(read_machine())
    else:
        room = recommending.room_of(memory)
    found = recommending.recommend(room)
    if as_json:
        echo_json(recommending.as_json(room, found))
    elif every:
        open_console().print(recommending.table(room, found, None))
    else:
        open_console().print(recommending.table(room, found))


def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Train a small model and measure; takes 2 minutes.")
    ] = False,
    fit_memory: Annotated[
        bool,
        typer.Option(
            "--fit-memory",
            help="Measure memory on this machine, in some minutes, and fit the estimates of plans "
            "to it.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check this machine: what is missing or risky, and the command that fixes it."""
    from your_ai.doctor import findings as examining
    from your_ai.doctor.machine import read_machine

    if fit_memory:
        if selftest:
            raise UserError("--fit-memory: cannot be combined with --selftest")
        fit_to_machine(as_json)
        return
    machine = read_machine()
    if selftest:
        test_device(machine, as_json)
        return
    found = examining.findings(machine)
    if as_json:
        echo_json(examining.as_json(machine, found))
    else:
        open_console().print(examining.table(machine, found))


def test_device(machine: MachineInfo, as_json: bool) -> None:
    """Show each check as it is done, then a report; exit status 1 if one failed."""
    from your_ai.doctor import selftest

    lines = []
    for line in selftest.run():
        lines.append(line)
        if not as_json:
            echo(selftest.text(line))
    if as_json:
        rows = [dataclasses.asdict(line) for line in lines]
        for row in rows:
            row["figures"].pop("folder", None)  # nobody else's business, as the store is
        told = dataclasses.asdict(dataclasses.replace(machine, store=None))
        echo_json({"machine": told, "checks": rows})
    else:
        echo(f"\n{selftest.report(lines, machine)}")
    if selftest.failed(lines):
        raise typer.Exit(1)


def fit_to_machine(as_json: bool) -> None:
    """Measure peaks, fit the coefficients of estimates to them, and keep both."""
    from your_ai.doctor import fit_memory as fitting
    from your_ai.doctor import measure_memory as measuring
    from your_ai.memory.coefficients import PACKAGED

    peaks = []
    for peak in measuring.measured_peaks():
        peaks.append(peak)
        if not as_json:
            echo(measuring.describe(peak))
    fitted = measuring.fitted_to(peaks)
    off = fitting.errors(peaks, PACKAGED)
    try:
        path = measuring.keep(fitted, peaks)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from error
    if as_json:
        echo_json(
            {
                "peaks": fitted.peaks,
                "lowest_before": float(off.min()),
                "highest_before": float(off.max()),
                "lowest": fitted.lowest,
                "highest": fitted.highest,
                "file": str(path),
            }
        )
        return
    echo(
        f"\nestimates of these {fitted.peaks} peaks: {off.min():+.0%} to {off.max():+.0%} before, "
        f"{fitted.lowest:+.0%} to {fitted.highest:+.0%} now\n"
        f"plans on this machine use them from now on; to go back, delete {path}"
    )
