from __future__ import annotations

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
