"""Models that an outside loop trains."""

from __future__ import annotations

import errno
import os
import queue
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest

from tests.conftest import TINY, events_of, flip, make_model, rollouts_of, train
from your_ai.config.requests import TinkerRequest
from your_ai.engine.gradients import SpilledGradients
from your_ai.errors import RunError, UserError
from your_ai.generation.likely import drawn, top
from your_ai.generation.rollouts import RolloutPrompt, sampler_of
from your_ai.nets import model as nets
from your_ai.objectives.outside import LOSSES
from your_ai.run import checkpoint, events
from your_ai.run.folder import RUNS, RunFolder
from your_ai.run.rollout_files import RolloutRecord
from your_ai.training import outside as outside_module
from your_ai.training import rollouts
from your_ai.training import train as recipe
from your_ai.training.optimizer_states import SpilledStates
from your_ai.training.outside import Outside, outside_config
from your_ai.training.outside_models import (
    BASE,
    GRADIENTS,
    PARKED_ADAPTERS,
    Adam,
    LoraShape,
    OutsideModel,
    SavedAdapters,
)
from your_ai.training.outside_texts import OutsideText, batches_of

SHAPE = LoraShape(4, 1)
FAST = Adam(learning_rate=1e-2)
AS_A_LOOP: dict[str, Any] = {  # settings of a run that are those of loops
    "max_steps": 5, "lora_targets": ["all-linear"], "lora_layers": "all", "lora_rank": 4,
    "lora_alpha": 32.0, "seed": 1, "lr_schedule": "constant", "warmup_steps": 0,
    "weight_decay": 0.0, "adam_beta2": 0.95, "adam_epsilon": 1e-12, "adam_bias_correction": True,
    "max_grad_norm": 0.0,
}  # fmt: skip


def text(count: int, seed: int = 0, **columns: float) -> OutsideText:
    """A text of random tokens, each with the next one as its target."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(3, 60, count + 1).astype(np.int32)
    given = {"advantages": 1.0, "old": -3.0, "clip_low": 0.8, "clip_high": 1.2, **columns}
    arrays = {name: np.full(count, value, np.float32) for name, value in given.items()}
    return OutsideText(
        tokens[:-1], np.arange(count, dtype=np.int32), tokens[1:], arrays, np.ones(count, bool)
    )


TEXTS = [text(9, 1), text(40, 2), text(23, 3), text(70, 4)]


@pytest.fixture
def outside(tiny_model, own_folder) -> Callable[..., Outside]:
    def make(spill: Any = None, **request: Any) -> Outside:
        asked = {"model": str(tiny_model), "max_seq_length": 128, "rank": 8, "batch_size": 2}
        config = outside_config(TinkerRequest(**{**asked, **request}))
        return Outside(config if spill is None else replace(config, spill=spill))

    return make


@pytest.fixture
def loops(outside) -> Outside:
    return outside()


@pytest.fixture
def made(loops) -> OutsideModel:
    return loops.create(SHAPE, RUNS / "a")


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a head of its own."""
    place = tmp_path_factory.mktemp("models")
    return str(make_model(place / "untied", "qwen3", tie_word_embeddings=False))


def copied(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in arrays.items()}


def adapters(outside: Outside) -> dict[str, np.ndarray]:
    assert outside.base.bench is not None
    return copied(nets.adapter_arrays(outside.base.bench.opened.network))


def scores(outside: Outside, of: OutsideModel | SavedAdapters) -> np.ndarray:
    """The log-probabilities of all targets of `TEXTS`."""
    return np.concatenate(outside.log_probabilities(of, TEXTS))


def saved_by(outside: Outside, model: OutsideModel, with_optimizer: bool = True) -> Path:
    place = RUNS / "a" / "weights" / "one"
    outside.base.save(model, place, with_optimizer=with_optimizer)
    return place


def step(outside: Outside, model: OutsideModel, loss: str = "cross_entropy") -> None:
    """One update on `TEXTS`."""
    outside.add_gradients(model, TEXTS, loss)
    outside.update(model, FAST)


def distance(first: dict[str, np.ndarray], second: dict[str, np.ndarray]) -> float:
    """The relative distance of all arrays together."""
    assert first.keys() == second.keys()
    apart = sum(float(np.square(first[n] - second[n]).sum()) for n in first)
    return float(np.sqrt(apart / sum(float(np.square(a).sum()) for a in first.values())))


def test_the_same_rows_train_the_same_adapter_as_a_run(outside, configure, monkeypatch):
    steps: list[list[OutsideText]] = []
    step_of = recipe.train_step

    def noted(loop, state):
        schedule = loop.trainer.schedule
        batches = schedule.batches_of(state.step)
        share = 1 / sum(batch.weight for batch in batches)
        found = []
        for row in schedule.rows_of(state.step):
            example = schedule.examples[row]
            made = text(len(example.tokens) - 1)
            weights = example.trained[1:].astype(np.float32) * np.float32(share)
            columns = {**made.columns, "advantages": weights}
            found.append(
                made._replace(
                    tokens=example.tokens[:-1], targets=example.tokens[1:], columns=columns
                )
            )
        steps.append(found)
        return step_of(loop, state)

    monkeypatch.setattr(recipe, "train_step", noted)
    run = train(configure(**AS_A_LOOP, learning_rate=1e-2, valid="none"))
    losses = [step.loss for step in events_of(run, events.Step)]
    loops = outside(max_seq_length=256)
    made = loops.create(SHAPE, RUNS / "loop")
    for texts, loss in zip(steps, losses, strict=True):
        found, _ = loops.add_gradients(made, texts, "cross_entropy")
        assert found == pytest.approx(loss, rel=1e-6)
        loops.update(made, FAST)
    trained = copied(checkpoint.load_adapters(run.adapter))
    assert distance(trained, adapters(loops)) < 1e-6


@pytest.mark.parametrize("updates", [1, 2])
def test_the_rollouts_of_a_run_train_the_same_adapter(outside, rewarded, monkeypatch, updates):
    """With the clipped ratio of GRPO, of what the run wrote. updates: of each batch; the ratio
    differs from 1 in the second."""
    prompts: list[np.ndarray] = []
    step_of = recipe.train_step

    def noted(loop, state):
        examples = loop.trainer.schedule.examples
        prompts[:] = [rollouts.prompt_of(examples, row) for row in range(len(examples))]
        return step_of(loop, state)

    monkeypatch.setattr(recipe, "train_step", noted)
    run = train(rewarded(
        **AS_A_LOOP, learning_rate=3e-3, updates_per_batch=updates, reward=["contains:e"],
        rollouts=6, kl_beta=0.0, clip_low=0.2, clip_high=0.3,
    ))  # fmt: skip
    found = events_of(run, events.Step)
    assert [step.grad_norm > 1 for step in found].count(True) >= 4  # rewards may be equal
    loops = outside(max_seq_length=256)
    made, clipped = loops.create(SHAPE, RUNS / "loop"), 0.0
    for number, step in enumerate(found):
        records = rollouts_of(run, number - number % updates + 1)
        total = sum(len(record.tokens) for record in records)
        texts = [rolled_out(prompts[r.row], r, r.advantage / total) for r in records]
        if updates == 1:  # the run takes those of its only update
            scores = loops.log_probabilities(made, texts)
            texts = [
                each._replace(columns={**each.columns, "old": values})
                for each, values in zip(texts, scores, strict=True)
            ]
        loss, scores = loops.add_gradients(made, texts, "ppo")
        assert loss == pytest.approx(step.loss, abs=1e-6)  # of terms that cancel
        ratios = [
            np.exp(own - each.columns["old"]) for own, each in zip(scores, texts, strict=True)
        ]
        clipped = max(clipped, *(abs(r - 1).max() for r in ratios))
        loops.update(made, Adam(learning_rate=3e-3))
    assert clipped > 0.3 if updates > 1 else clipped < 1e-4
    trained = copied(checkpoint.load_adapters(run.adapter))
    assert distance(trained, adapters(loops)) < 1e-6


def rolled_out(prompt: np.ndarray, record: RolloutRecord, advantage: float) -> OutsideText:
    """A completion as a text whose targets are its tokens."""
    whole = np.append(prompt, record.tokens).astype(np.int32)
    places = np.arange(len(prompt) - 1, len(whole) - 1, dtype=np.int32)
    given = {"advantages": advantage, "clip_low": 0.8, "clip_high": 1.3}
    columns = {name: np.full(len(places), value, np.float32) for name, value in given.items()}
    columns["old"] = np.array(record.old or np.zeros(len(places)), np.float32)
    return OutsideText(whole[:-1], places, whole[places + 1], columns, places >= 0)


def test_an_export_that_fails_leaves_the_one_that_was_there(loops, monkeypatch):
    made, target = loops.create(SHAPE, RUNS / "loop"), RUNS / "loop" / "external_weights" / "a"
    loops.export(made, target, "mlx", lambda folder: (folder / "more").touch())
    before = {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}
    assert {path.name for path in before} > {"more", "adapter_model.safetensors", "README.md"}
    full = UserError("no space")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(outside_module.peft, "write", Mock(side_effect=full))
    with pytest.raises(UserError, match="no space"):
        loops.export(made, target, "mlx", lambda folder: None)
    assert [path.name for path in target.parent.iterdir()] == ["a"]
    assert before == {path: path.read_bytes() for path in target.rglob("*") if path.is_file()}


def plain(loss: str, x: np.ndarray, columns: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The sum of a loss, and its derivative, by central differences in float64."""
    a, y, low, high = (
        columns[n].astype(float) for n in ("advantages", "old", "clip_low", "clip_high")
    )
    constant = np.clip(np.exp(x - y), low, high)

    def value(x: np.ndarray) -> float:
        r = np.exp(x - y)
        if loss == "gspo":
            r = np.exp(np.mean(x - y)) * np.ones_like(x)
        clipped = np.clip(r, low, high)
        of_kind = {
            "cross_entropy": -a * x,
            "importance_sampling": -a * r,
            "ppo": -np.minimum(a * r, a * clipped),
            "gspo": -np.minimum(a * r, a * clipped),
            "cispo": -a * constant * x,
            "dro": -a * x + low / 2 * (x - y) ** 2,
        }
        return float(of_kind[loss].sum())

    slopes = np.zeros_like(x)
    for place in range(len(x)):
        step = np.zeros_like(x)
        step[place] = 1e-6
        slopes[place] = (value(x + step) - value(x - step)) / 2e-6
    return value(x), slopes


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_has_the_gradients_of_its_formula(loops, made, loss):
    given = text(30, 5)
    before = loops.log_probabilities(made, [given])[0].astype(np.float64)
    rng = np.random.default_rng(0)
    columns = {
        "advantages": rng.normal(size=30).astype(np.float32),
        "old": (before + rng.normal(0, 0.4, 30)).astype(np.float32),
        "clip_low": np.full(30, 0.8, np.float32),
        "clip_high": rng.uniform(1.1, 1.3, 30).astype(np.float32),
    }
    value, slopes = plain(loss, before, columns)
    found, _ = loops.add_gradients(made, [given._replace(columns=columns)], loss)
    assert found == pytest.approx(value, rel=1e-5)
    grads = dict(loops.base.bench.gradients.arrays)
    loops.base.bench.gradients.clear()
    weights = {**columns, "advantages": (-slopes).astype(np.float32)}
    loops.add_gradients(made, [given._replace(columns=weights)], "cross_entropy")
    wanted = loops.base.bench.gradients.arrays
    assert distance(copied(wanted), copied(grads)) < 2e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("plan", ["fused", "staged", "streamed"])
def test_each_plan_gives_the_same_log_probabilities_and_gradients(outside, untied, plan, tied):
    results = []
    for name in ("fused", plan):
        loops = outside(plan=name, **({} if tied else {"model": untied}))
        made = loops.create(SHAPE, RUNS / f"{name}-{len(results)}")
        loops.add_gradients(made, TEXTS, "ppo")
        loops.update(made, FAST)
        loss, found = loops.add_gradients(made, TEXTS, "importance_sampling")
        scores = loops.log_probabilities(made, TEXTS)
        assert np.concatenate(found) == pytest.approx(np.concatenate(scores), abs=1e-5)
        held = loops.base.bench.gradients
        grads = copied(held.take(list(held.sizes())))
        results.append((loss, np.concatenate(found), grads))
        assert any("lm_head" in name for name in grads) is not tied
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-5)
    assert distance(results[0][2], results[1][2]) < 1e-5


def test_bfloat16_rounds_log_probabilities_alike_in_each_call(outside):
    saved, found = RUNS / "a" / "weights" / "one", {}
    for dtype in ("float32", "bfloat16"):
        loops = outside(dtype=dtype)
        made = loops.create(SHAPE, RUNS / dtype)
        if dtype == "float32":
            step(loops, made)
            loops.base.save(made, saved)
        loops.base.load(made, saved, with_optimizer=False)
        scores = np.concatenate(loops.log_probabilities(SavedAdapters.at(saved), TEXTS))
        _, others = loops.add_gradients(made, TEXTS[::-1], "cross_entropy")
        assert np.concatenate(others[::-1]) == pytest.approx(scores, abs=1e-5)
        found[dtype] = scores
    apart = np.abs(found["float32"] - found["bfloat16"])
    assert 1e-4 < apart.mean() < 0.2  # logits up to 13, to 8 bits


@pytest.mark.parametrize("disk", [False, True])
def test_models_take_turns_and_keep_gradients_and_optimizers(outside, disk):
    """Of equal and of other ranks, as if each were alone. disk: gradients and optimizers are there,
    which gives the same."""
    shapes = {"a": SHAPE, "b": LoraShape(4, 2), "c": LoraShape(2, 3, train_mlp=False)}
    alone, plan = {}, "staged" if disk else "fused"
    for name, shape in shapes.items():
        loops = outside(plan=plan)
        made = loops.create(shape, RUNS / f"alone-{name}")
        for _ in range(2):
            loops.add_gradients(made, TEXTS[:2], "cross_entropy")
            loops.add_gradients(made, TEXTS[2:], "cross_entropy")
            loops.update(made, FAST)
        alone[name] = adapters(loops)
    loops = outside(plan=plan, spill=disk)
    made = {name: loops.create(shape, RUNS / name) for name, shape in shapes.items()}
    assert isinstance(loops.base.bench.gradients, SpilledGradients) is disk
    assert isinstance(loops.base.bench.optimizer.states, SpilledStates) is disk
    for _ in range(2):
        for part in (TEXTS[:2], TEXTS[2:]):
            for each in made.values():
                loops.add_gradients(each, part, "cross_entropy")
        for each in made.values():
            loops.update(each, FAST)
    for name, each in made.items():
        loops.base.train(each)
        assert distance(alone[name], adapters(loops)) < 1e-6


def test_a_sampler_asks_what_was_saved_and_training_goes_on_unchanged(loops, made):
    step(loops, made)
    saved = saved_by(loops, made, with_optimizer=False)
    before, base = scores(loops, made), scores(loops, BASE)
    step(loops, made)
    after = scores(loops, made)
    assert np.array_equal(scores(loops, SavedAdapters.at(saved)), before)
    assert np.array_equal(scores(loops, BASE), base)
    assert np.array_equal(scores(loops, made), after)
    assert not np.array_equal(before, after)


def test_what_was_saved_goes_on_with_the_same_bytes(outside, loops, made):
    step(loops, made)
    saved = saved_by(loops, made)
    step(loops, made)
    wanted = adapters(loops)
    again = outside()
    other = again.create(SHAPE, RUNS / "b")
    again.base.load(other, saved, with_optimizer=True)
    step(again, other)
    found = adapters(again)
    assert all(np.array_equal(wanted[name], found[name]) for name in wanted)


def test_a_sampler_that_was_replaced_is_read_again(loops, made):
    found = []
    for _ in range(2):
        step(loops, made)
        saved = saved_by(loops, made, with_optimizer=False)
        found.append(scores(loops, SavedAdapters.at(saved)))
        assert np.array_equal(found[-1], scores(loops, made))
        scores(loops, SavedAdapters.at(saved))  # it is the one that is there
    assert not np.array_equal(*found)


def test_gradients_that_wait_are_not_in_memory_beside_completions(loops):
    """The plan does not count them there. They are used afterwards."""
    undisturbed, made = loops.create(SHAPE, RUNS / "a"), loops.create(SHAPE, RUNS / "b")
    for each in (undisturbed, made):
        loops.add_gradients(each, TEXTS, "ppo")
    prompts = [RolloutPrompt(np.array([3, 4]), (1, 2))]
    loops.sampled(made, prompts, sampler_of(1.0), (), 4)
    assert not loops.base.bench.gradients.sizes()
    wanted = loops.update(undisturbed, FAST)["grad_norm"]
    assert loops.update(made, FAST)["grad_norm"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("disk", [False, True])
def test_gradients_that_cannot_be_put_away_are_kept(outside, monkeypatch, disk):
    """The disk is full when another model wants its turn."""
    loops = outside(plan="staged" if disk else "fused", spill=disk)
    first, other = (loops.create(SHAPE, RUNS / name) for name in "ab")
    loops.add_gradients(other, TEXTS, "ppo")
    wanted = loops.update(other, FAST)["grad_norm"]
    loops.add_gradients(first, TEXTS, "ppo")
    save = checkpoint.save_arrays

    def full(path: Path, arrays: Any) -> None:
        if path.name == GRADIENTS.format(3):
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, arrays)

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save_arrays", full)
        with pytest.raises(RunError, match="No space left"):
            loops.add_gradients(other, TEXTS, "ppo")
    assert loops.update(first, FAST)["grad_norm"] == pytest.approx(wanted, rel=1e-6)


def test_the_policy_frees_memory_after_steps(loops):
    """The training goes on as before."""
    made, other = loops.create(SHAPE, RUNS / "a"), loops.create(SHAPE, RUNS / "b")
    loops.policy = replace(loops.policy, clear_cache_every=0, reload_interval=2)
    for _ in range(4):
        step(loops, made)
    wanted = adapters(loops)
    loops.policy = replace(loops.policy, reload_interval=0)
    for _ in range(4):
        step(loops, other)
    assert distance(wanted, adapters(loops)) == 0
    kinds = [[e.kind for e in events_of(RunFolder(RUNS / n), events.Action)] for n in "ab"]
    assert kinds == [["reload_lora"] * 2, []]


def test_a_process_over_its_limit_ends_with_one_line(outside, monkeypatch, capsys):
    loops, ended = outside(), queue.Queue[int]()
    loops.limit = replace(loops.limit, limit_bytes=1)
    monkeypatch.setattr(os, "_exit", ended.put)
    with loops.guarded():
        assert ended.get(timeout=20) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: --max-memory: ")
    assert said.count("\n") == 1


def test_the_plan_counts_a_prompt_for_each_completion(outside):
    rollouts = outside(samples=6).budget.workload.rollouts
    assert (rollouts.group, rollouts.rows) == (1, 6)


def test_completions_have_the_log_probabilities_of_their_texts(loops, made):
    prompts = [RolloutPrompt(np.arange(3, 9), (1, 2)), RolloutPrompt(np.arange(5, 30), (3,), 5)]
    ends = RolloutPrompt(np.arange(3, 9), (1,), ends=lambda found: len(found) == 3)
    found = loops.sampled(made, [*prompts, ends], sampler_of(1.0), (), 8)
    lengths = {(c.prompt, c.sample): (len(c.tokens), c.stopped) for c in found}
    whole = {(0, 0): (8, False), (0, 1): (8, False), (1, 0): (5, False)}
    assert lengths == {**whole, (2, 0): (3, True)}


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed"])
@pytest.mark.parametrize("architecture", ["llama", "untied", "gemma2"])
def test_likely_tokens_have_the_log_probabilities_of_targets(
    outside, untied, tmp_path, plan, architecture
):
    given = {"untied": {"model": untied}}
    if architecture == "gemma2":  # its logits are capped
        given["gemma2"] = {"model": str(make_model(tmp_path / "gemma2", "gemma2"))}
    loops = outside(plan=plan, **given.get(architecture, {}))
    made = loops.create(SHAPE, RUNS / "a")
    step(loops, made)
    tokens = text(40, 2).tokens
    for choose in (top(5), drawn(3, 7, 0.8)):
        found = loops.likely(made, tokens, 4, choose)
        places = np.repeat(np.arange(3, 39), found.ids.shape[1])
        wanted = loops.log_probabilities(made, [of_targets(tokens[:-1], places, found.ids)])[0]
        assert found.logprobs.reshape(-1) == pytest.approx(wanted, abs=1e-4)
        assert len(found.ids) == 36


def of_targets(tokens: np.ndarray, positions: np.ndarray, ids: np.ndarray) -> OutsideText:
    count = len(positions)
    columns = {name: np.zeros(count, np.float32) for name in text(1).columns}
    return OutsideText(
        tokens, positions.astype(np.int32), ids.reshape(-1), columns, np.ones(count, bool)
    )


def test_events_show_a_loop_as_a_run(loops, made):
    step(loops, made)
    loops.end(made)
    (event,) = events_of(RunFolder(RUNS / "a"), events.Step)
    assert event.trained_tokens == sum(len(t.targets) for t in TEXTS)
    assert (RUNS / "a" / "adapter" / checkpoint.ADAPTERS).is_file()


def test_models_keep_no_files_open(loops):
    """A server has any number of them, and macOS allows a process 256 files."""
    models = [loops.create(SHAPE, RUNS / "a0")]
    step(loops, models[0])
    before = psutil.Process().num_fds()
    models += [loops.create(SHAPE, RUNS / f"a{number}") for number in range(1, 4)]
    for model in models:
        step(loops, model)
    assert psutil.Process().num_fds() == before


def test_a_step_that_cannot_be_recorded_is_done(loops, made, monkeypatch, capsys):
    """Its loop must not take it for one that changed nothing."""
    before = adapters(loops)
    loops.add_gradients(made, TEXTS, "ppo")
    full = RunError("events.jsonl: cannot be written (No space left on device)")
    monkeypatch.setattr(made.log, "write", Mock(side_effect=full))
    assert loops.update(made, FAST)["grad_norm"] > 0
    assert distance(adapters(loops), before) > 0
    assert capsys.readouterr().err.count("No space left") == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (text(129), "128"),
        (text(5)._replace(tokens=np.full(5, 10**6, np.int32)), "token id 1000000"),
        (text(5)._replace(targets=np.full(5, -1, np.int32)), "token id -1"),
    ],
)
def test_a_text_that_cannot_be_trained_is_refused_before_any_gradient(loops, made, given, reason):
    with pytest.raises(UserError, match=reason):
        loops.add_gradients(made, [text(5), given], "cross_entropy")
    with pytest.raises(UserError, match="no gradients"):
        loops.update(made, FAST)


@pytest.mark.parametrize(
    "adam",
    [
        Adam(learning_rate=0),
        Adam(learning_rate=1e3, beta1=0, beta2=0, eps=1e-30, weight_decay=1e3, grad_clip_norm=1e30),
        Adam(beta1=0.999999, beta2=0.999999, eps=1, grad_clip_norm=1e-30),
    ],
    ids=["a rate of 0", "large", "small"],
)
def test_a_step_may_have_all_settings_that_the_server_takes(loops, made, adam):
    """A rate of 0 is that of the first step of a warmup, and of the last of a decay."""
    before = adapters(loops)
    loops.add_gradients(made, TEXTS, "ppo")
    assert loops.update(made, adam)["grad_norm"] > 0
    after = adapters(loops)
    assert all(np.isfinite(array).all() for array in after.values())
    is_same = all(np.array_equal(after[name], before[name]) for name in before)
    assert is_same == (adam.learning_rate == 0)


def test_a_step_that_fails_leaves_no_gradients_to_the_next(loops, made, monkeypatch):
    loops.add_gradients(made, TEXTS, "ppo")
    fail = Mock(side_effect=RuntimeError("out of memory"))
    with monkeypatch.context() as patched:
        patched.setattr(loops, "update_of", lambda *_: fail)
        with pytest.raises(RuntimeError):
            loops.update(made, FAST)
    loops.add_gradients(made, TEXTS, "ppo")
    norm = loops.update(made, FAST)["grad_norm"]
    other = loops.create(SHAPE, RUNS / "b")
    loops.add_gradients(other, TEXTS, "ppo")
    assert loops.update(other, FAST)["grad_norm"] == pytest.approx(norm, rel=1e-6)


def test_gradients_that_are_not_finite_change_nothing(loops, made):
    before = adapters(loops)
    loops.add_gradients(made, [text(5, advantages=1e38, old=-80.0)], "importance_sampling")
    with pytest.raises(UserError, match="gradient norm"):
        loops.update(made, FAST)
    after = adapters(loops)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_several_targets_of_a_token_are_separate(loops, made):
    """As in targets of shape (T, K)."""
    one = text(12)
    twice = one._replace(
        positions=np.repeat(one.positions, 2),
        targets=np.stack([one.targets, one.tokens], axis=1).reshape(-1),
        columns={name: np.repeat(array, 2) for name, array in one.columns.items()},
        counts=np.ones(24, bool),
    )
    _, found = loops.add_gradients(made, [twice], "cross_entropy")
    wanted = loops.log_probabilities(made, [one])[0]
    assert found[0][::2] == pytest.approx(wanted, abs=1e-5)
    assert found[0].shape == (24,)


def table(count: int, width: int, seed: int) -> OutsideText:
    """A text with `width` targets of each token."""
    one, rng = text(count, seed), np.random.default_rng(seed)
    total = count * width
    return one._replace(
        positions=np.repeat(one.positions, width),
        targets=rng.integers(3, 60, total).astype(np.int32),
        columns={name: np.repeat(array, width) for name, array in one.columns.items()},
        counts=np.ones(total, bool),
    )


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
def test_many_targets_need_no_more_memory_than_the_plan_counts(loops, made, loss, monkeypatch):
    """It counts one for each token of the rows. The gradients are those of all targets."""
    texts = [table(30, 5, 1), table(30, 1, 2), table(9, 7, 3), table(28, 1, 4), table(0, 1, 5)]
    none = np.zeros(0, np.int32)
    columns = {name: array[:0] for name, array in texts[0].columns.items()}
    texts[-1] = text(3)._replace(
        positions=none, targets=none, columns=columns, counts=np.zeros(0, bool)
    )
    sizes = []

    def noted(*given: Any) -> Any:
        for batch, parts in batches_of(*given):
            sizes.append((len(batch.positions), loops.rows_at(batch.tokens.shape[1]), batch))
            yield batch, parts

    monkeypatch.setattr(outside_module, "batches_of", noted)
    total, found = loops.add_gradients(made, texts, loss)
    assert loops.base.bench is not None
    gradients = copied(loops.base.bench.gradients.arrays)
    assert all(slots <= rows * batch.tokens.shape[1] for slots, rows, batch in sizes)
    assert max(slots for slots, _, _ in sizes) > 32
    loops.base.bench.gradients.clear()
    monkeypatch.setattr(outside_module, "batches_of", batches_of)
    monkeypatch.setattr(loops, "rows_at", lambda tokens: 64)
    wanted_total, wanted = loops.add_gradients(made, texts, loss)
    assert total == pytest.approx(wanted_total, rel=1e-5)
    for own, other in zip(found, wanted, strict=True):
        assert own == pytest.approx(other, rel=1e-5)
    assert distance(gradients, copied(loops.base.bench.gradients.arrays)) < 1e-5


def test_gradients_that_fail_leave_none_of_their_texts(loops, made):
    before = adapters(loops)
    loops.check_stop = Mock(side_effect=[None, None, RunError("the server stops")])
    with pytest.raises(RunError):
        loops.add_gradients(made, TEXTS + TEXTS, "ppo")
    loops.check_stop = lambda: None
    with pytest.raises(UserError, match="no gradients"):
        loops.update(made, FAST)
    assert distance(adapters(loops), before) == 0
    step(loops, made, "ppo")


def test_completions_end_when_the_server_stops(loops, made):
    before = adapters(loops)
    loops.check_stop = Mock(side_effect=RunError("the server stops"))
    prompts = [RolloutPrompt(np.array([3, 4]), (1, 2))]
    with pytest.raises(RunError):
        loops.sampled(made, prompts, sampler_of(1.0), [0], 9)
    loops.end(made)
    assert distance(adapters(loops), before) == 0


def test_what_was_saved_of_another_base_is_refused(outside, tmp_path):
    """Of the same shapes, so that nothing else tells."""
    loops = outside(model=str(make_model(tmp_path / "other", seed=5, **TINY)))
    saved = saved_by(loops, loops.create(SHAPE, RUNS / "a"))
    again = outside()
    made = again.create(SHAPE, RUNS / "b")
    before = adapters(again)
    with pytest.raises(UserError, match="different model"):
        again.base.load(made, saved, with_optimizer=True)
    with pytest.raises(UserError, match="different model"):
        again.log_probabilities(SavedAdapters.at(saved), TEXTS)
    assert distance(adapters(again), before) == 0


@pytest.mark.parametrize("name", ["optimizer.safetensors", checkpoint.ADAPTERS])
def test_a_damaged_file_changes_nothing(loops, made, name):
    step(loops, made, "ppo")
    saved = saved_by(loops, made)
    step(loops, made, "ppo")
    before = adapters(loops)
    flip(saved / name, -20)
    with pytest.raises(UserError, match=name):
        loops.base.load(made, saved, with_optimizer=True)
    assert distance(adapters(loops), before) == 0
    assert made.step == 2


def test_a_damaged_sampler_is_not_asked_and_the_model_is_unchanged(loops, made):
    saved = saved_by(loops, made, with_optimizer=False)
    before = adapters(loops)
    flip(saved / checkpoint.ADAPTERS, -20)
    for _ in range(2):
        with pytest.raises(UserError, match="checksum"):
            loops.log_probabilities(SavedAdapters.at(saved), TEXTS)
    loops.base.train(made)
    assert distance(adapters(loops), before) == 0


def test_a_model_whose_file_is_lost_does_not_harm_others(loops):
    lost, kept = loops.create(SHAPE, RUNS / "a"), loops.create(SHAPE, RUNS / "b")
    wanted = loops.log_probabilities(kept, TEXTS)
    (RUNS / "a" / PARKED_ADAPTERS / checkpoint.ADAPTERS).unlink()
    for _ in range(2):
        with pytest.raises(Exception, match=r"parked|adapters"):
            loops.add_gradients(lost, TEXTS, "ppo")
        found = loops.log_probabilities(kept, TEXTS)
        assert [own.tolist() for own in found] == [own.tolist() for own in wanted]
