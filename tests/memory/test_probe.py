from __future__ import annotations

import subprocess
import sys

import mlx.core as mx

from your_ai.memory import probe


def test_it_sees_an_array_come_and_go():
    before = probe.read()
    array = mx.zeros((4 << 20,), mx.float32)
    mx.eval(array)
    held = probe.read()
    assert held.active_bytes - before.active_bytes == 16 << 20
    assert held.peak_bytes >= held.active_bytes
    assert held.process_bytes > held.active_bytes
    del array
    assert probe.read().active_bytes == before.active_bytes


def test_the_peak_is_never_under_what_is_held():
    array = mx.zeros((1 << 20,))
    mx.eval(array)
    mx.reset_peak_memory()  # sets it to 0 until the next allocation
    assert probe.read().peak_bytes >= array.nbytes


def test_the_peak_of_a_process_is_its_own():
    """Not that of the process that started it, as ru_maxrss has it on Linux."""
    ballast = bytearray(300 << 20)
    ballast[::4096] = bytes([1]) * len(ballast[::4096])
    assert probe.process_peak() > len(ballast)
    code = "from your_ai.memory import probe; print(probe.process_peak())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 10 << 20 < int(done.stdout) < 250 << 20
