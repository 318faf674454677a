from __future__ import annotations

import math
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.dashboard.measures import RunningMean


def mean_of(values: list[float], highest: bool = False) -> RunningMean:
    found = RunningMean(highest)
    for step, value in enumerate(values, start=1):
        found = found.add(value, step)
    return found


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60))
def test_it_is_of_the_newer_half_and_at_most_twenty(values):
    size = min(20, math.ceil(len(values) / 2))
    mean = sum(values[-size:]) / size
    assert math.isclose(mean_of(values).value, mean, rel_tol=1e-9, abs_tol=1e-6)


@pytest.mark.parametrize("highest", [False, True])
def test_the_best_is_not_one_of_the_first_steps(highest):
    first = 9.0 if highest else 0.0
    found = mean_of([first] + [1.0] * 29 + [2.0 if highest else 0.5] + [1.0] * 60, highest)
    assert found.best == pytest.approx(1 + 1 / 16 if highest else 1 - 0.5 / 16)
    assert found.best_at == 31
    assert mean_of([first, 1.0, 1.0], highest).best == 1.0
    assert RunningMean(highest).best is None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e31])
def test_values_that_are_not_finite_are_left_out(value):
    assert reduce(RunningMean.add, [1.0, value, 3.0], RunningMean()).newest == (1.0, 3.0)
