"""The only module that prints, so that untrusted text cannot control the terminal.

File names, messages of libraries, responses of servers and generated text may contain escape
sequences, which could move the cursor, fill the clipboard, or reverse a line. Every command prints
through this module. Output for programs is JSON, which escapes them.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import traceback
import warnings
from collections.abc import Iterable
from typing import IO, TYPE_CHECKING, Any

import typer

from your_ai.gates.text import message_line, printable

if TYPE_CHECKING:
    from rich.console import Console


def echo(text: object = "", *, nl: bool = True) -> None:
    """Print text to stdout."""
    typer.echo(printable(text), nl=nl)


def echo_error(text: object) -> None:
    """Print a message to stderr, as one line."""
    typer.echo(message_line(text), err=True)


def echo_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value as ASCII JSON, for programs. Without an indent, it is one line.

    JSON has no NaN and no infinity: they are null.
    """
    try:
        text = json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        text = json.dumps(without_nan(value), indent=indent)
    typer.echo(text)


def without_nan(value: Any) -> Any:
    """A value for JSON with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    return [*map(without_nan, value)] if isinstance(value, list | tuple) else value


def write_json_lines(lines: Iterable[str], file: IO[str]) -> None:
    """Write lines of ASCII JSON, for programs. JSON already escapes control characters."""
    file.writelines(map(printable, lines))
    file.flush()


def confirm(question: str) -> bool:
    """Ask the user a yes-or-no question. Raises typer.Abort if there is no answer."""
    return typer.confirm(message_line(question))


def open_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> Console:
    """Open a rich console that shows text literally and removes terminal control characters.

    options: those of rich.console.Console.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Printing(Console):
        """A console whose own control codes reach the terminal, but none from the text."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    return Printing(stderr=stderr, file=file, highlight=False, markup=False, emoji=False, **options)


def ask(question: str, default: str) -> str:
    """Ask the user for a line of text. Raises typer.Abort if there is no answer."""
    return str(typer.prompt(message_line(question), default=default))


class PrintableRecord(logging.LogRecord):
    """A log record of a library, made printable, since such messages quote files."""

    def getMessage(self) -> str:
        return message_line(super().getMessage())


def guard_libraries() -> None:
    """Make log messages and warnings of libraries, and errors of threads, printable too."""

    def warning_text(message: Any, category: type[Warning], *_: Any, **__: Any) -> str:
        return f"{category.__name__}: {message_line(message)}\n"

    def show_thread_error(given: threading.ExceptHookArgs) -> None:
        if not issubclass(given.exc_type, SystemExit):
            lines = traceback.format_exception(given.exc_type, given.exc_value, given.exc_traceback)
            typer.echo(printable("".join(lines)), nl=False, err=True)

    logging.setLogRecordFactory(PrintableRecord)
    warnings.formatwarning = warning_text
    threading.excepthook = show_thread_error


def echo_traceback() -> None:
    """Print the traceback of the exception being handled, to stderr."""
    typer.echo(printable(traceback.format_exc()), nl=False, err=True)
