"""Settings and folder of a new run, which may start from an adapter (--from).

Loads MLX only for an adapter.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from your_ai.config import GENERATING, TrainConfig
from your_ai.config import resolve as resolve_settings
from your_ai.errors import RunError, UserError, without_run
from your_ai.rewards.names import RUN, parse_rewards, reward_texts
from your_ai.run import child, events, folder
from your_ai.run.child import DONE
from your_ai.run.folder import RunFolder, discard, is_running
from your_ai.session.attach import supervisor_command


def resolve(
    flags: Mapping[str, Any],
    preset: str | None,
    needs_data: bool = True,
    on_note: Callable[[str], object] = lambda text: None,
) -> TrainConfig:
    """Resolve as `config.resolve` does; take over the settings of the adapter at --from."""
    return resolve_settings(flags, preset, needs_data, on_note, settings_of_adapter)


def settings_of_adapter(source: str, base: str | None) -> dict[str, Any]:
    from your_ai.export import starting

    return starting.settings_of(source, base)


def check_rewards(config: TrainConfig) -> None:
    """Raise UserError for a reward that cannot be, before a model is downloaded for it.

    The user's functions are not imported, and a run is not read: training does both.
    """
    if config.objective not in GENERATING and not config.reward:
        return
    for each in parse_rewards(reward_texts(config)):
        if each.kind == RUN:
            try:
                folder.find(each.argument)
            except UserError as error:
                label = "--reward-model" if each.name == config.reward_model else "--reward"
                raise UserError(f"{label} {each.name}: {error}") from error


def create(config: TrainConfig, on_note: Callable[[str], object] = lambda text: None) -> RunFolder:
    """Create the folder of a new run, with a copy of the adapter that it starts from.

    on_note: called with what the user should know of the adapter.

    Raises UserError if the name is taken, the folder cannot be written, or the adapter does not
    fit the model.
    """
    if not config.from_adapter:
        return folder.create(config)
    from your_ai.export import starting

    return starting.create(config, on_note)


# Start a run that goes on without the process that started it. Does not import mlx


LOCK_S = 20.0  # a supervisor takes its lock within this time, also on a busy machine


@dataclass(frozen=True)
class BackgroundRun:
    """A supervisor that was started, and what it says."""

    folder: RunFolder
    process: subprocess.Popen[bytes]
    log_start: int
    """Where its output begins in the run's log, in bytes."""
    events_start: int
    """Where its events begin in the events file, in bytes."""
    new: bool
    """Whether its folder was made for it, and is removed if training never begins."""


def start(folder: RunFolder, settings: TrainConfig, *, new: bool) -> BackgroundRun:
    """Start a run's supervisor, and return when the run is locked by it, or has ended.

    new: as in BackgroundRun. Raises RunError if it cannot be started.
    """
    events_start = events.end_of(folder.events)
    with child.open_log(folder) as log:
        log_start = log.seek(0, os.SEEK_END)
        with child.started(supervisor_command(folder, settings), folder, log) as supervisor:
            supervisor.release()
    process = supervisor.process
    deadline = time.monotonic() + LOCK_S
    while process.poll() is None and not is_running(folder) and time.monotonic() < deadline:
        time.sleep(child.POLL_S)
    threading.Thread(target=process.wait, name="reaper", daemon=True).start()
    return BackgroundRun(folder, process, log_start, events_start, new)


def wait_until_begun(run: BackgroundRun, seconds: float) -> bool:
    """Return whether training began within this time.

    Raises the error that ended the run before it began.
    """
    deadline = time.monotonic() + seconds
    while True:
        ended = run.process.poll()  # before its events are read
        if events.tail(run.folder.events, run.events_start, (events.Started,))[0]:
            return True
        if ended is not None:
            if ended == DONE:
                return True
            raise failure(run, ended)
        if time.monotonic() > deadline:
            return False
        time.sleep(child.POLL_S)


def failure(run: BackgroundRun, status: int) -> Exception:
    """The error of a run that ended before it began; the folder of a new run is removed."""
    with child.open_log(run.folder) as log:
        error = child.reported_error(run.folder, status, child.read_log(log, run.log_start))
    if run.new and not isinstance(error, child.Lost) and not run.folder.has_work:
        discard(run.folder.path)
        return without_run(error) if isinstance(error, RunError) else error
    return error
