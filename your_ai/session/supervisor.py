"""The parent of the training process, which restarts it when it dies or no longer gets on.

The two processes share only the run folder. The child writes events; the output of both goes to
process.log. This module does not import mlx, because the memory limit is for the child.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO

from your_ai.config import TrainConfig, build
from your_ai.errors import REPORT, Interrupted, RunError, UserError
from your_ai.gates.console import echo_error, echo_traceback
from your_ai.gates.programs import python_module
from your_ai.hub.find import find_model
from your_ai.publish.after_training import push_finished
from your_ai.run import events, host, requests
from your_ai.run.child import (
    CRASHED,
    DONE,
    FAILED,
    LOG,
    LOST,
    OUT_OF_MEMORY,
    PEER_LOST,
    POLL_S,
    RESTART,
    USER,
    Child,
    Lost,
    open_log,
    read_log,
    reported_error,
    watch_parent,
)
from your_ai.run.events import Event, Step
from your_ai.run.folder import SUPERVISOR_LOCK, RunFolder, find, locked
from your_ai.run.stopping import SHOW_STACK, SIGNALS, recorded_signals
from your_ai.session.computer import looked_after
from your_ai.session.machines import (
    LAUNCHER,
    Machines,
    check_programs,
    check_reachable,
    machines_of,
    paths_to_sync,
    sync_hosts,
)
from your_ai.session.ranks import (
    check_processes,
    failed_in,
    is_users_error,
    lost_in,
    refused_in,
    started_group,
)
from your_ai.session.stalls import STARTING, Patience, StallWatch, patience_of
from your_ai.trackers.upload import tracked

MAX_IN_A_ROW = 3  # deaths without a new checkpoint, or restarts without a step
# A process that dies of these is broken: your_ai's fault or MLX's, not the machine's.
FAULTS = (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGABRT)
LAST_SAMPLES = 5
NEAR_LIMIT = 0.85  # a process that dies above this fraction of the limit probably ran out of memory
CRITICAL_PRESSURE = 4
SMALLER_PLAN = "smaller_plan"  # the governor's action
STACK = b"most recent call first"  # in the heading of each thread's stack


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
    stalled: str = ""
    """How it no longer got on, if it was ended for that."""
    rank: str = ""
    """Of a run on several ranks: the one that died, if it is not known as `lost`."""
    lost: str = ""
    """Which rank was lost and how, if that ended all."""

    @property
    def near_limit(self) -> bool:
        return self.used is not None and self.used > NEAR_LIMIT


@dataclass(frozen=True)
class Decision:
    """The plan to continue with after a process has ended."""

    level: int | None
    """Level of the plan to continue with; None to give up."""
    reason: str
    """What happened, in words."""


def supervise(
    folder: RunFolder,
    received: Sequence[int],
    settings: str = "",
    command: list[str] | None = None,
    patience: Patience | None = None,
    awake: bool = False,
    config: TrainConfig | None = None,
) -> int:
    """Train the run in `folder`, with restarts; return the exit status of `your_ai train`.

    received: stop signals so far; new ones are appended while this runs.
    settings: the settings of the run as JSON, if they may differ from config.yaml.
    command: what to start instead of `python -m your_ai.training`.
    patience: how long a process may take until its next event.
    config: the settings of the run, for how many processes and hosts it has; None: one process.
    awake: whether each training process keeps the computer awake, also if this one is killed.
    Raises the UserError or RunError that the training process reported, Lost if it makes no
    progress, and Interrupted for a stop signal before training began.
    """
    command = command or python_module("your_ai.training")
    offset = events.end_of(folder.events)
    life, level = Life(), 0
    lives: list[Life] = []
    watch = StallWatch(patience or Patience(), offset=offset)
    processes, machines = ready_ranks(folder, config)
    is_alone = processes == 1 and machines is None
    if not (is_alone or settings):  # only rank 0 has the config.yaml of the run
        settings = json.dumps(dataclasses.asdict(folder.read_config()))
    run = str(folder.path if is_alone else folder.path.resolve())
    with open_log(folder) as log:
        while not received:
            log_start = log.seek(0, os.SEEK_END)
            arguments = [*command, run, "--level", str(level)]
            arguments += ["--settings", settings] if settings else []
            status, stalled, rank = run_children(
                arguments, folder, log, received, watch, awake, processes, machines
            )
            records, offset = events.tail(folder.events, offset)
            life = summarize_process(life, level, status, [record.event for record in records])
            life, said = replace(life, stalled=stalled), read_log(log, log_start)
            if not is_alone:
                life = with_ranks(life, rank, said, machines)
            if status == DONE:
                return DONE
            check_reported(folder, status, said, machines)
            if stop_signal(status) is not None:
                break

            decision = decide(lives, life, told_to_stop=bool(received))
            if status != RESTART or decision.level is None:
                died = events.Died(step=life.step, reason=decision.reason, level=decision.level)
                events.write_event(folder.events, died)
            if decision.level is None and received:
                break
            if decision.level is None:
                raise gave_up(folder, life, decision.reason, config)
            lives.append(life)
            level = decision.level

    number = stop_signal(life.status) or received[0]
    if not life.began:
        from your_ai.session.room import record_stop  # others need not load it

        record_stop(folder, number)
        raise Interrupted(number)
    return 128 + number


def check_reported(folder: RunFolder, status: int, output: str, machines: Machines | None) -> None:
    """Raise the error that a training process reported, if that is how it ended."""
    if status == PEER_LOST and is_users_error(output):
        raise reported_error(folder, USER, output)
    if status == USER and machines is not None and (reason := refused_in(output)):
        raise UserError(f"{machines.option}: {LAUNCHER} started nothing ({reason})")
    if status in (FAILED, USER):
        raise reported_error(folder, status, output)


def gave_up(folder: RunFolder, life: Life, reason: str, config: TrainConfig | None) -> Lost:
    """The error of a run that is not started again."""
    fault = f"this is a bug in your_ai or in MLX: {REPORT}; " if life.status in FAULTS else ""
    if life.status == OUT_OF_MEMORY:
        other = "" if config is None or config.plan == "auto" else ", or no --plan"
        fault = f"it needs more than its limit: give it a larger --max-memory{other}; "
    return Lost(
        f"{folder.path}: training died: {reason}; {fault}its output is in {folder.path / LOG}; "
        f"continue with: your_ai train --resume {folder.reference}"
    )


def with_ranks(life: Life, rank: int, output: str, machines: Machines | None) -> Life:
    """A life of several ranks: which of them died, or was lost.

    rank: the one that its status is of. output: what they all wrote.
    """
    lost = ""
    if life.status == PEER_LOST:
        names = [] if machines is None else [host.ssh for host in machines.hosts]
        lost = lost_in(output, names) or ("" if machines is None else f"{LAUNCHER}, or rank 0")
    return replace(life, rank=failed_in(output) or f"rank {rank}", lost=lost)


def run_children(
    arguments: list[str],
    folder: RunFolder,
    log: BinaryIO,
    received: Sequence[int],
    watch: StallWatch,
    awake: bool,
    processes: int = 1,
    machines: Machines | None = None,
) -> tuple[int, str, int]:
    """Run the training processes, usually one, to their end and pass on signals.

    Returns a status as in Popen, how rank 0 stalled, if it was ended for that, and the rank that
    the status is of. On the first signal they save and end; on the second they end immediately;
    the third kills them.
    """
    stalled = ""
    watch.begin()
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(started_group(arguments, folder, log, processes, machines))
        child = group.first
        stack.enter_context(host.kept_awake(child.process.pid, awake))
        looked_at = time.monotonic()
        while child.process.poll() is None:
            group.pass_on(received, patience=2)
            group.look()
            time.sleep(POLL_S)  # a blocking wait would miss signals that another thread receives
            if not stalled and time.monotonic() - looked_at >= watch.patience.look_s:
                looked_at = time.monotonic()
                stalled = end_if_stalled(child, group.pid, folder, log, watch)
        group.end()
        status, rank = group.result
    return status, stalled, rank


def end_if_stalled(
    child: Child, pid: int, folder: RunFolder, log: BinaryIO, watch: StallWatch
) -> str:
    """Kill a training process that no longer gets on; return how it stalled.

    pid: the training process's, which `child` is or has started.
    It writes its stack first, if it can. A signal to stop would not do: it could not save.
    """
    look_at(folder, watch)
    if not watch.is_stalled:
        return ""
    process, what = child.process, watch.describe()
    state = host.process_state(pid)
    if state == "debugged":
        watch.waited_s = 0.0
        if not watch.told_of_debugger:
            text = f"{what}: a debugger has stopped process {pid}; waiting for it"
            note(folder, text)
        watch.told_of_debugger = True
        return ""
    if state == "stopped":
        stack = "it was stopped by a signal, so it cannot show its stack"
    elif has_shown_stack(child, pid, log, what, watch):
        stack = f"its stack is in {folder.path / LOG}"
    else:
        stack = "it did not answer with its stack"
    look_at(folder, watch)
    if not watch.is_stalled:
        note(folder, f"{what}, but then it went on; {stack}")
        return ""
    if process.poll() in (None, -SHOW_STACK):
        process.kill()
        watch.stalls += 1
        return f"{what}; {stack}"
    return ""


def look_at(folder: RunFolder, watch: StallWatch) -> None:
    """Let `watch` see the new events and the time; record what kept this process from looking."""
    with contextlib.suppress(UserError):
        records, watch.offset = events.tail(folder.events, watch.offset)
        written = [record.event for record in records]
        if away := watch.look(written, time.monotonic(), time.time()):
            note(folder, away)


def has_shown_stack(child: Child, pid: int, log: BinaryIO, what: str, watch: StallWatch) -> bool:
    """Ask a process for the stacks of its threads; whether they are in the log soon."""
    if watch.what == STARTING:
        return False  # it may not listen for the signal yet
    with contextlib.suppress(OSError):  # the disk is full
        log.write(f"{what}; the stacks of its threads:\n".encode())
    start = log.seek(0, os.SEEK_END)
    if child.process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SHOW_STACK)
    deadline, before = time.monotonic() + watch.patience.dump_s, b""
    while time.monotonic() < deadline and child.process.poll() is None:
        time.sleep(2 * POLL_S)
        shown = read_log(log, start).encode()
        if STACK in shown and shown == before:  # it is complete
            return True
        before = shown
    return STACK in before


def note(folder: RunFolder, text: str) -> None:
    """Write a notice; a full disk is for the training process to report."""
    with contextlib.suppress(RunError):
        events.write_event(folder.events, events.Notice(text=text))


def summarize_process(before: Life, level: int, status: int, written: Sequence[Event]) -> Life:
    """Summarize the process after `before`, started at `level`, from the events it wrote."""
    plans = events.of(events.Planned, written)
    started = [event.step for event in events.of(events.Started, written)]
    turns = [e for e in written if isinstance(e, events.Planned | events.Action)]
    turn = turns[-1] if turns else None
    done = [e.step for e in written if isinstance(e, events.Step | events.Skipped)]
    samples = events.of(events.Step, written)[-LAST_SAMPLES:]
    saved = [before.checkpoint, *(step for step in started if step > 0)]
    saved += [event.step for event in events.of(events.Checkpoint, written)]
    return Life(
        status=status,
        level=plans[-1].level if plans else level,
        smaller=isinstance(turn, events.Action) and turn.kind == SMALLER_PLAN,
        moved=bool(done),
        used=used_share(samples, events.of(events.Limit, written)),
        critical=any((s.pressure or 0) >= CRITICAL_PRESSURE for s in samples),
        finished=bool(events.of(events.Finished, written)),
        step=[before.step, *started, *done][-1],
        checkpoint=max((step for step in saved if step is not None), default=None),
        began=before.began or bool(started),
    )


def used_share(samples: Sequence[Step], limits: Sequence[events.Limit]) -> float | None:
    """The highest share of the last limit that the process held; None if one is unknown."""
    gauges = [gauge for s in samples for gauge in (s.process_bytes, s.highest_bytes)]
    held = [gauge for gauge in gauges if gauge is not None]
    return max(held) / max(1, limits[-1].limit_bytes) if held and limits else None


def decide(lives: Sequence[Life], life: Life, told_to_stop: bool) -> Decision:
    """Decide how to continue after a process that died or requested a restart."""
    if life.status == RESTART:  # as requested, unless the last three all did so without a step
        last = [*lives, life][-MAX_IN_A_ROW:]
        if len(last) == MAX_IN_A_ROW and all(x.status == RESTART and not x.moved for x in last):
            return Decision(None, f"{describe(life)}, {MAX_IN_A_ROW} times in a row")
        return Decision(life.level + life.smaller, describe(life))
    if told_to_stop:
        return Decision(None, f"{describe(life)}; not restarted, because a stop was requested")
    return after_death([earlier for earlier in lives if earlier.status != RESTART], life)


def after_death(deaths: Sequence[Life], death: Life) -> Decision:
    """Restart, with a smaller plan if memory ran out; give up at the third without progress.

    If all three were faults of the program, the next smaller plan, whose code differs, is tried
    once.
    """
    what = describe(death)
    same = [earlier for earlier in deaths if earlier.checkpoint == death.checkpoint]
    faults = all(each.status in FAULTS and not each.stalled for each in (*same, death))
    if faults and len(same) + 1 == MAX_IN_A_ROW:
        under = "trying the next smaller plan once"
        return Decision(death.level + 1, f"{what}, {MAX_IN_A_ROW} times in a row; {under}")
    if len(same) + 1 >= MAX_IN_A_ROW:
        kind = "stalls" if all(each.stalled for each in (*same, death)) else "deaths"
        return Decision(None, f"{what}; {len(same) + 1} {kind} in a row without a new checkpoint")
    near_limit = death.near_limit and not death.stalled  # it was not killed for its memory
    of_memory = death.status == OUT_OF_MEMORY or near_limit or death.critical
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
        OUT_OF_MEMORY: events.RAN_OUT,
        RESTART: "requested a restart",
        **{-n: f"killed by {n.name}" for n in signal.Signals},
    }
    if life.stalled:
        return f"stalled: {life.stalled}"
    if life.status == PEER_LOST:
        return f"lost {life.lost or 'another process of the run'}"
    how = ends.get(life.status, f"ended with status {life.status}")
    how = f"{life.rank} {how}" if life.rank else how
    where = f" after step {life.step}" if life.moved else " before its first step"
    share = f", with {life.used:.0%} of its limit in use" if life.near_limit else ""
    pressure = ", under critical memory pressure" if life.critical else ""
    return how + where + share + pressure


def stop_signal(status: int) -> int | None:
    """Return the stop signal that ended a child, whether it handled the signal or died of it."""
    return next((int(n) for n in SIGNALS if status in (128 + n, -n)), None)


def given_settings(folder: RunFolder, settings: str) -> TrainConfig:
    return build(json.loads(settings), "--settings") if settings else folder.read_config()


def ready_ranks(folder: RunFolder, config: TrainConfig | None) -> tuple[int, Machines | None]:
    """Return how many processes a run has on this machine, and its hosts if it has several.

    Checks that all hosts can be reached, and copies what they need, if asked to.
    """
    if config is None:
        return 1, None
    check_processes(config)
    machines = machines_of(config)
    if machines is not None:
        check_programs(machines)
        check_reachable(machines)
        if config.sync != "off":
            note(folder, "copying to the other hosts")
            sync_hosts(machines, paths_to_sync(config, find_model(config.model)))
    return config.processes, machines


def main() -> None:
    """Supervise one run; errors are one line on stderr, and give the exit status."""
    parser = argparse.ArgumentParser(prog="python -m your_ai.session.supervisor")
    parser.add_argument("run")
    parser.add_argument("--settings", default="", help="all settings, as JSON")
    parser.add_argument("--parent-fd", type=int, help="a pipe that closes when the parent ends")
    parser.add_argument("--quiet", action="store_true", help="show no notification at the end")
    given = parser.parse_args()
    with recorded_signals() as received:
        sys.exit(supervise_run(given.run, given.settings, given.parent_fd, received, given.quiet))


def supervise_run(
    run: str,
    settings: str,
    parent_fd: int | None,
    received: Sequence[int],
    quiet: bool = False,
    command: list[str] | None = None,
) -> int:
    """Supervise a run for the process at the other end of the pipe; return the exit status.

    quiet: no notification at the end.
    command: what to start instead of the training process.
    """
    detached = threading.Event()

    def stop() -> None:
        if not received:  # a second signal would end it without saving
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        if parent_fd is not None:
            watch_parent(parent_fd, stop, detached.set)
        folder = find(run)
        config = given_settings(folder, settings)
        patience, awake = patience_of(config), not config.allow_sleep
        with locked(folder, SUPERVISOR_LOCK), looked_after(folder, config, quiet, detached.is_set):
            requests.withdraw_all(folder)
            if config.wait:
                from your_ai.session.room import wait_for_room  # others need not load it

                wait_for_room(folder, config, received)
            with tracked(folder, config.report_to, received), recorded_errors(folder):
                status = supervise(folder, received, settings, command, patience, awake, config)
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
        records, _ = events.tail(folder.events, 0, (Step,))
        steps = [step.step for step in events.of(Step, (record.event for record in records))]
        died = events.Died(step=max(steps, default=0), reason=str(error), level=None)
        if type(error) is not Lost and folder.events.exists():
            with contextlib.suppress(RunError):
                events.write_event(folder.events, died)
        raise


if __name__ == "__main__":
    main()
