"""The keyboard of a terminal, which here is a pseudo-terminal in a process of its own."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import time

import pytest

from your_ai.dashboard.keys import Keyboard, keyboard

READS = """
import signal, sys, time
from your_ai.dashboard.keys import keyboard
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
def test_keys_come_one_by_one_and_the_terminal_is_as_it_was(pressed):
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
    """Make `fd` the terminal of a new session, in whose foreground the process is."""

    def take() -> None:
        os.setsid()
        os.close(os.open(os.ttyname(fd), os.O_RDWR))

    return take


def test_no_terminal_means_no_keys_but_time_passes(monkeypatch):
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        with keyboard() as keys:
            keys.take()
            began = time.monotonic()
            assert keys.read(0.1) == ""
            assert time.monotonic() - began >= 0.1


def test_a_terminal_of_others_is_left_alone():
    ours, theirs = pty.openpty()  # is not this process's terminal: it is not in its foreground
    before = termios.tcgetattr(theirs)
    keys = Keyboard(theirs)
    keys.take()
    assert termios.tcgetattr(theirs) == before
    os.write(ours, b"q")
    assert keys.read(0.01) == ""
    os.close(ours)
    os.close(theirs)


def test_no_standard_input_means_no_keys(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with keyboard() as keys:
        assert keys.fd is None
