"""The parent of the training process: owns the terminal, outlives it, and starts it again.

The two share the run folder alone: the child writes events, and what it prints goes to
process.log. No mlx here: the memory that counts is the child's.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from your_ai.dashboard.live import Follower
from your_ai.errors import RunError, UserError
from your_ai.run import events
from your_ai.run.events import Event
from your_ai.run.exits import CRASHED, DONE, FAILED, OUT_OF_MEMORY, RESTART, USER
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import SIGNALS, Interrupted

LOG = "process.log"
MAX_IN_A_ROW = 3  # deaths without a new checkpoint, or restarts without a step
LAST_SAMPLES = 5
NEAR_LIMIT = 0.85  # of the limit: what dies above it died of memory, as far as one can tell
CRITICAL_PRESSURE = 4
SMALLER_PLAN = "smaller_plan"  # the governor's action
LOG_TAIL_BYTES = 1 << 16
POLL_S = 0.05


class Lost(RunError):
    """The training process ended and did not say why: its folder and log are to be kept."""


@dataclass(frozen=True, kw_only=True)
class Life:
    """One training process: what its events told, and how it ended.

    status: as Popen has it, negative for a signal; level: of its last plan; smaller: whether
    it asked for the next smaller plan after that; moved: whether it did a step; used: the
    most of its limit that its last samples show (1.0: all), None where unknown; critical:
    whether one of them shows critical pressure; finished: whether it told of its end.
    In this life or before: step: the last one done; checkpoint: the newest, None before the
    first; began: whether training began.
    """

    status: int = DONE
    level: int = 0
    smaller: bool = False
    moved: bool = False
    used: float | None = None
    critical: bool = False
    finished: bool = False
    step: int = 0
    checkpoint: int | None = None
    began: bool = False

    @property
    def near_limit(self) -> bool:
        return self.used is not None and self.used > NEAR_LIMIT


@dataclass(frozen=True)
class Decision:
    """level: of the plan to go on under, None to give up; reason: what happened, in words."""

    level: int | None
    reason: str


def supervise(
    folder: RunFolder,
    follower: Follower,
    *,
    settings: str = "",
    command: list[str] | None = None,
) -> int:
    """Train the run in `folder` to its end, through deaths; the exit status of `your_ai train`.

    settings: those of the run as JSON, where they may not be config.yaml's; command: what to
    start instead of `python -m your_ai.train`. Raises UserError or RunError
    as the training process told, Lost where it does not get on, and Interrupted for a stop
    signal before training began. For the main thread, as signals are.
    """
    command = command or [sys.executable, "-m", "your_ai.train"]
    _, offset = events.tail(folder.events)
    life, lives, level = Life(), [], 0
    with open_log(folder) as log, noted_signals() as received:
        while not received:
            log_start = log.seek(0, os.SEEK_END)
            arguments = [*command, str(folder.path), "--level", str(level)]
            arguments += ["--settings", settings] if settings else []
            status = run_child(arguments, folder, log, received)
            records, offset = events.tail(folder.events, offset)
            life = next_life(life, level, status, [record.event for record in records])
            if status == DONE:
                return DONE
            if status in (FAILED, USER):
                raise told_error(folder, status, read_log(log, log_start))
            if stop_signal(status) is not None:
                break

            decision = decide(lives, life, told_to_stop=bool(received))
            if status != RESTART or decision.level is None:
                died = events.Died(step=life.step, reason=decision.reason, level=decision.level)
                with contextlib.closing(events.EventLog(folder.events)) as event_log:
                    event_log.write(died)
            if decision.level is None and not received:
                raise Lost(
                    f"{folder.path}: training died: {decision.reason}; its output is in "
                    f"{folder.path / LOG}; go on with: your_ai train --resume {folder.reference}"
                )
            lives.append(life)
            level = decision.level

    number = stop_signal(life.status) or received[0]
    if not life.began:
        raise Interrupted(number)
    if not life.finished:
        with contextlib.suppress(Exception):  # the terminal may be what went away
            follower.leave(folder.reference)
    return 128 + number


def run_child(
    arguments: list[str], folder: RunFolder, log: BinaryIO, received: Sequence[int]
) -> int:
    """Run a training process to its end, and pass on signals; its status as Popen has it.

    The first signal lets it save, the second leave at once, the third kills it. It has a
    session of its own, so that a terminal's Ctrl-C reaches it through here alone, and holds
    the read end of a pipe that tells it when this process is gone.
    """
    reader, writer = os.pipe()
    with open(writer, "wb"):  # which the child does not inherit
        try:
            with open(reader, "rb"):
                child = subprocess.Popen(
                    [*arguments, "--parent-fd", str(reader)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(reader,),
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(
                f"{folder.path}: the training process cannot be started ({error.strerror}); "
                f"go on with: your_ai train --resume {folder.reference}"
            ) from error
        passed_on = 0
        while child.poll() is None:
            for number in received[passed_on:]:
                child.send_signal(number if passed_on < 2 else signal.SIGKILL)
                passed_on += 1
            time.sleep(POLL_S)  # in waitpid, a signal that another thread takes is not heard
    return child.returncode


def next_life(before: Life, level: int, status: int, told: Sequence[Event]) -> Life:
    """The life that came after `before`, begun at `level`, from the events of its time."""

    def of(*kinds: type) -> list[Event]:
        return [event for event in told if isinstance(event, kinds)]

    limits, plans, starts = of(events.Limit), of(events.Planned), of(events.Started)
    turns = of(events.Planned, events.Action)
    done = of(events.Step, events.Skipped)
    samples = of(events.Step)[-LAST_SAMPLES:]
    gauges = [gauge for s in samples for gauge in (s.process_bytes, s.highest_bytes)]
    held = [gauge for gauge in gauges if gauge is not None]
    resumed = [start.step for start in starts if start.step > 0]
    saved = [before.checkpoint, *resumed, *(e.step for e in of(events.Checkpoint))]
    return Life(
        status=status,
        level=plans[-1].level if plans else level,
        smaller=bool(turns) and getattr(turns[-1], "kind", None) == SMALLER_PLAN,
        moved=bool(done),
        used=max(held) / max(1, limits[-1].limit_bytes) if held and limits else None,
        critical=any((s.pressure or 0) >= CRITICAL_PRESSURE for s in samples),
        finished=bool(of(events.Finished)),
        step=(done or starts or [before])[-1].step,
        checkpoint=max((step for step in saved if step is not None), default=None),
        began=before.began or bool(starts),
    )


def decide(lives: Sequence[Life], life: Life, told_to_stop: bool) -> Decision:
    """What follows on a life that ended in a death, or in the wish to be started again."""
    if life.status == RESTART:
        return after_restart(lives, life)
    if told_to_stop:
        return Decision(None, f"{describe(life)}; not started again, since it was told to stop")
    return after_death([earlier for earlier in lives if earlier.status != RESTART], life)


def after_restart(lives: Sequence[Life], life: Life) -> Decision:
    """As the life wished, unless the last three all wished it without having done a step."""
    last = [*lives, life][-MAX_IN_A_ROW:]
    if len(last) == MAX_IN_A_ROW and all(x.status == RESTART and not x.moved for x in last):
        return Decision(None, f"{describe(life)}, {MAX_IN_A_ROW} times in a row")
    return Decision(life.level + life.smaller, describe(life))


def after_death(deaths: Sequence[Life], death: Life) -> Decision:
    """Go on, under a smaller plan if it died of memory; give up at the third without progress."""
    what = describe(death)
    if sum(earlier.checkpoint == death.checkpoint for earlier in deaths) + 1 >= MAX_IN_A_ROW:
        return Decision(None, f"{what}; {MAX_IN_A_ROW} deaths in a row without a new checkpoint")
    of_memory = death.status == OUT_OF_MEMORY or death.near_limit or death.critical
    smaller = death.smaller or of_memory
    where = "starting again"
    if death.checkpoint is not None:
        where = f"going on from step {death.checkpoint}"
    under = " under the next smaller plan" if smaller else ""
    return Decision(death.level + smaller, f"{what}; {where}{under}")


def describe(life: Life) -> str:
    """`killed by SIGKILL after step 17, with 95% of its limit in use`."""
    ends = {
        CRASHED: "failed by a fault of your_ai",
        OUT_OF_MEMORY: "ran out of memory",
        RESTART: "asked to be restarted",
        **{-n: f"killed by {n.name}" for n in signal.Signals},
    }
    how = ends.get(life.status, f"ended with status {life.status}")
    where = f" after step {life.step}" if life.moved else " before its first step"
    share = f", with {life.used:.0%} of its limit in use" if life.near_limit else ""
    pressure = ", under critical memory pressure" if life.critical else ""
    return how + where + share + pressure


def stop_signal(status: int) -> int | None:
    """The stop signal that a child's status tells of: heeded or, as it came early, deadly."""
    return next((int(n) for n in SIGNALS if status in (128 + n, -n)), None)


def told_error(folder: RunFolder, status: int, output: str) -> Exception:
    """What a child that ended with FAILED or USER said, to be raised."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if told:
        return UserError(told[-1]) if status == USER else RunError(told[-1])
    last = f" ({lines[-1]})" if lines else ""
    return Lost(
        f"{folder.path}: the training process ended with status {status}{last}; its output is "
        f"in {folder.path / LOG}"
    )


def open_log(folder: RunFolder) -> BinaryIO:
    """The log, to append to and read. Raises UserError where it cannot be."""
    try:
        return open(folder.path / LOG, "a+b", buffering=0)
    except OSError as error:
        raise UserError(f"{folder.path / LOG}: cannot be written ({error.strerror})") from error


def read_log(log: BinaryIO, start: int) -> str:
    """The end of what was written since byte `start`, wherever the folder is by now."""
    size = log.seek(0, os.SEEK_END)
    log.seek(max(start, size - LOG_TAIL_BYTES))
    return log.read().decode(errors="replace")


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The stop signals that come until the block ends; then the handlers are as they were."""
    received: list[int] = []
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup has it
    heard = [n for n in SIGNALS if not (n == signal.SIGHUP and ignored)]
    old_handlers = {n: signal.signal(n, lambda number, _: received.append(number)) for n in heard}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
