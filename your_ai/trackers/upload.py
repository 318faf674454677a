"""The process of a tracker: follows a run's events and sends them to a service for metrics.

It only reads the run, and the run never waits for it. So a service that is away, or a package
that hangs, raises or exits, can neither stop nor slow the run, nor another tracker. In the
run's folder it writes trackers.log, trackers-NAME.json (how many events the tracker has, so
that a resumed run continues as the same one there), trackers-NAME.lock, and the tracker's own
tensorboard/, wandb/ or swanlog/.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from your_ai.config import nearest
from your_ai.errors import RunError, UserError
from your_ai.files import open_to_append, read_text, replace_text
from your_ai.gates.console import echo
from your_ai.gates.programs import python_module
from your_ai.run import events
from your_ai.run.events import Event, EventLog
from your_ai.run.folder import RunFolder, is_running

# wandb, SwanLab and TensorBoard behind the same two functions


PROJECT = "your_ai"
PACKAGES = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "tensorboardX"}
DONE = "done"  # the reason of a run that finished all its steps
TENSORBOARD_FLUSH_S = 2  # the default of 120 s is too slow to watch


@dataclass(frozen=True)
class Tracker:
    """An open tracker. Both functions may raise whatever the package raises."""

    log: Callable[[TrackerRow], None]
    close: Callable[[str], None]
    """Takes the reason why the run ended, empty if it is not known."""


def open_wandb(folder: RunFolder, identity: str) -> Tracker:
    """wandb's own step may only increase by log calls, so our step is a metric."""
    set_defaults(
        WANDB_PROJECT=PROJECT,
        WANDB_NAME=folder.name,
        WANDB_RUN_ID=identity,
        WANDB_RESUME="allow",
        WANDB_DIR=str(folder.path.resolve()),
        WANDB_CONSOLE="off",  # the output of this process is not the run's
    )
    import wandb

    try:
        # A resumed run may have other settings.
        run = wandb.init(config=asdict(folder.read_config()), allow_val_change=True)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except BaseException:
        wandb.teardown()  # else the next init fails: the id is in use
        raise

    def shown(value: float | TextTable) -> Any:
        if not isinstance(value, TextTable):
            return value
        return wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows])

    def log(row: TrackerRow) -> None:
        run.log({"step": row.step, **{name: shown(value) for name, value in row.values.items()}})

    return Tracker(log, lambda ended: run.finish(exit_code=int(ended != DONE)))


def open_swanlab(folder: RunFolder, identity: str) -> Tracker:
    set_defaults(
        SWANLAB_PROJ_NAME=PROJECT,
        SWANLAB_EXP_NAME=folder.name,
        SWANLAB_RUN_ID=identity,
        SWANLAB_RESUME="allow",
        SWANLAB_LOGDIR=str(folder.path.resolve() / "swanlog"),
        SWANLAB_TERMINAL_PROXY_TYPE="none",  # the output of this process is not the run's
    )
    import swanlab

    config = {n: value for n, value in asdict(folder.read_config()).items() if value is not None}
    run = swanlab.init(config=config, reinit=True)

    def shown(value: float | TextTable) -> Any:
        return swanlab.Text(markdown(value)) if isinstance(value, TextTable) else value

    def log(row: TrackerRow) -> None:
        run.log({name: shown(value) for name, value in row.values.items()}, step=row.step)

    def close(ended: str) -> None:
        if ended:
            run.finish(state="success" if ended == DONE else "aborted")
        else:
            run.finish(state="crashed", error="the run did not say how it ended")

    return Tracker(log, close)


def open_tensorboard(folder: RunFolder, identity: str) -> Tracker:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(
        str(folder.path.resolve() / "tensorboard"), flush_secs=TENSORBOARD_FLUSH_S
    )
    settings = tuple((name, str(value)) for name, value in asdict(folder.read_config()).items())
    writer.add_text("config", markdown(TextTable(("setting", "value"), settings)), 0)

    def log(row: TrackerRow) -> None:
        for name, value in row.values.items():
            if isinstance(value, TextTable):
                writer.add_text(name, markdown(value), row.step)
            else:
                writer.add_scalar(name, value, row.step)

    def close(ended: str) -> None:
        writer.add_text("status", ended or "unknown")
        writer.close()

    return Tracker(log, close)


# identity: the run's id in the tracker, which stays the same when the run is resumed.
OPEN: dict[str, Callable[[RunFolder, str], Tracker]] = {
    "wandb": open_wandb,
    "swanlab": open_swanlab,
    "tensorboard": open_tensorboard,
}


def set_defaults(**variables: str) -> None:
    """Set environment variables that are not set, or empty."""
    os.environ.update({name: v for name, v in variables.items() if not os.environ.get(name)})


def markdown(table: TextTable) -> str:
    """The table as Markdown, each row on one line."""

    def line(cells: tuple[str, ...]) -> str:
        texts = (cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    rule = f"|{' --- |' * len(table.columns)}"
    return "\n".join([line(table.columns), rule, *map(line, table.rows)])


# Events -> what trackers are sent. Pure: the same events give the same rows


GB = 1e9
PEAK_BYTES = "peak_bytes/"  # before the name of a phase, in the metrics of a step


@dataclass(frozen=True)
class TextTable:
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class TrackerRow:
    """The values that one event adds to a tracker."""

    step: int
    values: Mapping[str, float | TextTable]
    """By the name of the metric. Memory is in GB (1e9 bytes)."""


@dataclass(frozen=True, kw_only=True)
class UploadState:
    """Facts of earlier events that later rows need."""

    step: int = 0
    """The highest training step."""
    validated: int = 0
    """The highest step with a validation."""
    actions: int = 0
    """Actions of the memory governor since the run began."""
    freed_bytes: int = 0
    """Bytes that these actions freed."""
    limit_bytes: int | None = None
    ended: str = ""
    """Why the run ended; empty while it continues."""


def after(past: UploadState, event: Event) -> tuple[UploadState, TrackerRow | None]:
    """Return what is known after one more event, and the row for it.

    A step that is repeated after a resume gives no row: trackers need increasing steps, and
    they have its metrics already.
    """
    row = None
    match event:
        case events.Step() if event.step > past.step:
            past = replace(past, step=event.step)
            row = TrackerRow(event.step, metrics_of(past, event))
        case events.Validation() if event.step > past.validated:
            past = replace(past, validated=event.step)
            metrics = {f"validation/{name}": value for name, value in event.metrics.items()}
            loss = {} if event.reward is not None else {"validation/loss": event.loss}
            row = TrackerRow(event.step, loss | metrics)
        case events.ExactMatch():
            share = event.correct / max(1, event.rows)
            values = {"test/exact_match": share}
            if event.reward is not None:
                values["test/reward"] = event.reward
            row = TrackerRow(step_at(event.when, past), values)
        case events.Samples():
            texts = zip(event.prompts, event.answers, event.expected, strict=False)
            rows = tuple(tuple(map(str, row)) for row in texts)
            table = TextTable(("prompt", "answer", "expected"), rows)
            row = TrackerRow(step_at(event.when, past), {f"samples/{event.when}": table})
        case events.Limit():
            past = replace(past, limit_bytes=event.limit_bytes)
        case events.Action():
            freed = past.freed_bytes + max(0, event.before_bytes - event.after_bytes)
            past = replace(past, actions=past.actions + 1, freed_bytes=freed)
        case events.Started():
            past = replace(past, ended="")
        case events.Died(level=None) | events.Finished():
            past = replace(past, ended=event.reason)
    return past, row


def metrics_of(past: UploadState, step: events.Step) -> dict[str, float | TextTable]:
    sizes = {
        "active": step.active_bytes,
        "cache": step.cache_bytes,
        "process": step.process_bytes,
        "highest": step.highest_bytes,
        "limit": past.limit_bytes,
    }
    metrics = {
        f"train/{name}": value
        for name, value in step.metrics.items()
        if not name.startswith(PEAK_BYTES)
    }
    peaks = {
        f"memory/peak_{name.removeprefix(PEAK_BYTES)}_gb": value / GB
        for name, value in step.metrics.items()
        if name.startswith(PEAK_BYTES)
    }
    return {
        "train/loss": step.loss,
        "train/grad_norm": step.grad_norm,
        "train/learning_rate": step.learning_rate,
        "train/tokens_per_s": step.tokens / max(step.seconds, 1e-9),
        "train/step_s": step.seconds,
        "train/epoch": step.epoch,
        **({} if step.read_wait_s is None else {"train/read_wait_s": step.read_wait_s}),
        **metrics,
        **peaks,
        **{f"memory/{name}_gb": size / GB for name, size in sizes.items() if size is not None},
        "governor/actions": past.actions,
        "governor/freed_gb": past.freed_bytes / GB,
    }


def step_at(when: str, past: UploadState) -> int:
    """The step of a measurement `before` or `after` the training."""
    return 0 if when == "before" else past.step


NAMES = tuple(OPEN)
LOG = "trackers.log"
STATE_BYTES = 1 << 20
POLL_S = 1.0
RETRY_S = 300.0  # before a tracker that failed is opened again
LAST_S = 600.0  # to send the rest after the run has ended
NICENESS = 10
MESSAGE_CHARACTERS = 300


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for an unknown name, or one whose package is not installed."""
    for name in names:
        if name not in NAMES:
            raise UserError(
                f"--report-to {name}: no such tracker{nearest(name, NAMES)} "
                f"(choose from {', '.join(NAMES)})"
            )
        package = PACKAGES[name]
        spec = importlib.util.find_spec(package)
        if spec is None or spec.origin is None:  # a folder with this name is not the package
            raise UserError(
                f"--report-to {name}: the package {package} is not installed; "
                f"pip install '.[{name}]'"
            )


@contextlib.contextmanager
def tracked(
    folder: RunFolder, names: Sequence[str], received: Sequence[int] = ()
) -> Iterator[None]:
    """Send the run's events while the block lasts; a notice says if some were not sent.

    received: signals received so far; one more ends the wait for the last events.
    """
    processes = [process for name in names if (process := start(folder, name)) is not None]
    try:
        yield
    finally:
        fault = finish(folder, processes, received=received)
        if fault is not None and folder.events.exists():
            with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
                log.write(events.Notice(text=fault))


def start(folder: RunFolder, name: str) -> subprocess.Popen[bytes] | None:
    """Start the process of a tracker; None if that fails, which trackers.log says."""
    path = folder.path / LOG
    command = python_module("your_ai.trackers.upload", str(folder.path), name)
    try:
        with path.open("ab") as log:
            return subprocess.Popen(
                [*command, "--supervised"],
                stdin=subprocess.PIPE,  # says when the run has ended; closes if this process dies
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
    except OSError as error:
        with contextlib.suppress(OSError), path.open("a", encoding="utf-8") as log:
            log.write(log_line(f"{name}: cannot be started ({error.strerror})"))
        return None


def finish(
    folder: RunFolder,
    processes: Sequence[subprocess.Popen[bytes]],
    patience_s: float = 30.0,
    received: Sequence[int] = (),
) -> str | None:
    """Wait until the trackers have the last events; a message for the user if they do not.

    A process that needs more than `patience_s` seconds is left alone. It ends when all is
    sent, and after LAST_S seconds at the latest.
    """
    for process in processes:
        with contextlib.suppress(OSError):  # it has ended already
            assert process.stdin is not None
            process.stdin.write(b"\n")
            process.stdin.close()
    before, deadline, log = len(received), time.monotonic() + patience_s, folder.path / LOG
    while None in (statuses := {process.poll() for process in processes}):
        if len(received) > before or time.monotonic() > deadline:
            minutes = f"{LAST_S / 60:.0f}"
            return f"the trackers are still sending, for at most {minutes} minutes; see {log}"
        time.sleep(0.02)
    if statuses <= {0} or not log.exists():
        return None
    return f"not everything was sent to the trackers; {log} says why"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m your_ai.trackers.upload")
    parser.add_argument("run", help="folder of the run")
    parser.add_argument("tracker", choices=NAMES)
    parser.add_argument("--supervised", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    folder, name = RunFolder(Path(given.run)), given.tracker
    pipe = None
    if given.supervised:  # the package must not read the pipe as its standard input
        pipe = os.dup(0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status, over = 1, threading.Event()
    threading.Thread(target=watch, args=(folder, name, pipe, over), daemon=True).start()
    with contextlib.suppress(OSError):  # the folder is gone, or cannot be written
        os.nice(NICENESS)
        with open_to_append(folder.path / f"trackers-{name}.lock") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{name}: another process is sending the events of this run; waiting for it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            status = 0 if send(folder, name, over) else 1
    leave(status)


def watch(folder: RunFolder, name: str, pipe: int | None, over: threading.Event) -> None:
    """Set `over` when the run has ended, and leave LAST_S later, whatever the tracker does.

    pipe: gets a byte when the run has ended, and is closed if the supervisor died. None for a
    run without a supervisor.
    """
    if pipe is None or not os.read(pipe, 1):
        while is_running(folder):  # training continues without the supervisor
            time.sleep(POLL_S)
    over.set()
    time.sleep(LAST_S)
    say(f"{name}: did not finish in {LAST_S:.0f} s; {again(folder, name)}")
    leave(1)


def leave(status: int) -> None:
    """Exit without threads and exit handlers, which could hang."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(status)


def send(folder: RunFolder, name: str, over: threading.Event) -> bool:
    """Send the run's events until it is over; whether the tracker has all of them.

    The tracker is opened with the first row, so that a run that never began leaves no trace.
    The packages retry uploads by themselves, but not the start of a run. So a tracker that
    raised is opened again after RETRY_S, and once more when the run is over.
    """
    try:
        kept = json.loads(read_text(state_of(folder, name), STATE_BYTES))
        identity, sent = str(kept["id"]), int(kept["events"])
    except (OSError, ValueError, LookupError, TypeError):  # missing or damaged
        identity, sent = secrets.token_hex(8), 0
    past, count, offset = UploadState(), 0, 0
    waiting: deque[tuple[int, TrackerRow]] = deque()
    tracker: Tracker | None = None
    while folder.path.exists():
        last = over.is_set()
        try:
            records, offset = events.tail(folder.events, offset)
            for record in records:
                past, row = after(past, record.event)
                count += 1
                if row is not None and count > sent:
                    waiting.append((count, row))
            while waiting:
                if tracker is None:
                    save_progress(folder, name, identity, sent)
                    tracker = OPEN[name](folder, identity)
                tracker.log(waiting[0][1])
                sent, _ = waiting.popleft()
                save_progress(folder, name, identity, sent)
            if last:
                if tracker is not None:
                    tracker.close(past.ended)
                return True
            over.wait(POLL_S)
        except BaseException as error:  # packages raise anything, even SystemExit
            fault = " ".join(f"{type(error).__name__}: {error}".split())[:MESSAGE_CHARACTERS]
            then = again(folder, name) if last else f"next try in {RETRY_S:.0f} s"
            say(f"{name}: {fault}; {then}")
            with contextlib.suppress(BaseException):
                if tracker is not None:
                    tracker.close(past.ended)
            tracker = None
            if last:
                return False
            over.wait(RETRY_S)
    return True


def save_progress(folder: RunFolder, name: str, identity: str, sent: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the next row tries again
        replace_text(state_of(folder, name), json.dumps({"id": identity, "events": sent}))


def state_of(folder: RunFolder, name: str) -> Path:
    return folder.path / f"trackers-{name}.json"


def again(folder: RunFolder, name: str) -> str:
    run = shlex.quote(str(folder.path))
    return f"send the rest later: python -m your_ai.trackers.upload {run} {name}"


def log_line(text: str) -> str:
    return f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"


def say(text: str) -> None:
    """Write a line to trackers.log, which is the output of this process."""
    with contextlib.suppress(OSError, ValueError):
        echo(log_line(text), nl=False)


if __name__ == "__main__":
    main()
