"""Other programs, and other processes of this one: how they are started and ended."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

HAS_SAFE_PATH = sys.version_info >= (3, 11)  # Python's option -P
# What -P does, for Python 3.10: `-c` puts the current folder at the start of the path.
RUN_MODULE = (
    "import sys; del sys.path[0]; import runpy; "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)
OURS: list[bool] = []  # not empty in a process that runs only your_ai


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of this package in a new process of this Python.

    `python -m` alone would import from the current folder first, which is the user's: a file
    there called json.py would run instead of Python's json. The user's own functions are
    found by gates.functions.
    """
    with contextlib.suppress(FileNotFoundError):  # the folder was deleted
        if Path(__file__).resolve().parents[2] == Path.cwd():  # it is that of the package
            return [sys.executable, "-m", module, *arguments]
    if HAS_SAFE_PATH:
        return [sys.executable, "-P", "-m", module, *arguments]
    return [sys.executable, "-c", RUN_MODULE, module, *arguments]


def begun(
    *command: str,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that Ctrl-C in the terminal does not reach it.

    cwd, env: its folder and environment; None: ours. It reads nothing from standard input.
    Raises what Popen does.
    """
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        cwd=cwd,
        env=env,
        start_new_session=True,
    )


def end(process: subprocess.Popen[bytes], wait_s: float | None = None) -> None:
    """Kill a program that `begun` started, and what it started; wait for it, at most `wait_s`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    if process.stdout is not None:
        process.stdout.close()


def claim_process() -> None:
    """Say that this process runs only your_ai: no notebook, and no program of the user."""
    OURS.append(True)


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Search for no garbage while modules are imported, and keep what they made out of searches.

    The training process imports 1,100 modules, which live until it ends. Searching among them
    takes a quarter of the time of the imports, 40 ms of each later collection, and 70 ms at the
    end. In a process that is not ours, this does nothing: what the user has made so far must
    still be found once it is garbage.
    """
    if not OURS or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
