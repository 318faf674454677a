"""Stop signals: raised before the first step, recorded during training."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from tests.conftest import wait_until
from your_ai.run import stopping
from your_ai.run.stopping import SIGNALS, Interrupted, Stop, stop_signals

PATIENCE_S = 10.0
by_name = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


@contextlib.contextmanager
def training() -> Iterator[Stop]:
    """The block is training, which ends after a step if there is a signal."""
    with stop_signals() as stop:
        stop.graceful = True
        yield stop


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def send_and_wait(number: int) -> None:
    send(number)
    time.sleep(PATIENCE_S)  # cut short by the signal's handler


def handlers() -> list[object]:
    return [signal.getsignal(number) for number in SIGNALS]


def wakeup_fd() -> int:
    fd = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(fd)
    return fd


@pytest.fixture
def exits(monkeypatch) -> list[int]:
    """The statuses with which the process would have exited."""
    statuses: list[int] = []
    monkeypatch.setattr(stopping.os, "_exit", statuses.append)
    return statuses


@by_name
def test_a_signal_before_the_first_step_raises_interrupted(number):
    with pytest.raises(Interrupted) as caught, stop_signals():
        send_and_wait(number)
    assert caught.value.number == number


@by_name
def test_a_signal_during_training_is_recorded(number):
    with training() as stop:
        send(number)
        wait_until(lambda: stop)
    assert stop.received == number


def test_without_a_signal_nothing_is_recorded():
    with training() as stop:
        pass
    assert not stop


@pytest.mark.parametrize(
    ("number", "name"),
    [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")],
)
def test_the_stop_has_the_name_of_the_signal(number, name):
    stop = Stop()
    stop.received = number
    assert stop.name == name


def test_the_first_signal_calls_on_first_once(exits):
    calls = []
    with training() as stop:
        stop.on_first = lambda: calls.append("first")
        send(signal.SIGINT)
        wait_until(lambda: calls)
    assert calls == ["first"]
    assert exits == []


@by_name
def test_the_second_signal_exits_immediately(exits, number):
    calls = []
    with training() as stop:
        stop.on_second = lambda: calls.append("second")
        send(signal.SIGTERM)
        wait_until(lambda: stop)
        send(number)
        wait_until(lambda: exits)
    assert calls == ["second"]
    assert exits == [128 + number]


def test_the_second_signal_exits_even_if_on_first_failed(exits, monkeypatch):
    """on_first writes to a disk, which may be full."""
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with training() as stop:
        stop.on_first = Mock(side_effect=OSError)
        send(signal.SIGINT)
        wait_until(lambda: stop)
        send(signal.SIGINT)
        wait_until(lambda: exits)
    assert exits == [130]


def test_other_signals_do_not_stop(monkeypatch):
    seen = []
    old = signal.signal(signal.SIGUSR1, lambda *_: seen.append(1))
    try:
        with training() as stop:
            send(signal.SIGUSR1)
            wait_until(lambda: seen)
            assert not stop
    finally:
        signal.signal(signal.SIGUSR1, old)


def test_an_ignored_sighup_stays_ignored_but_sigint_is_handled():
    old = {n: signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, signal.SIGINT)}
    try:
        with stop_signals():
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            assert signal.getsignal(signal.SIGINT) != signal.SIG_IGN
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_handlers_are_restored(error):
    before, fd = handlers(), wakeup_fd()
    with pytest.raises(error) if error else contextlib.nullcontext(), training() as stop:
        assert handlers() != before
        if error:
            raise error
        send(signal.SIGTERM)
        wait_until(lambda: stop)
    assert handlers() == before
    assert wakeup_fd() == fd


def test_the_watching_thread_ends_with_the_block():
    with stop_signals():
        names = [thread.name for thread in threading.enumerate()]
    assert "stop-signals" in names
    assert "stop-signals" not in [thread.name for thread in threading.enumerate()]
