from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.config import AUTO, TrainConfig, coerce, defaults


@pytest.mark.parametrize(
    ("rows", "batch", "epochs"),
    [(1, 4, 50), (30, 4, 50), (130, 4, 24), (640, 4, 5), (2_999, 4, 2), (3_000, 4, 1),
     (5_000, 8, 1), (50_000, 16, 1), (10**9, 16, 1)],
)  # fmt: skip
def test_batch_and_epochs_follow_from_the_number_of_rows(rows, batch, epochs):
    found = defaults.sized(TrainConfig(), rows, validated=True)
    assert (found.batch_size, found.epochs) == (batch, epochs)


def test_epochs_are_few_where_one_too_many_would_do_harm():
    assert defaults.sized(TrainConfig(), 30, validated=True).epochs == 50
    assert defaults.sized(TrainConfig(), 30, validated=False).epochs == 10
    for changes in ({"keep_best": False}, {"objective": "dpo"}):
        assert defaults.sized(TrainConfig(**changes), 30, validated=True).epochs == 10


def test_a_limit_in_steps_is_the_only_limit():
    assert defaults.sized(TrainConfig(max_steps=7), 100).epochs is None
    assert defaults.sized(TrainConfig(max_steps=7, epochs=2), 100).epochs == 2


@pytest.mark.parametrize(
    ("rows", "steps", "warmup", "every"),
    [(3, 1, 0, 10), (30, 8, 0, 10), (80, 20, 2, 20), (640, 160, 10, 80), (100_000, 6_250, 10, 100)],
)
def test_warmup_and_validations_follow_from_an_epoch_alone(rows, steps, warmup, every):
    for limits in ({}, {"max_steps": 5}, {"epochs": 1}):
        found = defaults.resolved(TrainConfig(**limits), rows, True, steps, 16, 6, 6)
        assert (found.warmup_steps, found.eval_every) == (warmup, every)


@given(rows=st.integers(0, 10**7), steps=st.integers(1, 10**7), blocks=st.integers(1, 200))
def test_given_settings_never_change_and_automatic_ones_are_all_chosen(rows, steps, blocks):
    given = {"batch_size": 3, "epochs": 2, "warmup_steps": 5, "eval_every": 7, "lora_rank": 5}
    for config in (TrainConfig(), TrainConfig(lora_layers=1, **given)):
        for size in defaults.adapters(config, blocks):
            found = defaults.resolved(config, rows, True, steps, *size, blocks)
            for name in defaults.CHOSEN:
                value, asked = getattr(found, name), getattr(config, name)
                assert value != AUTO
                assert asked in (AUTO, value)


def test_adapters_shrink_in_rank_first_and_in_blocks_last():
    sizes = list(defaults.adapters(TrainConfig(), 7))
    assert sizes == [(16, 7), (8, 7), (4, 7), (4, 3), (4, 1)]
    for use_rslora, scale in ((False, 2.0), (True, 8.0)):
        config = TrainConfig(lora_alpha=32, use_rslora=use_rslora)
        found = [defaults.resolved(config, 640, False, 160, *size, 7) for size in sizes]
        assert [each.lora_layers for each in found] == ["all", "all", "all", 3, 1]
        root = math.sqrt if use_rslora else int
        assert {each.lora_alpha / root(each.lora_rank) for each in found} == {scale}


def test_what_was_recorded_is_not_chosen_again():
    before = defaults.resolved(TrainConfig(batch_size=8, epochs=3), 640, False, 160, 4, 2, 6)
    found = defaults.recorded(TrainConfig(epochs=9), before)
    assert (found.batch_size, found.epochs) == (8, 9)
    assert (found.lora_rank, found.lora_alpha, found.lora_layers) == (4, 8.0, 2)


def test_the_words_say_what_was_chosen_and_why():
    asked = TrainConfig()
    usual = defaults.resolved(asked, 640, False, 160, 16, 6, 6)
    line = (
        "chosen for 640 training rows: 4 rows per step, 4 epochs (640 steps), 10 steps to warm up"
    )
    assert defaults.words(asked, usual, 640, 640, 6, "9 GB") == [line]
    small = defaults.resolved(asked, 640, False, 160, 4, 3, 6)
    assert defaults.words(asked, small, 640, 640, 6, "9 GB") == [
        line,
        "chosen for a limit of 9 GB: rank 4 in the last 3 of 6 blocks, because no plan fits with "
        "rank 16 in all 6 blocks",
    ]
    assert defaults.words(usual, usual, 640, 640, 6, "9 GB") == []


@pytest.mark.parametrize(
    ("text", "rewards"),
    [
        ("regex:[a,b]{1,2}=0.5, judge", ("regex:[a,b]{1,2}=0.5", "judge")),
        (r"contains:a\,b", ("contains:a,b",)),
        (["contains:a,b"], ("contains:a,b",)),
    ],
)
def test_rewards_are_split_at_commas_outside_brackets(text, rewards):
    assert coerce("reward", text, "--reward") == rewards
