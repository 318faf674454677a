"""The keyboard of a terminal, tested with a pseudo-terminal in another process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import time

import pytest

from your_ai.dashboard.live import Keyboard, keyboard

READS = """
import signal, sys, time
from your_ai.dashboard.live import keyboard
with keyboard() as keys:
    keys.take()
    print("ready", flush=True)
    deadline = time.monotonic() + 10
    pressed = ""
    while "q" not in pressed and time.monotonic() < deadline:
        pressed += keys.read(0.05)
    print("pressed", pressed, flush=True)
    if "x" in pressed:
        raise SystemExit(3)
"""


def read_until(fd: int, text: bytes) -> bytes:
    found = b""
    while text not in found:
        found += os.read(fd, 1024)
    return found


@pytest.mark.parametrize("pressed", [b"cq", b"xq"], ids=["leaves", "fails"])
def test_keys_are_read_one_by_one_and_the_terminal_is_restored(pressed):
    ours, theirs = pty.openpty()
    before = termios.tcgetattr(theirs)
    with subprocess.Popen(
        [sys.executable, "-c", READS], stdin=theirs, stdout=theirs, preexec_fn=take_terminal(theirs)
    ) as process:
        read_until(ours, b"ready")
        assert not termios.tcgetattr(theirs)[3] & termios.ICANON
        os.write(ours, pressed)
        output = read_until(ours, b"pressed " + pressed)
    assert process.returncode == (3 if b"x" in pressed else 0)
    assert pressed not in output.split(b"pressed")[0]  # no echo
    assert termios.tcgetattr(theirs) == before


def take_terminal(fd: int):
    """Make `fd` the terminal of a new session, with the process in its foreground."""

    def take() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(fd), os.O_RDWR))

    return take


def test_without_a_terminal_read_only_waits(monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with keyboard() as keys:
            keys.take()
            began = time.monotonic()
            assert keys.read(0.1) == ""
            assert time.monotonic() - began >= 0.1


def test_terminal_in_background_is_not_changed():
    ours, theirs = pty.openpty()  # not this process's terminal
    before = termios.tcgetattr(theirs)
    keys = Keyboard(theirs)
    keys.take()
    assert termios.tcgetattr(theirs) == before
    os.write(ours, b"q")
    assert keys.read(0.01) == ""
    os.close(ours)
    os.close(theirs)


def test_without_standard_input_there_are_no_keys(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with keyboard() as keys:
        assert keys.fd is None
