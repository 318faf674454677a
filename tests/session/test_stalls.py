from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard import frames
from your_ai.config import TrainConfig
from your_ai.run import events
from your_ai.session.stalls import Patience, StallWatch, patience_of

PATIENCE = Patience(steps=10, longest=3, least_s=5.0, other_s=100.0)
CLOCKS_S = 1000.0  # the wall clock is ahead of the other one


def step(number: int, seconds: float = 1.0) -> events.Step:
    return frames.step(number, seconds=seconds)


STARTED = frames.started(steps=99, steps_per_epoch=9)
SAVED = events.Checkpoint(step=3, folder="", seconds=1.0)
VALIDATED = frames.validation(3)
SMALLER_PLAN = events.Action(
    step=3, kind="smaller_plan", cause="", before_bytes=1, after_bytes=1, seconds=1
)
GAUGES, NOTICE = events.Gauges(), events.Notice(text="")
STEPS = [STARTED, *[step(n) for n in (1, 2, 3)]]


def seen(*written: events.Event, patience: Patience = PATIENCE) -> StallWatch:
    watch = StallWatch(patience)
    watch.begin()
    watch.look(written, 0.0, CLOCKS_S)
    return watch


def wait(watch: StallWatch, seconds: float, *written: events.Event) -> list[str]:
    """Look every second for a time; return what was told."""
    assert watch.clock is not None
    begin, _ = watch.clock
    times = [begin + n for n in range(1, int(seconds) + 1)]
    return [told for t in times if (told := watch.look(written, t, CLOCKS_S + t))]


@pytest.mark.parametrize(
    ("written", "allowed_s"),
    [
        ([], 100),
        ([events.Stage(text="loading m")], 100),
        ([STARTED], 100),  # the first step compiles
        (STEPS, 10),
        ([STARTED, step(1, 0.01), step(2, 0.02)], 5),
        ([STARTED, step(1), step(2), step(3, 20.0)], 60),  # rows of very different lengths
        ([*STEPS, step(4, math.nan), step(5, math.inf)], 10),
        ([STARTED, events.Skipped(step=1, reason="", in_a_row=1, total=1)], 100),
        ([*STEPS, events.Phase(text="validating")], 100),
        ([*STEPS, events.Phase(text="validating"), VALIDATED], 10),
        ([*STEPS, events.Phase(text="saving"), SAVED], 10),
        ([*STEPS, events.Stage(text="generating: 3 of 8 completions")], 10),
        ([*STEPS, events.Paused(step=3)], math.inf),
        ([*STEPS, events.Paused(step=3), events.Continued(step=3, seconds=1.0)], 10),
        ([*STEPS, SMALLER_PLAN], 100),
        ([*STEPS, STARTED, SAVED], 100),  # again in one process, with another plan
        ([*STEPS, events.Finished(step=3, reason="done", adapter="", seconds=1.0), SAVED], 100),
    ],
)
def test_allowance_depends_on_what_the_process_does(written, allowed_s):
    watch = seen(*written)
    assert watch.allowed_s == allowed_s
    wait(watch, min(allowed_s, 10_000))
    assert not watch.is_stalled
    wait(watch, 1)
    assert watch.is_stalled == (allowed_s < math.inf)


def test_events_of_threads_are_no_progress():
    watch = seen(*STEPS)
    wait(watch, 11, GAUGES, NOTICE, events.Host(source="battery"))
    assert watch.is_stalled
    assert watch.describe() == "no progress for 11 s after step 3, where a step takes 1 s"
    watch.look([step(4)], 11.0, CLOCKS_S + 11.0)
    assert not watch.is_stalled


def test_stall_outside_of_steps_says_where():
    watch = seen(*STEPS, events.Phase(text="validating"))
    wait(watch, 125)
    assert watch.describe() == "no progress for 2:05 while validating"


def test_sleep_of_the_computer_does_not_count():
    watch = seen(*STEPS)
    wait(watch, 9)
    told = watch.look([], 10.0, CLOCKS_S + 3610.0)
    assert told == "the computer slept for 1:00:00, or its clock was changed"
    wait(watch, 0)
    assert watch.waited_s == 0


def test_time_while_the_supervisor_was_stopped_does_not_count():
    watch = seen(*STEPS)
    told = watch.look([], 600.0, CLOCKS_S + 600.0)
    assert told.startswith("the supervisor did not run for 10:00")
    assert not watch.is_stalled
    assert watch.look([], 609.0, CLOCKS_S + 609.0) == ""
    assert not watch.is_stalled
    watch.look([], 611.0, CLOCKS_S + 611.0)
    assert watch.is_stalled


def test_clock_that_is_set_back_changes_nothing():
    watch = seen(*STEPS)
    assert watch.look([], 4.0, 0.0) == ""
    assert watch.waited_s == 4.0


def test_each_stall_doubles_the_allowance_until_a_new_checkpoint():
    watch = seen(*STEPS)
    watch.stalls = 2
    assert watch.allowed_s == 40
    watch.begin()
    assert watch.allowed_s == 400
    watch.look([*STEPS, SAVED], 0.0, 0.0)
    assert watch.allowed_s == 10
    watch.stalls = 1
    watch.look([SAVED], 0.0, 0.0)  # again the same one
    assert watch.allowed_s == 20


def test_times_of_steps_are_known_to_the_next_process():
    watch = seen(*STEPS)
    watch.begin()
    assert watch.allowed_s == 100
    watch.look([STARTED, step(1, 100.0)], 1.0, 1.0)
    assert watch.allowed_s == 300


def test_steps_that_wait_for_a_judge_may_take_long():
    settings = {"objective": "grpo", "reward": ("judge",), "judge_model": "m"}
    assert patience_of(TrainConfig()) == Patience()
    assert patience_of(TrainConfig(**settings)).least_s == Patience().other_s


KINDS = st.sampled_from([*STEPS, SAVED, VALIDATED, GAUGES, events.Phase(text="saving")])


@given(st.lists(st.tuples(KINDS, st.floats(0, 4.9))))
def test_run_that_writes_more_often_than_the_shortest_wait_never_stalls(written):
    watch, now = seen(STARTED), 0.0
    for event, passed_s in written:
        now += passed_s
        watch.look([event, step(1)], now, CLOCKS_S + now)
        assert not watch.is_stalled
