"""Runs that train a policy through its own sampled tokens."""

from __future__ import annotations

import json
from functools import partial
from unittest.mock import Mock, call

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import (
    TINY,
    adapter_of,
    events_of,
    killed_in,
    losses_of,
    make_model,
    resume,
    rollouts_of,
    train,
    train_once,
    write_rows,
)
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.run import events
from your_ai.run.checkpoint import ADAPTERS
from your_ai.run.folder import find
from your_ai.run.rollout_files import RolloutRecord, rollout_steps
from your_ai.run.stopping import Stop
from your_ai.session import new_run
from your_ai.soft import columns, engine
from your_ai.training import prepare as preparing
from your_ai.training import rollouts, soft_rollouts, trainer
from your_ai.training import train as training
from your_ai.training.process import train_until_done
from your_ai.training.soft_rollouts import parts_of, temperature_at


@pytest.fixture
def reward_model(own_folder, configure):
    """A function that trains a reward model as the run `rm`."""
    pairs = [
        {"prompt": f"Ask {i}", "chosen": f"Yes {i}", "rejected": "No " * (1 + i % 3)}
        for i in range(8)
    ]
    data = write_rows(own_folder / "pairs" / "train.jsonl", pairs).parent
    first = {"data": str(data), "objective": "reward", "run": "rm", "valid": "none"}
    return lambda **settings: train_once(
        configure(**{**first, "learning_rate": 1e-2, "max_steps": 4, **settings})
    )


@pytest.fixture
def soft(configure, own_folder):
    """A function that makes the config of a short run, with changed settings."""
    rows = [{"prompt": text} for text in ("Ask", "Ask please", "Ask for more, please", "What?")]
    data = write_rows(own_folder / "prompts.jsonl", rows)
    return partial(
        configure, data=str(data), valid="none", objective="soft", reward_model="run:rm",
        prompts_per_step=3, max_new_tokens=5, max_steps=3, batch_size=2, kl_beta=0.1,
    )  # fmt: skip


def test_a_step_is_written_scored_and_trained(reward_model, soft):
    reward_model()
    run = train(soft(reward=["length:3"]))
    assert rollout_steps(run.path) == [1, 2, 3]
    steps = events_of(run, events.Step)
    for step in steps:
        records = rollouts_of(run, step.step)
        assert len(records) in (1, 3)
        assert all(r.reward == r.rewards["run:rm"] for r in records)
        assert all(r.rewards["length:3"] is not None for r in records)
        reward = np.mean([r.reward for r in records])
        assert step.metrics["reward"] == pytest.approx(reward, abs=1e-4)
        tokens = sum(len(r.tokens) for r in records)
        kl = step.metrics["kl"] * tokens / len(records)  # of a completion, from that of a token
        assert step.loss == pytest.approx(-reward + 0.1 * kl, abs=1e-3)
        assert step.trained_tokens == tokens
    assert steps[0].metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert steps[-1].metrics["kl"] > 0


def test_resident_and_streamed_weights_learn_the_same(reward_model, soft, monkeypatch):
    reward_model()
    used = []
    for module, name in ((columns, "gradients"), (engine, "sweep")):
        inner = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, inner=inner, n=name: (used.append(n), inner(*a))[1]
        )
    fused = train(soft(run="fused", plan="fused", max_steps=2))
    assert set(used) == {"gradients"}
    used.clear()
    streamed = train(soft(run="streamed", plan="streamed", max_steps=2))
    assert set(used) == {"sweep"}
    assert losses_of(streamed) == pytest.approx(losses_of(fused), rel=1e-3, abs=1e-3)
    norms = [[s.grad_norm for s in events_of(r, events.Step)] for r in (fused, streamed)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-2)


@pytest.mark.parametrize("size", [1, 3])
def test_the_update_does_not_depend_on_the_micro_batches(reward_model, soft, size):
    reward_model()
    whole = train_once(soft(run="whole", max_steps=2))
    parts = train(soft(run="parts", batch_size=size, max_steps=2))
    assert losses_of(parts) == pytest.approx(losses_of(whole), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"straight_through": False, "soft_credit": "2"},
        {"soft_credit": "0.01", "kl_beta": 0.0, "use_dora": True},
        {"temperature_end": 0.5},
    ],
)
def test_every_setting_trains_and_resumes(reward_model, soft, settings):
    reward_model()
    whole = train(soft(run="whole", max_steps=2, **settings))
    if "temperature_end" not in settings:  # it is reached at the last step, wherever that is
        cut = train(soft(run="cut", max_steps=1, **settings))
        assert resume(cut, max_steps=2) == 0
        assert adapter_of(cut) == adapter_of(whole)
    assert all(step.grad_norm > 0 for step in events_of(whole, events.Step))
    if not settings.get("straight_through", True):
        assert "reward_relaxed" in events_of(whole, events.Step)[0].metrics


def test_credit_that_is_cut_off_has_a_residual(reward_model, soft):
    reward_model()
    runs = [train(soft(run=f"of-{n}", soft_credit=str(n), max_steps=1)) for n in (4, 0)]
    residuals = [events_of(run, events.Step)[0].metrics["credit/residual"] for run in runs]
    assert residuals == [0, 1]
    assert adapter_of(runs[0]) != adapter_of(runs[1])


@pytest.mark.parametrize("place", ["sample", "reward", "gradients", "between"])
def test_a_run_that_is_killed_in_any_phase_ends_with_the_same_bytes(reward_model, soft, place):
    reward_model()
    whole = train_once(soft(run="whole", max_steps=2))
    owner, name = {
        "sample": (soft_rollouts.SoftSource, "sampled"),
        "reward": (rollouts.RolloutSource, "rewarded"),
        "gradients": (soft_rollouts.SoftSource, "gradients"),
        "between": (training.optimizer, "clip_factor"),
    }[place]
    with killed_in(owner, name):
        train(soft(run="killed", max_steps=2, save_every=1))
    killed = find("killed")
    assert resume(killed) == 0
    assert adapter_of(killed) == adapter_of(whole)


def test_an_interrupt_while_tokens_are_sampled_ends_the_step(reward_model, soft, monkeypatch):
    reward_model()
    stop, config = Stop(), soft(run="r")
    run = new_run.create(config)
    inner = soft_rollouts.SoftSource.sampled

    def interrupted(self, *args):
        stop.received = 2
        return inner(self, *args)

    monkeypatch.setattr(soft_rollouts.SoftSource, "sampled", interrupted)
    assert train_until_done(run, config, stop) == 130
    assert rollout_steps(run.path) == []


def test_all_roles_of_one_base_share_its_weights(reward_model, soft, own_folder):
    reward_model()
    (folder := own_folder / "s").mkdir()
    prepared = preparing.prepare(soft(), events.EventLog(folder / "e.jsonl"), folder)
    policy = {id(a) for _, a in tree_flatten(prepared.model.parameters())}
    weights = sum(a.nbytes for _, a in tree_flatten(prepared.model.parameters()))
    assert len(prepared.beside.sharing(prepared.job)) == 2
    for network in prepared.beside.sharing(prepared.job):
        own = [a for _, a in tree_flatten(network.parameters()) if id(a) not in policy]
        assert sum(a.nbytes for a in own) < 0.5 * weights


def test_the_reference_is_rounded_as_the_policy_is(reward_model, soft, configure, monkeypatch):
    put, opened = trainer.put_first_adapter, []
    monkeypatch.setattr(
        trainer, "put_first_adapter", lambda *args: opened.append(args[0]) or put(*args)
    )
    reward_model()
    train_once(configure(run="sft"))
    run = train(soft(run="r", from_adapter="sft", max_steps=1, adapter_dtype="bfloat16"))
    first = mx.load(str(run.checkpoints / "step-000000" / ADAPTERS))
    reference = dict(tree_flatten(opened[0].network.parameters()))
    assert {array.dtype for array in first.values()} == {mx.bfloat16}
    assert all(mx.array_equal(reference[name], array) for name, array in first.items())


@pytest.mark.parametrize("more", [-32, 0, 32])
def test_a_reward_model_of_another_base_with_the_tokenizer(reward_model, soft, tmp_path, more):
    sizes = {**TINY, "hidden_size": 64, "vocab_size": TINY.get("vocab_size", 768) + more}
    make_model(tmp_path / "other", "qwen2", 4, factor=1, **sizes)
    reward_model(model=str(tmp_path / "other"))
    run = train(soft(max_steps=1))
    assert len(events_of(run, events.Step)) == 1


def test_another_tokenizer_is_refused_with_its_first_difference(reward_model, soft, tmp_path):
    other = make_model(tmp_path / "other", "llama", 4, factor=1, **TINY)
    path = other / "tokenizer.json"
    content = json.loads(path.read_text())
    token = next(iter(content["model"]["vocab"]))
    number = content["model"]["vocab"].pop(token)
    content["model"]["vocab"]["another!"] = number
    path.write_text(json.dumps(content))
    reward_model(model=str(other))
    with pytest.raises(UserError, match="its tokenizer differs from the policy's: token"):
        train(soft())


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"reward_model": ""}, "--reward-model is missing"),
        ({"reward_model": "rm"}, "--reward-model 'rm': expected run:NAME"),
        ({"reward_model": "run:nope"}, "run:nope: no run named nope"),
        ({"soft_credit": "all"}, "--soft-credit 'all': must be exact"),
        ({"soft_credit": "-1"}, "must be exact"),
        ({"soft_credit": "1.5"}, "must be exact"),
        ({"temperature": 0}, "--temperature 0.0: must be at least 0.01"),
        ({"temperature_end": 0}, "--temperature-end 0"),
        ({"plan": "staged"}, "--plan staged: not supported with --objective soft"),
        ({"rollouts": 4}, "--rollouts: --objective soft does not use it"),
        ({"packing": True}, "--packing: not supported with --objective soft"),
    ],
)
def test_wrong_settings_are_one_line(soft, settings, text):
    with pytest.raises(UserError, match=text) as caught:
        train(soft(**settings))
    assert "\n" not in str(caught.value)


def test_a_run_that_is_no_reward_model_is_refused(soft, configure):
    train(configure(run="rm"))
    with pytest.raises(UserError, match="run:rm: rm is not a reward model"):
        train(soft())


def test_the_temperature_changes_linearly():
    config = TrainConfig(objective="soft", reward_model="run:a", temperature_end=0.5)
    assert [temperature_at(config, i, 5) for i in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]
    assert temperature_at(config, 9, 5) == 0.5
    assert temperature_at(TrainConfig(), 3, 5) == 1.0


def test_rows_that_go_together_are_counted_with_their_padding():
    records = [
        RolloutRecord(row, 0, "p:1", "Ask", None, "", [3] * 10, True, {}, 0.0) for row in range(6)
    ]
    rows_at = Mock(side_effect=lambda tokens: 128 // tokens)
    parts = parts_of(records, np.array([40, 23, 5, 40, 23, 5]), rows_at)
    assert rows_at.call_args_list == [call(64), call(64), call(32)]
    assert [len(part) for part in parts] == [2, 2, 2]
    assert sorted(place for part in parts for place in part) == list(range(6))
