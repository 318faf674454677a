"""Commands that the studio began, such as a download or an export: they go on without it.

Each has a folder in studio/jobs/ with the command, its output and, when it has ended, its exit
status. The folder is locked while the command runs, so that it is known which do.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from your_ai.errors import UserError, named_errors
from your_ai.files import open_regular, replace_text
from your_ai.gates.programs import begun, python_module
from your_ai.gates.text import message_line, printable
from your_ai.run.child import DONE, USER, errors_in

JOBS = Path("studio") / "jobs"
COMMAND, OUTPUT, STATUS, LOCK = "command.json", "output.txt", "status", "lock"
LAST_BYTES = 1 << 14  # of the output, that are shown
MOST_KEPT = 50  # jobs; the oldest that have ended are removed
STARTED_S = 5.0


@dataclass(frozen=True)
class StudioJob:
    """A command and how far it is."""

    folder: Path
    title: str
    words: tuple[str, ...]
    """The arguments of your_ai."""
    pid: int
    """Of a running one; else 0."""
    status: int | None
    """Its exit status; None if it runs, or was killed."""
    lines: tuple[str, ...]
    """The last lines of its output."""
    then: str = ""
    """The page that shows what it made."""

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def command(self) -> str:
        return shlex.join(["your_ai", *self.words])

    @property
    def state(self) -> str:
        """running, finished, stopped or failed."""
        if self.pid:
            return "running"
        ended = {DONE: "finished", 128 + signal.SIGINT: "stopped"}
        return "failed" if self.status is None else ended.get(self.status, "failed")

    @property
    def can_continue(self) -> bool:
        """True if the same command may come further: it was stopped, or failed for no mistake."""
        return self.state in ("stopped", "failed") and self.status != USER

    @property
    def fault(self) -> str:
        """The error of a job that failed."""
        errors = errors_in("\n".join(self.lines))
        return message_line(errors[-1]) if errors else f"{self.title}: it ended before its end"

    @property
    def said(self) -> list[str]:
        """The output without the error at its end."""
        lines = list(self.lines)
        while lines and self.state == "failed" and lines[-1].startswith("error: "):
            lines.pop()
        return lines


def begin(title: str, *words: str, then: str = "") -> StudioJob:
    """Begin a command of your_ai. Raises UserError.

    title: what it does, for people. then: the page, below the root, that shows what it made.
    """
    with named_errors(JOBS, "written"):
        JOBS.mkdir(parents=True, exist_ok=True)
        tidy()
        folder = JOBS / f"{time.time_ns():x}"
        folder.mkdir()
        replace_text(folder / COMMAND, json.dumps({"title": title, "words": words, "then": then}))
    process = begun(*python_module("your_ai.studio.jobs", str(folder)))
    until = time.monotonic() + STARTED_S
    while not (job := read(folder)).pid and job.status is None and time.monotonic() < until:
        if process.poll() is not None:
            break
        time.sleep(0.01)
    return job


def found() -> list[StudioJob]:
    """The jobs, the newest first."""
    jobs = []
    for path in sorted(JOBS.glob("*/"), reverse=True):
        with contextlib.suppress(UserError):
            jobs.append(read(path))
    return jobs


def named(name: str) -> StudioJob:
    """The job of this name. Raises UserError."""
    folder = JOBS / name
    if not name.isalnum() or not folder.is_dir():
        raise UserError(f"{name[:40]}: is no job of this studio")
    return read(folder)


def read(folder: Path) -> StudioJob:
    """A job as it is now. Raises UserError if its files cannot be read."""
    pid = holder(folder / LOCK)
    try:
        about = json.loads((folder / COMMAND).read_text(encoding="utf-8"))
        title, words = str(about["title"]), tuple(map(str, about["words"]))
        then = str(about.get("then", ""))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: is no job of this studio") from error
    status = None
    with contextlib.suppress(OSError, ValueError):
        status = int((folder / STATUS).read_text(encoding="utf-8"))
    return StudioJob(folder, title, words, pid, status, last_lines(folder / OUTPUT), then)


def last_lines(path: Path) -> tuple[str, ...]:
    try:
        with open_regular(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ()
    return tuple(printable(line, one_line=True) for line in text.splitlines()[-100:])


def holder(lock: Path) -> int:
    """The process that holds a lock; 0 if none does."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return 0
    except BlockingIOError:
        with contextlib.suppress(OSError, ValueError):
            return int(lock.read_text())
        return 0
    except OSError:
        return 0


def stop(job: StudioJob) -> None:
    """Interrupt a job, as Ctrl-C does. Raises UserError if it has ended."""
    if not job.pid:
        raise UserError(f"{job.title}: has ended")
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGINT)


def tidy() -> None:
    """Remove the oldest jobs that have ended."""
    for job in found()[MOST_KEPT:]:
        if not job.pid:
            shutil.rmtree(job.folder, ignore_errors=True)


def main(folder: Path) -> None:
    """Run the command of a job, and keep its output and exit status."""
    words = json.loads((folder / COMMAND).read_text(encoding="utf-8"))["words"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the command ends by it
    with (folder / LOCK).open("w") as lock, (folder / OUTPUT).open("wb") as output:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write(str(os.getpid()))
        lock.flush()
        process = subprocess.Popen(
            python_module("your_ai", *words),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            preexec_fn=default_interrupt,
        )
        status = process.wait()
        replace_text(folder / STATUS, str(status))


def default_interrupt() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
