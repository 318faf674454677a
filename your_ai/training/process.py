"""The process of a training run: one plan after another, until the run is done.

`your_ai.session.supervisor` starts `python -m your_ai.training RUN`, which trains the run with the
config.yaml in its folder.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from your_ai.config import TrainConfig, build
from your_ai.errors import Interrupted, RunError, UserError, explain, first_line, is_memory_error
from your_ai.gates.console import echo_error, echo_traceback
from your_ai.memory import allocator, probe
from your_ai.memory.governor import MemoryAction, Watch
from your_ai.run import child, events, host
from your_ai.run.child import watch_parent, watch_pid
from your_ai.run.folder import RunFolder, find, locked
from your_ai.run.heartbeat import LOST, end_process, write_report
from your_ai.run.stopping import SHOW_STACK, Stop, stop_signals
from your_ai.training.distributed import ALONE, PeerLost, Ranks
from your_ai.training.joining import DEFAULT_TIMEOUT_S, join, telling_others
from your_ai.training.memory_actions import Replan, action_event, telling_gauges, within_limit
from your_ai.training.saving import saved_step
from your_ai.training.train import run

OUT_OF_ROOM = ("ran out of memory", child.OUT_OF_MEMORY)
MAX_OUT_OF_MEMORY = 3  # in a row, without a checkpoint in between


def train_until_done(
    folder: RunFolder,
    config: TrainConfig,
    stop: Stop,
    level: int = 0,
    begin_guard: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> int:
    """Train `folder` with `config`, under one plan after another; return the exit status.

    level: the number of faster plans that fit but are skipped.
    begin_guard: is called once the run is known to fit.

    After an out-of-memory error the run continues from its last checkpoint under the next smaller
    plan.
    """
    with locked(folder), contextlib.closing(events.EventLog(folder.events)) as log:
        rest = "stopping after this step"
        if config.samples_completions:
            rest += ", or before it if its completions are not there yet"
        text = f"{rest}; signal again to stop immediately"
        stop.on_first = lambda: log.write(events.Stopping(text=text))
        failed_at, watch = list[int](), Watch()
        try:
            while True:
                wanted = train_under_plan(
                    folder, config, log, stop, level, watch, begin_guard, ranks
                )
                if isinstance(wanted, events.Finished):
                    return 0 if wanted.adapter else 128 + (ranks.stopped_by(stop) or 0)
                if wanted.action.kind == "restart":
                    if config.supervise:
                        return child.RESTART
                    raise RunError(
                        f"{folder.path}: {wanted.action.cause}; everything is saved, but only a "
                        "new process can free this memory: your_ai train --resume "
                        f"{folder.reference}"
                    )
                if wanted.failed and ranks.size > 1:  # the others wait in the step
                    ranks.fail(wanted.action.cause, child.OUT_OF_MEMORY)
                    return child.OUT_OF_MEMORY
                watch = wanted.watch
                level += {"smaller_plan": 1, "larger_plan": -1}.get(wanted.action.kind, 0)
                failed_at = [*failed_at, wanted.step] if wanted.failed else []
                if failed_at.count(wanted.step) > MAX_OUT_OF_MEMORY:
                    echo_error(f"error: {folder.path}: {wanted.action.cause}")
                    return child.OUT_OF_MEMORY
        finally:
            stop.on_first = lambda: None  # a late signal must not write to a closed file


def train_under_plan(
    folder: RunFolder,
    config: TrainConfig,
    log: events.EventLog,
    stop: Stop,
    level: int,
    watch: Watch,
    begin_guard: Callable[[], None],
    ranks: Ranks,
) -> events.Finished | Replan:
    """Call `run` under one plan; return how it ended, or how to continue. Frees its memory."""
    try:
        with probe.Sampler() as sampler, telling_gauges(folder, log):
            return run(folder, config, log, stop, level, watch, sampler, begin_guard, ranks)
    except Replan as replan:
        before, wanted = probe.read(), Replan(replan.action, replan.step, replan.watch)
    except (RuntimeError, MemoryError) as error:
        reason = explain(first_line(error))
        if not is_memory_error(error):
            if type(error) is not RuntimeError:  # Python's subclasses of it are bugs of this code
                raise
            raise RunError(f"{folder.path}: {reason}") from error
        action, before = MemoryAction(kind="smaller_plan", cause=reason), probe.read()
        wanted = Replan(action, saved_step(folder), watch, failed=True)
    began = time.perf_counter()
    log.write(events.Phase(text="freeing memory for another plan"))
    allocator.free()  # nothing refers to the model any more: the exception is gone
    after = probe.read()
    log.write(action_event(wanted.action, wanted.step, before, after, time.perf_counter() - began))
    return wanted


def awake_elsewhere(ranks: Ranks, config: TrainConfig) -> contextlib.AbstractContextManager[None]:
    """Keep the Mac of another rank than 0 awake; that of rank 0 is the supervisor's care."""
    return host.kept_awake(os.getpid(), not ranks.is_first and not config.allow_sleep)


def train_launched(folder: RunFolder | None, config: TrainConfig, stop: Stop) -> int:
    """Train a rank that `mlx.launch` started with the command line; return the exit status.

    Without mlx.launch it is the only rank.
    folder: the run folder of rank 0; None on other ranks.
    """
    ranks = join(config.heartbeat_timeout_s)
    try:
        return launched_rank(ranks, folder, config, stop)
    except PeerLost as error:
        raise RunError(f"another process of the run is gone ({error}); resume the run") from error


def launched_rank(ranks: Ranks, folder: RunFolder | None, config: TrainConfig, stop: Stop) -> int:
    """Train as `train_launched`, once the ranks have met. Raises PeerLost."""
    with telling_others(ranks):
        place = ranks.of_first(lambda: str(folder and folder.path.resolve()))
        mine = folder or ranks.folder_of(RunFolder(Path(place)), config)
        if ranks.size == 1:
            return train_until_done(mine, config, stop)
        limited = ranks.with_own_limit(config)
        with (
            awake_elsewhere(ranks, config),
            within_limit(mine, limited, partial(ranks.fail, *OUT_OF_ROOM)) as begin_guard,
        ):
            return train_until_done(mine, config, stop, 0, begin_guard, ranks)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m your_ai.training")
    parser.add_argument("run")
    parser.add_argument("--level", type=int, default=0, help="number of plans to skip")
    parser.add_argument("--settings", help="all settings as JSON, instead of config.yaml")
    parser.add_argument("--parent-fd", type=int, help="a pipe that closes with the supervisor")
    parser.add_argument("--memory-of-ranks", help="limit of each rank in GB, as JSON")
    parser.add_argument("--report", help="file for the exit status of rank 0")
    parser.add_argument("--parent-pid", type=int, help="supervisor of rank 0, on its machine")
    return parser.parse_args()


def train_given(
    given: argparse.Namespace, settings: TrainConfig | None, ranks: Ranks, stop: Stop
) -> int:
    """Train the run as one of these ranks; return the exit status."""
    folder = find(given.run) if ranks.is_first else RunFolder(Path(given.run))
    config = settings or folder.read_config()
    if given.memory_of_ranks:
        ranks.limit_gb = json.loads(given.memory_of_ranks)[ranks.rank]
    if given.parent_pid is not None and ranks.is_first:
        watch_pid(given.parent_pid)
    folder = ranks.folder_of(folder, config)
    limited = ranks.with_own_limit(config) if ranks.size > 1 else config
    awake = awake_elsewhere(ranks, config) if given.parent_fd is None else contextlib.nullcontext()
    with awake, within_limit(folder, limited, partial(ranks.fail, *OUT_OF_ROOM)) as begin_guard:
        return train_until_done(folder, config, stop, given.level, begin_guard, ranks)


def main() -> None:
    """Train one run; print errors as one line on stderr."""
    given, ranks = arguments(), ALONE
    faulthandler.enable()
    faulthandler.register(SHOW_STACK)
    try:
        with stop_signals() as stop:
            if given.parent_fd is not None:
                watch_parent(given.parent_fd)
            settings = build(json.loads(given.settings), "--settings") if given.settings else None
            ranks = join(settings.heartbeat_timeout_s if settings else DEFAULT_TIMEOUT_S)
            if given.report is not None and ranks.beats is not None:
                ranks.beats.on_loss = partial(end_process, report=Path(given.report))
            with telling_others(ranks):
                status = train_given(given, settings, ranks, stop)
    except (UserError, RunError) as error:
        status = child.USER if isinstance(error, UserError) else child.FAILED
        if ranks.is_first:  # else rank 0 says it, with the name of this rank
            echo_error(f"error: {error}")
    except PeerLost as error:
        echo_error(f"{LOST}{error}")
        status = child.PEER_LOST
    except Interrupted as interrupted:
        status = 128 + interrupted.number
    except Exception:
        echo_traceback()
        status = child.CRASHED
    if given.report is not None and ranks.is_first:
        write_report(Path(given.report), status)
    sys.exit(status)
