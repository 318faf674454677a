"""Confidence intervals of means over rows: the paired percentile bootstrap. Imports only numpy.

Shares, such as exact match, have Wilson intervals instead (`dashboard/measures.py`), except for the
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

from collections.abc import Callable, Iterator
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
        rng = generator(seed)
        counted = (drawn_counts(rng, len(sizes), count) for count in blocks(len(sizes), resamples))
        sums = np.concatenate([counts @ columns.T for counts in counted])
        bases, differences = means[:, None] + (sums[:, :2] / sums[:, 2:]).T
        if len(sizes) == 1:
            bases, differences = np.full((2, resamples), np.nan)
        return Paired(float(of_base), float(of_adapter), np.stack([bases, bases + differences]))


Statistic = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def paired_apart(
    base: np.ndarray,
    adapter: np.ndarray,
    good: np.ndarray,
    statistic: Statistic,
    resamples: int,
    seed: int,
) -> Paired:
    """Compare the good rows with the bad ones, also for each resample.

    The good and the bad rows are drawn separately, so that no resample lacks one of them.

    base, adapter: (n,) values; good: (n,) bool, with at least one row of each kind.
    statistic: `mean_difference` or `ranked_right`.
    """
    sides = [(values[good], values[~good]) for values in (base, adapter)]
    sizes = good_rows, bad_rows = int(good.sum()), int((~good).sum())
    with np.errstate(invalid="ignore"):  # values may be infinite or NaN
        all_rows = [np.ones((1, size)) for size in sizes]
        of_base, of_adapter = (statistic(*side, *all_rows).item() for side in sides)
        if min(sizes) == 1:
            return Paired(of_base, of_adapter, np.full((2, resamples), np.nan))
        rng, found = generator(seed), []
        for count in blocks(len(good), resamples):
            counts = [drawn_counts(rng, size, count) for size in (good_rows, bad_rows)]
            found.append([statistic(*side, *counts) for side in sides])
    return Paired(of_base, of_adapter, np.concatenate(found, axis=1))


def paired_correlation(
    base: np.ndarray, adapter: np.ndarray, wanted: np.ndarray, resamples: int, seed: int
) -> Paired:
    """Pearson's correlation of the values of each system, (n,), with `wanted`, (n,); NaN if one of
    them is the same in all rows.
    """
    rng, ones = generator(seed), np.ones((1, len(wanted)))
    of_base, of_adapter = (correlations(each, wanted, ones).item() for each in (base, adapter))
    found = []
    for count in blocks(len(wanted), resamples):
        counts = drawn_counts(rng, len(wanted), count)
        found.append([correlations(values, wanted, counts) for values in (base, adapter)])
    return Paired(of_base, of_adapter, np.concatenate(found, axis=1))


def correlations(values: np.ndarray, wanted: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """(k,) the correlations in k resamples; counts: (k, n), how often each row is drawn."""
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = counts / counts.sum(axis=1, keepdims=True)
        x = values - (shares @ values)[:, None]
        y = wanted - (shares @ wanted)[:, None]
        products = ((shares * a * b).sum(axis=1) for a, b in ((x, y), (x, x), (y, y)))
        of_both, of_x, of_y = products
        return np.asarray(of_both / np.sqrt(of_x * of_y))


def mean_difference(
    good: np.ndarray, bad: np.ndarray, good_counts: np.ndarray, bad_counts: np.ndarray
) -> np.ndarray:
    """(k,) the mean of the good rows minus that of the bad ones, for each of k resamples.

    good, bad: values of g and of b rows; good_counts, bad_counts: (k, g) and (k, b), how often
    each row is drawn.
    """
    return np.asarray(good_counts @ good / len(good) - bad_counts @ bad / len(bad))


def ranked_right(
    good: np.ndarray, bad: np.ndarray, good_counts: np.ndarray, bad_counts: np.ndarray
) -> np.ndarray:
    """(k,) the area under the ROC curve, for each of k resamples; arguments as above.

    It is the share of (good, bad) pairs of rows whose good row has the higher value; a tie counts
    half. NaN if a value is NaN.
    """
    if np.isnan(good).any() or np.isnan(bad).any():
        return np.full(len(good_counts), np.nan)
    order = np.argsort(bad)
    below = np.pad(np.cumsum(bad_counts[:, order], axis=1), ((0, 0), (1, 0)))
    lower, upper = (np.searchsorted(bad[order], good, side) for side in ("left", "right"))
    wins = (below[:, lower] + below[:, upper]) / 2  # (k, g): drawn bad rows below each good one
    return np.asarray((good_counts * wins).sum(axis=1) / (len(good) * len(bad)))


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(derive_seed(seed, "bootstrap")))


def blocks(rows: int, resamples: int) -> Iterator[int]:
    """Yield the sizes of the parts of the resamples that are drawn together."""
    at_once = max(1, ROWS_PER_DRAW // rows)
    for first in range(0, resamples, at_once):
        yield min(at_once, resamples - first)


def drawn_counts(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """(count, rows) float64: how often each row is drawn, for some of the resamples."""
    drawn = rng.integers(rows, size=(count, rows))
    drawn += rows * np.arange(count)[:, None]
    counts = np.bincount(drawn.reshape(-1), minlength=count * rows)
    return counts.reshape(count, rows).astype(np.float64)
