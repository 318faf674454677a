"""A run's processes, from the side of the one that starts the next: pipe, signals, log.

`your_ai train` starts a supervisor, which starts the training process. What either prints
goes to process.log. run.parent is the other side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from your_ai.errors import RunError, UserError
from your_ai.files import open_to_append
from your_ai.run.exits import LOST, USER
from your_ai.run.folder import RunFolder
from your_ai.run.parent import RELEASE

LOG = "process.log"
LOG_TAIL_BYTES = 1 << 16
POLL_S = 0.05


class Lost(RunError):
    """A process of the run ended and did not say why: its folder and log are to be kept."""


@dataclass
class Child:
    """A started process, and how many of the signals that came it was sent."""

    process: subprocess.Popen[bytes]
    pipe: BinaryIO
    passed_on: int = 0

    def pass_on(self, received: Sequence[int], patience: int) -> None:
        """Send it the signals it has not had; those that come after `patience` of them kill it."""
        for number in received[self.passed_on :]:
            self.process.send_signal(number if self.passed_on < patience else signal.SIGKILL)
            self.passed_on += 1

    def release(self) -> None:
        """Let it go on when this process ends."""
        with contextlib.suppress(BrokenPipeError):  # it has ended just now
            self.pipe.write(RELEASE)


@contextlib.contextmanager
def started(arguments: list[str], folder: RunFolder, log: BinaryIO) -> Iterator[Child]:
    """A child with a session of its own, so that a terminal's Ctrl-C reaches it through here.

    It holds the read end of a pipe, `--parent-fd`, that tells it when this process is gone
    or leaves the block. Raises RunError where it cannot be started.
    """
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as pipe:  # which the child does not inherit
        try:
            with open(reader, "rb"):
                process = subprocess.Popen(
                    [*arguments, "--parent-fd", str(reader)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reader,),
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(
                f"{folder.path}: a process of the run cannot be started ({error.strerror}); "
                f"go on with: your_ai train --resume {folder.reference}"
            ) from error
        yield Child(process, pipe)


def told_error(folder: RunFolder, status: int, output: str) -> Exception:
    """What a child that ended with a failure said, to be raised."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        kinds = {USER: UserError, LOST: Lost}
        return kinds.get(status, RunError)(told[-1])
    last = f" ({lines[-1]})" if lines else ""
    return Lost(
        f"{folder.path}: a process of the run ended with status {status}{last}; its output is "
        f"in {folder.path / LOG}"
    )


def open_log(folder: RunFolder) -> BinaryIO:
    """The log, to append to and read. Raises UserError where it cannot be."""
    try:
        return open_to_append(folder.path / LOG)
    except OSError as error:
        raise UserError(f"{folder.path / LOG}: cannot be written ({error.strerror})") from error


def read_log(log: BinaryIO, start: int) -> str:
    """The end of what was written since byte `start`, wherever the folder is by now."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(start, size - LOG_TAIL_BYTES))
    return log.read().decode(errors="replace")
