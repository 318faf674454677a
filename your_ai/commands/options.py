"""Options that commands share, and the options made from the settings in TrainConfig."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

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
from your_ai.gates.console import echo_error

if TYPE_CHECKING:
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
