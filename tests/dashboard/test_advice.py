"""The end of a run says in one line whether it learned, and what to try if it did not."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.dashboard.frames import started, step, validation
from tests.dashboard.test_view import state_of
from your_ai.dashboard import view
from your_ai.dashboard.view import advice_line, preference_line
from your_ai.run import events

DONE = events.Finished(step=60, reason="done", adapter="a", seconds=9.0)
LONG = started(steps=60, steps_per_epoch=20, more="a higher --learning-rate")


def measured(at: int, loss: float, best: bool = True, **metrics: float) -> events.Validation:
    return validation(at, loss, best=best, metrics=metrics)


def answers(*given: str, expected: str = "It is on its way.") -> events.Samples:
    texts = [expected] * len(given)
    return events.Samples(when="after", prompts=texts, answers=list(given), expected=texts)


def told(*happened: events.Event) -> str:
    return advice_line(state_of(LONG, step(60), *happened), "r")


def test_run_whose_validation_still_fell_names_the_command_that_goes_on():
    assert told(measured(30, 2.0), measured(60, 1.5)) == (
        "not learned enough: the validation loss still fell, from 2.0000 at step 30 to 1.5000; go "
        "on with: your_ai train --resume r --epochs 6"
    )
    state = state_of(dataclasses.replace(LONG, steps=50), measured(30, 2.0), measured(50, 1.5))
    assert advice_line(state, "r").endswith("--resume r --max-steps 100")


@pytest.mark.parametrize(
    "found",
    [
        (),
        (measured(60, 2.0),),
        (measured(30, 2.0), measured(60, 1.99)),
        (measured(30, 1.5), measured(60, 2.0, best=False)),
        (measured(30, 1.5), measured(50, 1.0), measured(60, 2.0, best=False)),
        (measured(30, math.nan), measured(60, 2.0)),
        (measured(30, -0.1, reward=0.1), measured(60, -0.5, reward=0.5)),
        (measured(30, 2.0), measured(60, 1.99), answers("It is on the way.", "Sorry.")),
    ],
)
def test_run_that_learned_what_it_could_gets_no_advice(found):
    assert told(*found) == ""


@pytest.mark.parametrize(("before", "end"), [(0.5, 0.4), (2.0, 1.8)])
def test_fall_is_what_the_last_quarter_brought_in_however_many_validations(before, end):
    late = [measured(at, before - (before - end) * (at - 45) / 15) for at in (45, 48, 51, 54, 57)]
    assert "still fell, from" in told(measured(42, 3.0), *late, measured(60, end))


def test_loss_near_zero_does_not_fall():
    assert told(measured(30, 0.01), measured(60, 0.005)) == ""


def test_run_whose_answers_are_all_right_gets_no_advice():
    fell = (measured(30, 2.0), measured(60, 1.0))
    assert told(*fell, answers("It is on its way.", "It is on its way. ")) == ""
    assert told(*fell, answers("It is on its way.", "It is on the way."))


def test_run_whose_answers_are_mostly_wrong_says_so():
    wrong = answers("{", "}}}}", "It is on its way.")
    assert told(measured(30, 2.0), measured(60, 2.0), wrong) == (
        "not learned enough: 2 of 3 answers to held-out prompts are unlike the expected ones; try "
        "a higher --learning-rate"
    )
    assert "still fell" in (both := told(measured(30, 2.0), measured(60, 1.0), wrong))
    assert ", and 2 of 3 answers" in both
    overfit = told(measured(30, 1.0), measured(60, 2.0, best=False), wrong)
    assert overfit.endswith("try more rows, or a lower --learning-rate")


def test_answers_without_an_expected_one_do_not_count():
    assert told(measured(30, 2.0), measured(60, 2.0), answers("x", "y", expected="")) == ""


@pytest.mark.parametrize(
    ("share", "margin", "begin"),
    [(0.96, 0.25, "learned: "), (0.5, 0.25, "did not learn: "), (0.9, -0.1, "did not learn: ")],
)
def test_run_on_preferences_says_whether_it_learned(share, margin, begin):
    metrics = {"rewards/accuracies": share, "rewards/margins": margin}
    state = state_of(LONG, step(60), measured(60, 0.5, **metrics), DONE)
    line = preference_line(state)
    assert line.startswith(f"{begin}prefers the chosen answer in {share:.0%} of the validation pai")
    assert line.endswith("try a higher --learning-rate") == (begin != "learned: ")
    lines = [text for text in view.summary(state, "r") if isinstance(text, str)]
    assert line in lines
    assert not any("rewards/" in text for text in lines)


def test_run_on_preferences_without_validation_takes_the_last_step():
    metrics = {"rewards/accuracies": 1.0, "rewards/margins": 2.0}
    assert "the last step's pairs" in preference_line(state_of(LONG, step(60, metrics=metrics)))


def test_summary_has_the_advice_before_the_adapter():
    state = state_of(LONG, step(60), measured(30, 2.0), measured(60, 1.0), DONE)
    lines = [text for text in view.summary(state, "r") if isinstance(text, str)]
    place = next(n for n, text in enumerate(lines) if text.startswith("not learned enough"))
    assert lines[place + 1].startswith("adapter: ")
