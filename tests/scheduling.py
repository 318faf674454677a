"""Let the threads of a worker take turns in tests that do not measure memory (mark `memory`), and
compute in order in those that do.

MLX hands each operation to a thread, which the system wakes up at once: tests that compute little
switched between two threads 50,000 times per second, which took a quarter of their time. Of a batch
process on one core, the thread that hands out work goes on until it has to wait. It is then further
ahead, so that more arrays exist together: measured peaks are larger, and vary.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import mlx.core as mx

TAKING = False  # turns, in this process


def take_turns(on: bool) -> None:
    """Make this process a batch process or an ordinary one.

    A batch process of a worker uses one core; of workers beyond the number of cores, all: they
    compute while others wait. Processes that tests start are ordinary ones; see
    quick_start/sitecustomize.py.
    """
    global TAKING
    tasks = Path("/proc/self/task")
    if on == TAKING or not tasks.exists():  # not on Linux
        return
    TAKING = on
    cores = range(os.cpu_count() or 1)
    number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if on and number.isdigit() and int(number) < len(cores):
        cores = cores[int(number) : int(number) + 1]
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # the thread has ended, or it is not allowed
            policy = os.SCHED_BATCH if on else os.SCHED_OTHER
            os.sched_setscheduler(int(task.name), policy, os.sched_param(0))
            os.sched_setaffinity(int(task.name), cores)


def compute_in_order() -> None:
    """Let MLX begin a few operations only once those before them are done, so that peaks hardly
    vary: by default it is further ahead, which adds up to nine tenths to a peak.

    Above its memory limit MLX waits. Beside other programs that takes several times as long.
    """
    mx.set_memory_limit(1)
