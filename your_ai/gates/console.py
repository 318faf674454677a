"""The one place where text is printed, so that nobody else's text steers a terminal.

Names in a file, messages of libraries, answers of servers and what a model wrote may hold
escape sequences: they could move the cursor, fill the clipboard, or show a line backwards.
Every command prints through here. Streams that programs read are JSON, which escapes them.
"""

from __future__ import annotations

import json
import logging
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
    """Print a text on standard output."""
    typer.echo(printable(text), nl=nl)


def echo_error(text: object) -> None:
    """Print a message on standard error, as one line."""
    typer.echo(message_line(text), err=True)


def echo_json(value: Any, *, indent: int | None = None) -> None:
    """Print a value for programs, as JSON in ASCII; in one line where there is no indent."""
    typer.echo(json.dumps(value, indent=indent))


def write_json_lines(lines: Iterable[str], file: IO[str]) -> None:
    """Write lines of JSON in ASCII for programs; such lines escape what would steer."""
    file.writelines(map(printable, lines))
    file.flush()


def confirm(question: str) -> bool:
    """Ask the user. Raises typer.Abort where there is no answer."""
    return typer.confirm(message_line(question))


def open_console(*, stderr: bool = False, file: IO[str] | None = None, **options: Any) -> Console:
    """A rich console that shows texts as they are, and nothing that steers a terminal.

    options: as rich.console.Console has them.
    """
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment

    class Printing(Console):
        """Its own control codes alone reach the terminal, not those within texts."""

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield Segment(printable(segment.text), segment.style)

    plain = {"highlight": False, "markup": False, "emoji": False}
    return Printing(stderr=stderr, file=file, **plain, **options)


class PrintableRecord(logging.LogRecord):
    """What a library logs: its messages quote files."""

    def getMessage(self) -> str:
        return message_line(super().getMessage())


def guard_libraries() -> None:
    """Show what libraries log or warn of, and what ends a thread, as everything else."""

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
    """Print the traceback of the exception that is handled, on standard error."""
    typer.echo(printable(traceback.format_exc()), nl=False, err=True)
