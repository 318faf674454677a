"""The training process's side of "no orphan": it ends when its supervisor is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

GRACE_S = 30.0  # to finish a step and save


def leave(grace_s: float = GRACE_S) -> None:
    """Stop this process as SIGTERM does, and by force if it is there after `grace_s` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def watch_parent(fd: int, on_death: Callable[[], None] = leave) -> None:
    """Call `on_death`, in a thread, once nobody holds the other end of the pipe `fd`.

    The kernel closes that end however the parent dies, SIGKILL included. Raises OSError
    where `fd` is not open.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        while os.read(fd, 1):
            pass
        on_death()

    threading.Thread(target=watch, name="parent", daemon=True).start()
