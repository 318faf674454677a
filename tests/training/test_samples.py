"""Answers to held-out prompts: of the test rows, or else of the validation rows; 3 by default."""

from __future__ import annotations

import pytest

from tests.conftest import chat, events_of, train, write_rows
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run import events


@pytest.fixture
def rows(tmp_path):
    """A function that writes a folder of rows, with the splits that it is told."""

    def make(*splits: str, rows: list[dict] | None = None) -> str:
        folder = tmp_path / "-".join(splits or ["alone"])
        for split in ("train", *splits):
            named = [chat(f"{split} {i}", "Yes") for i in range(6)]
            write_rows(folder / f"{split}.jsonl", rows or named)
        return str(folder)

    return make


def asked(run) -> list[str]:
    before, after = events_of(run, events.Samples)
    assert (before.when, after.when) == ("before", "after")
    assert before.prompts == after.prompts
    return after.prompts


@pytest.mark.parametrize(
    ("splits", "split"), [(("valid",), "valid"), (("test",), "test"), (("valid", "test"), "test")]
)
def test_three_held_out_prompts_are_answered_by_default(configure, rows, splits, split):
    run = train(configure(data=rows(*splits), samples="auto", max_steps=1))
    assert asked(run) == [f"{split} {i}" for i in range(3)]


def test_given_number_of_validation_prompts(configure, rows):
    assert len(asked(train(configure(data=rows("valid"), samples=5, max_steps=1)))) == 5


def test_nothing_is_answered_without_prompts_or_held_out_rows(configure, rows):
    run = train(configure(data=rows(), samples="auto", valid="folder", max_steps=1))
    assert not events_of(run, events.Samples)
    texts = rows("valid", "test", rows=[{"text": "once upon a time"}] * 3)
    run = train(configure(data=texts, samples="auto", max_steps=1, run="s"))
    assert not events_of(run, events.Samples)


def test_number_without_held_out_rows_is_refused(configure, rows):
    with pytest.raises(UserError, match="--samples 2: there are no test rows, and no row is held"):
        train(configure(data=rows(), samples=2, valid="folder"))


def test_weights_that_are_read_again_for_each_token_answer_only_if_asked(configure, rows):
    data = rows("valid")
    run = train(configure(data=data, samples="auto", plan="streamed", max_steps=1))
    assert not events_of(run, events.Samples)


@pytest.mark.parametrize(
    ("objective", "count"), [("sft", 3), ("dpo", 3), ("kto", 3), ("reward", 0), ("grpo", 0)]
)
def test_runs_with_answers_have_samples_by_default(objective, count):
    rewards = {"reward": ("exact_match",)} if objective == "grpo" else {}
    assert TrainConfig(objective=objective, **rewards).sample_count == count
