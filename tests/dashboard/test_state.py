from __future__ import annotations

from functools import reduce

import pytest

from tests.dashboard.frames import record, step
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events


def folded(*happened: events.Event) -> ViewState:
    return reduce(fold, map(record, happened), ViewState())


def test_means_begin_plain_and_become_exponential():
    state = folded(step(1, loss=4.0), step(2, loss=2.0))
    assert state.smooth_loss == pytest.approx(3.0)
    state = folded(*(step(i, loss=1.0) for i in range(1, 40)), step(40, loss=11.0))
    assert state.smooth_loss == pytest.approx(2.0)


def test_time_left_is_of_the_steps_to_come():
    assert folded(step(1, seconds=2.0), step(2, seconds=4.0)).seconds_left == pytest.approx(24)
    assert ViewState().seconds_left is None


def test_resuming_forgets_the_end_and_the_speed_but_not_the_samples():
    before = events.Samples(when="before", prompts=["p"], answers=["a"], expected=["e"])
    finished = events.Finished(step=3, reason="stopped by Ctrl-C", adapter="", seconds=1.0)
    started = events.Started(
        step=3, steps=10, steps_per_epoch=5, model="m", rows=9, trainable_parameters=1,
        dtype="float32", plan="fused",
    )  # fmt: skip
    state = folded(before, step(3), finished, started)
    assert (state.finished, state.step_s, state.samples_before) == (None, None, before)


def test_before_and_after_are_told_apart():
    before = events.ExactMatch(when="before", correct=1, rows=4)
    after = events.ExactMatch(when="after", correct=3, rows=4)
    state = folded(before, after)
    assert (state.match_before, state.match_after) == (before, after)
