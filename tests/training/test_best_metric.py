"""--best-metric: exact match, or a function of the user's, decides which checkpoint is the best."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import chat, events_of, resume, train, write_rows
from tests.training.test_validation import assert_result, files_of, state_of
from your_ai.config import TrainConfig
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.dashboard.view import event_line, result_lines
from your_ai.data.encode import Encoder
from your_ai.errors import UserError
from your_ai.run import events, folder
from your_ai.run.checkpoint import TrainState
from your_ai.run.events import Record
from your_ai.run.stopping import Stop
from your_ai.training import run_data, validation
from your_ai.training.process import train_until_done
from your_ai.training.run_data import best_metric_of
from your_ai.training.validation import after_validation

VALUES = {1: 0.0, 2: 0.5, 3: 0.25, 4: 0.5}
METRIC = """
def answered(answer, expected, row):
    assert expected == row["messages"][-1]["content"]
    return len(answer) / 100


def broken(answer, expected, row):
    raise ValueError("no")
"""


@pytest.fixture
def settings(data_folder) -> dict[str, object]:
    """Of runs of four short steps."""
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(8)])
    rows = [chat("Ask", "Yes"), {"text": "A text asks nothing."}, chat("Ask", "No")]
    write_rows(data_folder / "valid.jsonl", rows)
    return {"max_steps": 4, "eval_every": 1, "save_every": 0, "keep": 1}


@pytest.fixture
def module(own_folder, monkeypatch) -> str:
    """The name of a module in the current folder with functions that score answers."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_scores", raising=False)
    Path("own_scores.py").write_text(METRIC)
    return "own_scores"


@pytest.fixture
def values(monkeypatch) -> None:
    """The exact match of each step, instead of the model's."""
    measure = validation.validate

    def validate(prepared, state, log, stop, rollouts=None):
        monkeypatch.setattr(run_data, "exact_match", lambda *_: VALUES[state.step])
        return measure(prepared, state, log, stop)

    monkeypatch.setattr("your_ai.training.train.validate", validate)


@pytest.mark.parametrize(
    ("value", "loss", "is_better"),
    [
        (0.6, 9.0, True),
        (0.5, 1.9, True),
        (0.5, 2.0, False),
        (0.4, 0.1, False),
        (0.9, np.nan, False),
    ],
)
def test_the_higher_value_is_better_and_of_equal_ones_the_lower_loss(value, loss, is_better):
    state = TrainState(step=7, best_loss=2.0, best_value=0.5, best_step=5, without_better=1)
    better = TrainState(step=7, best_loss=loss, best_value=value, best_step=7)
    worse = dataclasses.replace(state, without_better=2)
    assert after_validation(state, loss, value) == (better if is_better else worse)


def test_result_of_a_run_has_the_best_exact_match(configure, settings, values):
    settings["learning_rate"] = 1e-3  # so that the loss still falls at step 4
    run = train(configure(best_metric="exact_match", **settings))
    found = events_of(run, events.Validation)
    assert [event.metrics["exact_match"] for event in found] == list(VALUES.values())
    assert found[3].loss < found[1].loss
    assert_result(run, 4)
    assert (state_of(run).best_value, state_of(run).best_loss) == (0.5, found[3].loss)


def test_patience_counts_validations_without_a_better_value(configure, settings, values):
    settings |= {"patience": 1, "learning_rate": 1e-3}
    run = train(configure(best_metric="exact_match", **settings))
    assert max(event.step for event in events_of(run, events.Step)) == 3
    assert_result(run, 2)


def test_exact_match_is_of_the_rows_that_ask(configure, settings):
    """The model learns the answer of one of the two rows that ask."""
    settings |= {"max_steps": 12, "eval_every": 4, "lora_targets": "all-linear"}
    run = train(configure(best_metric="exact_match", **settings))
    found = [event.metrics["exact_match"] for event in events_of(run, events.Validation)]
    assert found[-1] == 0.5


def test_exact_match_compares_the_answers_also_if_prompts_are_trained(
    configure, settings, demo_tokenizer
):
    config = configure(best_metric="exact_match", mask_prompt=False, **settings)
    valid = Path(config.data) / "valid.jsonl"
    found = best_metric_of(config, valid, Encoder(demo_tokenizer, mask_prompt=False), "key")
    masked = best_metric_of(config, valid, Encoder(demo_tokenizer), "key")
    answers = [rows.answers.examples.trained for rows in (found.rows, masked.rows)]
    assert np.array_equal(*answers)
    assert found.rows.has_answer.tolist() == [True, False, True]


@pytest.mark.parametrize("metric", ["exact_match", "own_scores:answered"])
def test_resumed_run_measures_the_same(configure, settings, module, monkeypatch, metric):
    settings |= {"max_steps": 2, "best_metric": metric}
    monkeypatch.setattr("your_ai.generation.generate.ANSWER_TOKENS", 4)
    whole = train(configure(run="whole", **settings))
    cut = train(configure(run="cut", **settings | {"max_steps": 1}))
    assert resume(cut, max_steps=2) == 0
    assert files_of(cut) == files_of(whole)
    measured = [[e.metrics for e in events_of(run, events.Validation)] for run in (cut, whole)]
    assert measured[0] == measured[1]
    assert metric in measured[0][0]


def test_adapter_is_saved_if_the_function_of_the_user_fails(
    configure, settings, module, monkeypatch
):
    monkeypatch.setattr("your_ai.generation.generate.ANSWER_TOKENS", 4)
    config = configure(best_metric="own_scores:broken", **settings)
    run = folder.create(config)
    with pytest.raises(UserError, match=r"valid.jsonl:1: --best-metric own_scores:broken raised"):
        train_until_done(run, config, Stop())
    assert (state_of(run).step, state_of(run).validation_due) == (1, True)


def test_only_the_first_rows_are_answered(configure, settings, module, demo_tokenizer, monkeypatch):
    monkeypatch.setattr(run_data, "METRIC_ROWS", 1)
    config = configure(best_metric="own_scores:answered", **settings)
    valid = Path(config.data) / "valid.jsonl"
    found = best_metric_of(config, valid, Encoder(demo_tokenizer), "key")
    assert [asked.prompt.expected for asked in found.questions] == ["Yes"]


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"text": "Only text."}], {}, "--best-metric exact_match: no row of .*valid.jsonl asks"),
        ([chat("a", "b")], {"valid": "none"}, "exact_match: there are no validation rows"),
        ([chat("a", "b")], {"best_metric": "own_scores:absent"}, "has no function absent"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_training(
    configure, settings, module, data_folder, rows, more, message
):
    write_rows(data_folder / "valid.jsonl", rows)
    config = configure(**{**settings, "best_metric": "exact_match", **more})
    run = folder.create(config)
    with pytest.raises(UserError, match=message):
        train_until_done(run, config, Stop())
    assert not events_of(run, events.Step)


def test_values_are_shown_with_the_losses():
    kind = events.Validation
    first = kind(step=2, loss=1.5, trained_tokens=9, seconds=1.0, best=True, metrics={"f1": 0.75})
    last = kind(step=4, loss=1.25, trained_tokens=9, seconds=1.0, metrics={"f1": 0.5})
    state = fold_all(ViewState(), [Record(1.0, first), Record(2.0, last)])
    line = event_line(first, state)
    assert line == "step 2: validation loss 1.5000, f1 0.75, the best so far"
    expected = "f1 of the validation rows: 0.5 at the end, best 0.75 at step 2"
    assert expected in result_lines(state)


def test_a_run_from_before_has_the_loss_as_its_metric():
    assert "best_metric" not in TrainConfig().fixed_on_resume()
    assert "best_metric" in TrainConfig(best_metric="exact_match").fixed_on_resume()
