from __future__ import annotations

import io
import math

import pytest
from rich.console import Console

from tests.dashboard.frames import record, reward_validation, rewarded, started, step, validation
from your_ai.dashboard import view
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events


def drawn(*parts: object, width: int = 60) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, color_system=None)
    for part in parts:
        console.print(part, markup=False, highlight=False)
    return console.file.getvalue().splitlines()


def state_of(*happened: events.Event) -> ViewState:
    state = ViewState()
    for event in happened:
        state = fold(state, record(event))
    return state


def done(at: int = 4, **changes: object) -> events.Finished:
    return events.Finished(step=at, **{"reason": "done", "adapter": "a", "seconds": 9.0, **changes})


def summary_of(*happened: events.Event, width: int = 100, **options: bool) -> list[str]:
    return drawn(*view.summary(state_of(*happened), "r", **options), width=width)


STARTED = started()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (3725, "1:02:05")]
)
def test_duration(seconds, text):
    assert view.duration(seconds) == text


def test_line_of_a_step():
    state = state_of(STARTED, step(3))
    assert view.event_line(step(3), state) == (
        "step 3/10  loss 1.2500  100 tokens/s  14 s left  "
        "memory 5.00 GB, MLX active 412 MB, MLX peak 4.73 GB"
    )


def test_line_of_a_step_without_gauges():
    blind = step(3, active_bytes=None, peak_bytes=None, process_bytes=None)
    line = view.event_line(blind, state_of(STARTED, blind))
    assert line == "step 3/10  loss 1.2500  100 tokens/s  14 s left"


def test_summary_ends_with_the_exact_match():
    text = summary_of(
        STARTED,
        events.Samples(when="before", prompts=["[p]"], answers=["old"], expected=["new"]),
        events.ExactMatch(when="before", correct=2, rows=64),
        step(10),
        events.Samples(when="after", prompts=["[p]"], answers=["new"], expected=["new"]),
        events.ExactMatch(when="after", correct=62, rows=64),
        done(10, adapter="runs/r/adapter"),
        width=80,
    )
    assert text[-1] == "exact match: 3% [1, 11] before, 97% [89, 99] after (64 held-out rows)"
    assert "adapter: runs/r/adapter" in text
    row = next(line for line in text if "[p]" in line)
    assert row.index("old") < row.index("new")


def test_samples_are_shown_unformatted_and_shortened():
    after = events.Samples(when="after", prompts=["[b]x[/b]"], answers=["y" * 999], expected=["z"])
    lines = drawn(view.samples_table(None, after), width=100)
    assert any("[b]x[/b]" in line for line in lines)
    assert sum(line.count("y") for line in lines) == view.SAMPLE_CHARACTERS
    assert view.shorten("a\nb") == "a\nb"
    assert view.shorten("\n".join("abcdefgh")) == "a\nb\nc\nd\ne\nf ..."


def test_summary_of_a_stopped_run_says_how_to_resume():
    assert summary_of(STARTED, done(reason="stopped by Ctrl-C", adapter="")) == [
        "stopped by Ctrl-C after step 4; everything is saved. Continue with:",
        "  your_ai train --resume r",
    ]


def test_summary_after_a_screen_repeats_the_notices():
    assert summary_of(STARTED, events.Notice(text="mind"), step(4), events_shown=False) == [
        "note: mind",
        "ended after step 4 before it was finished. Continue with:",
        "  your_ai train --resume r",
    ]


def test_summary_shows_peak_memory_and_limit():
    limit = events.Limit(limit_bytes=7_000_000_000, reason="")
    assert "peak memory: 5.00 GB of 7.00 GB" in summary_of(limit, step(4), done())


def test_summary_says_that_a_run_passed_its_limit():
    limit = events.Limit(limit_bytes=4_990_000_000, reason="")
    lines = summary_of(limit, step(4), done(), width=200)
    assert (
        "the run passed its memory limit by 10.0 MB, which is a bug in your_ai; please report it, "
        "with the file that this command writes: your_ai doctor --report FILE" in lines
    )


def test_skipped_steps_and_notices_have_lines():
    skipped = events.Skipped(step=4, reason="the loss is nan", in_a_row=1, total=2)
    assert view.event_line(skipped, ViewState()) == (
        "step 4 was skipped: the loss is nan (2 so far)"
    )
    assert view.event_line(events.Notice(text="mind"), ViewState()) == "note: mind"


def test_a_run_of_one_row_and_one_step_is_said_in_the_singular():
    one = started(steps=1, steps_per_epoch=1, rows=1, trainable_parameters=1)
    text = "training: m, 1 row, 1 step, 1 trainable parameter, float32"
    assert view.event_line(one, ViewState()) == text
    assert "done: 1 step in 9 s" in summary_of(one, done(1))


def test_lines_keep_the_digits_of_small_losses():
    small = step(3, loss=0.0004)
    assert "loss 0.000400 " in view.event_line(small, state_of(STARTED, small))
    assert view.event_line(validation(4, 0.0312), ViewState()) == "step 4: validation loss 0.0312"


def told(*losses: float, trained: float = 1.25) -> list[str]:
    """The result of a run with these validation losses at steps 5, 10, ..."""
    found = [validation(5 * n, loss) for n, loss in enumerate(losses, 1)]
    begun = started(more="a higher --learning-rate, or more --epochs")
    return view.result_lines(state_of(begun, step(1), *found, step(99, loss=trained)))


def test_result_has_the_last_and_the_best_validation_loss():
    assert told() == []
    assert told(1.0) == ["validation loss: 1.0000 at the end"]
    assert told(1.0, 0.5) == ["validation loss: 0.5000 at the end, the best"]
    assert told(1.0, 0.5, 0.75) == ["validation loss: 0.7500 at the end, best 0.5000 at step 10"]
    assert told(math.nan) == ["validation loss: nan at the end"]


def test_run_that_barely_learned_is_told_what_to_try():
    (_, line) = told(1.0, 0.995)
    assert line == "barely learned: try a higher --learning-rate, or more --epochs"
    assert len(told(1.0, 0.98)) == 1
    assert len(told(1.0, 1.5)) == 1  # it moved, in the wrong direction
    assert len(told(1.0, 0.995, trained=0.5)) == 1  # it learned before the first validation


def test_a_reward_that_did_not_move_is_told_what_to_try():
    """Whatever the losses of the steps are, which begin close to 0."""
    found = [reward_validation(5, 0.5), reward_validation(10, 0.501)]
    lines = view.result_lines(state_of(STARTED, step(1), *found, step(99, loss=0.3)))
    assert "barely learned" in lines[-1]


def test_summary_names_the_step_of_a_best_adapter():
    assert "adapter: a (of step 5, the best)" in summary_of(step(10), done(10, adapter_step=5))


def test_line_of_a_rewarded_step_has_a_short_list_of_metrics():
    shown = rewarded(3, active_bytes=None, peak_bytes=None, process_bytes=None)
    assert view.event_line(shown, state_of(STARTED, shown)) == (
        "step 3/10  loss 0.00300  reward 0.45  reward_std 0.2  kl 0.0125  entropy 0.75  "
        "length 25.5  cut off 12%  100 tokens/s  14 s left"
    )


def test_summary_has_what_the_judge_did_in_all_of_the_run():
    found = {"judge/calls": 3.0, "judge/cache_hits": 1.0, "judge/missing": 0.0, "judge/cost": 0.004}
    steps = [step(1, metrics=found), step(2, metrics=found), step(3)]
    assert view.judge_lines(state_of(STARTED, *steps)) == [
        "judge: 6 calls, 2 answers from the cache, $0.01"
    ]
    missing = step(1, metrics={"judge/calls": 1.0, "judge/missing": 2.0})
    assert view.judge_lines(state_of(missing)) == [
        "judge: 1 call, 0 answers from the cache, 2 rewards missing"
    ]
    assert view.judge_lines(state_of(STARTED, step(1))) == []


def test_line_of_another_objective_has_all_metrics():
    shown = step(1, metrics={"rewards/margins": 0.25, "kl": 0.5})
    assert "  rewards/margins 0.25  kl 0.5  " in view.event_line(shown, state_of(STARTED, shown))


def test_validation_of_rewards_is_shown_as_a_reward():
    state = state_of(STARTED)
    assert view.event_line(reward_validation(5, 0.83), state) == "step 5: validation reward 0.83"
    others = {"rewards/a/mean": 0.5, "rewards/a/std": 0.1}
    line = view.event_line(reward_validation(5, 0.83, **others), state)
    assert line == "step 5: validation reward 0.83"  # a is the only reward
    others |= {"rewards/b/mean": 1.0, "rewards/b/std": 0.1}
    line = view.event_line(reward_validation(5, 0.83, **others), state)
    assert line == "step 5: validation reward 0.83, a 0.5, b 1"


def test_metric_that_is_called_reward_is_not_the_loss():
    found = validation(5, 1.5, metrics={"reward": 0.25})
    line = view.event_line(found, state_of(STARTED))
    assert line == "step 5: validation loss 1.5000, reward 0.25"


def test_result_of_rewards_has_the_last_and_the_best_reward():
    found = [reward_validation(5, 0.5), reward_validation(10, 0.25)]
    lines = view.result_lines(state_of(STARTED, step(1), *found))
    assert lines == ["validation reward: 0.25 at the end, best 0.5 at step 5"]
    assert view.result_lines(state_of(reward_validation(5, 0.0))) == [
        "validation reward: 0 at the end"
    ]


@pytest.mark.parametrize("has_answers", [True, False])
def test_summary_offers_an_evaluation_of_rows_with_answers(has_answers):
    begun = started(has_answers=has_answers)
    text = "\n".join(summary_of(begun, done(10)))
    assert "try it: your_ai chat r" in text
    assert ("your_ai eval r --data FILE" in text) == has_answers  # the run has no other rows
    text = "\n".join(summary_of(begun, validation(10), done(10)))
    assert ("your_ai eval r\n" in text + "\n") == has_answers


def test_summary_has_the_reward_before_the_exact_match():
    text = summary_of(
        events.ExactMatch(when="before", correct=2, rows=64, reward=0.84),
        events.ExactMatch(when="after", correct=62, rows=64, reward=0.97),
        done(10),
    )
    assert text[-2] == "reward: 0.84 before, 0.97 after"
    assert text[-1].startswith("exact match: 3%")
