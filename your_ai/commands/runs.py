"""`your_ai watch`, `your_ai runs` and `your_ai report`: look at runs, stop or remove them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from your_ai.commands.options import (
    CommandWithPanels,
    JsonList,
    RunOrNewest,
    Unasked,
    joined,
    names_of_runs,
    with_options,
)
from your_ai.config.requests import ReportRequest
from your_ai.errors import UserError
from your_ai.gates.console import confirm, echo, echo_json, open_console
from your_ai.gates.text import counted, size_text

if TYPE_CHECKING:
    from your_ai.run.folder import RunFolder


app = typer.Typer(name="runs", help="List, stop or remove runs.", invoke_without_command=True)


def watch(
    run: RunOrNewest = None,
    replay: Annotated[bool, typer.Option("--replay", help="Replay a run from its start.")] = False,
    speed: Annotated[float, typer.Option(help="Replay speed; 1 = real time.", min=0.01)] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="New events as JSON lines.")] = False,
    web: Annotated[
        bool, typer.Option("--web", help="Show the run in a browser of this machine.")
    ] = False,
    port: Annotated[
        int | None,
        typer.Option(help="Port for --web; default: a free one from 8765.", min=1, max=65535),
    ] = None,
) -> None:
    """Watch a run in progress, or show one that has ended. Leaving does not affect the run."""
    from your_ai.run import folder as folders
    from your_ai.session import attach, run_list

    if web and (replay or as_json):
        raise UserError(f"--web: shows a page; leave out {'--replay' if replay else '--json'}")
    if port is not None and not web:
        raise UserError("--port: is the port of a page; add --web")
    folder = run_list.newest() if run is None else folders.find(run)
    if web:
        from your_ai.serving.live_page import serve_page

        raise typer.Exit(serve_page(folder, port))
    if replay:
        raise typer.Exit(attach.replay(folder, open_console(), speed, as_json=as_json))
    raise typer.Exit(attach.watch(folder, open_console(), as_json=as_json))


@with_options
def report(request: ReportRequest) -> None:
    """Write an HTML report of a run in one file: curves, memory, plans, samples."""
    from your_ai import api

    echo(api.report(**vars(request)))


@app.callback()
def runs(context: typer.Context, as_json: JsonList = False) -> None:
    """List the runs in ./runs, newest first."""
    from your_ai.session import run_list

    if context.invoked_subcommand is not None:
        return
    found = run_list.run_rows()
    if as_json:
        echo_json(run_list.rows_as_json(found))
    elif found:
        console = open_console()
        console.print(run_list.runs_table(found, time.time(), console.width))
    else:
        echo("no runs here; start one: your_ai train")


@app.command(cls=CommandWithPanels)
def rm(
    names: Annotated[
        list[str],
        typer.Argument(help="The runs to remove.", metavar="RUN...", autocompletion=names_of_runs),
    ],
    yes: Unasked = False,
) -> None:
    """Remove runs with their checkpoints and adapters."""
    from your_ai.run import folder as folders

    remove([folders.find(name) for name in names], yes)


@app.command(cls=CommandWithPanels)
def prune(
    states: Annotated[
        list[str] | None,
        typer.Option(
            help="Only runs with this status: died, stopped, finished, imported or merged; several "
            "separated by commas. [default: died,stopped]",
            metavar="NAMES",
        ),
    ] = None,
    older_than: Annotated[
        float, typer.Option(help="Only runs unchanged for this many days.", min=0.0)
    ] = 0.0,
    yes: Unasked = False,
) -> None:
    """Remove runs that died or were stopped, after asking."""
    from your_ai.run.folder import RUNS, RunFolder
    from your_ai.session import run_list

    named = joined(["died", "stopped"] if states is None else states).split(",")
    wanted = [state.strip() for state in named if state.strip()]
    found = run_list.prunable(run_list.run_rows(), wanted, older_than * run_list.DAY_S)
    if not found:
        echo("nothing to remove")
    else:
        remove([RunFolder(RUNS / row.name) for row in found], yes)


@app.command(cls=CommandWithPanels)
def stop(
    run: Annotated[str, typer.Argument(help="The run to stop.", autocompletion=names_of_runs)],
) -> None:
    """Stop a run after its current step, and save it, as Ctrl-C does."""
    from your_ai.run import folder as folders
    from your_ai.session import run_list

    folder = folders.find(run)
    run_list.stop(folder)
    echo(f"{folder.name}: stopping after this step; your_ai watch {folder.reference}")


def remove(folders: list[RunFolder], yes: bool) -> None:
    """Remove runs after asking the user; report at the end which could not be removed."""
    from your_ai.session import run_list

    for folder in folders:
        echo(f"  {folder.path}")
    runs_text = counted(len(folders), "run")
    if not yes and not confirm(f"remove {runs_text}, with checkpoints and adapters?"):
        echo("nothing was removed")
        raise typer.Exit(1)
    removed, freed, faults = [], 0, []
    for folder in folders:
        try:
            freed += run_list.remove(folder)
            removed.append(folder)
        except UserError as error:
            faults.append(error)
    echo(f"removed {counted(len(removed), 'run')}, {size_text(freed)}")
    if faults:
        raise UserError("; ".join(map(str, faults)))
