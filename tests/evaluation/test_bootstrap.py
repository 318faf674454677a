from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.evaluation.bootstrap import (
    Interval,
    blocks,
    drawn_counts,
    generator,
    mean_difference,
    paired,
    paired_apart,
    ranked_right,
)

RESAMPLES = 400


@st.composite
def systems(draw) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sums of base and adapter, and sizes, of 20 to 60 realistic rows."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(20, 60))
    sizes = rng.integers(1, 200, rows).astype(float)
    per_token = rng.gamma(2.0, draw(st.floats(0.01, 2.0)), (2, rows))
    return per_token[0] * sizes, per_token[1] * sizes, sizes


def width(found: Interval) -> float:
    return found.high - found.low


@given(systems(), st.integers(0, 100), st.floats(0.5, 0.99))
def test_intervals_contain_the_measured_value(case, seed, confidence):
    base, adapter, sizes = case
    found = paired(base, adapter, sizes, RESAMPLES, seed).intervals(confidence)
    values = base.sum() / sizes.sum(), adapter.sum() / sizes.sum()
    for name, value in zip(("base", "adapter"), values, strict=True):
        assert found[name].value == pytest.approx(value)
        assert found[name].low < found[name].value < found[name].high
    assert found["difference"].value == pytest.approx(values[1] - values[0])


def test_one_row_alone_has_no_interval():
    found = paired(np.array([2.0]), np.array([1.0]), np.array([4.0]), RESAMPLES, 0).intervals(0.95)
    assert [interval.value for interval in found.values()] == [0.5, 0.25, -0.25]
    assert all(np.isnan([interval.low, interval.high]).all() for interval in found.values())


@given(st.integers(2, 40), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 500))
def test_equal_rows_give_intervals_of_zero_width(rows, base, adapter, size):
    given_rows = (np.full(rows, value) for value in (base, adapter, size))
    found = paired(*given_rows, RESAMPLES, 0).intervals(0.95)
    last_digit = np.spacing(max(base, adapter) / size)
    assert all(width(interval) <= last_digit for interval in found.values())


@given(systems())
def test_equal_systems_have_a_difference_of_exactly_zero(case):
    base, _, sizes = case
    pair = paired(base, base.copy(), sizes, RESAMPLES, 0)
    assert pair.intervals(0.95)["difference"] == Interval(0, 0, 0)
    assert pair.exp().intervals(0.95)["difference"] == Interval(0, 0, 0)


@given(systems())
def test_higher_confidence_gives_a_wider_interval(case):
    pair = paired(*case, RESAMPLES, 0)
    narrow, wide = pair.intervals(0.5)["difference"], pair.intervals(0.99)["difference"]
    assert wide.low <= narrow.low <= narrow.high <= wide.high


@given(systems(), st.integers(0, 5))
def test_the_same_seed_gives_the_same_intervals(case, seed):
    first, again = (paired(*case, RESAMPLES, seed).intervals(0.9) for _ in range(2))
    assert first == again
    assert paired(*case, RESAMPLES, seed + 1).intervals(0.9) != first


def test_base_and_adapter_use_the_same_drawn_rows():
    """Rows differ from each other far more than the two systems differ on the same row."""
    rng = np.random.default_rng(0)
    base, sizes = rng.gamma(1.0, 5.0, 200), np.ones(200)
    found = paired(base, base + 0.01 + 0.001 * rng.random(200), sizes, 1000, 0).intervals(0.95)
    assert found["difference"].low > 0.01
    assert width(found["difference"]) < 0.01 * width(found["base"])


def test_perplexity_is_the_exponential_of_the_loss():
    rng = np.random.default_rng(0)
    pair = paired(*rng.gamma(2.0, 1.0, (2, 50)), np.ones(50), 500, 0)
    loss, perplexity = pair.intervals(0.9), pair.exp().intervals(0.9)
    for name in ("base", "adapter"):  # exp is monotone, so it keeps the quantiles
        assert perplexity[name].value == pytest.approx(np.exp(loss[name].value))
        assert perplexity[name].low == pytest.approx(np.exp(loss[name].low), rel=1e-3)
        assert perplexity[name].high == pytest.approx(np.exp(loss[name].high), rel=1e-3)


def test_intervals_contain_the_true_value_as_often_as_their_confidence():
    """Over 400 draws of 80 rows of various lengths with a mean loss of 1 per token."""
    rng = np.random.default_rng(0)
    held = {0.8: 0, 0.95: 0}
    for trial in range(400):
        sizes = rng.integers(5, 60, 80).astype(float)
        losses = sizes * rng.gamma(2.0, 0.5, 80)
        better = losses - sizes * rng.normal(0.3, 0.2, 80)
        pair = paired(losses, better, sizes, 300, trial)
        for confidence in held:
            found = pair.intervals(confidence)
            held[confidence] += found["base"].low <= 1 <= found["base"].high
            held[confidence] += found["difference"].low <= -0.3 <= found["difference"].high
    for confidence, count in held.items():
        assert count / 800 == pytest.approx(confidence, abs=0.03)


@pytest.mark.parametrize("value", [np.inf, np.nan])
def test_values_that_are_not_finite_get_no_interval_and_leave_others_intact(value):
    rng = np.random.default_rng(0)
    base, adapter = rng.random((2, 30))
    adapter[3] = value
    found = paired(base, adapter, np.ones(30), RESAMPLES, 0).intervals(0.95)
    assert found["base"].low < found["base"].value < found["base"].high
    for name in ("adapter", "difference"):
        assert not np.isfinite([found[name].value, found[name].low, found[name].high]).any()


# Good and bad rows


def plain_auc(good: np.ndarray, bad: np.ndarray) -> float:
    return ((good[:, None] > bad) + 0.5 * (good[:, None] == bad)).mean()


def repeated(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    return np.repeat(values, counts.astype(int))


def test_statistics_of_resamples_are_those_of_the_drawn_rows():
    rng = np.random.default_rng(0)
    good, bad = rng.integers(0, 5, 6).astype(float), rng.integers(0, 5, 4).astype(float)
    counts = [drawn_counts(generator(seed), size, 9) for seed, size in ((0, 6), (1, 4))]
    areas, differences = (f(good, bad, *counts) for f in (ranked_right, mean_difference))
    for area, difference, *drawn in zip(areas, differences, *counts, strict=True):
        of_good, of_bad = repeated(good, drawn[0]), repeated(bad, drawn[1])
        assert area == pytest.approx(plain_auc(of_good, of_bad))
        assert difference == pytest.approx(of_good.mean() - of_bad.mean())


def test_good_and_bad_rows_of_equal_systems_differ_by_exactly_0():
    values, good = np.random.default_rng(0).normal(size=20), np.arange(20) % 3 == 0
    for statistic in (ranked_right, mean_difference):
        found = paired_apart(values, values, good, statistic, 100, 0).intervals(0.9)
        assert found["difference"] == Interval(0, 0, 0)
        assert found["base"].low < found["base"].value < found["base"].high


@pytest.mark.parametrize("statistic", [ranked_right, mean_difference])
def test_one_good_row_or_one_that_is_unknown_has_no_interval(statistic):
    values, good = np.array([1.0, 2, 3]), np.array([True, False, False])
    found = paired_apart(values, np.array([1, 2, np.nan]), good, statistic, 10, 0).intervals(0.9)
    assert np.isfinite(found["base"].value)
    assert np.isnan([found["base"].low, found["adapter"].value]).all()


def test_a_resample_draws_as_many_rows_as_there_are():
    counts = np.concatenate([drawn_counts(generator(0), 7, n) for n in blocks(7, 100_000)])
    assert counts.shape == (100_000, 7)
    assert (counts.sum(axis=1) == 7).all()
    assert counts.mean(axis=0) == pytest.approx(np.ones(7), abs=0.01)
    assert counts.var(axis=0) == pytest.approx(np.full(7, 6 / 7), abs=0.02)


def test_memory_is_bounded_for_many_rows():
    rows = np.random.default_rng(0).random((2, 100_000))
    tracemalloc.start()
    paired(*rows, np.ones(100_000), 20, 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6
