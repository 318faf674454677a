"""The command line: its commands, and how it reports errors. Heavy imports come late."""

from __future__ import annotations

import atexit
import copy
import errno
import functools
import io
import os
import signal
import sys
from importlib import import_module
from typing import Annotated, Any

import typer

from your_ai import __version__
from your_ai.commands.options import CommandWithPanels
from your_ai.config.other_programs import option_hint
from your_ai.errors import Interrupted, RunError, UserError
from your_ai.gates.console import echo, echo_error, echo_traceback, guard_libraries
from your_ai.gates.programs import claim_process
from your_ai.gates.text import shown
from your_ai.hub.remote import check_environment

UNWRITABLE = (errno.ENOSPC, errno.EIO, errno.EPIPE)

app = typer.Typer(
    name="your_ai",
    help="Fine-tune LLMs with LoRA on Apple Silicon, inside a memory budget.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
) -> None:
    if version:
        echo(f"your_ai {__version__}")
    elif context.invoked_subcommand is None:
        echo(context.get_help())


# The commands in the order in which they are listed, by the module of `your_ai.commands` that has
# their function: only the module of the command that is called is imported. Groups of commands,
# which are no functions, are listed last.
COMMANDS = {
    "init": "beginning",
    "train": "training",
    "plan": "training",
    "tune": "tuning",
    "generate": "generating",
    "chat": "generating",
    "eval": "evaluating.evaluate",
    "score": "evaluating",
    "studio": "serving",
    "serve": "serving",
    "tinker": "serving",
    "mcp": "serving",
    "fuse": "fusing",
    "export": "exporting",
    "import": "exporting.import_adapter",
    "merge": "fusing",
    "push": "exporting",
    "bench": "benching",
    "download": "models",
    "quantize": "models",
    "recommend": "models",
    "doctor": "models",
    "watch": "runs",
    "report": "runs",
    "compare": "evaluating",
    "rollouts": "rollouts",
    "data": "surveying.app",
    "models": "models.app",
    "runs": "runs.app",
}


@functools.cache
def parser(name: str = "") -> typer.core.TyperGroup:
    """The parser of one command, or of all if there is none of that name, made once.

    Importing all commands, and reading their signatures, takes 80 ms.
    """
    found = copy.copy(app)
    found.registered_groups, found.registered_commands = [], []
    if name not in COMMANDS:
        found.registered_commands += app.registered_commands
    for each in [name] if name in COMMANDS else COMMANDS:
        module, _, attribute = COMMANDS[each].partition(".")
        function = getattr(import_module(f"your_ai.commands.{module}"), attribute or each)
        if isinstance(function, typer.Typer):
            found.add_typer(function)
        else:
            found.command(each, cls=CommandWithPanels)(function)
    group = typer.main.get_command(found)
    assert isinstance(group, typer.core.TyperGroup)
    return group


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line on stderr, tracebacks only with --debug."""
    signals: list[int] = []
    if arguments is None:
        claim_process()
        signals = end_as_interrupted()
        atexit.register(ignore_signals)
        arguments = sys.argv[1:]
    debug = "--debug" in arguments
    arguments = [a for a in arguments if a != "--debug"]
    open_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a question mark is better than a crash mid-run
    guard_libraries()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # its messages are about torch
    try:
        check_environment()
        status = parser(next(iter(arguments), ""))(
            args=arguments, standalone_mode=False, prog_name="your_ai"
        )
    except BaseException as error:
        if debug and not isinstance(error, SystemExit):
            echo_traceback()
        status = report(error)
    if signals:
        status = 128 + signals[0]
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # the reader closed the pipe, so the rest of the output is dropped
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(status or 0)


def end_as_interrupted() -> list[int]:
    """Let SIGTERM and a closed terminal end a command as Ctrl-C does, unless they are ignored;
    return a list to which such a signal is added."""
    received: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)
    return received


def ignore_signals() -> None:
    """Let no further signal change the exit status, while Python ends: a closing terminal sends
    several."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def open_streams() -> None:
    """Open an empty stream for each standard stream that the process was started without.

    Otherwise the next file to be opened would get that file descriptor.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            empty = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(empty, empty == number)
            stream = open(empty, "w" if number else "r", encoding="utf-8")  # noqa: SIM115
            setattr(sys, name, stream)


def report(error: BaseException) -> int:
    """Print the error as one line on stderr; return the exit status."""
    if isinstance(error, SystemExit):
        raise error
    if isinstance(error, Interrupted):
        echo_error(f"stopped before the first step; {error.rest}")
        return 128 + error.number
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        echo_error("interrupted")
        return 130
    if isinstance(error, UserError):
        status, text = 2, str(error)
    elif isinstance(error, OSError) and error.errno in UNWRITABLE and error.filename is None:
        status, text = 1, f"the output cannot be written ({error.strerror})"
    elif isinstance(error, RunError):
        status, text = 1, str(error)
    elif hasattr(error, "option_name") and hasattr(error, "possibilities"):  # an unknown option
        status, text = 2, unknown_option(error)
    elif hasattr(error, "format_message") and hasattr(error, "exit_code"):  # from typer's parser
        message = error.format_message().replace(": Value error, ", ": ")  # pydantic's words
        context = getattr(error, "ctx", None)
        asked = "your_ai" if context is None else context.command_path
        status, text = 2, f"{message} (see {asked} --help)"
    else:
        status = 1
        text = f"{type(error).__name__}: {error}; this is a bug in your_ai; --debug shows where"
    echo_error(f"error: {text}")
    return status


def unknown_option(error: Any) -> str:
    """The message for an option that the command does not have."""
    context, name = error.ctx, str(error.option_name)
    parameters = context.command.get_params(context)
    known = [text for p in parameters for text in (*p.opts, *p.secondary_opts) if text[0] == "-"]
    hint = option_hint(context.info_name or "", name, known)
    return f"no such option: {shown(name)}{hint} (see {context.command_path} --help)"
