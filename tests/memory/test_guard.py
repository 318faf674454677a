"""A process that is about to exceed its limit ends before it does."""

from __future__ import annotations

import threading
import time

import pytest

from your_ai.memory import guard, probe
from your_ai.memory.guard import guarded, wait_s
from your_ai.memory.limit import headroom_bytes

LIMIT = 1_000_000_000


@pytest.fixture
def held(monkeypatch) -> list[int]:
    """Readings of the gauge of the process; the last entry is the current one."""
    readings = [0]
    monkeypatch.setattr(probe, "process_bytes", lambda: readings[-1])
    monkeypatch.setattr(guard.allocator, "keep_nothing", lambda: None)
    return readings


def wait_for(event: threading.Event) -> bool:
    return event.wait(5.0)


def test_guard_calls_end_just_below_the_limit(held):
    ended, calls = threading.Event(), []

    def end(held_bytes: int) -> None:
        calls.append(held_bytes)
        ended.set()

    with guarded(LIMIT, end):
        held.append(LIMIT - headroom_bytes(LIMIT))
        assert wait_for(ended)
    assert calls == [LIMIT - headroom_bytes(LIMIT)]


@pytest.mark.parametrize("held_bytes", [int(0.98 * LIMIT), None])
def test_guard_does_nothing_further_below_the_limit_or_without_a_gauge(held, held_bytes):
    ended = threading.Event()
    with guarded(LIMIT, lambda _: ended.set()):
        held.append(held_bytes)
        time.sleep(0.2)
    assert not ended.is_set()


def test_guard_frees_memory_first_and_continues_if_that_helps(held, monkeypatch):
    ended, freed = threading.Event(), threading.Event()

    def keep_nothing() -> None:
        held.append(LIMIT // 2)
        freed.set()

    monkeypatch.setattr(guard.allocator, "keep_nothing", keep_nothing)
    with guarded(LIMIT, lambda _: ended.set()):
        held.append(int(0.95 * LIMIT))
        assert wait_for(freed)
        time.sleep(0.05)
    assert not ended.is_set()


def test_guard_does_not_wait_for_memory_that_is_being_freed(held, monkeypatch):
    """MLX frees its cache only once the running work is done, in which memory grows on."""
    ended, freeing, working = threading.Event(), threading.Event(), threading.Event()

    def keep_nothing() -> None:
        freeing.set()
        working.wait(20)

    monkeypatch.setattr(guard.allocator, "keep_nothing", keep_nothing)
    with guarded(LIMIT, lambda _: ended.set()):
        held.append(int(0.95 * LIMIT))
        assert wait_for(freeing)
        held.append(LIMIT)
        assert wait_for(ended)
        working.set()


def test_memory_is_freed_again_only_if_mlx_keeps_some(held, monkeypatch):
    freed, cache = threading.Semaphore(0), [0]
    monkeypatch.setattr(guard.allocator, "keep_nothing", freed.release)
    monkeypatch.setattr(probe, "mlx_bytes", lambda name: cache[0])
    with guarded(LIMIT, lambda _: None):
        held.append(int(0.95 * LIMIT))
        assert freed.acquire(timeout=5.0)
        assert not freed.acquire(timeout=0.2)
        cache[0] = 1
        assert freed.acquire(timeout=5.0)


def test_guard_waits_until_it_may_end_the_process(held):
    ended, ready = threading.Event(), threading.Event()
    with guarded(LIMIT, lambda _: ended.set(), lambda most: ready.is_set()):
        held.append(LIMIT)
        time.sleep(0.15)
        assert not ended.is_set()
        ready.set()
        assert wait_for(ended)


@pytest.mark.parametrize("room_bytes", [-5, 0, 10**6, 10**8, 10**11])
def test_guard_looks_again_before_the_process_can_reach_the_limit(room_bytes):
    wait = wait_s(room_bytes)
    assert 0 < wait <= 0.05
    assert wait <= max(0.001, room_bytes / 4e9)
