"""Confidence intervals of means over rows: the paired percentile bootstrap. Imports only numpy.

Shares, such as exact match, have Wilson intervals instead (`dashboard/shares.py`), except for the
difference between base and adapter.

A resample draws as many rows as the file has, with replacement, and computes the mean again.
This is repeated `resamples` times. The interval at confidence 0.95 contains the middle 95% of
these means (Efron & Tibshirani, An Introduction to the Bootstrap, 1993, section 13.3). Base and
adapter use the same drawn rows each time, so the interval of their difference comes from the
differences within rows and is far narrower than the two separate intervals. A mean is a ratio
of two sums, and both are computed again from the drawn rows, because rows differ in length.

Only the choice of rows is treated as random. The training seed is not, and neither is the
chance that other users ask different questions. With few rows, about thirty, the intervals are
somewhat too narrow. A single row has no interval.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from your_ai.rng import derive_seed

ROWS_PER_DRAW = 1 << 18  # about 24 bytes each


@dataclass(frozen=True)
class Interval:
    """A measured value and its confidence interval; NaN bounds if the interval is unknown."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Paired:
    """The means of base and adapter over the same rows, and those means in each resample."""

    base: float
    adapter: float
    drawn: np.ndarray
    """(2, resamples): the mean of base and of adapter over the rows of each resample."""

    def exp(self) -> Paired:
        """Return the exponentials of all values: perplexities, if the values are losses."""
        with np.errstate(over="ignore"):
            return Paired(np.exp(self.base), np.exp(self.adapter), np.exp(self.drawn))

    def intervals(self, confidence: float) -> dict[str, Interval]:
        """Intervals of base, adapter and difference (adapter's mean minus base's)."""
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
    """Compute sum(base) / sum(sizes) and sum(adapter) / sum(sizes), also for each resample.

    base, adapter, sizes: (n,), one value per row; sizes are above 0. Memory does not grow with
    `resamples`, except for the means themselves.
    """
    base, adapter, sizes = (np.asarray(array, np.float64) for array in (base, adapter, sizes))
    with np.errstate(invalid="ignore"):  # values may be infinite or NaN
        difference, total = adapter - base, sizes.sum()
        of_base, of_adapter = base.sum() / total, adapter.sum() / total
        means = np.array([of_base, difference.sum() / total])
        # Subtract the means, so that no digits are lost and equal rows give exactly the mean
        # every time. Sum the difference separately, so that equal systems differ by exactly 0.
        columns = np.stack([base - means[0] * sizes, difference - means[1] * sizes, sizes])
        counted = drawn_counts(len(sizes), resamples, seed)
        sums = np.concatenate([counts @ columns.T for counts in counted])
        bases, differences = means[:, None] + (sums[:, :2] / sums[:, 2:]).T
        if len(sizes) == 1:
            bases, differences = np.full((2, resamples), np.nan)
        return Paired(float(of_base), float(of_adapter), np.stack([bases, bases + differences]))


def drawn_counts(rows: int, resamples: int, seed: int) -> Iterator[np.ndarray]:
    """Yield how often each row is drawn, (part of the resamples, rows) float64, for all of them."""
    rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "bootstrap")))
    at_once = max(1, ROWS_PER_DRAW // rows)
    for first in range(0, resamples, at_once):
        count = min(at_once, resamples - first)
        drawn = rng.integers(rows, size=(count, rows))
        drawn += rows * np.arange(count)[:, None]
        counts = np.bincount(drawn.reshape(-1), minlength=count * rows)
        yield counts.reshape(count, rows).astype(np.float64)
