"""Reads single keys from a terminal, and restores the terminal's settings afterwards."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Keyboard:
    """Reads the keys that are pressed on a terminal.

    Ctrl-C stays a signal. The terminal is read and changed only while this process is in the
    foreground: a shell stops a background job that does either.
    """

    fd: int | None = None
    """The terminal; None if there is none, and then no keys are read."""
    before: list[Any] = field(default_factory=list)
    """The terminal's settings to restore; empty while they are unchanged."""

    @property
    def terminal(self) -> int | None:
        """The terminal, if this process is in its foreground, else None."""
        with contextlib.suppress(OSError):  # the terminal is closed
            if self.fd is not None and os.tcgetpgrp(self.fd) == os.getpgrp():
                return self.fd
        return None

    @property
    def were_taken(self) -> bool:
        """Whether a shell has restored the terminal since, as it does when it stops a job."""
        fd = self.terminal
        if not self.before or fd is None:
            return False
        try:
            return bool(termios.tcgetattr(fd)[3] & termios.ICANON)
        except termios.error:
            return False

    def take(self) -> None:
        """Receive keys one by one, without echo."""
        fd = self.terminal
        if fd is not None and not self.before:
            with contextlib.suppress(termios.error):
                self.before = termios.tcgetattr(fd)
                tty.setcbreak(fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        fd = self.terminal
        if self.before and fd is not None:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(fd, termios.TCSADRAIN, self.before)
        self.before = []

    def read(self, timeout_s: float) -> str:
        """Return the keys pressed within `timeout_s` seconds; without a terminal, only wait."""
        fd = self.terminal
        if not self.before or fd is None:
            time.sleep(timeout_s)
            return ""
        try:
            ready, _, _ = select.select([fd], [], [], timeout_s)
            data = os.read(fd, 64) if ready else b""
        except OSError:
            return ""
        if ready and not data:  # the terminal is closed, and would always be ready
            self.fd = None
        return data.decode(errors="replace")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """Yield the keyboard of standard input; its keys are taken when something is drawn."""
    try:
        fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    except (ValueError, AttributeError):  # stdin is closed or missing
        fd = None
    keys = Keyboard(fd)
    try:
        yield keys
    finally:
        keys.give_back()
