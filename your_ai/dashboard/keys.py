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
    def in_foreground(self) -> bool:
        if self.fd is None:
            return False
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # the terminal is closed
            return False

    @property
    def were_taken(self) -> bool:
        """Whether a shell has restored the terminal since, as it does when it stops a job."""
        if not self.before or not self.in_foreground:
            return False
        try:
            return bool(termios.tcgetattr(self.fd)[3] & termios.ICANON)
        except termios.error:
            return False

    def take(self) -> None:
        """Receive keys one by one, without echo."""
        if self.in_foreground and not self.before:
            with contextlib.suppress(termios.error):
                self.before = termios.tcgetattr(self.fd)
                tty.setcbreak(self.fd, termios.TCSADRAIN)

    def give_back(self) -> None:
        if self.before and self.in_foreground:
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self.fd, termios.TCSADRAIN, self.before)
        self.before = []

    def read(self, timeout_s: float) -> str:
        """Return the keys pressed within `timeout_s` seconds; without a terminal, only wait."""
        if not self.before or not self.in_foreground:
            time.sleep(timeout_s)
            return ""
        try:
            ready, _, _ = select.select([self.fd], [], [], timeout_s)
            data = os.read(self.fd, 64) if ready else b""
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
