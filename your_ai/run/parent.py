"""A process's side of "no orphan": it ends when the one that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

GRACE_S = 30.0  # to finish a step and save
RELEASE = b"r"  # from a parent that leaves and wants its child to go on


def leave(grace_s: float = GRACE_S) -> None:
    """Stop this process as SIGTERM does, and by force if it is there after `grace_s` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def watch_parent(fd: int, on_death: Callable[[], None] = leave) -> None:
    """Call `on_death`, in a thread, once nobody holds the other end of the pipe `fd`.

    The kernel closes that end however the parent dies, SIGKILL included; a parent that first
    writes RELEASE is not missed. Raises OSError where `fd` is not open.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        if os.read(fd, 1) != RELEASE:
            on_death()

    threading.Thread(target=watch, name="parent", daemon=True).start()
