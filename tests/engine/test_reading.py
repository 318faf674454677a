"""The clock of reads, and hints to the system."""

from __future__ import annotations

import fcntl
import os
import struct
from types import SimpleNamespace

from your_ai.engine import weights
from your_ai.engine.weights import F_RDADVISE, ReadClock, hint


def test_the_clock_counts_waiting_alone_and_begins_again(monkeypatch):
    now = iter([1.0, 3.0, 10.0, 10.5])
    monkeypatch.setattr(weights, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    clock = ReadClock()
    for _ in range(2):
        with clock.waiting():
            pass
    assert clock.take() == 2.5
    assert clock.take() == 0


def test_linux_is_asked_for_each_part(tmp_path, monkeypatch):
    file, asked = tmp_path / "weights", []
    file.write_bytes(bytes(100))
    monkeypatch.setattr(os, "posix_fadvise", lambda _, *part: asked.append(part), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    hint(file, [(8, 20), (40, 60)], "linux")
    assert asked == [(8, 20, 3), (40, 60, 3)]


def test_macos_is_asked_for_each_part(tmp_path, monkeypatch):
    file, asked = tmp_path / "weights", []
    file.write_bytes(bytes(100))
    monkeypatch.setattr(fcntl, "fcntl", lambda _, *rest: asked.append(rest))
    hint(file, [(8, 20), (40, 1 << 40)], "darwin")
    places = [(8, 20), (40, 2**31 - 1)]
    assert asked == [(F_RDADVISE, struct.pack("=qi4x", *place)) for place in places]
    assert len(asked[0][1]) == 16


def test_a_missing_file_and_an_unknown_system_are_no_errors(tmp_path):
    hint(tmp_path / "missing", [(0, 1)])
    hint(tmp_path, [(0, 1)], "plan9")
