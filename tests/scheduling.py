"""Run the suite's processes so that MLX's thread does not interrupt the one that feeds it.

MLX hands each operation to a thread, which the system wakes up at once: tests that compute little
switched between the two threads 50,000 times per second, and that took up to a third of their
time. As batch processes, and each worker on a core of its own, the threads take turns when one has
to wait.
"""

from __future__ import annotations

import contextlib
import os


def use_one_core() -> None:
    """Let this process, and those that it starts, be batch processes, a worker's on one core.

    Workers beyond the number of cores use all: they compute while others wait.
    """
    if not hasattr(os, "sched_setscheduler"):
        return
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        number = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
        cores = sorted(os.sched_getaffinity(0))
        if number.isdigit() and int(number) < len(cores):
            os.sched_setaffinity(0, {cores[int(number)]})
