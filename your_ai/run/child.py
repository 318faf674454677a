"""Start a child process of a run: pipe, signals and log on the parent's side.

`your_ai train` starts a supervisor, which starts the training process. The output of both goes
to process.log. The child's side is run.parent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from your_ai.errors import AGAIN, RunError, UserError, named_errors
from your_ai.files import open_to_append
from your_ai.run.folder import RunFolder

# Prevent orphans: end this process when the process that started it is gone


GRACE_S = 30.0  # time to finish a step and save
PARENT_POLL_S = 0.5
RELEASE = b"r"  # sent by a parent that ends and wants its child to continue


def leave(grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to this process, and exit by force after `grace_s` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def watch_parent(
    fd: int,
    on_death: Callable[[], None] = leave,
    on_release: Callable[[], None] = lambda: None,
) -> None:
    """Call `on_death` in a thread when the other end of the pipe `fd` is closed.

    The kernel closes that end however the parent dies, even by SIGKILL. If the parent wrote
    RELEASE first, `on_release` is called instead. Raises OSError if `fd` is not open.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        if os.read(fd, 1) == RELEASE:
            on_release()
        else:
            on_death()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def watch_pid(pid: int, on_death: Callable[[], None] = leave) -> None:
    """Call `on_death` in a thread when the process `pid` of this user is gone.

    For a process that is not its child, so that no pipe connects them.
    """

    def watch() -> None:
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                on_death()
                return
            time.sleep(PARENT_POLL_S)

    threading.Thread(target=watch, name="parent", daemon=True).start()


# Exit statuses of the training process for its supervisor, and of the supervisor for its parent


DONE = 0
FAILED = 1  # a RunError; its text is the last line `error: ...` of the log
USER = 2  # a UserError; its text is there too
CRASHED = 70  # an exception that is a bug of this program; its traceback is in the log
OUT_OF_MEMORY = 71  # an out-of-memory error that the process could not recover from
RESTART = 75  # the memory governor asks for a restart; everything is saved
LOST = 76  # only of the supervisor: training died, and the supervisor gave up
PEER_LOST = 77  # only of a run on several ranks: another rank died; the log has a line LOST


LOG = "process.log"
LOG_TAIL_BYTES = 1 << 16
LINE_BYTES = 4096  # of an error
POLL_S = 0.05


class Lost(RunError):
    """A process of the run ended without an error message; keep its folder and log."""


@dataclass
class Child:
    """A started process."""

    process: subprocess.Popen[bytes]
    pipe: BinaryIO
    passed_on: int = 0
    """How many of the received signals were sent to it."""

    def pass_on(self, received: Sequence[int], patience: int) -> None:
        """Send new signals to the child; after `patience` signals, further ones kill it."""
        for number in received[self.passed_on :]:
            self.process.send_signal(number if self.passed_on < patience else signal.SIGKILL)
            self.passed_on += 1

    def release(self) -> None:
        """Let the child continue when this process ends."""
        with contextlib.suppress(BrokenPipeError):  # the child has already ended
            self.pipe.write(RELEASE)


@contextlib.contextmanager
def started(
    arguments: list[str],
    folder: RunFolder,
    log: BinaryIO,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    """Start a child in its own session, so that Ctrl-C reaches it only through this process.

    The child has the read end of a pipe, `--parent-fd`, which closes when this process ends or
    leaves the block.

    environment: variables to add to those of this process.
    Raises RunError if the child cannot be started.
    """
    reader, writer = os.pipe()
    with open(writer, "wb", buffering=0) as pipe:  # the child does not inherit it
        try:
            with open(reader, "rb"):
                process = subprocess.Popen(
                    [*arguments, "--parent-fd", str(reader)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reader,),
                    start_new_session=True,
                    env=None if environment is None else {**os.environ, **environment},
                )
        except OSError as error:
            raise RunError(
                f"{folder.path}: a process of the run cannot be started ({error.strerror}); "
                f"continue with: your_ai train --resume {folder.reference}"
            ) from error
        yield Child(process, pipe)


def reported_error(folder: RunFolder, status: int, output: str) -> Exception:
    """Turn the output of a failed child into an exception to raise."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if errors := errors_in(output):
        kinds = {USER: UserError, LOST: Lost}
        return kinds.get(status, RunError)(errors[-1])
    if not lines and is_full(folder):  # the child could not write its error
        return RunError(
            f"{folder.path}: cannot be written ({os.strerror(errno.ENOSPC)}); free some disk "
            f"space, {AGAIN}"
        )
    last = f" ({lines[-1]})" if lines else ""
    return Lost(
        f"{folder.path}: a process of the run ended with status {status}{last}; its output is "
        f"in {folder.path / LOG}"
    )


def is_full(folder: RunFolder) -> bool:
    """Return whether the disk of a run has no room for a line."""
    try:
        return shutil.disk_usage(folder.path).free < LINE_BYTES
    except OSError:
        return False


def errors_in(output: str) -> list[str]:
    """The errors that a child printed, without the word error."""
    lines = [line.strip() for line in output.splitlines()]
    return [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]


def open_log(folder: RunFolder) -> BinaryIO:
    """Open the log for appending and reading. Raises UserError if that fails."""
    with named_errors(folder.path / LOG, "written"):
        return open_to_append(folder.path / LOG)


def read_log(log: BinaryIO, start: int) -> str:
    """Read the end of the log after byte `start`, even if the folder was moved."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(start, size - LOG_TAIL_BYTES))
    return log.read().decode(errors="replace")
