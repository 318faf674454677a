"""The command line on a pseudo-terminal, as a user runs it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

PATIENCE_S = 60.0
OPENED, CLOSED = b"\x1b[?1049h", b"\x1b[?1049l"  # the alternate screen


@dataclass
class Terminal:
    """A process, the user's side of its terminal, and its output so far."""

    process: subprocess.Popen
    fd: int
    written: bytes = b""
    before: list = field(default_factory=list)

    def read(self, timeout_s: float = 0.1) -> bytes:
        ready, _, _ = select.select([self.fd], [], [], timeout_s)
        with contextlib.suppress(OSError):  # the other side was closed
            self.written += os.read(self.fd, 65536) if ready else b""
        return self.written

    def wait_for(self, done) -> None:
        """Wait until `done()` is true, or until a text appears on the screen."""
        deadline = time.monotonic() + PATIENCE_S
        start = len(self.written)
        while not (done.encode() in self.read()[start:] if isinstance(done, str) else done()):
            assert time.monotonic() < deadline, self.written[-3000:].decode(errors="replace")
            self.read()

    def press(self, keys: str) -> None:
        """Write keys. Some are lost if nobody reads them any more: the process may be ending."""
        left = keys.encode()
        with contextlib.suppress(OSError):
            while left and select.select([], [self.fd], [], 1.0)[1]:
                left = left[os.write(self.fd, left) :]

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def end(self) -> int:
        """Wait for the process to end; return its status."""
        self.wait_for(lambda: self.process.poll() is not None)
        self.read()
        return self.process.returncode

    @property
    def is_as_it_was(self) -> bool:
        modes = termios.tcgetattr(self.fd) == self.before
        screen = self.written.count(OPENED) == self.written.count(CLOSED)
        cursor = self.written.rfind(b"\x1b[?25h") >= self.written.rfind(b"\x1b[?25l")
        return modes and screen and cursor


@contextlib.contextmanager
def on_terminal(
    *arguments: str,
    program: Sequence[str] = (sys.executable, "-m", "your_ai"),
    width: int = 80,
    height: int = 24,
    **environment: str,
) -> Iterator[Terminal]:
    """Run `your_ai` with these arguments in the foreground of a terminal; kill it at the end."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    before = termios.tcgetattr(ours)
    cleared = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LINES")}

    def take() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    os.set_blocking(ours, False)  # a write to a terminal that is being closed would not return
    process = subprocess.Popen(
        [*program, *arguments],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        preexec_fn=take,
        env={**cleared, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", **environment},
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours, before=before)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
