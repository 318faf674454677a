"""Options that commands share, and the options made from the settings in TrainConfig."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand

from your_ai.config import (
    ABOUT,
    FIELDS,
    PANELS,
    TYPES,
    coerce,
    default_text,
    describe,
    flag,
    gigabytes,
    negated,
    parts_of,
    words_of,
)
from your_ai.errors import UserError
from your_ai.gates.console import echo_error, open_console
from your_ai.gates.text import now_and_then

if TYPE_CHECKING:
    from rich.console import Console

    from your_ai.modelfiles.shards import WriteProgress
    from your_ai.nets.saved_adapter import Trained


METAVARS = {
    "a whole number": "N",
    "a number": "X",
    "a text": "TEXT",
    "a list of names": "NAMES",
    " or ": "|",
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def names_of_runs(incomplete: str) -> list[str]:
    """The runs in runs/ whose names start so, for the completion of a shell."""
    from your_ai.run.folder import NAME, RUNS

    try:
        names = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete) and NAME.fullmatch(name)]


# For commands that use the adapter of a run.
RUN = typer.Argument(
    help="The run: its name in runs/, or its folder.",
    metavar="RUN",
    autocompletion=names_of_runs,
)
NEWEST = typer.Argument(
    help="The run: its name in runs/, or its folder; default: the newest.",
    metavar="RUN",
    autocompletion=names_of_runs,
)
LATEST = typer.Argument(help="The run; default: the newest.", autocompletion=names_of_runs)
CHECKPOINT = typer.Option(
    help="Use this checkpoint: step-000120, best, or latest; default: the finished adapter."
)
MODEL = typer.Option(help="Folder of the run's model, if it was moved.")


def text_of(name: str) -> str:
    """The help of a setting."""
    return ABOUT[name].help


def choices_of(name: str) -> Callable[[str], list[str]] | None:
    """What completes the value of a setting: its words; None for a setting without words."""
    words = words_of(TYPES[name])

    def completed(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed if words else None


def is_listed(name: str) -> bool:
    """Whether a setting is a list, so that its option may be given several times."""
    return name == "data" or TYPES[name] == tuple[str, ...]


def size_in_gb(text: str) -> float:
    """The value of an option in GB, which may have a unit: 8, 8GB, 500MB."""
    found = gigabytes(text)
    if found is None or found < 0:
        raise typer.BadParameter(f"{text!r} is not a number of GB, such as 8 or 500MB")
    return found


def memory_option(help: str) -> Any:
    """An option for a size in GB."""
    return typer.Option(help=help, parser=size_in_gb, metavar="GB")


MAX_MEMORY = memory_option("Memory limit of this process, in GB.")
# For commands that read rows of a run, or others.
COLUMNS = typer.Option(
    "--columns",
    help=ABOUT["columns"].help.replace(
        "default: guessed from their names", "default: as the run's, or guessed from their names"
    ),
    metavar="NAMES",
)


def columns_of(texts: Sequence[str] | None) -> tuple[str, ...]:
    """The value of --columns, which may be given several times."""
    columns: tuple[str, ...] = coerce("columns", joined(texts or ()), "--columns")
    return columns


def joined(texts: Sequence[str]) -> str:
    """The list of an option that was given several times, or once with commas."""
    return ",".join(texts)


def given_settings(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that were given; the values of an option that was repeated are one list."""
    found = {name: value for name, value in flags.items() if value is not None}
    if found.get("hostfile") == "":
        raise UserError(
            "--hostfile: is empty; name a file, or leave the option out to train on this machine "
            "alone"
        )
    for name in filter(is_listed, found):
        texts = found[name]
        found[name] = (
            joined(texts) if name == "data" else [p for text in texts for p in parts_of(name, text)]
        )
    return found


def option(name: str, declaration: str, kind: Any, help: str, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(declaration, help=help, **more)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def with_settings(*first: inspect.Parameter) -> inspect.Signature:
    """Return the parameters of a command that takes every setting as an option."""
    config = option(
        "config",
        "--config",
        str | None,
        "YAML file, also one of mlx-lm, or the name of a preset; command-line options override it.",
        metavar="FILE",
    )
    parameters = [config, *first]
    for name in FIELDS:
        help = f"{text_of(name)}{default_text(name)}"
        panel = {"rich_help_panel": PANEL_OF[name]}
        if TYPES[name] is bool:
            names = f"{flag(name)}/{negated(name)}"
            parameters.append(option(name, names, bool | None, help, **panel))
        else:
            metavar = describe(TYPES[name])
            for words, short in METAVARS.items():
                metavar = metavar.replace(words, short)
            kind = list[str] | None if is_listed(name) else str | None
            more = {"metavar": metavar, "autocompletion": choices_of(name)}
            parameters.append(option(name, flag(name), kind, help, **more, **panel))
    return inspect.Signature(parameters)


def run_or_newest(run: str | None) -> str:
    """Return `run`, or else the newest run with an adapter or a checkpoint, named on stderr.

    Raises UserError if there is no such run.
    """
    from your_ai.session.run_list import newest_trained

    if run is not None:
        return run
    folder, is_newest = newest_trained()
    which = "the newest" if is_newest else "the newest with an adapter or a checkpoint"
    echo_error(f"run: {folder.name} ({which})")
    return folder.name


def open_trained_with_note(run: str, checkpoint: str | None, model: str | None) -> Trained:
    """Call `open_trained`, and print its note for the user on stderr."""
    from your_ai.nets.saved_adapter import open_trained

    trained = open_trained(run, checkpoint, model)
    if trained.note:
        echo_error(f"note: {trained.note}")
    return trained


# The help of a command: its options in panels, with whole names at any width


NAMES_WIDTH = 0.4  # maximum share of the width for the names of options


class CommandWithPanels(TyperCommand):
    """A command whose help has a panel for each `rich_help_panel` of its parameters."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Print the help; `formatter`, which would collect it as plain text, gets nothing."""
        console = open_console()
        usage = " ".join(self.collect_usage_pieces(ctx))
        console.print(Text.assemble("\nUsage: ", (f"{ctx.command_path} {usage}", "bold"), "\n"))
        console.print(Text(" ".join((self.help or "").split()) + "\n"))
        for title, parameters in self.panels(ctx).items():
            table = Table.grid(padding=(0, 2, 0, 0))
            names_width = max(12, int(NAMES_WIDTH * console.width))
            table.add_column(style="cyan", overflow="fold", max_width=names_width)
            table.add_column(overflow="fold")
            for names, text in parameters:
                table.add_row(Text(names), Text(text))
            console.print(Panel(table, title=Text(title), title_align="left", border_style="dim"))

    def panels(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """(names, help) of each parameter, by the title of its panel."""
        found: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:  # it is hidden
                continue
            is_argument = parameter.param_type_name == "argument"
            own = getattr(parameter, "rich_help_panel", None)
            title = own or ("Arguments" if is_argument else "Options")
            found.setdefault(title, []).append(record)
        return found


# How far a command is: bytes written, rows read, layers done


def show_bytes(doing: str, steps: Iterable[WriteProgress], console: Console) -> None:
    """Run `steps`, with a progress bar on a terminal; the bar disappears at the end."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    doing_column = TextColumn("{task.description}", markup=False)
    columns = (doing_column, BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        for step in steps:
            bar.update(task, completed=step.done_bytes, total=step.total_bytes)


def rows_read() -> Callable[[str, int], None]:
    """A function of (file, rows) that prints a line on stderr every few seconds."""
    return now_and_then(echo_error, lambda name, rows: f"reading {name}: {rows:,} rows")


def layers_done(doing: str) -> Callable[[int, int], None]:
    """A function of (done, total) that prints a line on stderr every few seconds."""
    return now_and_then(echo_error, lambda done, total: f"{doing}: {done:,} of {total:,} layers")
