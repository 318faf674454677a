"""Prevent orphans: end this process when the process that started it is gone."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

GRACE_S = 30.0  # time to finish a step and save
POLL_S = 0.5
RELEASE = b"r"  # sent by a parent that ends and wants its child to continue


def leave(grace_s: float = GRACE_S) -> None:
    """Send SIGTERM to this process, and exit by force after `grace_s` seconds."""
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(128 + signal.SIGTERM)


def watch_parent(
    fd: int,
    on_death: Callable[[], None] = leave,
    on_release: Callable[[], None] = lambda: None,
) -> None:
    """Call `on_death` in a thread when the other end of the pipe `fd` is closed.

    The kernel closes that end however the parent dies, even by SIGKILL. If the parent wrote
    RELEASE first, `on_release` is called instead. Raises OSError if `fd` is not open.
    """
    os.set_inheritable(fd, False)

    def watch() -> None:
        if os.read(fd, 1) == RELEASE:
            on_release()
        else:
            on_death()

    threading.Thread(target=watch, name="parent", daemon=True).start()


def watch_pid(pid: int, on_death: Callable[[], None] = leave) -> None:
    """Call `on_death` in a thread when the process `pid` of this user is gone.

    For a process that is not its child, so that no pipe connects them.
    """

    def watch() -> None:
        while True:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                on_death()
                return
            time.sleep(POLL_S)

    threading.Thread(target=watch, name="parent", daemon=True).start()
