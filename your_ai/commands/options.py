"""Options that commands share, and the options made from the settings in TrainConfig."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.config import FIELDS, OBJECTIVES_WITH, TYPES, default_text, describe, flag, negated
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
PREFERENCES = "Preferences: only with an --objective other than sft"  # a panel of the help


# For commands that use the adapter of a run.
RUN = typer.Argument(help="The run: its name in runs/, or its folder.", metavar="RUN")
NEWEST = typer.Argument(
    help="The run: its name in runs/, or its folder; default: the newest.", metavar="RUN"
)
CHECKPOINT = typer.Option(
    help="Use this checkpoint: step-000120, best, or latest; default: the finished adapter."
)
MODEL = typer.Option(help="Folder of the run's model, if it was moved.")


def text_of(name: str) -> str:
    """The help of a setting."""
    return FIELDS[name].metadata["help"]


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
        panel = {"rich_help_panel": PREFERENCES} if name in OBJECTIVES_WITH else {}
        if TYPES[name] is bool:
            names = f"{flag(name)}/{negated(name)}"
            parameters.append(option(name, names, bool | None, help, **panel))
        else:
            metavar = describe(TYPES[name])
            for words, short in METAVARS.items():
                metavar = metavar.replace(words, short)
            parameters.append(option(name, flag(name), str | None, help, metavar=metavar, **panel))
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
