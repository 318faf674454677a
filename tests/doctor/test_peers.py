"""Peers do the task of the benchmark, with their own trainers and what those need."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from tests.conftest import call
from tests.doctor.test_bench import contest_of, tiny_shape
from your_ai.doctor import bench, our_plans, peers
from your_ai.doctor.contest import Contest
from your_ai.doctor.peers import run_peer
from your_ai.doctor.shapes import llama, make_shape

__all__ = ["tiny_shape"]  # a fixture
PAIRS = ("bench", "--shape", "tiny", "--plan", "none")
IS_INSTALLED = importlib.util.find_spec("mlx_lm_lora") is not None


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setitem(bench.SHAPES, "tiny", llama(64, 2, 4, 2, 128, 512))


@pytest.mark.parametrize(
    ("objective", "peer", "message"),
    [
        ("dpo", "mlx-lm", "does not train dpo; compare with mlx-lm-lora"),
        ("simpo", "mlx-lm-checkpoint", "does not train simpo; use none"),
        ("simpo", "mlx-lm-lora", "does not train simpo; use none"),
    ],
)
def test_a_peer_without_the_objective_is_refused(capsys, objective, peer, message):
    assert call(*PAIRS, "--objective", objective, "--against", peer) == 2
    assert f"--against {peer}: it {message}" in capsys.readouterr().err


def test_a_missing_peer_is_refused_with_the_command_that_installs_it(capsys, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda _: None)
    assert call(*PAIRS, "--objective", "dpo", "--against", "mlx-lm-lora-checkpoint") == 2
    assert "pip install mlx-lm-lora==5.10.2" in capsys.readouterr().err


@dataclass
class Arguments:
    """As the trainers of mlx-lm-lora have them."""

    batch_size: int
    iters: int
    steps_per_report: int
    steps_per_save: int
    adapter_file: str
    grad_checkpoint: bool
    max_seq_length: int
    beta: float = 0.0


@dataclass
class RolloutArguments(Arguments):
    group_size: int = 0
    max_completion_length: int = 0
    epsilon: float = 0.0
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 20
    grpo_loss_type: str = ""


@pytest.fixture
def calls(monkeypatch) -> list[dict[str, Any]]:
    """What a substitute for mlx-lm-lora was called with, and what MLX then said of the device."""
    found: list[dict[str, Any]] = []

    def train(*, args, training_callback, **given: Any) -> None:
        found.append({**given, "args": args, "device": mx.device_info()})
        for step in range(args.iters):
            report = {"train_loss": 1.0 - step, "train_total_rewards_mean": step / 4}
            training_callback.on_train_loss_report({**report, "iterations_per_second": 4.0})

    for name in ("sft", "dpo", "orpo", "grpo"):
        module = ModuleType(f"mlx_lm_lora.trainer.{name}_trainer")
        arguments = RolloutArguments if name == "grpo" else Arguments
        vars(module).update({f"train_{name}": train, f"{name.upper()}TrainingArgs": arguments})
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("mlx_lm_lora", "mlx_lm_lora.trainer"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return found


def test_pairs_reach_mlx_lm_lora_with_a_second_model_as_the_reference(tiny_shape, calls):
    contest = contest_of(tiny_shape, objective="ipo", batch_size=3, steps=2)
    assert run_peer(contest, "mlx-lm-lora-checkpoint") == [(1.0, 0.25, 96), (0.0, 0.25, 96)]
    (given,) = calls
    assert len(given["train_dataset"]) == given["args"].batch_size == 3
    pair = given["train_dataset"][0]
    assert len(pair["chosen"]) == len(pair["rejected"]) == given["args"].max_seq_length == 17
    assert pair["chosen_prompt_length"] == pair["rejected_prompt_length"] == 9
    assert (given["loss_type"], given["args"].beta) == ("ipo", 0.1)
    assert given["args"].grad_checkpoint
    assert not given["ref_model"].trainable_parameters().get("lora_a")
    assert given["ref_model"] is not given["model"]


def test_rollouts_reach_mlx_lm_lora_with_the_same_prompts_rewards_and_settings(tiny_shape, calls):
    contest = rollout_contest(tiny_shape)
    assert run_peer(contest, "mlx-lm-lora") == [(0.0, 0.25, 48), (0.25, 0.25, 48)]
    (given,) = calls
    (prompt, answer, _, _), _ = given["train_dataset"]
    ours = our_plans.prepare_ours(contest, "fused").loop.trainer.schedule.examples
    assert (prompt, answer) == (ours[0].tokens.tolist(), [])
    args, (reward,) = given["args"], given["reward_funcs"]
    assert (args.group_size, args.max_completion_length, args.batch_size) == (3, 8, 2)
    assert (args.beta, args.epsilon, args.grpo_loss_type) == (0.1, 0.2, "bnpo")
    assert (args.temperature, args.top_p, args.top_k) == (1.0, 1.0, 0)
    assert given["ref_model"] is not given["model"]
    text = given["tokenizer"].decode([2, 4, 7])
    assert reward(completions=[text], prompts=[]) == [pytest.approx(2 / 3)]


def rollout_contest(folder: Path) -> Contest:
    return contest_of(folder, objective="grpo", rollouts=3, kl_beta=0.1, batch_size=2, steps=2)


def test_orpo_and_sft_need_no_reference(tiny_shape, calls):
    for objective in ("orpo", "sft"):
        run_peer(contest_of(tiny_shape, objective=objective), "mlx-lm-lora")
    assert all("ref_model" not in given for given in calls)
    assert calls[0]["args"].beta == 0.1  # lambda
    assert not calls[0]["args"].grad_checkpoint


def test_only_meanwhile_the_device_names_the_size_that_mlx_lm_lora_reads(
    tiny_shape, calls, monkeypatch
):
    monkeypatch.setattr(mx, "device_info", lambda: {"device_name": "CPU"})
    run_peer(contest_of(tiny_shape, objective="orpo"), "mlx-lm-lora")
    assert calls[0]["device"] == {"device_name": "CPU", peers.WORKING_SET: 0}
    assert mx.device_info() == {"device_name": "CPU"}
    monkeypatch.setattr(mx, "device_info", lambda: {peers.WORKING_SET: 7})
    with peers.working_set_named():
        assert mx.device_info() == {peers.WORKING_SET: 7}


@pytest.mark.skipif(not IS_INSTALLED, reason="needs mlx-lm-lora: pip install mlx-lm-lora")
@pytest.mark.parametrize("objective", ["sft", "dpo", "ipo", "orpo"])
def test_mlx_lm_lora_follows_our_losses(tmp_path, objective):
    folder = make_shape("tiny", 0, "float32", tmp_path)
    contest = contest_of(folder, objective=objective, batch_size=2, steps=5)
    ours = [loss for loss, *_ in our_plans.run_ours(contest, "fused")]
    theirs = [loss for loss, *_ in run_peer(contest, "mlx-lm-lora")]
    assert theirs == pytest.approx(ours, rel=1e-4)


@pytest.mark.skipif(not IS_INSTALLED, reason="needs mlx-lm-lora: pip install mlx-lm-lora")
def test_mlx_lm_lora_trains_rollouts(tmp_path):
    contest = rollout_contest(make_shape("tiny", 0, "float32", tmp_path))
    rewards = [reward for reward, *_ in run_peer(contest, "mlx-lm-lora")]
    assert all(0 < reward < 1 for reward in rewards)
