"""Ctrl-C, SIGTERM and a closed terminal: finish the step and save; a second signal exits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator

from your_ai.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SHOW_STACK = signal.SIGUSR1  # the training process writes the stacks of its threads to its log


class Stop:
    """A request by a signal to stop the run, if there was one.

    While `graceful` is false, as it is before the first step, a signal raises Interrupted.
    Later a signal is only recorded here, and the training loop checks it. `on_first` is called
    when the first signal is recorded, `on_second` just before a second signal ends the process;
    both are called in a thread.
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
        """The name of the signal that stopped the run."""
        if self.received in (None, signal.SIGINT):
            return "Ctrl-C"
        return signal.Signals(self.received).name


@contextlib.contextmanager
def stop_signals() -> Iterator[Stop]:
    """Watch for stop signals until the block ends; then restore the signal handlers.

    A thread watches, because Python runs no signal handler while the main thread is inside an
    MLX evaluation.
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
                with contextlib.suppress(
                    Exception
                ):  # e.g. a full disk; a second signal must still work
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
    # nohup makes a process ignore SIGHUP, and that is respected. SIGINT is always handled:
    # background jobs of a script ignore it, but whoever sends it there wants to stop the run.
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
def recorded_signals() -> Iterator[list[int]]:
    """Collect the stop signals until the block ends; then restore the signal handlers.

    A closing terminal may send SIGHUP twice, from the shell and from the system; that counts
    once. Outside the main thread no signal is collected.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        if number != signal.SIGHUP or number not in received:
            received.append(number)

    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # under nohup
    heard = [n for n in SIGNALS if not (n == signal.SIGHUP and ignored)]
    old_handlers = {n: signal.signal(n, note) for n in heard}
    try:
        yield received
    finally:
        for number, handler in old_handlers.items():
            signal.signal(number, handler)
