"""Seconds of operations are found again from the times of mixed work."""

from __future__ import annotations

import pytest

from your_ai.doctor.fit_speed import TimedWork, errors, fitted_seconds

TRUE = {"matmul": 2e-11, "elements": 1e-9, "calls": 2e-3}
WORKS = [
    {"matmul": m, "elements": e, "calls": c}
    for m, e, c in ((1e9, 1e6, 1), (1e8, 1e7, 1), (2e10, 1e7, 4), (1e6, 1e5, 9), (5e9, 4e8, 2))
]


def timed(work: dict[str, float], times: float = 1.0) -> TimedWork:
    return TimedWork("case", work, times * sum(n * TRUE[kind] for kind, n in work.items()))


def test_seconds_are_found_again():
    measured = [timed(work) for work in WORKS]
    found = fitted_seconds(measured)
    assert {kind: found[kind] for kind in TRUE} == pytest.approx(TRUE, rel=0.01)
    assert found["read"] == 0.0
    assert abs(errors(measured, found)).max() < 0.01


def test_a_time_that_something_else_disturbed_counts_little():
    more = [{kind: 3 * n for kind, n in work.items()} for work in WORKS]
    measured = [timed(work) for work in (*WORKS, *more)]
    measured.append(timed(WORKS[0], times=10))
    found = fitted_seconds(measured)
    assert {kind: found[kind] for kind in TRUE} == pytest.approx(TRUE, rel=0.05)


def test_no_seconds_are_negative():
    odd = [TimedWork("a", {"matmul": 1e9, "calls": 1}, 0.01), TimedWork("b", {"calls": 1}, 0.02)]
    assert min(fitted_seconds(odd).values()) >= 0
