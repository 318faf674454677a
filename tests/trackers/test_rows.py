from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.frames import reward_validation, started, step, validation
from your_ai.run import events
from your_ai.run.events import Event
from your_ai.trackers.upload import TextTable, TrackerRow, UploadState, after


def rows_of(*logged: Event) -> list[TrackerRow]:
    past, rows = UploadState(), []
    for event in logged:
        past, row = after(past, event)
        rows += [] if row is None else [row]
    return rows


def past_after(*logged: Event) -> UploadState:
    return reduce(lambda past, event: after(past, event)[0], logged, UploadState())


def action(before_bytes: int, after_bytes: int) -> events.Action:
    sizes = {"before_bytes": before_bytes, "after_bytes": after_bytes}
    return events.Action(step=1, kind="clear_cache", cause="", seconds=0.1, **sizes)


def finished(reason: str = "done") -> events.Finished:
    return events.Finished(step=1, reason=reason, adapter="", seconds=1.0)


def test_a_step_is_sent_with_its_metrics():
    limit = events.Limit(limit_bytes=8_000_000_000, reason="")
    third = step(3, epoch=2, highest_bytes=6_000_000_000)
    assert rows_of(limit, third) == [
        TrackerRow(
            3,
            {
                "train/loss": 1.25,
                "train/grad_norm": 0.5,
                "train/learning_rate": 1e-4,
                "train/tokens_per_s": 100.0,
                "train/step_s": 2.0,
                "train/epoch": 2,
                "memory/active_gb": 0.412,
                "memory/cache_gb": 0.0,
                "memory/process_gb": 5.0,
                "memory/highest_gb": 6.0,
                "memory/limit_gb": 8.0,
                "governor/actions": 0,
                "governor/freed_gb": 0.0,
            },
        )
    ]


def test_metrics_of_an_objective_are_sent_by_their_names():
    (row,) = rows_of(step(1, metrics={"rewards/margins": 0.25}))
    assert row.values["train/rewards/margins"] == 0.25


def test_memory_of_the_phases_is_sent_in_gb():
    (row,) = rows_of(step(1, metrics={"peak_bytes/generate": 2.5e9, "seconds/generate": 1.5}))
    assert row.values["memory/peak_generate_gb"] == 2.5
    assert row.values["train/seconds/generate"] == 1.5
    assert "train/peak_bytes/generate" not in row.values


def test_missing_memory_readings_are_not_sent():
    [row] = rows_of(step(1, process_bytes=None, cache_bytes=None))
    assert [name for name in row.values if name.startswith("memory/")] == ["memory/active_gb"]


def test_a_step_that_took_no_time_has_a_finite_speed():
    [row] = rows_of(step(1, seconds=0.0))
    assert row.values["train/tokens_per_s"] == pytest.approx(2e11)


def test_governor_actions_are_counted_over_the_whole_run():
    rows = rows_of(action(3_000_000_000, 1_000_000_000), step(1), action(1, 2), step(2))
    counted = [(r.values["governor/actions"], r.values["governor/freed_gb"]) for r in rows]
    assert counted == [(1, 2.0), (2, 2.0)]


@pytest.mark.parametrize("make", [step, validation])
@given(numbers=st.lists(st.integers(1, 9)))
def test_steps_always_increase_even_if_some_are_repeated(make, numbers):
    sent = [row.step for row in rows_of(*map(make, numbers))]
    assert sent == sorted(set(sent))
    assert set(sent) <= set(numbers)
    assert max(sent, default=0) == max(numbers, default=0)


BEFORE = events.ExactMatch(when="before", correct=0, rows=4)
AFTER = events.ExactMatch(when="after", correct=3, rows=4)
SAMPLES = events.Samples(when="after", prompts=["p", "q"], answers=["a", "b"], expected=["e", "f"])
TABLE = TextTable(("prompt", "answer", "expected"), (("p", "a", "e"), ("q", "b", "f")))
SENT = {
    "a validation": ([step(5), validation(5, 0.5)], 5, {"validation/loss": 0.5}),
    "one of rewards, without a loss": (
        [step(5), reward_validation(5, 0.5)],
        5,
        {"validation/reward": 0.5},
    ),
    "exact match at step 0": ([BEFORE], 0, {"test/exact_match": 0.0}),
    "exact match at the last step": ([BEFORE, step(7), AFTER], 7, {"test/exact_match": 0.75}),
    "exact match of no rows": ([replace(BEFORE, rows=0)], 0, {"test/exact_match": 0.0}),
    "reward of the test rows": (
        [replace(BEFORE, correct=1, reward=0.5)],
        0,
        {"test/exact_match": 0.25, "test/reward": 0.5},
    ),
    "samples as a table": ([step(2), SAMPLES], 2, {"samples/after": TABLE}),
}


@pytest.mark.parametrize(("logged", "at", "values"), SENT.values(), ids=SENT)
def test_what_was_measured_is_sent_at_the_step_before_it(logged, at, values):
    assert rows_of(*logged)[-1] == TrackerRow(at, values)


@pytest.mark.parametrize(
    ("logged", "ended"),
    [
        ([], ""),
        ([finished("stopped by SIGINT")], "stopped by SIGINT"),
        ([finished(), started()], ""),
        ([events.Died(step=1, reason="killed", level=None)], "killed"),
        ([events.Died(step=1, reason="killed", level=1)], ""),
    ],
)  # fmt: skip
def test_the_reason_for_the_end_of_the_run_is_known(logged, ended):
    assert past_after(*logged).ended == ended


def test_other_events_are_not_sent():
    assert rows_of(events.Stage(text="x"), events.Gauges(), events.Notice(text="y")) == []
