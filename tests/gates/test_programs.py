"""Other programs, and what they start, are ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time

import psutil

from your_ai.gates.programs import begun, end

PATIENCE_S = 10.0


def is_gone(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


def test_what_a_program_started_ends_with_it():
    process = begun("sh", "-c", "sleep 60 & echo $!; wait", stdout=subprocess.PIPE)
    child = int(process.stdout.readline())
    assert not is_gone(child)
    end(process)
    assert process.returncode < 0
    assert process.stdout.closed
    deadline = time.monotonic() + PATIENCE_S
    while not is_gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_program_that_has_ended_is_no_error():
    process = begun("true")
    process.wait()
    end(process)
    assert process.returncode == 0


def test_a_program_has_its_own_session():
    process = begun("sleep", "60")
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    end(process, 1.0)
