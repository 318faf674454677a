"""What a computation takes, and whether it fits into memory."""

from __future__ import annotations

import mlx.core as mx
import pytest

from your_ai.engine import peaks
from your_ai.engine.peaks import Room, cost_of
from your_ai.memory import probe


@pytest.mark.memory
def test_a_cost_is_the_peak_beside_what_a_phase_begins_with():
    def twice(given):
        return mx.concatenate(2 * [given.pop()])

    assert cost_of(lambda: [mx.ones(1 << 20)], twice).bytes == 8 << 20


def test_there_is_room_for_a_guess_with_a_margin(monkeypatch):
    monkeypatch.setattr(probe, "process_bytes", lambda: 100)
    monkeypatch.setattr(peaks, "BESIDE_BYTES", 0)
    room = Room(limit_bytes=225)
    assert room.has(100)
    assert room.was_enough
    assert not room.has(101)
    assert not room.was_enough


def test_guesses_count_as_much_more_as_the_worst_one_was_wrong(monkeypatch):
    monkeypatch.setattr(probe, "process_bytes", lambda: 0)
    monkeypatch.setattr(peaks, "BESIDE_BYTES", 0)
    room = Room(limit_bytes=330)
    room.learn("forward", measured=300, guess=100)
    room.learn("forward", measured=50, guess=100)
    assert room.has(99, "forward")
    assert not room.has(101, "forward")
    assert room.has(101, "backward")
