"""`your_ai download`, `models`, `quantize`, `recommend` and `doctor`: commands before a run."""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Bars

from your_ai.commands.options import (
    CommandWithPanels,
    JsonList,
    JsonObject,
    Unasked,
    about_option,
    memory_option,
    show_bytes,
    text_of,
)
from your_ai.config import SFT, coerce
from your_ai.config.requests import MAX_MEMORY
from your_ai.errors import UserError
from your_ai.gates.console import confirm, echo, echo_error, echo_json, open_console
from your_ai.gates.text import counted, size_text
from your_ai.hub.download import DownloadProgress, how_to_continue

if TYPE_CHECKING:
    from your_ai.doctor.machine import MachineInfo


# Show a download on a terminal or in a log file


LINE_PERCENT = 10  # progress between two lines, when there is no bar

Show = Callable[[DownloadProgress], None]


def show(steps: Generator[DownloadProgress, None, Path], console: Console) -> Path:
    """Run a download, with a bar on a terminal and lines elsewhere. Returns the model's folder.

    On KeyboardInterrupt, prints what is kept and how to continue, and raises it again.
    """
    last = None
    try:
        display = bar(console) if console.is_terminal else lines(console)
        with contextlib.closing(steps), display as shown:
            while True:
                try:
                    last = next(steps)
                except StopIteration as end:
                    folder: Path = end.value
                    return folder
                shown(last)
    except KeyboardInterrupt:
        if last is not None:
            text = f"stopped; {how_to_continue(last.name, last.done_bytes)}"
            console.print(text, markup=False, highlight=False)
        raise


@contextlib.contextmanager
def bar(console: Console) -> Iterator[Show]:
    """Show a bar for all bytes, removed at the end. Notes are printed above it."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("", total=None)

        def shown(at: DownloadProgress) -> None:
            if at.note:
                console.print(at.note, markup=False, highlight=False)
            bars.update(
                task, description=doing(at), completed=at.done_bytes, total=at.total_bytes or None
            )

        yield shown


@contextlib.contextmanager
def lines(console: Console) -> Iterator[Show]:
    """Print notes, and a line at each LINE_PERCENT."""
    printed = -1

    def shown(at: DownloadProgress) -> None:
        nonlocal printed
        if at.note:
            console.print(at.note, markup=False, highlight=False, soft_wrap=True)
        tenth = at.done_bytes * 100 // at.total_bytes // LINE_PERCENT if at.total_bytes else -1
        if at.doing == "fetching" and tenth > printed:
            printed = tenth
            console.print(line(at), markup=False, highlight=False, soft_wrap=True)

    yield shown


def doing(at: DownloadProgress) -> str:
    """`fetching 2/5 model.safetensors`."""
    if at.doing == "waiting":
        return "waiting for another download of this model"
    count = f" {min(at.done_files + 1, at.files)}/{at.files}" if at.files else ""
    return f"{at.doing}{count} {at.file}".rstrip()


def line(at: DownloadProgress) -> str:
    """`llama-8b: 1.20 GB of 4.52 GB, 2 of 5 files`."""
    size = f"{size_text(at.done_bytes)} of {size_text(at.total_bytes)}"
    return f"{at.name}: {size}, {at.done_files} of {counted(at.files, 'file')}"


app = typer.Typer(name="models", help="List, verify or remove models.")


def download(
    name: Annotated[
        str, typer.Argument(help="An alias, a repo id on the hub, or a dataset: hf:OWNER/NAME.")
    ],
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit; default: main.")
    ] = None,
    to: Annotated[Path | None, typer.Option(help="Output folder; default: one in models/.")] = None,
) -> None:
    """Download a model or dataset and check its hashes. Continues an interrupted download."""
    from your_ai.data.hub_datasets import PREFIX

    if not name.startswith(PREFIX):
        fetch(name, open_console(), revision, to)
        return
    if revision is not None or to is not None:
        raise UserError(f"{name}: give the revision as {name}@REVISION; --to is for models")
    fetch_dataset(name, open_console())


def fetch(name: str, console: Console, revision: str | None = None, to: Path | None = None) -> Path:
    from your_ai.hub import download as downloads

    return show(downloads.downloading(name, revision, to), console)


def fetch_dataset(name: str, console: Console) -> Path:
    from your_ai.data import hub_datasets

    return show(hub_datasets.downloading(name), console)


def fetch_datasets(data: str, console: Console, yes: bool) -> None:
    """Download the datasets in --data that are missing, after asking the user."""
    from your_ai.data import hub_datasets, sources

    for name in sources.names_in(data):
        if not name.startswith(hub_datasets.PREFIX):
            continue
        try:
            hub_datasets.find_dataset(name)
        except hub_datasets.MissingDataset:
            if not yes:
                if not (sys.stdin.isatty() and sys.stdout.isatty()):
                    raise
                found = hub_datasets.remote_listing(name)
                size = f"{size_text(found.size_bytes)} in {len(found.files)} files"
                if not confirm(f"{name} is not on this machine ({size}); download it?"):
                    raise
            fetch_dataset(name, console)


def find_or_fetch(name: str, console: Console, yes: bool) -> Path:
    """Return the folder of a model; if it is missing, ask the user and download it."""
    from your_ai.hub.find import Missing, find_model

    try:
        return find_model(name)
    except Missing as missing:
        if not yes:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise
            size = f", {missing.size_text}" if missing.size_text else ""
            if not confirm(f"{name} is not on this machine ({missing.repo}{size}); download it?"):
                raise
        return fetch(name, console)


@app.callback(invoke_without_command=True)
def models(
    context: typer.Context,
    online: Annotated[
        bool,
        typer.Option(
            "--online",
            help="Ask the hub instead for the quantized models of mlx-community, and say which "
            "are new since the last time.",
        ),
    ] = False,
    as_json: JsonList = False,
) -> None:
    """List local and known models, and whether this machine can train them."""
    if context.invoked_subcommand is not None:
        return
    from your_ai.doctor import model_list

    if online:
        from your_ai.hub.online import online_models

        found = online_models()
        if as_json:
            echo_json([dataclasses.asdict(model) for model in found])
        else:
            echo_error(model_list.news(found))
            open_console().print(model_list.online_table(found))
        return

    rows = model_list.model_rows()
    if as_json:
        echo_json([dataclasses.asdict(row) for row in rows])
    else:
        console = open_console()
        console.print(model_list.models_table(rows, console.width))


@app.command(cls=CommandWithPanels)
def verify(
    name: Annotated[str, typer.Argument(help="A local model: its name, alias or folder.")],
) -> None:
    """Check a model's files against the hashes from the hub."""
    from your_ai.hub.check import verify as verify_folder
    from your_ai.hub.find import find_model, put_model, repo_of

    put = None if Path(name).is_dir() else put_model(repo_of(name, name))
    folder = put or find_model(name)  # a folder in models/ may be incomplete; report all faults
    verdict = verify_folder(folder)
    for fault in verdict.faults:
        echo(fault)
    if verdict.faults:
        raise UserError(f"{folder}: is damaged; download it again: your_ai download {name}")
    echo(f"{folder}: {verdict.checked}")


@app.command(cls=CommandWithPanels)
def rm(
    names: Annotated[list[str], typer.Argument(help="Models in models/.", metavar="NAME...")],
    yes: Unasked = False,
) -> None:
    """Remove models, or the files of an interrupted download."""
    from your_ai.hub.local import folder_to_remove, remove_model

    folders = [folder_to_remove(name) for name in names]  # before any of them is removed
    if not yes and not confirm(f"remove {', '.join(folder.name for folder in folders)}?"):
        echo("nothing was removed")
        raise typer.Exit(1)
    for folder in folders:
        echo(f"removed {folder.name}, {size_text(remove_model(folder))}")


def quantize(
    source: Annotated[str, typer.Argument(help="A model: an alias, a folder, or an id.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    bits: Annotated[int, typer.Option(help="Bits per weight.")] = 4,
    group_size: Annotated[int, typer.Option(help="Quantization group size.")] = 64,
    max_memory: Annotated[float | None, about_option(MAX_MEMORY)] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Allow a limit above the machine's memory.")
    ] = False,
) -> None:
    """Quantize a model shard by shard: the same result as mlx_lm.convert, with less memory."""
    from your_ai.hub.find import find_model
    from your_ai.modelfiles import quantize

    steps = quantize.quantize(find_model(source), target, bits, group_size, max_memory, force)
    try:
        show_bytes("quantizing", steps, open_console())
    except KeyboardInterrupt:
        echo_error(quantize.work_of(target).interrupted_message)
        raise
    echo(target)


def recommend(
    memory: Annotated[
        float | None, memory_option("Plan for another machine with this much RAM, in GB.")
    ] = None,
    objective: Annotated[str, typer.Option(help=text_of("objective"))] = SFT,
    every: Annotated[
        bool, typer.Option("--all", help="Show every model that fits, not only the best.")
    ] = False,
    as_json: JsonObject = False,
) -> None:
    """Recommend the best model that can be trained on this machine, with its command."""
    from your_ai.doctor import recommend as recommending
    from your_ai.doctor.machine import read_machine

    if memory is None:
        room = recommending.room_here(read_machine())
    else:
        room = recommending.room_of(memory)
    objective = coerce("objective", objective, "--objective")
    found = recommending.recommend(room, objective=objective)
    if as_json:
        echo_json(recommending.recommendations_json(room, found))
    elif every:
        open_console().print(recommending.recommendations_table(room, found))
    else:
        seconds = None
        if found and memory is None:
            from your_ai.session.run_list import seconds_for

            tokens = found[0].batch * found[0].seq_len
            seconds = seconds_for(tokens, found[0].known.repo)
        open_console().print(recommending.recommendation_text(room, found, seconds))


def doctor(
    selftest: Annotated[
        bool, typer.Option("--selftest", help="Train a small model as a test; takes 2 minutes.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option(
            "--report",
            help="Try everything on this machine, in less than 15 minutes, and write what was "
            "measured to a new JSON file, without anything private.",
            metavar="FILE",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer parts of --report, in less than 3 minutes.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(
            help="Time limit of --report, which drops its last parts; default: 14, or 2.9 with "
            "--quick.",
            min=0.1,
        ),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Write the file of --report without asking.")
    ] = False,
    as_json: JsonObject = False,
) -> None:
    """Check this machine: what is missing or risky, and the command that fixes it."""
    from your_ai.doctor import findings as examining
    from your_ai.doctor.machine import read_machine

    if selftest and report is not None:
        raise UserError("--selftest: cannot be combined with --report")
    of_report = {"--quick": quick, "--minutes": minutes is not None, "--yes": yes}
    if report is None and (alone := [name for name, value in of_report.items() if value]):
        raise UserError(f"{alone[0]}: only works with --report; give --report FILE, too")
    if report is not None:
        report_device(report, quick, minutes, yes, as_json)
        return
    machine = read_machine()
    if selftest:
        test_device(machine, as_json)
        return
    found = examining.findings(machine)
    if as_json:
        echo_json(examining.findings_json(machine, found))
    else:
        open_console().print(examining.findings_table(machine, found))


def test_device(machine: MachineInfo, as_json: bool) -> None:
    """Show each check when it is done, then a report; exit status 1 if one failed."""
    from your_ai.doctor import selftest

    lines = []
    for line in selftest.run_selftest():
        lines.append(line)
        if not as_json:
            echo(selftest.text(line))
    if as_json:
        rows = [dataclasses.asdict(line) for line in lines]
        for row in rows:
            row["figures"].pop("folder", None)  # paths are private; so is the store
        shared = dataclasses.asdict(dataclasses.replace(machine, store=None))
        echo_json({"machine": shared, "checks": rows})
    else:
        echo(f"\n{selftest.report(lines, machine)}")
    if selftest.failed(lines):
        raise typer.Exit(1)


def report_device(path: Path, quick: bool, minutes: float | None, yes: bool, as_json: bool) -> None:
    """Show each part when it is done, then what would be written, and write it; exit status 1 if a
    part failed, or if the user does not want it written."""
    from your_ai.doctor import report as reporting
    from your_ai.doctor import selftest
    from your_ai.files import replace_text

    reporting.check_place(path)
    if minutes is None:
        minutes = reporting.QUICK_MINUTES if quick else reporting.MINUTES
    began, lines = time.monotonic(), []
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no process behind
    try:
        for line in reporting.run_report(reporting.parts_of(quick), minutes):
            lines.append(line)
            if not as_json:
                echo(selftest.text(line))
    except KeyboardInterrupt:
        echo_error(f"the report was interrupted; {path} was not written")
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    content = reporting.document(lines, time.monotonic() - began, minutes)
    written = reporting.text_of(content)
    if as_json:
        echo(written, nl=False)
    else:
        echo(f"\n{written}")
        on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
        if on_terminal and not yes and not confirm(f"write this, and nothing else, to {path}?"):
            echo("nothing was written")
            raise typer.Exit(1)
    try:
        replace_text(path, written)
    except OSError as error:
        raise reporting.unwritable(path, error) from error
    if not as_json:
        dropped = f"; dropped: {', '.join(content['dropped'])}" if content["dropped"] else ""
        echo(f"wrote {path}{dropped}")
    if content["failed"]:
        raise typer.Exit(1)
