"""Runs that train a reward model, and runs that are rewarded by one."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import (
    TINY,
    events_of,
    losses_of,
    make_model,
    resume,
    rollouts_of,
    train,
    train_once,
    whole_and_resumed,
    write_rows,
)
from tests.training import test_preferences as preferences
from your_ai.data.preferences import parse_to_score
from your_ai.engine.reload import reload_adapted
from your_ai.engine.weights import open_model
from your_ai.errors import UserError
from your_ai.evaluation.reward_model import RewardModel, load_reward_model, put_reward_model
from your_ai.nets.saved_adapter import open_trained
from your_ai.rewards.rollout import Rollout
from your_ai.run import checkpoint, events
from your_ai.training import prepare as preparing
from your_ai.training import reward_models
from your_ai.training.memory_actions import Governor

PAIRS = [{**pair, "margin": 0.1 * (i % 2)} for i, pair in enumerate(preferences.PAIRS)]
SCORED = [
    {"prompt": f"Question {i // 2}", "completion": ("Yes", "No")[i % 2], "score": 3.0 * (i % 2)}
    for i in range(12)
]


@pytest.fixture
def rated(own_folder, configure):
    """A function that makes the config of a reward model on 12 rows; 4 of them validate."""
    for name, rows in (("pairs", PAIRS), ("scores", SCORED)):
        write_rows(own_folder / name / "train.jsonl", rows)
        write_rows(own_folder / name / "valid.jsonl", rows[:4])

    def make(form="pairs", **settings: Any):
        first = {"data": str(own_folder / form), "objective": "reward", "eval_every": 2}
        return configure(**{**first, "learning_rate": 1e-2, **settings})

    return make


@pytest.fixture
def scored(rewarded):
    """A function that makes the config of a run that is rewarded by the run `rm`."""
    return partial(rewarded, reward=["run:rm"], max_steps=2)


def files_of(run) -> tuple[bytes, bytes]:
    """The adapter and the score head."""
    names = (checkpoint.ADAPTERS, checkpoint.SCORE_HEAD)
    return tuple((run.adapter / name).read_bytes() for name in names)


def score_texts(run, texts: list[str]) -> list[float]:
    """The scores of answers to a prompt, by the model loaded alone."""
    model = load_reward_model(open_trained(str(run.path)))
    return model.scores([encoded(model, "Question 0", text) for text in texts]).tolist()


def encoded(model: RewardModel, prompt: str, text: str) -> Any:
    row = parse_to_score({"prompt": prompt, "completion": text}, "rows.jsonl:1")
    (found,) = model.encode(row)
    return found


def test_pairs_are_told_apart(rated):
    run = train(rated(max_steps=8, keep_best=False))
    first, *_, last = events_of(run, events.Validation)
    assert first.loss > last.loss
    assert first.metrics["rewards/margins"] < last.metrics["rewards/margins"]
    assert last.metrics["rewards/accuracies"] == 1
    assert {"scores/mean", "scores/std"} <= last.metrics.keys()
    assert "scores/square" not in last.metrics


def test_scores_of_rows_are_learned(rated):
    run = train(rated("scores", max_steps=30, eval_every=10, keep_best=False))
    first, *_, last = events_of(run, events.Validation)
    assert last.metrics["rewards/error"] < 0.7 * first.metrics["rewards/error"]
    assert run.read_config().reward_loss == "scores"
    yes, no = score_texts(run, ["Yes", "No"])
    assert no > yes + 1


@pytest.mark.parametrize("form", ["pairs", "scores"])
def test_every_plan_learns_the_same_head_and_adapter(rated, form, monkeypatch):
    whole = train_once(rated(form, run="whole"))
    weights = mx.load(str(whole.adapter / checkpoint.SCORE_HEAD))[checkpoint.SCORE_WEIGHT]
    ways = {
        "streamed": {"plan": "streamed"}, "staged": {"plan": "staged"}, "packed": {"packing": True},
        "cached": {"prefix_cache": "memory", "lora_layers": 1},
    }  # fmt: skip
    for name, settings in list(ways.items())[: len(ways) if form == "pairs" else 1]:
        run = train(rated(form, run=name, **settings))
        if name != "cached":  # it adapts fewer blocks
            assert losses_of(run) == pytest.approx(losses_of(whole), rel=1e-4)
            other = mx.load(str(run.adapter / checkpoint.SCORE_HEAD))[checkpoint.SCORE_WEIGHT]
            assert mx.abs(other - weights).max().item() < 1e-3
    monkeypatch.setattr(Governor, "rows_at", lambda self, tokens: 1)
    split = train(rated(form, run="split"))
    assert losses_of(split) == pytest.approx(losses_of(whole), rel=1e-4)


def test_a_resumed_run_ends_with_the_same_bytes(rated):
    whole, resumed = whole_and_resumed(rated, 2, 4)
    assert files_of(resumed) == files_of(whole)


def test_the_head_is_in_a_file_of_its_own(rated):
    run = train(rated())
    assert set(mx.load(str(run.adapter / checkpoint.SCORE_HEAD))) == {"score.weight"}
    names = {name.rpartition(".")[2] for name in mx.load(str(run.adapter / checkpoint.ADAPTERS))}
    assert names == {"lora_a", "lora_b"}
    assert open_trained(str(run.path)).adapter.config["score_head"] == checkpoint.SCORE_HEAD


@pytest.mark.parametrize("damage", ["delete", "cut"])
def test_a_damaged_head_is_named(rated, damage):
    run = train_once(rated(max_steps=1))
    path = run.adapter / checkpoint.SCORE_HEAD
    content = path.read_bytes()
    path.unlink()
    if damage == "cut":
        path.write_bytes(content[:-1])
        with pytest.raises(UserError, match=r"score_head\.safetensors: its checksum is wrong"):
            load_reward_model(open_trained(str(run.path)))
    else:
        with pytest.raises(UserError, match=r"score_head\.safetensors: is missing"):
            open_trained(str(run.path))


def test_a_reward_model_goes_on_from_another_with_its_head(rated):
    train(rated(run="first", max_steps=3))
    again = train(rated(run="again", from_adapter="first", max_steps=1, learning_rate=1e-9))
    first = score_texts(open_trained("first").folder, ["Yes"])
    assert score_texts(again, ["Yes"]) == pytest.approx(first, abs=1e-4)


def test_a_reward_model_begins_from_an_adapter_without_a_head(rated, configure):
    train_once(configure(run="sft"))
    run = train(rated(from_adapter="sft", max_steps=1))
    assert (run.adapter / checkpoint.SCORE_HEAD).exists()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([PAIRS[0], SCORED[0]], "train.jsonl:2: is an answer with a score, but .*train.jsonl:1 is"),
        ([{"prompt": "a", "completion": "b"}], r"expected chosen \+ rejected, or prompt"),
        ([{**PAIRS[0], "margin": -1}], "margin -1: must be at least 0"),
        (
            [{**SCORED[0], "score": "high"}],
            "score: expected a number up to 1,000,000, found .high.",
        ),
        ([{**SCORED[0], "score": float("nan")}], "score: expected a number"),
        ([{**PAIRS[0], "rejected": PAIRS[0]["chosen"]}], "chosen equals rejected"),
    ],
)
def test_bad_rows_are_refused_in_one_line(own_folder, rated, rows, text):
    write_rows(own_folder / "bad" / "train.jsonl", rows)
    with pytest.raises(UserError, match=text):
        train(rated("bad", valid="none"))


def test_another_loss_than_that_of_the_rows_is_refused(rated):
    with pytest.raises(UserError, match="--reward-loss scores: the rows are pairs"):
        train(rated(reward_loss="scores"))
    with pytest.raises(UserError, match="--center-rewards: only for pairs"):
        train(rated("scores", run="other", center_rewards=0.1))


# -- rewards of other runs


def test_completions_are_scored_as_the_model_alone_scores_them(rated, scored):
    train_once(rated(run="rm"))
    run = train(scored(max_steps=1))
    model = load_reward_model(open_trained("rm"))
    records = rollouts_of(run, 1)
    for record in records:
        assert record.rewards["run:rm"] == record.reward
    by_text = {r.completion: r.reward for r in records if r.completion.strip() and r.stopped}
    for text, reward in by_text.items():  # texts that encode to the sampled tokens
        asked = records[0].question
        if next(r.question for r in records if r.completion == text) == asked:
            score = model.scores([encoded(model, asked, text)])[0]
            assert score == pytest.approx(reward, abs=1e-3)
    assert len({r.reward for r in records}) > 1


@pytest.mark.parametrize("plan", ["staged", "streamed"])
def test_every_plan_gives_the_same_rewards(rated, scored, plan):
    train_once(rated(run="rm"))
    whole = train_once(scored(run="whole", plan="fused", max_steps=1))
    runs = (whole, train(scored(plan=plan, max_steps=1)))
    expected, found = ([r.reward for r in rollouts_of(run, 1)] for run in runs)
    assert found == pytest.approx(expected, abs=1e-4)


def prepared_of(config, name):
    (folder := Path(name)).mkdir()
    return preparing.prepare(config, events.EventLog(folder / "events.jsonl"), folder)


@pytest.mark.memory
def test_a_reward_model_of_the_same_base_shares_its_weights(rated, scored):
    train_once(rated(run="rm"))
    sizes = {}
    for reward in ("length:3", "run:rm"):
        gc.collect()  # what earlier tests left would be freed in between
        mx.clear_cache()
        before = mx.get_active_memory()
        prepared = prepared_of(scored(reward=[reward]), reward.replace(":", "-"))
        twins = prepared.beside.sharing(prepared.job)
        mx.eval(prepared.model.parameters(), [twin.parameters() for twin in twins])
        sizes[reward] = mx.get_active_memory() - before
        weights = sum(array.nbytes for _, array in tree_flatten(prepared.model.parameters()))
        for twin in twins:
            ours = {id(a) for _, a in tree_flatten(prepared.model.parameters())}
            own = sum(a.nbytes for _, a in tree_flatten(twin.parameters()) if id(a) not in ours)
            assert 0 < own < 0.5 * weights
        assert len(twins) == (reward == "run:rm")
        prepared = twins = twin = None
    assert sizes["run:rm"] - sizes["length:3"] <= own + 10_000


@pytest.mark.memory
def test_a_reload_gives_the_new_arrays_to_the_reward_model(rated, scored):
    train_once(rated(run="rm"))
    prepared = prepared_of(scored(), "g")
    rollout = Rollout("Ask", [], "Yes", 2, False, None, {}, "p:1", 0, ids=(3, 4, 5))
    scorer = prepared.rewards.models["run:rm"]
    before, active = scorer([rollout]), mx.get_active_memory()
    twins = prepared.beside.sharing(prepared.job)
    assert reload_adapted(prepared.model, prepared.opened.tensors, twins) > 0
    mx.clear_cache()
    assert scorer([rollout]) == before
    assert mx.get_active_memory() <= active + 10_000


def test_a_reward_model_of_another_base_reads_the_texts(rated, scored, tmp_path):
    other = tmp_path / "other"
    make_model(other, "qwen2", 4, factor=1, **TINY)
    train(rated(run="rm", model=str(other)))
    run = train(scored(max_steps=1))
    rewards = [r.reward for r in rollouts_of(run, 1)]
    assert all(reward is None or np.isfinite(reward) for reward in rewards)
    prepared = prepared_of(scored(), "p")
    assert prepared.beside.sharing(prepared.job) == ()
    (sizes,) = prepared.budget.workload.reward_models
    assert sizes.facts is not None
    components = prepared.budget.choice.option.estimate.components
    assert components["reward models"] > sizes.facts.weights_bytes


def test_what_is_not_a_reward_model_is_refused(scored, configure):
    with pytest.raises(UserError, match=r"--reward run:rm: .*no run"):
        train(scored())
    train(configure(run="rm"))
    with pytest.raises(UserError, match="--reward run:rm: rm is not a reward model"):
        train(scored(run="other"))


def test_a_run_does_not_go_on_with_another_reward_model(rated, scored):
    rm = train_once(rated(run="rm", max_steps=1))
    run = train(scored(max_steps=1))
    assert resume(rm, max_steps=2) == 0
    with pytest.raises(UserError, match="the reward model run:rm changed since the run began"):
        resume(run, max_steps=2)


def completed(text: str, truncated: bool = False) -> Rollout:
    asked = [{"role": "user", "content": "Ask"}]
    return Rollout("Ask", asked, text, 1, truncated, None, {}, "p:1", 0)


def test_an_empty_completion_has_no_score_where_texts_are_encoded(rated):
    train_once(rated(run="rm"))
    model = load_reward_model(open_trained("rm"))
    found = reward_models.score_rollouts(model, False, [completed(""), completed("Yes")])
    assert found[0] is None
    assert np.isfinite(found[1])


@pytest.mark.memory
def test_opening_a_reward_model_reads_no_weights(rated, tiny_model):
    run = train_once(rated(run="rm"))
    mx.clear_cache()
    opened = open_model(tiny_model, mx.float32)
    before = mx.get_active_memory()
    put_reward_model(opened, open_trained(str(run.path)))
    own = sum(array.nbytes for _, array in tree_flatten(opened.network.trainable_parameters()))
    assert mx.get_active_memory() - before <= own + 10_000


def test_rows_of_another_form_for_validation_are_refused(own_folder, rated):
    mixed = own_folder / "mixed"
    write_rows(mixed / "train.jsonl", PAIRS)
    write_rows(mixed / "valid.jsonl", SCORED)
    with pytest.raises(UserError, match=r"valid\.jsonl:1: is an answer with a score, but .*train"):
        train(rated("mixed"))


def test_a_completion_that_was_cut_off_has_no_end_token(rated):
    train_once(rated(run="rm"))
    model = load_reward_model(open_trained("rm"))
    whole, cut = (
        reward_models.encoded(model, False, completed("Yes", truncated))
        for truncated in (False, True)
    )
    assert int(whole.tokens[-2]) in model.encoder.tokenizer.eos_token_ids
    assert cut.tokens.tolist() == [*whole.tokens[:-2].tolist(), 0]
    assert cut.trained.tolist() == [False] * (len(cut.tokens) - 1) + [True]
