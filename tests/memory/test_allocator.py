"""Freed memory is returned, and MLX gets the right limits."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator

import mlx.core as mx
import pytest

from your_ai.memory import allocator, probe

pytestmark = pytest.mark.memory

MB = 10**6


@pytest.fixture
def limits() -> Iterator[None]:
    """Set MLX's limits, and restore them after the test."""
    memory, cache = mx.set_memory_limit(10**12), mx.set_cache_limit(100 * MB)
    mx.clear_cache()
    yield
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    mx.clear_cache()


def limits_now() -> tuple[int, int]:
    """MLX's memory and cache limits; setting a limit returns the one before."""
    memory, cache = mx.set_memory_limit(0), mx.set_cache_limit(0)
    return memory, cache


@pytest.mark.parametrize(
    ("limit", "needed", "python", "memory", "cache"),
    [
        (1000 * MB, 600 * MB, 150 * MB, 850 * MB, 200 * MB),
        (1000 * MB, 1000 * MB, 150 * MB, 850 * MB, 0),
        (1000 * MB, 1200 * MB, 150 * MB, 850 * MB, 0),
        (100 * MB, 90 * MB, 150 * MB, 1, 5 * MB),
    ],
)
def test_hold_sets_the_memory_and_cache_limits_of_mlx(limits, limit, needed, python, memory, cache):
    allocator.set_limits(limit, needed, python)
    assert limits_now() == (memory, cache)


def test_cache_limit_never_exceeds_what_the_plan_leaves(limits):
    for needed in range(0, 1000 * MB, 90 * MB):
        allocator.set_limits(1000 * MB, needed, 0)
        _, cache = limits_now()
        assert 0 <= cache <= 1000 * MB - needed


@pytest.fixture
def wires(monkeypatch) -> list[int]:
    """The limits that MLX was given, of a Metal that recommends 700 MB; first is the old one."""
    set_to = [20 * MB]

    def set_wired_limit(size: int) -> int:
        set_to.append(size)
        return set_to[-2]

    monkeypatch.setattr(mx, "set_wired_limit", set_wired_limit)
    monkeypatch.setattr(probe, "working_set_bytes", lambda: 700 * MB)
    return set_to


@pytest.mark.parametrize(("limit", "expected"), [(500 * MB, 500 * MB), (900 * MB, 700 * MB)])
def test_at_most_the_limit_and_what_metal_recommends_is_wired(wires, limit, expected):
    with allocator.wired(limit) as has_effect:
        assert has_effect
        assert wires[-1] == expected
    assert wires[-1] == 20 * MB


def test_the_old_limit_of_wired_memory_comes_back_after_an_error(wires):
    with pytest.raises(RuntimeError), allocator.wired(500 * MB):
        raise RuntimeError
    assert wires[-1] == 20 * MB


def test_without_metal_nothing_is_wired(wires, monkeypatch):
    monkeypatch.setattr(probe, "working_set_bytes", lambda: None)
    with allocator.wired(500 * MB) as has_effect:
        assert not has_effect
    assert wires == [20 * MB]


def test_mlx_still_computes_beyond_its_memory_limit(limits):
    """The limit is a guideline: MLX allocates beyond it if it must."""
    allocator.set_limits(MB, MB, 2 * MB)
    assert mx.ones((1000, 1000)).sum().item() == MB


@pytest.mark.parametrize("collect", [True, False])
def test_free_empties_the_cache_of_mlx(limits, collect):
    arrays = [mx.ones((1000, 250)) for _ in range(20)]
    mx.eval(arrays)
    del arrays
    assert mx.get_cache_memory() >= 20 * MB
    allocator.free(collect)
    assert mx.get_cache_memory() == 0


class Cycle:
    """Refers to itself, so that only the garbage collector frees it."""

    def __init__(self) -> None:
        self.array, self.itself = mx.ones((1000, 250)), self
        mx.eval(self.array)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_free_collects_reference_cycles_only_if_asked(limits, no_collector):
    allocator.free()
    before = mx.get_active_memory()
    Cycle()
    allocator.free(collect=False)
    assert mx.get_active_memory() >= before + MB
    allocator.free()
    assert mx.get_active_memory() < before + MB


FREES_BUFFERS = """
import mlx.core as mx
from your_ai.memory import allocator, probe

mx.set_cache_limit(0)
allocator.return_freed_buffers()
mx.eval(mx.zeros(1_000_000))
before = probe.process_bytes()
kept = []
for megabytes in (30, 20, 10, 5, 2, 1):  # small live buffers between large freed ones
    for _ in range(60 // megabytes):
        mx.eval(mx.ones((megabytes, 250_000)))
        array = mx.ones((megabytes, 250_000))
        other = mx.ones(250)
        mx.eval(array, other)
        kept.append(other)
        del array
print(probe.process_bytes() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS returns memory by itself")
def test_freed_buffers_return_to_the_system():
    done = subprocess.run(
        [sys.executable, "-c", FREES_BUFFERS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 8 * MB


def test_give_back_at_once_can_be_called_twice():
    allocator.return_freed_buffers()
    allocator.return_freed_buffers()
    assert mx.ones(10).sum().item() == 10


def test_nothing_freed_is_kept_until_limits_are_set_again(monkeypatch):
    monkeypatch.setattr(allocator, "return_freed_buffers", lambda: None)
    before = mx.set_cache_limit(1 << 30)
    try:
        mx.eval(mx.ones(1 << 22))  # freed at once, and kept
        assert mx.get_cache_memory() >= 1 << 24
        allocator.keep_nothing()
        mx.eval(mx.ones(1 << 22))
        mx.synchronize()
        assert mx.get_cache_memory() == 0
    finally:
        mx.set_cache_limit(before)
