"""The push that `train --push-to` asked for, once the run is done. No mlx here.

It is `your_ai push` in a process of its own: what it needs of memory is not the supervisor's,
and what becomes of it cannot harm the run.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence

from your_ai.errors import RunError, UserError
from your_ai.run import events
from your_ai.run.child import POLL_S, open_log, read_log, told_error
from your_ai.run.events import EventLog
from your_ai.run.exits import DONE
from your_ai.run.folder import RunFolder

PATIENCE_S = 5.0  # with a push that was told to stop


def push_finished(folder: RunFolder, repo: str, received: Sequence[int]) -> None:
    """Push a run that is done, and tell of it among its events.

    received: the stop signals that have come, and come meanwhile; one ends the push. Raises
    RunError where it did not get there, with the command that does it again.
    """
    run = shlex.split(folder.reference)[0]
    command = [sys.executable, "-m", "your_ai", "push", run, repo]
    tell(folder, f"pushing to {repo}")
    try:
        with open_log(folder) as log:
            start = log.seek(0, os.SEEK_END)
            status = push_status(command, log, received)
            output = read_log(log, start)
    except (OSError, UserError) as error:  # of the log, or of starting a process
        status, output, why = None, "", str(error)
    else:
        why = "stopped" if status is None else str(told_error(folder, status, output))
    for line in output.splitlines():
        if line.startswith(("note: ", "pushed to ")):
            tell(folder, line.removeprefix("note: "))
    if status == DONE:
        return
    again = shlex.join(["your_ai", "push", run, repo])
    fault = f"the run is done and its adapter safe, but not pushed: {why}"
    fault += "" if again in why else f"; push it with: {again}"
    tell(folder, fault)
    raise RunError(fault)


def push_status(command: list[str], log: object, received: Sequence[int]) -> int | None:
    """The exit status of a push; None where a signal that came meanwhile ended it."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
    )
    try:
        while process.poll() is None:
            if received:
                return None
            time.sleep(POLL_S)  # in waitpid, a signal that another thread takes is not heard
        return process.returncode
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
        process.kill()
        process.wait()


def tell(folder: RunFolder, text: str) -> None:
    """Leave word among the events, where there is room for it."""
    with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
        log.write(events.Notice(text=text))
