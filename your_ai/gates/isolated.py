"""Read a file from outside in a process of its own, whose time and memory are limited.

Parsers of documents may take forever, or all memory, for a file that was made to do that. The
process can write no files, and nothing in a document is run.
"""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import psutil

from your_ai.errors import UserError, first_line
from your_ai.gates.programs import begun, end, python_module
from your_ai.gates.text import shown

MEMORY_BYTES = 1_000_000_000  # of the process, which a Mac does not limit: `ProcessWatch` looks
QUIET_S, WHOLE_S = 30, 1_200  # processor time, in seconds: between two results, and in all
LOOK_EVERY_S = 0.1
RESULT_BYTES = 256_000_000
ADVICE = "save it as plain text"
TOO_SLOW = f"takes too long to read; {ADVICE}"
TOO_LARGE = f"needs more than {MEMORY_BYTES // 10**6:,} MB to be read; split it, or {ADVICE}"


class ProcessWatch(threading.Thread):
    """Ends a process that passes its limits, and knows the reason."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        super().__init__(daemon=True)
        self.process, self.done = process, threading.Event()
        self.reason = ""
        self.results = 0

    def run(self) -> None:
        results, since = 0, 0.0
        with contextlib.suppress(psutil.Error):  # it has ended
            process = psutil.Process(self.process.pid)
            while not self.reason and not self.done.wait(LOOK_EVERY_S):
                times = process.cpu_times()
                spent = times.user + times.system
                if results != self.results:
                    results, since = self.results, spent
                if process.memory_info().rss > MEMORY_BYTES:
                    self.reason = TOO_LARGE
                elif spent - since > QUIET_S:
                    self.reason = TOO_SLOW
            if self.reason:
                self.process.kill()


def run_isolated(module: str, path: Path, *arguments: str) -> Iterator[Any]:
    """Yield what `answer` in a module of this package yields for a file, as JSON has it.

    Raises UserError with the file for what it raises, and if it passes its limits.
    """
    try:
        process = begun(*python_module(module, str(path), *arguments), stdout=subprocess.PIPE)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: no process starts ({error.strerror})") from error
    watch = ProcessWatch(process)
    assert process.stdout is not None
    try:
        watch.start()
        while (line := process.stdout.readline(RESULT_BYTES)).endswith(b"\n"):
            watch.results += 1
            kind, value = json.loads(line)
            if kind == "end":
                return
            if kind == "error":
                raise UserError(value)
            yield value
    finally:
        watch.done.set()
        end(process)
        watch.join()
    raise UserError(f"{path}: {watch.reason or (TOO_LARGE if line else TOO_SLOW)}")


def answer(read: Callable[..., Iterable[Any]]) -> None:
    """Be such a process: read the file that the arguments name, and write the results."""
    sys.dont_write_bytecode = True
    for kind, most in (
        (resource.RLIMIT_CPU, WHOLE_S),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a lower one holds already; a Mac has none
            resource.setrlimit(kind, (most, most))
    path, *arguments = sys.argv[1:]
    last = ["end", None]

    def write(what: list[Any]) -> None:
        sys.stdout.buffer.write(json.dumps(what).encode() + b"\n")
        sys.stdout.buffer.flush()

    try:
        for result in read(Path(path), *arguments):
            write(["result", result])
    except UserError as error:
        last = ["error", str(error)]
    except MemoryError:
        last = ["error", f"{path}: {TOO_LARGE}"]
    except Exception as error:  # parsers of others may raise anything
        reason = shown(f"{type(error).__name__}: {first_line(error)}")
        last = ["error", f"{path}: is damaged, or cannot be read ({reason})"]
    write(last)
