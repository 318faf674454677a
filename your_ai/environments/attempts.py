"""Calls that may hang, crash or use up memory, without the end of the process that makes them.

A copy of the process (fork) waits beside each call. If the call returns, the copy ends, and all
that the call changed stays. If it takes too long or the process dies, the copy goes on in its
place: in the state before the call, as if that had changed nothing. Only threads are lost then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class CallDied(Exception):
    """A call took too long, or ended the process that made it."""


def attempt(call: Callable[[], T], timeout_s: float) -> T:
    """Make a call, and return its result or raise its error.

    Raises CallDied, in the copy, if the call does not end within `timeout_s` or ends its process;
    processes that it started are killed with it. Raises OSError if there can be no copy.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the user's code may have replaced them
            stream.flush()
    # One of the two processes ends the other: the one that reads the only byte of `turn`.
    turn, writer = os.pipe()
    os.write(writer, b".")
    os.close(writer)
    os.set_blocking(turn, False)
    alive, held = os.pipe()  # the process of the call holds `held` open
    caller = os.getpid()
    copy = os.fork()
    if copy == 0:
        os.close(held)
        ended = bool(select.select([alive], [], [], timeout_s)[0])
        if not takes(turn):
            os._exit(0)
        if not ended or os.getppid() == caller:  # which may have closed `held`
            kill_tree(caller, except_for=os.getpid())
        os.close(turn)
        os.close(alive)
        raise CallDied("its process ended" if ended else f"took more than {timeout_s:g} s")
    os.close(alive)
    try:
        return call()
    finally:
        if not takes(turn):
            while True:  # until the copy has killed this process
                signal.pause()
        os.kill(copy, signal.SIGKILL)
        os.waitpid(copy, 0)
        os.close(turn)
        os.close(held)


def takes(turn: int) -> bool:
    try:
        return os.read(turn, 1) == b"."
    except OSError:  # the other one has it, or the call closed `turn`
        return False


def kill_tree(pid: int, except_for: int) -> None:
    """Kill a process and those that it started."""
    import psutil  # only where something hangs

    found: list[psutil.Process] = []
    with contextlib.suppress(psutil.Error):
        found = [each for each in psutil.Process(pid).children(True) if each.pid != except_for]
    os.kill(pid, signal.SIGKILL)
    for each in found:
        with contextlib.suppress(psutil.Error):
            each.kill()
