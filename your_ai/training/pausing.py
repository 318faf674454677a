"""Pause a run between two steps, at the request of the user."""

from __future__ import annotations

import time

from your_ai.memory import allocator
from your_ai.run import events, requests
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training.trainer import Trainer

POLL_S = 0.1


def pause(folder: RunFolder, step: int, log: events.EventLog, stop: Stop) -> None:
    """Wait while a pause is requested. The model stays in memory; freed buffers are released.

    The step is already saved, so requests to save are withdrawn.
    """
    if not requests.is_asked(folder, requests.PAUSE):
        return
    began = time.perf_counter()
    allocator.free()
    log.write(events.Paused(step=step))
    while requests.is_asked(folder, requests.PAUSE) and not stop:
        requests.withdraw(folder, requests.SAVE)
        time.sleep(POLL_S)
    log.write(events.Continued(step=step, seconds=time.perf_counter() - began))


def pause_all(
    folder: RunFolder,
    trainer: Trainer,
    step: int,
    log: events.EventLog,
    heard: Stop,
    stop: Stop,
    pausing: bool,
) -> None:
    """Pause if asked to; the other ranks wait for rank 0, with their freed buffers released.

    heard: the stop of this process; stop: the one that all ranks see at the same place.
    """
    if trainer.ranks.size == 1 or (pausing and trainer.ranks.is_first):
        pause(folder, step, log, heard)
    elif pausing:
        allocator.free()
    if pausing:
        trainer.ranks.agree(heard, stop)
