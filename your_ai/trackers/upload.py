"""The trackers' process: tails a run's events and sends them to services that keep figures.

It reads the run alone and is read by nobody, so that a service that is away, or a package
that hangs, can neither stop nor slow a run. Of the run's folder it writes trackers.log,
trackers.json (what has been sent, so that a resumed run goes on as the same one there),
trackers.lock, and the trackers' own files: tensorboard/, wandb/ and swanlog/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import math
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from your_ai.config import nearest
from your_ai.errors import RunError, UserError
from your_ai.files import read_text
from your_ai.run import events
from your_ai.run.events import EventLog
from your_ai.run.folder import RunFolder, is_running, locked
from your_ai.trackers.rows import UploadProgress
from your_ai.trackers.sending import again, line, say, send
from your_ai.trackers.services import PACKAGES

NAMES = ("wandb", "swanlab", "tensorboard")
LOG = "trackers.log"
LOCK = "trackers.lock"
STATE = "trackers.json"
STATE_BYTES = 1 << 20
LOOK_S = 0.25  # between two looks at whether the run goes on
LAST_S = 600.0  # to send what there is, once the run has ended,
VANISHED_S = 5.0  # or once its folder is gone
NICENESS = 10
TURNS = (events.Started, events.Finished)


def check(names: Sequence[str]) -> None:
    """Raises UserError for a name that is unknown, or whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise UserError(
                f"--report-to {name}: no such tracker{nearest(name, NAMES)} "
                f"(there are {', '.join(NAMES)})"
            )
        package = PACKAGES[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder of its files is not the package
            raise UserError(
                f"--report-to {name}: the package {package} is not installed; "
                f"pip install 'your_ai[{name}]'"
            )


def start(folder: RunFolder, names: Sequence[str], pid: int) -> subprocess.Popen | None:
    """Start the trackers' process for a run that process `pid` supervises.

    None where there are no names, or where it cannot be started, which trackers.log tells.
    """
    if not names:
        return None
    path = folder.path / LOG
    command = [sys.executable, "-m", "your_ai.trackers.upload", str(folder.path), ",".join(names)]
    # It begins with SIGTERM blocked, so that one of finish() waits until it can be heeded.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        with path.open("ab") as log:
            return subprocess.Popen(
                [*command, "--until", str(pid)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
            log.write(line(f"the trackers cannot be started ({error.strerror})"))
        return None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def finish(
    process: subprocess.Popen | None, patience_s: float = 30.0, received: Sequence[int] = ()
) -> str | None:
    """Let the trackers send the last events; a sentence for the user where they did not.

    Those that need longer than `patience_s` seconds are left to themselves: they end when
    all is sent, at the latest LAST_S seconds after this. received: of signals; one more ends
    the wait.
    """
    if process is None:
        return None
    log = Path(process.args[3]) / LOG  # as start() has it
    process.terminate()
    before, deadline = len(received), time.monotonic() + patience_s
    while (status := process.poll()) is None and time.monotonic() < deadline:
        if len(received) > before:
            break
        time.sleep(0.02)
    if status is None:
        return (
            "the trackers are still sending, and go on for at most "
            f"{LAST_S / 60:.0f} minutes; see {log}"
        )
    if status == 0 or not log.exists():
        return None
    return f"not all was sent to the trackers; {log} says why"


@contextlib.contextmanager
def tracked(
    folder: RunFolder, names: Sequence[str], received: Sequence[int] = ()
) -> Iterator[None]:
    """Send what happens in the run while the block lasts; what was not sent is noted there."""
    process = start(folder, names, os.getpid())
    try:
        yield
    finally:
        fault = finish(process, received=received)
        if fault is not None and folder.events.exists():
            with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
                log.write(events.Notice(text=fault))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m your_ai.trackers.upload")
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("names", help="trackers, separated by commas")
    parser.add_argument("--until", type=int, help="process that supervises the run")
    given = parser.parse_args()
    names = list(dict.fromkeys(given.names.split(",")))
    if not set(names) <= set(NAMES):
        parser.error(f"trackers are {', '.join(NAMES)}")
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    folder = RunFolder(Path(given.run))
    with contextlib.ExitStack() as stack:
        supervisor = find_process(given.until)
        alone = wait_for_turn(stack, folder)
        status = report(folder, names, supervisor, told) if alone else 1
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        os._exit(status)  # a thread that hangs, or a package's last wishes, would hold it here


def wait_for_turn(stack: contextlib.ExitStack, folder: RunFolder) -> bool:
    """Hold the run's trackers; False where an earlier process does, or the folder is gone."""
    deadline = time.monotonic() + LAST_S + VANISHED_S
    told = ""
    while time.monotonic() < deadline and folder.path.exists():
        try:
            stack.enter_context(locked(folder, LOCK))
            return True
        except UserError as error:
            if str(error) != told:
                say(str(error))
            told = str(error)
            time.sleep(LOOK_S)
    return False


def find_process(pid: int | None) -> psutil.Process | None:
    """A process as it is now: one that gets its number later is another."""
    try:
        return None if pid is None else psutil.Process(pid)
    except psutil.NoSuchProcess:
        return None


def report(
    folder: RunFolder, names: Sequence[str], supervisor: psutil.Process | None, told: list[int]
) -> int:
    """Send until the run has ended and all is sent; 0 where every tracker has all of it.

    told: is given what asks to end. Each tracker has a thread, and reads the events by itself.
    """
    kept = load(folder)
    identity = kept.setdefault("id", secrets.token_hex(8))
    progress = {name: restored(kept.get(name)) for name in names}
    over, done = threading.Event(), set[str]()
    threads = {
        name: threading.Thread(
            target=send, args=(folder, name, identity, progress, over, done), daemon=True
        )
        for name in names
    }
    end = size_of(folder.events)
    finished, deadline = False, math.inf
    for thread in threads.values():
        thread.start()
    while any(t.is_alive() for t in threads.values()) and time.monotonic() < deadline:
        with contextlib.suppress(UserError):
            records, end = events.tail(folder.events, end)
            turns = [r.event for r in records if isinstance(r.event, TURNS)]
            finished = isinstance(turns[-1], events.Finished) if turns else finished
        vanished = not folder.path.exists()
        if vanished or told or has_ended(folder, supervisor, finished):
            over.set()
            deadline = min(deadline, time.monotonic() + (VANISHED_S if vanished else LAST_S))
        kept = save(folder, kept, progress)
        time.sleep(LOOK_S)
    save(folder, kept, progress)
    if not folder.path.exists():
        return 0
    for name in (name for name, thread in threads.items() if thread.is_alive()):
        say(f"{name}: was not done in {LAST_S:.0f} s; {again(folder, name)}")
    return 0 if done == set(names) else 1


def has_ended(folder: RunFolder, supervisor: psutil.Process | None, finished: bool) -> bool:
    """Whether nobody works on the run, or will.

    finished: whether it told of its end since this process began.
    """
    gone = supervisor is None or not is_alive(supervisor)
    free = not is_running(folder)
    return (gone and free) or (finished and (gone or free))


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def load(folder: RunFolder) -> dict[str, Any]:
    """What trackers.json holds; nothing where it is missing or damaged."""
    try:
        kept = json.loads(read_text(folder.path / STATE, STATE_BYTES))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) and isinstance(kept.get("id"), str) else {}


def restored(fields: object) -> UploadProgress:
    try:
        return UploadProgress(**fields)  # type: ignore[arg-type]
    except TypeError:  # of another version: the tracker is sent everything
        return UploadProgress()


def save(
    folder: RunFolder, kept: dict[str, Any], progress: dict[str, UploadProgress]
) -> dict[str, Any]:
    """Write trackers.json where it is not as it should be; what it holds."""
    now = {**kept, **{name: dataclasses.asdict(reached) for name, reached in progress.items()}}
    if now == kept:
        return kept
    path = folder.path / STATE
    try:
        path.with_suffix(".tmp").write_text(json.dumps(now), encoding="utf-8")
        os.replace(path.with_suffix(".tmp"), path)
    except OSError:  # a full disk: tried again with the next event
        return kept
    return now


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


if __name__ == "__main__":
    main()
