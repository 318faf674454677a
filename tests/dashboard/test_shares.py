from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.dashboard.measures import match_share, wilson
from your_ai.run.events import ExactMatch

CONFIDENCES = st.one_of(st.floats(0.01, 0.999), st.just(1 - 2**-53))


@st.composite
def counts(draw) -> tuple[int, int]:
    """A count of correct rows, and of all rows."""
    rows = draw(st.integers(1, 10**6))
    return draw(st.one_of(st.just(0), st.just(rows), st.integers(0, rows))), rows


@given(counts(), CONFIDENCES)
def test_the_interval_has_a_width_and_contains_the_share_and_stays_in_0_to_1(case, confidence):
    correct, rows = case
    low, high = wilson(correct / rows, rows, confidence)
    assert 0 <= low <= correct / rows <= high <= 1
    assert low < high
    assert correct or low == 0
    assert correct < rows or high == 1


@given(counts(), CONFIDENCES)
def test_more_rows_narrow_the_interval_and_more_confidence_widens_it(case, confidence):
    correct, rows = case
    share = correct / rows
    low, high = wilson(share, rows, confidence)
    more_low, more_high = wilson(share, 2 * rows, confidence)
    assert more_high - more_low < high - low
    less_low, less_high = wilson(share, rows, confidence / 2)
    assert low <= less_low
    assert less_high <= high


@given(counts(), CONFIDENCES)
def test_the_interval_of_the_rest_is_the_mirror_image(case, confidence):
    correct, rows = case
    low, high = wilson(correct / rows, rows, confidence)
    rest = wilson((rows - correct) / rows, rows, confidence)
    assert rest == pytest.approx((1 - high, 1 - low), abs=1e-9)


@pytest.mark.parametrize(
    ("correct", "rows", "confidence", "low", "high"),
    [
        (8, 10, 0.95, 0.490, 0.943),
        (0, 10, 0.95, 0.000, 0.278),
        (10, 10, 0.95, 0.722, 1.000),
        (81, 263, 0.95, 0.255, 0.366),  # Newcombe 1998, table I
        (15, 148, 0.95, 0.062, 0.160),
        (0, 20, 0.95, 0.000, 0.161),
        (1, 29, 0.95, 0.006, 0.172),
    ],
)
def test_known_intervals(correct, rows, confidence, low, high):
    assert wilson(correct / rows, rows, confidence) == pytest.approx((low, high), abs=0.0006)


def test_no_rows_say_nothing():
    assert wilson(0.0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("correct", "rows", "text"),
    [
        (62, 64, "97% [89, 99]"),
        (0, 64, "0% [0, 6]"),
        (1, 1, "100% [21, 100]"),
        (9991, 10_000, "99.9% [99.8, 100.0]"),
        (0, 0, "0% [0, 100]"),
    ],
)
def test_an_exact_match_is_shown_with_its_interval(correct, rows, text):
    assert match_share(ExactMatch(when="after", correct=correct, rows=rows)) == text
