"""Options that are made of settings and requests, and what else commands share."""

from __future__ import annotations

import functools
import inspect
import math
import os
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from your_ai.config import (
    ABOUT,
    FIELDS,
    PANELS,
    TYPES,
    TrainConfig,
    coerce,
    default_text,
    describe,
    flag,
    gigabytes,
    negated,
    parts_of,
    words_of,
)
from your_ai.config.requests import (
    GIGABYTES,
    LATEST,
    ChatRequest,
    ExportRequest,
    FuseRequest,
    PushRequest,
    RunLike,
    ServeRequest,
    expanded,
)
from your_ai.config.setting import About, settings_of, types_of
from your_ai.config.values import as_texts
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
    "values by layer": "BY_LAYER",
    " or ": "|",
}
PLAIN = (bool, int, float, str, Path)  # types of options
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def names_of_runs(incomplete: str) -> list[str]:
    """The runs in runs/ whose names start so, for the completion of a shell."""
    from your_ai.run.folder import NAME, RUNS

    try:
        names = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete) and NAME.fullmatch(name)]


def text_of(name: str) -> str:
    """The help of a setting."""
    return ABOUT[name].help


def completion_of(words: Sequence[str]) -> Callable[[str], list[str]] | None:
    """The completion of a value in a shell, by one of the words; None if there are none."""

    def completed(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return completed if words else None


def is_listed(name: str) -> bool:
    """Return whether a setting is a list, so that its option may be given several times."""
    return name == "data" or TYPES[name] == tuple[str, ...]


def size_in_gb(text: str) -> float:
    """The value of an option in GB, which may have a unit: 8, 8GB, 500MB."""
    found = gigabytes(text)
    if found is None or found < 0:
        raise typer.BadParameter(f"{text!r} is not a number of GB, such as 8 or 500MB")
    return found


def memory_option(help: str) -> Any:
    """An option for a size in GB."""
    return about_option(About(help, metavar=GIGABYTES))


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


def with_options(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function, which gets a request, or `**flags`, from options in its place.

    `flags` are the settings of `TrainConfig` that were given, not yet of their types.
    """
    requests, signature = expanded(function, options_of)
    parameters = sorted(signature.parameters.values(), key=lambda p: not is_argument(p))
    has_settings = set(FIELDS) <= signature.parameters.keys()

    @functools.wraps(function)
    def command(**given: Any) -> None:
        for name, request in requests.items():
            given[name] = asked(request, {n: given.pop(n) for n in settings_of(request)})
        if has_settings:
            given |= given_settings({name: given.pop(name) for name in FIELDS})
        function(**given)

    command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return command


def asked(request: Any, values: Mapping[str, Any]) -> Any:
    """A request with the values of options; a list may have been given in several options."""
    optional = {each.name for each in fields(request) if each.default is not MISSING}
    given = {n: value for n, value in values.items() if value is not None or n not in optional}
    for name, value in given.items():
        if isinstance(value, list):
            given[name] = as_texts(name, joined(value), flag(name))
    return request(**given)


def options_of(request: Any) -> Iterator[inspect.Parameter]:
    """The arguments and options of a command for the fields of a request, or all settings."""
    if request is TrainConfig:
        yield from map(setting_option, FIELDS)
        return
    defaults = {field.name: field.default for field in fields(request)}
    for name, about in settings_of(request).items():
        kind, default = plain_type(types_of(request)[name]), defaults[name]
        if default is MISSING:
            default = None if kind == str | None else inspect.Parameter.empty
        elif kind == list[str] | None:
            default = None
        names = about.option or ([flag(name)] if default is False else [])
        yield parameter_of(name, kind, default, about_option(about, *names))


def is_argument(parameter: inspect.Parameter) -> bool:
    """Return whether it is given by its place; in help, these come first."""
    return any(isinstance(i, ArgumentInfo) for i in typing.get_args(parameter.annotation))


def parameter_of(name: str, kind: Any, default: Any, info: Any) -> inspect.Parameter:
    """A parameter of a command, which typer makes an argument or an option."""
    only = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, only, default=default, annotation=Annotated[kind, info])


def plain_type(kind: Any) -> Any:
    """The type of an option for a field: a list for texts, words as they are, or one of PLAIN."""
    kinds = typing.get_args(kind) or (kind,)
    if typing.get_origin(kind) is Literal:
        return kind
    if any(typing.get_origin(each) is Sequence for each in (kind, *kinds)):
        return list[str] | None
    found: Any = next((each for each in kinds if each in PLAIN), str)
    return found | None if type(None) in kinds else found


def about_option(about: About, *names: str) -> Any:
    """An option, or an argument, of a command."""
    more: dict[str, Any] = {"help": about.help, "metavar": about.metavar or None}
    if about.metavar == GIGABYTES:
        more["parser"] = size_in_gb
    elif about.bounds is not None:
        most = about.bounds.most
        more |= {"min": about.bounds.least, "max": None if math.isinf(most) else most}
    if about.agents == "run":
        more["autocompletion"] = names_of_runs
    elif about.words:
        more["autocompletion"] = completion_of(about.words)
    return typer.Argument(**more) if about.argument else typer.Option(*names, **more)


def setting_option(name: str) -> inspect.Parameter:
    """The option of a setting, whose value is not read yet; None if it is not given."""
    kind, panel = TYPES[name], PANEL_OF[name]
    help = f"{text_of(name)}{default_text(name)}"
    if kind is bool:
        names = f"{flag(name)}/{negated(name)}"
        info = typer.Option(names, help=help, rich_help_panel=panel)
        return parameter_of(name, bool | None, None, info)
    metavar = describe(kind)
    for words, short in METAVARS.items():
        metavar = metavar.replace(words, short)
    completion = completion_of(words_of(kind))
    info = typer.Option(
        flag(name), help=help, metavar=metavar, autocompletion=completion, rich_help_panel=panel
    )
    return parameter_of(name, list[str] | None if is_listed(name) else str | None, None, info)


# Options of several commands
FileOfSettings = Annotated[
    str | None,
    typer.Option(
        "--config",
        help="YAML file, also one of mlx-lm, or the name of a preset; command-line options "
        "override it.",
        metavar="FILE",
    ),
]
RunOrNewest = Annotated[str | None, about_option(LATEST)]
JsonObject = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
JsonList = Annotated[bool, typer.Option("--json", help="Print one JSON list.")]
DownloadsUnasked = Annotated[
    bool, typer.Option("--yes", help="Download a missing model or dataset without asking.")
]
Unasked = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def echo_note(text: str) -> None:
    echo_error(f"note: {text}")


def run_or_newest(run: RunLike) -> str:
    """Return `run`, or else the newest run with an adapter or a checkpoint, named on stderr.

    Raises UserError if there is no such run.
    """
    from your_ai.session.run_list import newest_trained

    if run is not None:
        return os.fspath(run)
    folder, is_newest = newest_trained()
    which = "the newest" if is_newest else "the newest with an adapter or a checkpoint"
    echo_error(f"run: {folder.name} ({which})")
    return folder.name


def opened(
    request: ChatRequest | ExportRequest | FuseRequest | PushRequest | ServeRequest,
) -> Trained:
    """Open the run of a request, or the newest; print its note for the user on stderr."""
    from your_ai.nets.saved_adapter import open_trained

    trained = open_trained(run_or_newest(request.run), request.checkpoint, request.model)
    if trained.note:
        echo_note(trained.note)
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
