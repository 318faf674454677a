"""Single keys from a terminal, which is as it was when the block ends."""

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
    """The keys pressed on the terminal `fd`; of none where there is no terminal (None).

    Ctrl-C stays a signal. Keys are read, and the terminal is changed, only while this
    process is in the foreground: a shell stops a background job that does either.
    """

    fd: int | None = None
    before: list[Any] = field(default_factory=list)

    @property
    def in_foreground(self) -> bool:
        if self.fd is None:
            return False
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:  # the terminal is gone
            return False

    @property
    def were_taken(self) -> bool:
        """Whether a shell has set the terminal back since, as it does when it stops a job."""
        if not self.before or not self.in_foreground:
            return False
        try:
            return bool(termios.tcgetattr(self.fd)[3] & termios.ICANON)
        except termios.error:
            return False

    def take(self) -> None:
        """Let keys come one by one and unseen."""
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
        """What is pressed within `timeout_s` seconds; waits so long where nothing can be."""
        if not self.before or not self.in_foreground:
            time.sleep(timeout_s)
            return ""
        try:
            ready, _, _ = select.select([self.fd], [], [], timeout_s)
            data = os.read(self.fd, 64) if ready else b""
        except OSError:
            return ""
        if ready and not data:  # the terminal is gone: it would be ready for ever
            self.fd = None
        return data.decode(errors="replace")


@contextlib.contextmanager
def keyboard() -> Iterator[Keyboard]:
    """That of standard input, taken once something is drawn."""
    try:
        fd = sys.stdin.fileno() if sys.stdin.isatty() else None
    except (ValueError, AttributeError):  # closed, or none
        fd = None
    keys = Keyboard(fd)
    try:
        yield keys
    finally:
        keys.give_back()
