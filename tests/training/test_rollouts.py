"""Runs that train on rewards."""

from __future__ import annotations

import json
import math
import signal
import sys
from typing import Any

import numpy as np
import pytest

from tests.conftest import (
    adapter_of,
    call,
    events_of,
    killed_in,
    losses_of,
    notices_of,
    refused,
    resume,
    rollouts_of,
    train,
    train_once,
    write_rows,
)
from tests.data.test_encode import make_tokenizer
from your_ai.data.encode import Encoder
from your_ai.data.prompts import PromptRows
from your_ai.data.rows import read_rows
from your_ai.errors import UserError
from your_ai.generation import rollouts as generation
from your_ai.run import events
from your_ai.run.folder import find
from your_ai.run.rollout_files import rollout_file, rollout_steps
from your_ai.run.stopping import Stop
from your_ai.session import new_run
from your_ai.training import rollouts
from your_ai.training.job import have_answers
from your_ai.training.process import train_until_done

CALLING = (
    "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[CALL]' ~ c.function | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("key", ["answer", "completion"])
def test_only_a_prompt_with_a_completion_has_an_answer_to_evaluate(own_folder, key):
    rows = PromptRows(write_rows(own_folder / "p.jsonl", [{"prompt": "Ask", key: "Yes"}]))
    assert have_answers({"valid": rows}) == (key == "completion")
    assert have_answers({})


@pytest.mark.parametrize("special", [True, False])
def test_an_expected_call_is_what_is_trained_as_completions_are_decoded(own_folder, special):
    tokenizer = make_tokenizer(CALLING, ("<|im_end|>", "[CALL]") if special else ("<|im_end|>",))
    call = {"name": "add", "arguments": {"a": 1}}
    asked = {"role": "user", "content": "1 + 1?"}
    row = {"messages": [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]}
    file = write_rows(own_folder / "p.jsonl", [row])
    rows, encoder = PromptRows(file), Encoder(tokenizer)
    (parsed,) = read_rows(file)
    encoded = encoder.encode(parsed)
    trained = tokenizer.decode(encoded.tokens[encoded.trained].tolist(), skip_special_tokens=True)
    assert rollouts.asked_of(rows, 0, encoder)["expected"] == trained
    assert trained == ("" if special else "[CALL]") + '{"name": "add", "arguments": {"a": 1}}'


def test_rollouts_are_written_with_their_rewards(rewarded):
    run = train(rewarded())
    assert rollout_steps(run.path) == [1, 2, 3]
    records = rollouts_of(run, 1)
    first = [(records[at].row, sample) for at, sample in ((0, 0), (0, 1), (0, 2), (3, 0))]
    assert [(r.row, r.sample) for r in records][:4] == first
    assert all(len(r.tokens) == 6 or r.stopped for r in records)
    assert all(r.rewards == {"length:3": r.reward} for r in records)
    steps = events_of(run, events.Step)
    means = [np.mean([r.reward for r in rollouts_of(run, step)]) for step in (1, 2, 3)]
    assert [step.metrics["reward"] for step in steps] == pytest.approx(means)
    assert all("seconds/generate" in step.metrics for step in steps)


NEW: dict[str, Any] = {"max_steps": 2}  # nothing is scored before the update
REPEATED = {"updates_per_batch": 2, "kl_beta": 0.1}
SEQUENCE = {"importance": "sequence", "kl_beta": 0.1, "max_steps": 2}
PROMPTED = ("--data", "prompts.jsonl", "--valid", "none", "--objective", "grpo")


@pytest.mark.parametrize(
    ("phase", "settings"),
    [
        pytest.param("generate", NEW, id="generate-new"),
        pytest.param("reward", REPEATED, id="reward-repeated"),
        pytest.param("score", SEQUENCE, id="score-sequence"),
        pytest.param("score", REPEATED, id="score-repeated"),
        pytest.param("update", NEW, id="update-new"),
        pytest.param("update", REPEATED, id="update-repeated"),
    ],
)
def test_a_run_killed_in_any_phase_ends_with_the_same_adapter(rewarded, phase, settings):
    whole = train_once(rewarded(run="whole", save_every=1, **settings))
    owner, name = {
        "generate": (generation.Rollouts, "sample"),
        "reward": (rollouts, "asked_of"),
        "score": (rollouts, "computed"),
        "update": (rollouts, "accumulate"),
    }[phase]
    with killed_in(owner, name):
        train(rewarded(run="killed", save_every=1, **settings))
    killed = find("killed")
    assert resume(killed) == 0
    assert adapter_of(killed) == adapter_of(whole)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_finite_and_resumes_exactly(rewarded, dtype):
    settings = {**REPEATED, "dtype": dtype, "clip_low": 0.01, "clip_high": 0.01}
    settings["max_new_tokens"] = 4
    whole = train(rewarded(run="whole", max_steps=3, save_every=2, **settings))
    steps = events_of(whole, events.Step)
    assert all(math.isfinite(step.loss) and math.isfinite(step.grad_norm) for step in steps)
    assert {step.step for step in steps} | {s.step for s in events_of(whole, events.Skipped)} == {
        *range(1, 4)
    }
    assert any(step.metrics["clip_ratio/high_mean"] > 0 for step in steps)
    stopped = train(rewarded(run="stopped", max_steps=1, **settings))
    assert resume(stopped, max_steps=3) == 0
    assert adapter_of(stopped) == adapter_of(whole)


def test_every_plan_samples_and_learns_the_same(rewarded):
    plans = ("fused", "staged", "streamed")
    runs = [train(rewarded(run=plan, plan=plan, kl_beta=0.05, max_steps=2)) for plan in plans]
    tokens = [[r.tokens for r in rollouts_of(run, 2)] for run in runs]
    assert tokens[0] == tokens[1] == tokens[2]
    first, *others = (list(losses_of(run).values()) for run in runs)
    for losses in others:
        assert losses == pytest.approx(first, rel=1e-5, abs=1e-6)


def test_a_smaller_limit_makes_smaller_waves_and_changes_no_token(rewarded, monkeypatch):
    whole = train_once(rewarded(run="whole"))
    found = []
    genuine = generation.Rollouts.sample

    def counted(self):
        found.append(len(self.batch))
        return genuine(self)

    monkeypatch.setattr(generation.Rollouts, "sample", counted)
    monkeypatch.setattr("your_ai.memory.plan.waves_of", lambda workload: [[2]])
    small = train(rewarded(run="small"))
    assert max(found) == 2
    assert adapter_of(small) == adapter_of(whole)


def test_a_planted_reward_is_learned(configure, own_folder, rewarded):
    """A model that answers yes as often as no is rewarded for yes."""
    rows = [
        {"prompt": f"Is it {thing}?", "completion": answer}
        for thing in ("so", "hot", "late", "far")
        for answer in ("yes", "no")
    ]
    data = write_rows(own_folder / "answers.jsonl", rows)
    wide: dict[str, Any] = {"lora_targets": ["all-linear"], "lora_layers": "all", "lora_rank": 8}
    train(configure(run="start", data=str(data), valid="none", batch_size=8, max_steps=30, **wide))
    asked = write_rows(own_folder / "asked.jsonl", [{"prompt": row["prompt"]} for row in rows[::2]])
    (own_folder / "planted.py").write_text(
        "def yes(completions, **_):\n"
        "    return [float(text.startswith('yes')) for text in completions]\n"
    )
    run = train(rewarded(
        data=str(asked), from_adapter="start", reward=["planted:yes"], rollouts=8,
        prompts_per_step=4, max_new_tokens=4, max_steps=10,
        learning_rate=3e-3, lr_schedule="linear", **wide,
    ))  # fmt: skip
    means = [step.metrics["reward"] for step in events_of(run, events.Step)]
    assert 0.3 < means[0] < 0.7
    assert sum(means[-4:]) / 4 > 0.8  # of 128 samples, which differ with the rounding of a machine


def test_a_signal_gives_up_the_completions_of_a_step(rewarded, monkeypatch):
    """They are generated again, the same, by the resumed run."""
    whole = train_once(rewarded(run="whole"))
    config, stop = rewarded(run="cut"), Stop()
    run = new_run.create(config)
    monkeypatch.setattr(stop, "received", None)
    genuine, calls = generation.sampler_of, []

    def sampler_of(*args):
        sampler = genuine(*args)

        def signalled(*arrays):
            calls.append(1)
            if len(calls) == 9:  # in step 2
                stop.received = signal.SIGINT
            return sampler(*arrays)

        return signalled

    monkeypatch.setattr(rollouts, "sampler_of", sampler_of)
    assert train_until_done(run, config, stop) == 130
    assert rollout_steps(run.path) == [1]
    assert [step.step for step in events_of(run, events.Step)] == [1]
    monkeypatch.setattr(rollouts, "sampler_of", genuine)
    assert resume(run) == 0
    assert adapter_of(run) == adapter_of(whole)


def test_a_validation_measures_the_reward_of_the_most_likely_completions(rewarded, own_folder):
    valid = write_rows(own_folder / "valid.jsonl", [{"prompt": "Ask"}, {"prompt": "Ask me"}])
    run = train(rewarded(valid=str(valid), eval_every=1))
    found = events_of(run, events.Validation)
    assert [event.step for event in found] == [1, 2, 3]
    assert all(event.metrics["reward"] == -event.loss for event in found)


def test_missing_rewards_are_left_out(rewarded, own_folder):
    (own_folder / "partial.py").write_text(
        "def some(completions, **_):\n"
        "    return [None if i % 3 == 0 else i % 3 for i, _ in enumerate(completions)]\n"
    )
    run = train(rewarded(reward=["partial:some"], max_steps=1))
    records = rollouts_of(run, 1)
    assert [r.reward for r in records[:3]] == [None, 1.0, 2.0]
    assert [r.advantage for r in records[:3]] == pytest.approx([0, -0.7070, 0.7070], abs=1e-3)
    (step,) = events_of(run, events.Step)
    assert step.metrics["reward"] == 1.5
    assert step.metrics["rewards/missing"] == 2


def test_a_step_without_differences_changes_nothing_and_says_so(rewarded):
    run = train(rewarded(reward=["contains:never"]))
    (notice,) = [text for text in notices_of(run) if "changed nothing" in text]
    assert "all completions of each prompt earned the same reward" in notice
    assert [s.metrics["frac_reward_zero_std"] for s in events_of(run, events.Step)] == [1, 1, 1]


def test_rollouts_that_a_step_needs_again_must_be_there(rewarded):
    run = train(rewarded(updates_per_batch=2, max_steps=3))
    rollout_file(run.path, 3).unlink()
    with pytest.raises(UserError, match=r"step-000003.*missing or damaged.*step 4"):
        resume(run, max_steps=4)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, "--reward: names no reward"),
        ({"reward": "exact_mach"}, "did you mean exact_match"),
        ({"reward": "exact_match", "rollouts": 1}, "--rollouts 1: must be at least 2"),
        ({"reward": "judge"}, "--judge-model is missing"),
        ({"reward": "exact_match", "packing": True}, "--packing"),
        ({"reward": "exact_match"}, "prompts.jsonl:2"),
        ({"reward": "broken:nan"}, "nan"),
        ({"reward": "length:3", "max_new_tokens": 4000}, "--max-new-tokens 4000"),
    ],
)
def test_bad_input_is_one_line(capsys, tiny_model, own_folder, settings, wanted):
    write_rows(own_folder / "prompts.jsonl", [{"prompt": "a", "answer": "b"}, {"prompt": "c"}])
    (own_folder / "broken.py").write_text(
        "def nan(completions, **_):\n    return [float('nan') for _ in completions]\n"
    )
    flags = []
    for name, value in {"rollouts": 2, "max_new_tokens": 4, "max_steps": 1, **settings}.items():
        flag = "--" + name.replace("_", "-")
        flags += [flag] if value is True else [flag, value]
    error = refused(capsys, "train", "--no-supervise", "--model", tiny_model, *PROMPTED, *flags)
    assert wanted.lower() in error.lower()


def test_the_plan_shows_the_peak_of_each_phase(capsys, tiny_model, own_folder):
    write_rows(own_folder / "prompts.jsonl", [{"prompt": "a"}])
    reward = ("--reward", "length:3", "--kl-beta", "0.1")
    assert call("plan", "--model", tiny_model, *PROMPTED, *reward, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["phases"]) == {"generate", "score", "update"}
    assert max(found["phases"].values()) <= found["process_peak_bytes"]
    assert found["components"]["KV cache"] >= 0


def test_rows_that_change_during_a_run_end_it(rewarded, own_folder):
    (own_folder / "rewriting.py").write_text(
        "from pathlib import Path\n"
        "def f(completions, **_):\n"
        "    rows = Path('prompts.jsonl').read_text()\n"
        "    Path('prompts.jsonl').write_text(rows.replace('Ask', 'Tell'))\n"
        "    return [float(i) for i, _ in enumerate(completions)]\n"
    )
    data = (own_folder / "prompts.jsonl").read_bytes()
    settings = {"reward": ["rewriting:f"], "prompts_per_step": 1, "save_every": 1}
    with pytest.raises(UserError, match=r"^\S*prompts.jsonl: was changed while the run reads it"):
        train(rewarded(**settings))
    run = find("r")
    assert [step.step for step in events_of(run, events.Step)] == rollout_steps(run.path) == [1]
    with pytest.raises(UserError, match=r"the data changed since the run began \(prompts.jsonl\)"):
        resume(run)
    (own_folder / "prompts.jsonl").write_bytes(data)
    (own_folder / "rewriting.py").write_text("def f(completions, **_):\n    return [0, 1, 2]\n")
    sys.modules.pop("rewriting")
    assert resume(run) == 0
