"""Shows a run to the user, and passes on the user's keys and signals. Does not import mlx.

`your_ai train` starts a supervisor in a new session and shows the run. `your_ai watch` shows a
run that continues without it, and changes the run only if a key asks for it.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console

from your_ai.config import TrainConfig
from your_ai.dashboard.live import (
    CHECKPOINT_KEY,
    CONTINUE_KEY,
    KEYS_GAP,
    PAUSE_KEY,
    Follower,
    Keyboard,
    following,
    keyboard,
    style_for,
)
from your_ai.errors import Interrupted, RunError, UserError, without_run
from your_ai.gates.console import echo_error
from your_ai.gates.programs import python_module, quick_imports
from your_ai.run import child, events, requests
from your_ai.run.child import DONE, FAILED, POLL_S, Child
from your_ai.run.events import Event
from your_ai.run.folder import RESTART_S, RunFolder, discard, is_running
from your_ai.run.stopping import SIGNALS, recorded_signals, stop_signals
from your_ai.session.computer import looked_after
from your_ai.session.finished import already_finished

KEYS = KEYS_GAP.join(("q detach", CHECKPOINT_KEY, PAUSE_KEY))

FRAME_S = 0.1  # between two frames of a replay
LONGEST_GAP_S = 2.0  # a replay shortens longer gaps to this
PATIENCE = 3  # signals that the supervisor receives before it is killed


@dataclass
class Terminal:
    """The screen and the keyboard, in use while this process is in the foreground."""

    follower: Follower
    keys: Keyboard
    to_suspend: bool = False

    def read(self, wait_s: float = POLL_S) -> str:
        """Return the keys that are pressed within `wait_s` seconds."""
        if self.to_suspend:
            self.to_suspend = False
            self.suspend()
        if self.keys.were_taken:
            self.follower.close()
            self.keys.before = []
        drawn = self.follower.style in ("screen", "notebook")
        if drawn and (self.keys.fd is None or self.keys.terminal is not None):
            self.follower.open()
            self.keys.take()
        return self.keys.read(wait_s)

    def suspend(self) -> None:
        """Stop until the shell continues this job; without a shell, do not stop."""
        self.put_away()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)
        signal.signal(signal.SIGTSTP, handler)

    def put_away(self) -> None:
        self.follower.close()
        self.keys.give_back()


@contextlib.contextmanager
def terminal(follower: Follower) -> Iterator[Terminal]:
    """Yield the terminal; restore it at the end, and while Ctrl-Z suspends the process."""
    with keyboard() as keys:
        found = Terminal(follower, keys)
        if keys.fd is None:
            follower.keys = ""

        def note(*_: object) -> None:
            found.to_suspend = True

        before = signal.getsignal(signal.SIGTSTP)
        is_main = threading.current_thread() is threading.main_thread()  # others get no signals
        if is_main and before != signal.SIG_IGN:
            signal.signal(signal.SIGTSTP, note)
        try:
            yield found
        finally:
            found.put_away()
            if is_main:
                signal.signal(signal.SIGTSTP, before)


def supervisor_command(folder: RunFolder, settings: TrainConfig) -> list[str]:
    """The arguments of the process that supervises a run."""
    command = python_module("your_ai.session.supervisor", str(folder.path))
    return [*command, "--settings", json.dumps(dataclasses.asdict(settings))]


def train(
    folder: RunFolder,
    settings: TrainConfig,
    console: Console,
    *,
    detach: bool = False,
    as_json: bool = False,
) -> int:
    """Train under a supervisor and show the run; return the exit status of `your_ai train`.

    detach: leave when training has begun, or waits for memory.
    Raises the errors that the run's processes reported, and Interrupted for a signal before
    training began.
    """
    style = "lines" if detach and not as_json else style_for(console, as_json)
    follower = Follower(folder.events, console, style, KEYS, resumes=True)
    offset = events.end_of(folder.events)
    command = supervisor_command(folder, settings)
    with recorded_signals() as received, child.open_log(folder) as log:
        start = log.seek(0, os.SEEK_END)
        with child.started(command, folder, log) as supervisor, terminal(follower) as shown:
            while supervisor.process.poll() is None:
                supervisor.pass_on(received, PATIENCE)
                follower.catch_up()
                pressed = shown.read()
                has_begun = follower.begun or follower.failure is not None
                has_begun |= follower.state.is_waiting
                if not received and ("q" in pressed or (detach and has_begun)):
                    shown.put_away()
                    return detached(supervisor, folder, None if as_json else console)
                handle_keys(pressed, folder)
            follower.catch_up(at_once=True)
        status = supervisor.process.returncode
        recorded = [record.event for record in events.tail(folder.events, offset)[0]]
        output = child.read_log(log, start)
    follower.report_failure()
    is_signal = status - 128 in SIGNALS
    if received and status > 0 and not (is_signal or recorded or child.errors_in(output)):
        raise Interrupted(received[0])  # while Python started, which then ends with status 1
    return shown_end(folder, follower, status, recorded, output)


def shown_end(
    folder: RunFolder, follower: Follower, status: int, recorded: Sequence[Event], output: str
) -> int:
    """Show how a run ended whose supervisor did; return the exit status of `your_ai train`.

    recorded: its events since it was started or resumed. output: what its processes printed.
    Raises the error that they reported.
    """
    number = status - 128 if status > 0 else -status  # of a signal that it handled, or died of
    if number in SIGNALS:
        return stopped(folder, follower, number, recorded)
    is_done = any(isinstance(e, events.Finished) and e.reason == "done" for e in recorded)
    if status == DONE or (status == FAILED and is_done):  # the push failed; raised below
        follower.print_summary(folder.reference)
    if status == DONE:
        return DONE
    raise supervisor_error(folder, status, output)


def stopped(folder: RunFolder, follower: Follower, number: int, recorded: Sequence[Event]) -> int:
    """Print how a run ended after a signal; return the exit status.

    recorded: its events since it was started or resumed. Raises Interrupted if it had not begun.
    """
    if not events.of(events.Started, recorded):
        raise Interrupted(number)
    if events.of(events.Finished, recorded):
        follower.print_summary(folder.reference)
    else:
        follower.leave(folder.reference)
    return 128 + number


def supervisor_error(folder: RunFolder, status: int, output: str) -> Exception:
    """The error of a supervisor that did not end with a signal to stop."""
    if status >= 0:
        return child.reported_error(folder, status, output)
    return child.Lost(
        f"{folder.path}: the supervisor was killed by {signal.Signals(-status).name}; the "
        f"training process saves and ends; continue with: your_ai train --resume "
        f"{folder.reference}"
    )


def train_and_show(
    folder: RunFolder,
    settings: TrainConfig,
    console: Console,
    *,
    new: bool,
    detach: bool = False,
    as_json: bool = False,
) -> int:
    """Train and show the run's events; return the exit status.

    new: the folder was created for this call, and is deleted if training never begins.
    """
    if not new and (done := already_finished(folder, settings)):
        echo_error(f"note: {done}")
        return DONE
    try:
        if settings.supervise:
            return train(folder, settings, console, detach=detach, as_json=as_json)
        return train_here(folder, settings, console, as_json)
    except child.Lost:
        raise  # keep the folder, which says why
    except BaseException as error:
        if new and not folder.has_work:
            discard(folder.path)
            if isinstance(error, RunError):
                raise without_run(error) from error
        elif new and isinstance(error, Interrupted) and not folder.checkpoints.exists():
            rest = f"what there is stays: your_ai train --resume {folder.reference}"
            raise Interrupted(error.number, rest) from error
        raise


def train_here(
    folder: RunFolder, settings: TrainConfig, console: Console, as_json: bool = False
) -> int:
    """Train in this process, e.g. under a debugger; return the exit status."""
    from your_ai.publish.after_training import push_finished
    from your_ai.trackers.upload import tracked

    follower = Follower(folder.events, console, style_for(console, as_json), resumes=True)
    names = () if is_running(folder) else settings.report_to
    if not is_running(folder):
        requests.withdraw_all(folder)
    push_error = None
    with looked_after(folder, settings), following(follower):
        with tracked(folder, names), stop_signals() as stop:
            with quick_imports():  # MLX takes a second to load
                from your_ai.training.process import train_launched

            stop.on_second = lambda: follower.leave(folder.reference)
            status = train_launched(folder, settings, stop)
        if status == DONE and settings.push_to:
            with recorded_signals() as received:
                try:
                    push_finished(folder, settings.push_to, received)
                except RunError as error:  # raised after the summary
                    push_error = error
    follower.report_failure()
    follower.print_summary(folder.reference)
    if push_error is not None:
        raise push_error
    return status


def train_as_rank(settings: TrainConfig) -> int:
    """Train a rank other than 0 that `mlx.launch` started; rank 0 shows the run."""
    with stop_signals() as stop:
        from your_ai.training.process import train_launched

        return train_launched(None, settings, stop)


def detached(supervisor: Child, folder: RunFolder, console: Console | None) -> int:
    """Detach: let the run continue by itself."""
    supervisor.release()
    run = folder.reference
    if console is None:
        return DONE
    for line in (
        "Detached. Training continues in the background.",
        f"  your_ai watch {run}",
        f"  your_ai runs stop {run}",
    ):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return DONE


def handle_keys(pressed: str, folder: RunFolder) -> None:
    """Carry out the requests of the keys, if the run's folder can be written."""
    with contextlib.suppress(UserError):
        if "c" in pressed:
            requests.ask(folder, requests.SAVE)
        if pressed.count("p") % 2 and not requests.withdraw(folder, requests.PAUSE):
            requests.ask(folder, requests.PAUSE)


def watch(folder: RunFolder, console: Console, *, as_json: bool = False) -> int:
    """Show a run until it ends or the user leaves; a run that has ended is shown once.

    Raises RunError if its folder is deleted meanwhile.
    """
    style = style_for(console, as_json)
    follower = Follower(folder.events, console, style, KEYS.replace("detach", "leave"))
    seen_at, was_over = time.monotonic(), not is_running(folder)
    with recorded_signals() as received, terminal(follower) as shown:
        while not received and follower.failure is None and not follower.is_cut_off:
            follower.catch_up()
            if is_running(folder):
                seen_at = time.monotonic()
            elif follower.state.finished or time.monotonic() - seen_at > RESTART_S:
                break
            pressed = shown.read()
            if "q" in pressed:
                return DONE
            handle_keys(pressed, folder)
        follower.catch_up(at_once=True)
    if follower.is_cut_off:
        raise RunError(f"{folder.path}: was deleted while it was watched")
    if was_over and follower.state.finished is not None:
        follower.print_screen()
    return ended(folder, follower, received)


def replay(folder: RunFolder, console: Console, speed: float, *, as_json: bool = False) -> int:
    """Replay the events of a run, `speed` times as fast; long gaps are shortened."""
    records, end = events.tail(folder.events)
    style = style_for(console, as_json)
    follower = Follower(folder.events, console, style, from_start=True)
    follower.offset = end
    clock = records[0].time if records else 0.0
    shown_until, last, paused = 0, time.monotonic(), False
    with recorded_signals() as received, terminal(follower) as shown:
        while shown_until < len(records) and not received and follower.failure is None:
            pressed = shown.read(FRAME_S)
            if "q" in pressed:
                return DONE
            paused ^= pressed.count("p") % 2 == 1
            follower.keys = f"q leave   {CONTINUE_KEY if paused else PAUSE_KEY}"
            last, passed = time.monotonic(), time.monotonic() - last
            if not paused:
                clock += passed * speed
                clock = max(clock, records[shown_until].time - LONGEST_GAP_S * speed)
            due = bisect.bisect_right(records, clock, shown_until, key=lambda r: r.time)
            follower.show(records[shown_until:due], clock)
            shown_until = due
    return ended(folder, follower, received)


def ended(folder: RunFolder, follower: Follower, received: list[int]) -> int:
    """Print the summary after watching; return the exit status."""
    follower.report_failure()
    if received:
        return DONE if received[0] == signal.SIGINT else 128 + received[0]
    follower.print_summary(folder.reference)
    return DONE if follower.failure is None else FAILED
