"""Measure the peak of MLX's memory and the seconds of a computation, if it fits into memory."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import mlx.core as mx

from your_ai.memory import allocator, probe

# Peaks depend on how far MLX's threads compute ahead, most in large graphs: the largest counts.
REPEATS = 6
ENOUGH_S, VARYING_S = 0.1, 0.25  # after so long, no more runs
BESIDE_BYTES = 10_000_000  # that graphs, and kernels while they are compiled, may take
UNSURE, SURER = 1.25, 1.1  # factors on what may be needed, before and after something was measured
TIGHT_BYTES = 1 << 30  # with less left, the C library keeps no freed buffers


@dataclass
class Room:
    """The bytes that measuring may use."""

    limit_bytes: int
    """Of the process."""
    off: dict[str, float] = field(default_factory=dict)
    """Measured bytes over those guessed by phase, the largest so far."""
    was_enough: bool = True
    is_tight: bool = False
    """Whether the C library no longer keeps freed buffers, which takes time."""

    def has(self, needed_bytes: float, phase: str = "") -> bool:
        """Return whether this process may need so many bytes more, if that is a guess."""
        factor = max(1.0, self.off[phase]) * SURER if phase in self.off else UNSURE
        expected = needed_bytes * factor + BESIDE_BYTES
        left = self.limit_bytes - (probe.process_bytes() or 0)
        if not self.is_tight and left < max(TIGHT_BYTES, 2 * expected):
            self.is_tight = True
            allocator.return_freed_buffers()  # it keeps up to as much as was needed
            allocator.free(collect=False)
        fits = (probe.process_bytes() or 0) + expected <= self.limit_bytes
        self.was_enough = self.was_enough and fits
        return fits

    def learn(self, phase: str, measured: float, guess: float) -> None:
        if guess > 0:
            self.off[phase] = max(self.off.get(phase, 0.0), measured / guess)


class Cost(NamedTuple):
    """The cost of a phase, beside what was in memory before it."""

    bytes: float
    seconds: float


def cost_of(
    prepare: Callable[[], list[Any]],
    run: Callable[[list[Any]], Any],
    *,
    varies: bool = False,
    repeats: int = REPEATS,
) -> Cost:
    """The peak of MLX's memory and the seconds while `run` computes.

    prepare: makes the arrays that a phase begins with, which `run` takes off the list. varies:
        whether the peak depends on threads. repeats: the most runs.
    """
    enough_s = VARYING_S if varies else ENOUGH_S
    most, seconds, count, began = 0, math.inf, 0, time.perf_counter()
    while not count or (count < repeats and time.perf_counter() - began <= enough_s):
        given = prepare()
        mx.eval(given)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        started = time.perf_counter()
        result = run(given)
        mx.eval(result)
        mx.synchronize()
        seconds = min(seconds, time.perf_counter() - started)
        most = max(most, mx.get_peak_memory() - before)
        del result, given
        count += 1
    return Cost(float(most), seconds)


@contextlib.contextmanager
def no_cache() -> Iterator[None]:
    """Until the `with` block ends, MLX keeps no freed buffers, which would add to peaks."""
    allocator.free()
    before = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(before)
        allocator.free()


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Until the `with` block ends, MLX computes nothing ahead, as above its limit, so that peaks
    hardly depend on threads."""
    limit = mx.set_memory_limit(1)
    try:
        yield
    finally:
        mx.set_memory_limit(limit)
