"""How far a mean over rows may be off: the percentile bootstrap, paired. Numpy alone.

Rows are drawn with replacement as often as there are rows, and what was measured is computed
again from those drawn, `resamples` times; an interval is what the middle of the results lies
within: of 0.95 of them, say (Efron & Tibshirani, An Introduction to the Bootstrap, 1993,
section 13.3). Base and adapter are given the same rows each time, so that the interval of
their difference is of the rows' own differences, and far narrower than the two beside it. A
mean is a ratio of sums, both of which are drawn anew: rows are not alike in length.

What rows there are is all that is taken as left to chance: not the seed of the training, nor
that others would ask other things. With few rows, thirty say, intervals are somewhat too
narrow; one alone says nothing of others, and has none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from your_ai.rng import derive_seed

DRAWN_AT_ONCE = 1 << 18  # rows, of some 24 bytes each


@dataclass(frozen=True)
class Interval:
    """A measured value, and between what it may lie; not finite where it cannot be told."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """base, adapter: means over rows; drawn: (2, resamples), the same of rows drawn."""

    base: float
    adapter: float
    drawn: np.ndarray

    def exp(self) -> Paired:
        """Of the exponentials of both: perplexity, where this is of losses."""
        with np.errstate(over="ignore"):
            return Paired(np.exp(self.base), np.exp(self.adapter), np.exp(self.drawn))

    def intervals(self, confidence: float) -> dict[str, Interval]:
        """Of base, adapter, and difference: the adapter's mean less the base's."""
        base, adapter = self.drawn
        with np.errstate(invalid="ignore"):
            return {
                "base": interval(self.base, base, confidence),
                "adapter": interval(self.adapter, adapter, confidence),
                "difference": interval(self.adapter - self.base, adapter - base, confidence),
            }


def interval(value: float, drawn: np.ndarray, confidence: float) -> Interval:
    if not np.isfinite(drawn).all():
        return Interval(float(value), np.nan, np.nan)
    low, high = np.quantile(drawn, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(value), float(low), float(high))


def paired(
    base: np.ndarray, adapter: np.ndarray, sizes: np.ndarray, resamples: int, seed: int
) -> Paired:
    """The means sum(base) / sum(sizes) and sum(adapter) / sum(sizes), and those of rows drawn.

    base, adapter, sizes: (n,) of each row; sizes above 0. Memory does not grow with
    `resamples`, but for the means themselves.
    """
    base, adapter, sizes = (np.asarray(array, np.float64) for array in (base, adapter, sizes))
    with np.errstate(invalid="ignore"):  # of what is not finite
        difference, total = adapter - base, sizes.sum()
        of_base, of_adapter = base.sum() / total, adapter.sum() / total
        means = np.array([of_base, difference.sum() / total])
        # Less their means, so that digits are not lost, and rows that are equal give them each
        # time; the difference by itself, so that systems that are the same differ by nothing.
        columns = np.stack([base - means[0] * sizes, difference - means[1] * sizes, sizes])
        counted = drawn_counts(len(sizes), resamples, seed)
        sums = np.concatenate([counts @ columns.T for counts in counted])
        bases, differences = means[:, None] + (sums[:, :2] / sums[:, 2:]).T
        if len(sizes) == 1:
            bases, differences = np.full((2, resamples), np.nan)
        return Paired(float(of_base), float(of_adapter), np.stack([bases, bases + differences]))


def drawn_counts(rows: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """How often each row is drawn, (some resamples, rows) float64, until they are `resamples`."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "bootstrap")))
    at_once = max(1, DRAWN_AT_ONCE // rows)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        drawn = rng.integers(rows, size=(count, rows))
        drawn += rows * np.arange(count)[:, None]
        counts = np.bincount(drawn.reshape(-1), minlength=count * rows)
        yield counts.reshape(count, rows).astype(np.float64)
