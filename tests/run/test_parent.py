"""A child notices its parent's death, whatever the cause."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from your_ai.run.child import RELEASE, watch_parent

PATIENCE_S = 10.0
CHILD = """
import signal, sys, time
from your_ai.run.child import leave, watch_parent

print("started", flush=True)
if sys.argv[2] == "deaf":
    signal.signal(signal.SIGTERM, lambda *_: print("heard", flush=True))
if sys.argv[2] == "saving":
    def save(*_):
        print("saved", flush=True)
        sys.exit(7)
    signal.signal(signal.SIGTERM, save)
watch_parent(int(sys.argv[1]), lambda: leave(grace_s=0.3))
print("watching", flush=True)
while True:
    time.sleep(0.01)
"""


def orphaned(kind: str) -> tuple[int, list[str]]:
    """The status and the output of a child whose pipe is closed while it is running."""
    reader, writer = os.pipe()
    command = [sys.executable, "-c", CHILD, str(reader), kind]
    with subprocess.Popen(command, pass_fds=[reader], stdout=subprocess.PIPE, text=True) as child:
        os.close(reader)
        assert child.stdout.readline() == "started\n"
        assert child.stdout.readline() == "watching\n"
        assert child.poll() is None
        os.close(writer)
        try:
            output, _ = child.communicate(timeout=PATIENCE_S)
        finally:
            child.kill()
    return child.returncode, output.splitlines()


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("saving", 7, ["saved"]),
        ("plain", -signal.SIGTERM, []),
        ("deaf", 128 + signal.SIGTERM, ["heard"]),  # after the grace time
    ],
)
def test_an_orphan_gets_sigterm_and_ends(kind, status, said):
    assert orphaned(kind) == (status, said)


@pytest.mark.parametrize("released", [False, True])
def test_a_custom_callback_is_called_when_the_parent_of_a_child_not_released_ends(released):
    reader, writer = os.pipe()
    gone = threading.Event()
    watch_parent(reader, gone.set)
    assert not gone.wait(0.05)
    if released:
        os.write(writer, RELEASE)
    os.close(writer)
    assert gone.wait(0.2 if released else PATIENCE_S) != released
    os.close(reader)


def test_the_pipe_is_not_inherited_by_further_children():
    reader, writer = os.pipe()
    os.set_inheritable(reader, True)
    watch_parent(reader, lambda: None)
    assert not os.get_inheritable(reader)
    os.close(writer)


def test_a_closed_pipe_is_an_error():
    reader, writer = os.pipe()
    os.close(reader)
    os.close(writer)
    with pytest.raises(OSError, match="descriptor"):
        watch_parent(reader)
