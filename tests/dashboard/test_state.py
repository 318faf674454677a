from __future__ import annotations

import dataclasses
from functools import reduce

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.frames import record, started, step
from your_ai.dashboard.state import SERIES_POINTS, Series, ViewState, fold, resumed
from your_ai.run import events
from your_ai.run.events import Record


def folded(*happened: events.Event) -> ViewState:
    return reduce(fold, map(record, happened), ViewState())


def saved(at: int) -> events.Checkpoint:
    return events.Checkpoint(step=at, folder="c", seconds=0.1)


def test_time_left_is_unknown_until_a_resumed_run_is_loaded():
    stage = events.Stage(text="loading m")
    ended = events.Finished(step=5, reason="stopped", adapter="", seconds=1.0)
    running = folded(started(steps=99), *(step(i) for i in range(1, 6)))
    assert running.seconds_left_at(1.0) is not None
    for happened in ([ended, stage], [stage], [events.Died(step=5, reason="killed", level=1)]):
        state = reduce(fold, map(record, happened), running)
        assert (state.seconds_left, state.seconds_left_at(1.0)) == (None, None)
    state = resumed(reduce(fold, map(record, [ended]), running), 9.0)
    assert (state.seconds_left_at(10.0), state.step_s, state.tokens_per_s) == (None, None, None)


def test_a_resumed_run_took_the_time_of_all_its_processes():
    def end(reason: str) -> events.Finished:
        return events.Finished(step=9, reason=reason, adapter="", seconds=5.0)

    stage = events.Stage(text="loading m")
    happened = [(0, stage), (10, started(steps=99)), (60, end("stopped")), (500, stage),
                (530, end("done"))]  # fmt: skip
    records = [Record(at, event) for at, event in happened]
    assert reduce(fold, records, ViewState()).took_s == 90


def test_steps_that_are_lost_are_in_no_running_mean():
    first = [started(steps=99), *(step(i, loss=2.0) for i in range(1, 31)), saved(30)]
    lost = [step(i, loss=0.5) for i in range(31, 61)]
    again = [started(30, steps=99), *(step(i, loss=1.0) for i in range(31, 61))]
    assert folded(*first, *lost).best_loss == 0.5
    found, whole = folded(*first, *lost, *again), folded(*first, *again)
    assert found.loss_mean == whole.loss_mean
    assert (found.best_loss, found.loss_mean.best_at) == (1.0, 50)
    unknown = folded(*first[:-1], *lost, *again)
    assert unknown.best_loss == 1.0


def test_seconds_left_counts_the_remaining_steps():
    assert folded(step(1, seconds=2.0), step(2, seconds=4.0)).seconds_left == pytest.approx(24)
    assert ViewState().seconds_left is None


def test_resume_clears_end_and_speed_but_keeps_samples():
    before = events.Samples(when="before", prompts=["p"], answers=["a"], expected=["e"])
    finished = events.Finished(step=3, reason="stopped by Ctrl-C", adapter="", seconds=1.0)
    state = folded(before, step(3), finished, started(3))
    assert (state.finished, state.step_s, state.samples_before) == (None, None, before)


@given(st.lists(st.floats(0, 1e12), max_size=3000), st.booleans())
def test_series_stays_short_and_keeps_its_extremes(values, highest):
    series = reduce(Series.add, values, Series(highest))
    assert len(series.values) <= SERIES_POINTS
    assert (len(series.values) - 1) * series.every < max(1, len(values))
    if values and highest:
        assert max(series.values) == max(values)
    elif values:
        assert min(values) - 1e-3 <= min(series.values) <= max(series.values) <= max(values) + 1e-3


def test_gauges_between_steps_count_for_the_peak():
    state = folded(step(1), events.Gauges(process_bytes=6_000_000_000), step(2))
    assert state.highest_bytes == 6_000_000_000
    assert state.memory.values == (5_000_000_000, 6_000_000_000, 5_000_000_000)


def test_reason_of_a_plan_change_is_kept_until_the_next():
    action = events.Action(
        step=3, kind="smaller_plan", cause="too large", before_bytes=2, after_bytes=1, seconds=0.1
    )
    state = folded(action, dataclasses.replace(action, kind="clear_cache", cause="every 10 steps"))
    assert (state.replanned, len(state.actions)) == ("too large", 2)
    assert folded(action, events.Died(step=4, reason="killed", level=1)).replanned == "killed"


def test_warnings_list_pressure_swap_skips_and_deaths():
    assert folded(step(1, swap_bytes=4_000_000_000, pressure=1)).warnings == ()
    state = folded(
        step(1, swap_bytes=10**9),
        events.Skipped(step=2, reason="nan", in_a_row=1, total=1),
        events.Died(step=3, reason="killed by SIGKILL", level=0),
        step(3, swap_bytes=2 * 10**9, pressure=2),
    )
    assert state.warnings == (
        "memory pressure: warning",
        "swap has grown by 1.00 GB",
        "skipped steps: 1, last: 2",
        "died once: killed by SIGKILL",
    )


def test_pause_lasts_until_the_run_continues():
    assert folded(events.Paused(step=1)).paused
    assert not folded(events.Paused(step=1), events.Continued(step=1, seconds=2.0)).paused


def test_wait_lasts_until_the_work_begins_and_takes_no_time():
    waiting = events.Waiting(text="waiting for a", since=0.0, pid=1, needed_bytes=None)
    over, stage = dataclasses.replace(waiting, text=""), events.Stage(text="loading m")
    ended = events.Finished(step=9, reason="stopped", adapter="", seconds=5.0)
    happened = [ended, waiting, events.Host(), over, stage, ended]
    records = [Record(100 * at, event) for at, event in enumerate(happened, 1)]
    states = [reduce(fold, records[:count], ViewState()) for count in range(1, len(records) + 1)]
    assert [state.is_waiting for state in states] == [False, True, True, False, False, False]
    doing = [state.doing for state in states[1:5]]
    assert doing == ["waiting for a"] * 2 + ["starting", stage.text]
    assert states[1].finished is None
    assert states[-1].took_s == 200


def test_event_with_wrong_field_types_is_skipped():
    strange = step(2, loss="much", process_bytes=[1])
    assert folded(step(1), strange, step(3)) == folded(step(1), step(3))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        (events.Host(), ()),
        (events.Host(source="mains", percent=40, thermal="nominal"), ()),
        (events.Host(source="battery", percent=63), ("on battery, 63%",)),
        (events.Host(source="UPS", thermal="fair"), ("on UPS", "thermal pressure: fair")),
        (events.Host(thermal="critical"), ("thermal pressure: critical",)),
    ],
)
def test_battery_and_heat_are_warnings_while_they_last(host, expected):
    hot = events.Host(source="battery", percent=99, thermal="serious")
    assert folded(hot, step(1), host).warnings == expected
    finished = events.Finished(step=1, reason="done", adapter="a", seconds=1.0)
    assert folded(host, step(1), finished).warnings == ()


def test_phase_lasts_until_the_next_event_of_the_work():
    saving = folded(step(1), events.Phase(text="saving"))
    assert saving.doing == "saving"
    for beside in (events.Gauges(), events.Notice(text="n"), events.Host()):
        assert folded(step(1), events.Phase(text="saving"), beside).doing == "saving"
    saved = events.Checkpoint(step=1, folder="", seconds=1.0)
    assert folded(step(1), events.Phase(text="saving"), saved).doing == "training"
