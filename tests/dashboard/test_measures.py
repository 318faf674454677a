from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from your_ai.dashboard.measures import folded_actions, with_action
from your_ai.run.events import Action


def clear(step: int, cause: str = "every 10 steps", kind: str = "clear_cache") -> Action:
    return Action(
        step=step, kind=kind, cause=cause, before_bytes=500_000_000, after_bytes=400_000_000,
        seconds=0.25, read_bytes=7,
    )  # fmt: skip


def test_routine_actions_are_one_line_with_a_count():
    [line] = folded_actions(clear(step) for step in (10, 20, 30, 40))
    assert (line.kind, line.where, line.times_text) == ("clear cache", "steps 10-40", "4 times")
    assert (line.change_text, line.seconds, line.read_bytes) == ("-100 MB", 1.0, 28)
    assert line.mean_seconds == 0.25


def test_an_action_with_another_cause_is_another_line():
    near = clear(15, "process 4.95 GB is over 70% of the limit of 7.00 GB")
    first, second = folded_actions([clear(10), near, clear(20)])
    assert (first.last, first.times_text, first.where) == (near, "", "step 15")
    assert second.count == 2


def test_an_action_that_changed_nothing_has_no_sign():
    [line] = folded_actions([Action(
        step=1, kind="reload_lora", cause="c", before_bytes=5, after_bytes=5, seconds=0.0
    )])  # fmt: skip
    assert line.change_text == "0 MB"


@given(st.lists(st.builds(clear, st.integers(0, 9), st.sampled_from("abc"))))
def test_no_action_is_lost_or_counted_twice(actions):
    lines = folded_actions(actions)
    assert sum(line.count for line in lines) == len(actions)
    assert sum(line.freed_bytes for line in lines) == 100_000_000 * len(actions)
    assert len({(line.last.kind, line.last.cause) for line in lines}) == len(lines)
    one_by_one = ()
    for action in actions:
        one_by_one = with_action(one_by_one, action)
    assert one_by_one == lines
