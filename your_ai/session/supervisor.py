"""The parent of the training process, which restarts it when it dies.

The two processes share only the run folder. The child writes events; the output of both goes to
process.log. This module does not import mlx, because the memory limit is for the child.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from your_ai.config import TrainConfig, build
from your_ai.errors import RunError, UserError
from your_ai.gates.console import echo_error, echo_traceback
from your_ai.publish.after_training import push_finished
from your_ai.run import events, requests
from your_ai.run.child import LOG, POLL_S, Lost, open_log, read_log, reported_error, started
from your_ai.run.events import Event, EventLog, Step
from your_ai.run.exits import CRASHED, DONE, FAILED, LOST, OUT_OF_MEMORY, RESTART, USER
from your_ai.run.folder import SUPERVISOR_LOCK, RunFolder, find, locked
from your_ai.run.parent import watch_parent
from your_ai.run.stopping import SIGNALS, Interrupted, recorded_signals
from your_ai.trackers.upload import tracked

MAX_IN_A_ROW = 3  # deaths without a new checkpoint, or restarts without a step
LAST_SAMPLES = 5
NEAR_LIMIT = 0.85  # a process that dies above this fraction of the limit probably ran out of memory
CRITICAL_PRESSURE = 4
SMALLER_PLAN = "smaller_plan"  # the governor's action


@dataclass(frozen=True, kw_only=True)
class Life:
    """One training process: what its events say, and how it ended."""

    status: int = DONE
    """Exit status as Popen gives it, negative for a signal."""
    level: int = 0
    """Level of its last plan."""
    smaller: bool = False
    """Whether it asked for the next smaller plan after its last plan."""
    moved: bool = False
    """Whether it did a step."""
    used: float | None = None
    """Highest fraction of the limit in its last samples; None if unknown."""
    critical: bool = False
    """Whether its last samples show critical memory pressure."""
    finished: bool = False
    """Whether it wrote its last event."""
    step: int = 0
    """Last step done, by this process or an earlier one."""
    checkpoint: int | None = None
    """Newest checkpoint, of this process or an earlier one; None before the first."""
    began: bool = False
    """Whether training began, in this process or an earlier one."""

    @property
    def near_limit(self) -> bool:
        return self.used is not None and self.used > NEAR_LIMIT


@dataclass(frozen=True)
class Decision:
    """How to continue after a process has ended."""

    level: int | None
    """Level of the plan to continue with; None to give up."""
    reason: str
    """What happened, in words."""


def supervise(
    folder: RunFolder,
    received: Sequence[int],
    settings: str = "",
    command: list[str] | None = None,
) -> int:
    """Train the run in `folder`, with restarts; return the exit status of `your_ai train`.

    received: stop signals so far; new ones are appended while this runs.
    settings: the settings of the run as JSON, if they may differ from config.yaml.
    command: what to start instead of `python -m your_ai.training.train`.
    Raises the UserError or RunError that the training process reported, Lost if it makes no
    progress, and Interrupted for a stop signal before training began.
    """
    command = command or [sys.executable, "-m", "your_ai.training.train"]
    _, offset = events.tail(folder.events)
    life, lives, level = Life(), [], 0
    with open_log(folder) as log:
        while not received:
            log_start = log.seek(0, os.SEEK_END)
            arguments = [*command, str(folder.path), "--level", str(level)]
            arguments += ["--settings", settings] if settings else []
            status = run_child(arguments, folder, log, received)
            records, offset = events.tail(folder.events, offset)
            life = summarize_process(life, level, status, [record.event for record in records])
            if status == DONE:
                return DONE
            if status in (FAILED, USER):
                raise reported_error(folder, status, read_log(log, log_start))
            if stop_signal(status) is not None:
                break

            decision = decide(lives, life, told_to_stop=bool(received))
            if status != RESTART or decision.level is None:
                died = events.Died(step=life.step, reason=decision.reason, level=decision.level)
                with contextlib.closing(EventLog(folder.events)) as event_log:
                    event_log.write(died)
            if decision.level is None and not received:
                raise Lost(
                    f"{folder.path}: training died: {decision.reason}; its output is in "
                    f"{folder.path / LOG}; continue with: your_ai train --resume {folder.reference}"
                )
            lives.append(life)
            level = decision.level

    number = stop_signal(life.status) or received[0]
    if not life.began:
        raise Interrupted(number)
    return 128 + number


def run_child(
    arguments: list[str], folder: RunFolder, log: BinaryIO, received: Sequence[int]
) -> int:
    """Run a training process to its end and pass on signals; return its status as in Popen.

    On the first signal it saves and ends; on the second it ends immediately; the third kills it.
    """
    with started(arguments, folder, log) as child:
        while child.process.poll() is None:
            child.pass_on(received, patience=2)
            time.sleep(POLL_S)  # a blocking wait would miss signals that another thread receives
    return child.process.returncode


def summarize_process(before: Life, level: int, status: int, written: Sequence[Event]) -> Life:
    """Summarize the process after `before`, started at `level`, from the events it wrote."""

    def of(*kinds: type) -> list[Event]:
        return [event for event in written if isinstance(event, kinds)]

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
    """Decide how to continue after a process that died or requested a restart."""
    if life.status == RESTART:
        return after_restart(lives, life)
    if told_to_stop:
        return Decision(None, f"{describe(life)}; not restarted, because a stop was requested")
    return after_death([earlier for earlier in lives if earlier.status != RESTART], life)


def after_restart(lives: Sequence[Life], life: Life) -> Decision:
    """Restart as requested, unless the last three processes all did so without a step."""
    last = [*lives, life][-MAX_IN_A_ROW:]
    if len(last) == MAX_IN_A_ROW and all(x.status == RESTART and not x.moved for x in last):
        return Decision(None, f"{describe(life)}, {MAX_IN_A_ROW} times in a row")
    return Decision(life.level + life.smaller, describe(life))


def after_death(deaths: Sequence[Life], death: Life) -> Decision:
    """Restart, with a smaller plan if memory ran out; give up at the third without progress."""
    what = describe(death)
    if sum(earlier.checkpoint == death.checkpoint for earlier in deaths) + 1 >= MAX_IN_A_ROW:
        return Decision(None, f"{what}; {MAX_IN_A_ROW} deaths in a row without a new checkpoint")
    of_memory = death.status == OUT_OF_MEMORY or death.near_limit or death.critical
    smaller = death.smaller or of_memory
    where = "restarting"
    if death.checkpoint is not None:
        where = f"continuing from step {death.checkpoint}"
    under = " with the next smaller plan" if smaller else ""
    return Decision(death.level + smaller, f"{what}; {where}{under}")


def describe(life: Life) -> str:
    """Say how a process ended: `killed by SIGKILL after step 17, with 95% of its limit in use`."""
    ends = {
        CRASHED: "failed because of a bug in your_ai",
        OUT_OF_MEMORY: "ran out of memory",
        RESTART: "requested a restart",
        **{-n: f"killed by {n.name}" for n in signal.Signals},
    }
    how = ends.get(life.status, f"ended with status {life.status}")
    where = f" after step {life.step}" if life.moved else " before its first step"
    share = f", with {life.used:.0%} of its limit in use" if life.near_limit else ""
    pressure = ", under critical memory pressure" if life.critical else ""
    return how + where + share + pressure


def stop_signal(status: int) -> int | None:
    """Return the stop signal that ended a child, whether it handled the signal or died of it."""
    return next((int(n) for n in SIGNALS if status in (128 + n, -n)), None)


def settings_of(folder: RunFolder, settings: str) -> TrainConfig:
    return build(json.loads(settings), "--settings") if settings else folder.read_config()


def main() -> None:
    """Supervise one run; errors are one line on stderr, and give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m your_ai.session.supervisor")
    parser.add_argument("run")
    parser.add_argument("--settings", default="", help="all settings, as JSON")
    parser.add_argument("--parent-fd", type=int, help="a pipe that closes when the parent ends")
    given = parser.parse_args()
    with recorded_signals() as received:
        sys.exit(supervise_run(given.run, given.settings, given.parent_fd, received))


def supervise_run(run: str, settings: str, parent_fd: int | None, received: Sequence[int]) -> int:
    """Supervise a run for the process at the other end of the pipe; return the exit status."""

    def stop() -> None:
        if not received:  # a second signal would end it without saving
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        if parent_fd is not None:
            watch_parent(parent_fd, stop)
        folder = find(run)
        config = settings_of(folder, settings)
        with locked(folder, SUPERVISOR_LOCK):
            requests.withdraw_all(folder)
            with tracked(folder, config.report_to, received), recorded_errors(folder):
                status = supervise(folder, received, settings)
            if status == DONE and config.push_to:
                push_finished(folder, config.push_to, received)
            return status
    except (UserError, RunError) as error:
        echo_error(f"error: {error}")
        return {UserError: USER, Lost: LOST}.get(type(error), FAILED)
    except Interrupted as interrupted:
        return 128 + interrupted.number
    except Exception:
        echo_traceback()
        return CRASHED


@contextlib.contextmanager
def recorded_errors(folder: RunFolder) -> Iterator[None]:
    """Write the error that ends a run to its events, since nobody may see the output."""
    try:
        yield
    except (UserError, RunError) as error:
        steps = [r.event.step for r in events.tail(folder.events)[0] if type(r.event) is Step]
        died = events.Died(step=max(steps, default=0), reason=str(error), level=None)
        if type(error) is not Lost and folder.events.exists():
            with contextlib.suppress(RunError), contextlib.closing(EventLog(folder.events)) as log:
                log.write(died)
        raise


if __name__ == "__main__":
    main()
