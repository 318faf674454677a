"""A process that is about to pass its limit ends before it does."""

from __future__ import annotations

import threading
import time

import pytest

from your_ai.memory import guard, probe
from your_ai.memory.guard import HEADROOM_BYTES, guarded

LIMIT = 1_000_000_000


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """What the process holds, as the gauge shows it; the last entry is now."""
    readings = [0]
    monkeypatch.setattr(probe, "process_bytes", lambda: readings[-1])
    monkeypatch.setattr(guard.allocator, "free", lambda collect: None)
    return readings


def wait_for(event: threading.Event) -> bool:
    return event.wait(5.0)


def test_it_ends_a_process_that_is_close_below_its_limit(held):
    ended, told = threading.Event(), []

    def end(held_bytes: int) -> None:
        told.append(held_bytes)
        ended.set()

    with guarded(LIMIT, end) as begin:
        begin()
        held.append(LIMIT - HEADROOM_BYTES)
        assert wait_for(ended)
    assert told == [LIMIT - HEADROOM_BYTES]


def test_it_leaves_one_that_holds_less_alone(held):
    ended = threading.Event()
    with guarded(LIMIT, lambda _: ended.set()) as begin:
        begin()
        held.append(int(0.98 * LIMIT))
        time.sleep(0.2)
    assert not ended.is_set()


def test_it_first_gives_back_what_is_not_used(held, monkeypatch):
    ended, freed = threading.Event(), threading.Event()

    def free(collect: bool) -> None:
        held.append(LIMIT // 2)
        freed.set()

    monkeypatch.setattr(guard.allocator, "free", free)
    with guarded(LIMIT, lambda _: ended.set()) as begin:
        begin()
        held.append(LIMIT)
        assert wait_for(freed)
        time.sleep(0.05)
    assert not ended.is_set()


def test_a_gauge_that_cannot_be_read_ends_nothing(held):
    ended = threading.Event()
    with guarded(LIMIT, lambda _: ended.set()) as begin:
        begin()
        held.append(None)
        time.sleep(0.15)
    assert not ended.is_set()


def test_it_watches_only_once_it_is_told_to(held):
    ended = threading.Event()
    with guarded(LIMIT, lambda _: ended.set()):
        held.append(LIMIT)
        time.sleep(0.15)
    assert not ended.is_set()
