"""Other programs: started so that all they start can be ended with them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess


def begun(
    *command: str, stdout: int = subprocess.DEVNULL, stderr: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a program in its own session, so that Ctrl-C in the terminal does not reach it.

    It reads nothing from standard input. Raises what Popen does.
    """
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, start_new_session=True
    )


def end(process: subprocess.Popen[bytes], wait_s: float | None = None) -> None:
    """Kill a program that `begun` started, and what it started; wait for it, at most `wait_s`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(wait_s)
    if process.stdout is not None:
        process.stdout.close()
