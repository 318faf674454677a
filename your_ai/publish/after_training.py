"""The push of `train --push-to`, after the run has finished. It loads no MLX.

It runs `your_ai push` in a separate process, so that the push takes no memory of the supervisor
and cannot harm the run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import time
from collections.abc import Sequence
from typing import BinaryIO

from your_ai.errors import RunError, UserError
from your_ai.gates.programs import python_module
from your_ai.run import events
from your_ai.run.child import DONE, POLL_S, open_log, read_log, reported_error
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder

PATIENCE_S = 5.0  # before a push that was asked to stop is killed


def push_finished(folder: RunFolder, repo: str, received: Sequence[int]) -> None:
    """Push a finished run, and report the push in the run's events.

    received: stop signals, also those that arrive later; one ends the push. Raises RunError if
    the push failed, with the command that repeats it.
    """
    run = shlex.split(folder.reference)[0]
    command = python_module("your_ai", "push", run, repo)
    notice(folder, f"pushing to {repo}")
    try:
        with open_log(folder) as log:
            start = log.seek(0, os.SEEK_END)
            status = push_status(command, log, received)
            output = read_log(log, start)
    except (OSError, UserError) as error:  # from the log, or from starting a process
        status, output, why = None, "", str(error)
    else:
        why = "stopped" if status is None else str(reported_error(folder, status, output))
    for line in output.splitlines():
        if line.startswith(("note: ", "pushed to ")):
            notice(folder, line.removeprefix("note: "))
    if status == DONE:
        return
    again = shlex.join(["your_ai", "push", run, repo])
    fault = f"the run is finished and its adapter is safe, but it was not pushed: {why}"
    fault += "" if again in why else f"; push it with: {again}"
    notice(folder, fault)
    raise RunError(fault)


def push_status(command: list[str], log: BinaryIO, received: Sequence[int]) -> int | None:
    """The exit status of a push; None if a signal ended it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        while (status := process.poll()) is None:
            if received:
                return None
            time.sleep(POLL_S)  # waitpid would miss a signal that another thread handles
        return status
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()


def notice(folder: RunFolder, text: str) -> None:
    """Add a notice to the run's events if the disk has room for it."""
    with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
        log.write(events.Notice(text=text))
