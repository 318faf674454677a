"""Ctrl-C, SIGTERM and a closed terminal: finish the step and save; a second one leaves at once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A stop signal while there was no step to finish. Exit status 128 + signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class Stop:
    """Whether a signal asked the run to stop.

    While `graceful` is false, as it is before the first step, a signal raises
    Interrupted; after that it is only noted here, for the loop to see. on_first is
    called when that happens, on_second just before a second signal ends the process;
    both in a thread.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.graceful = False
        self.on_first: Callable[[], None] = lambda: None
        self.on_second: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return self.received is not None

    @property
    def name(self) -> str:
        """What stopped the run, in words."""
        if self.received in (None, signal.SIGINT):
            return "Ctrl-C"
        return signal.Signals(self.received).name


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Watch for stop signals until the block ends; then the handlers are as they were.

    A thread watches, since Python runs no handler while the main thread is inside an
    evaluation.
    """
    stop = Stop()
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def watch() -> None:
        while data := reader.recv(1):
            number = data[0]
            if number == 0:
                return
            if number not in SIGNALS or not stop.graceful:
                continue
            if stop.received is None:
                stop.received = number
                with contextlib.suppress(Exception):  # a full disk, say: the second must work
                    stop.on_first()
            else:
                with contextlib.suppress(Exception):
                    stop.on_second()
                os._exit(128 + number)

    def handle(number: int, frame: object) -> None:
        if not stop.graceful:
            raise Interrupted(number)

    thread = threading.Thread(target=watch, name="stop-signals", daemon=True)
    thread.start()
    # nohup has SIGHUP ignored, and so it stays. SIGINT is always heard: a script's background
    # job has it ignored, but whoever sends it there means to stop the run.
    heard = [
        number
        for number in SIGNALS
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    old_handlers = {number: signal.signal(number, handle) for number in heard}
    old_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(old_fd)
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            writer.send(b"\0")
        thread.join()
        reader.close()
        writer.close()


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """The stop signals that come until the block ends; then the handlers are as they were.

    A terminal that closes may say so twice, the shell and the system each: that counts once.
    Outside the main thread none come.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        if number != signal.SIGHUP or number not in received:
            received.append(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as nohup has it
    heard = [n for n in SIGNALS if not (n == signal.SIGHUP and ignored)]
    old_handlers = {n: signal.signal(n, note) for n in heard}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
