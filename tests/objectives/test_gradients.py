"""Every objective under every plan: the loss and gradients of a plain reading in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from tests.conftest import TINY, make_model
from tests.engine.test_fused import assert_gradients
from tests.engine.test_tiles import cut
from tests.objectives.plain import Arrays, plain_gradients, plain_model
from your_ai.config import TrainConfig
from your_ai.data.batches import make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.prefix import MemoryStore
from your_ai.engine.scoring import with_baseline, with_weights
from your_ai.engine.weights import FileTensor, tensors_of
from your_ai.memory import facts
from your_ai.memory.estimate_kept import everything
from your_ai.memory.workload import NOTHING, Kept
from your_ai.nets import model
from your_ai.nets.head import LinearHead, put_score_head
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.grpo import GRPO
from your_ai.objectives.kto import KTO
from your_ai.objectives.objective import Objective
from your_ai.objectives.orpo import ORPO
from your_ai.objectives.reward import BradleyTerry, ScoreRegression
from your_ai.objectives.sft import SUPERVISED
from your_ai.objectives.simpo import SimPO
from your_ai.training.steps import accumulate

VOCABULARY = 160
LENGTHS = [(9, 7, 3), (30, 1, 12), (5, 4, 6), (3, 2, 2)]  # tokens of a prompt and of its answers
WEIGHTS = [1.0, 2.5, 0.5, 0.0]  # of the pairs
LABELS = [True, False, True, True]  # of the first answers, for KTO
TOLERANCE = 1e-5

OBJECTIVES: dict[str, Objective] = {
    "sft": SUPERVISED,
    "dpo": DPO(beta=0.05, label_smoothing=0.1),
    "ipo": IPO(beta=0.3),
    "simpo": SimPO(beta=0.5, sft_weight=0.5),
    "orpo": ORPO(odds_weight=0.8),
    "kto": KTO(beta=0.05, desirable_weight=1.5, undesirable_weight=0.8, sft_weight=0.3),
    "grpo": GRPO(clip_high=0.3),
    "grpo-k3": GRPO(kl_beta=0.05, kl="k3", normalization="grpo"),
    "grpo-reverse": GRPO(clip_low=0.1, kl_beta=0.3, normalization="dr"),
    "gspo": GRPO(clip_low=0.1, clip_high=0.1, importance="sequence", kl_beta=0.1),
    "grpo-new": GRPO(kl_beta=0.1),
    "reward": BradleyTerry(center=0.1),
    "reward-scores": ScoreRegression(),
}
TEMPERATURES = {"grpo-new": 0.7, "grpo-reverse": 1.5}
MODELS: dict[str, tuple[str, int | None, bool | None]] = {  # architecture, bits, DoRA
    "llama": ("llama", None, False),
    "llama-dora": ("llama", 4, True),
    "qwen2": ("qwen2", 4, False),
    "qwen2-dora": ("qwen2", None, True),
    "gemma2": ("gemma2", None, False),
    "gemma2-dora": ("gemma2", 4, True),
}
WHOLE: dict[str, tuple[str, int | None, bool | None]] = {  # no adapters: their own weights
    "llama-tied": ("llama", None, None),
    "qwen2-untied": ("qwen2", None, None),  # with biases
    "gemma2-tied": ("gemma2", None, None),
}


@dataclass(frozen=True, kw_only=True)
class Way:
    """How a step is computed."""

    plan: str = "fused"
    rows: int = 8
    """In a micro-batch."""
    packed_tokens: int | None = None
    cached: bool = False
    """Whether there is a prefix cache."""
    split: bool = False
    """Whether texts of a pair may be in different micro-batches."""
    tiled: bool = False
    """Whether rows are cut into tiles, as long ones are."""
    kept: Kept = NOTHING
    """What blocks keep for the backward pass."""


WAYS = {
    "fused": Way(),
    "tiled": Way(plan="staged", rows=6, tiled=True),
    "streamed": Way(plan="streamed"),
    "cached": Way(cached=True, rows=2),
    "cached and streamed": Way(plan="streamed", cached=True),
    "packed": Way(packed_tokens=96),
    "split": Way(plan="staged", rows=3, split=True),
    "split and packed": Way(packed_tokens=48, split=True),
}


def cases() -> list[tuple[str, str, str]]:
    """(objective, way, model), so that any two of them occur together.

    The relatives of grpo share its ways, but for those that weigh texts as a whole; ipo shares
    those of dpo, and orpo those of simpo.
    """
    names = list(MODELS)
    related = [name for name in OBJECTIVES if name.startswith("grpo-") or name in ("ipo", "orpo")]
    return [
        (objective, way, names[(i + j) % len(names)])
        for i, objective in enumerate(OBJECTIVES)
        for j, way in enumerate(WAYS)
        if objective not in related or (j - i) % 3 == 0
    ]


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut the small vocabulary like a large one."""
    slices = [(0, 64), (64, 100), (100, VOCABULARY)]
    monkeypatch.setattr(LinearHead, "slices", lambda head, count: iter(slices))


class Made(NamedTuple):
    """A model, and what is expected of each objective."""

    folder: Path
    tensors: dict[str, FileTensor]
    dora: bool | None
    expected: Callable[[str], tuple[float, Arrays]]
    """The name of an objective -> the loss and its gradients by path."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    """A function that makes a model by its name, once."""

    @cache
    def make(name: str) -> Made:
        architecture, bits, dora = {**MODELS, **WHOLE}[name]
        folder = tmp_path_factory.mktemp("models") / name
        biases = {"mlp_bias": True, "attention_bias": True} if name == "llama-tied" else {}
        make_model(folder, architecture, bits, factor=1, **TINY, **biases, vocab_size=VOCABULARY)
        base, _ = model.load_network(folder, mx.float32)
        tensors, plain = tensors_of(base, folder), plain_model(base)

        @cache
        def expected(objective: str) -> tuple[float, Arrays]:
            network, _, scale = load(folder, dora, is_reward(objective))
            adapters = dict(tree_flatten(network.trainable_parameters()))
            examples, temperature = make_examples(objective), TEMPERATURES.get(objective, 1.0)
            return plain_gradients(
                OBJECTIVES[objective], plain, adapters, scale, examples, temperature
            )

        return Made(folder, tensors, dora, expected)

    return make


def is_reward(objective: str) -> bool:
    return isinstance(OBJECTIVES[objective], BradleyTerry | ScoreRegression)


def load(
    folder: Path, dora: bool | None, scores: bool = False
) -> tuple[nn.Module, model.DropoutKeys, float]:
    """A network with random adapters, and the scale of their products; scores: a score head.

    dora: None for no adapters.
    """
    config = TrainConfig(
        lora_layers=2, lora_targets=("all-linear",), lora_rank=4, lora_alpha=8.0,
        use_dora=bool(dora), adapter="full" if dora is None else "lora",
    )  # fmt: skip
    network, _ = model.load_network(folder, mx.float32)
    keys = model.add_adapters(network, config).dropout_keys
    if scores:
        put_score_head(network, network.args.hidden_size, seed=3)
    mx.random.seed(1)  # lora_b is initially zero, which would make half the gradients zero
    if dora is not None:
        network.update(
            tree_map(lambda p: p + 0.05 * mx.random.normal(p.shape), network.trainable_parameters())
        )
    mx.eval(network.trainable_parameters())
    return network, keys, model.lora_scale(config, config.lora_rank, config.lora_alpha)


def make_examples(objective: str) -> Examples:
    """Random pairs with random log-probabilities of a reference, or rollouts, or with ratings.

    Rollouts also have advantages, and log-probabilities from when they were generated, but for
    those that are new.
    """
    rng = np.random.default_rng(5)
    texts, trained = [], []
    for asked, *answers in LENGTHS:
        prompt = rng.integers(0, VOCABULARY, asked)
        for count in answers:
            texts.append(np.append(prompt, rng.integers(0, VOCABULARY, count)))
            at = np.arange(asked + count)
            spoken = at >= asked
            if isinstance(OBJECTIVES[objective], GRPO):  # a conversation: some of it was heard
                spoken &= (at - asked) % 5 != 2
            trained.append(at == asked + count - 1 if is_reward(objective) else spoken)
    tokens = np.concatenate(texts).astype(np.uint32)
    reference = -rng.gamma(4.0, 2.0, len(tokens)).astype(np.float32)
    rollouts: dict[str, np.ndarray] = {}
    if isinstance(OBJECTIVES[objective], GRPO):
        near = rng.normal(-np.log(VOCABULARY), 0.3, (2, len(tokens))).astype(np.float32)
        reference = near[0]
        rollouts = {
            "advantages": rng.normal(0.5, 1, len(tokens)).astype(np.float32),
            "old": near[1],
        }
        if objective == "grpo-new":
            del rollouts["old"]
    more = {"labels": np.repeat(LABELS, 2), "reference": reference, **rollouts}
    if is_reward(objective):
        more = {"ratings": np.repeat(rng.gamma(1.0, 1.0, len(LENGTHS)), 2).astype(np.float32)}
    return Examples(
        tokens,
        np.concatenate(trained),
        np.cumsum([0, *map(len, texts)]),
        np.repeat(WEIGHTS, 2).astype(np.float32),
        RowCounts(),
        more,
    )


def computed(name: str, made: Made, way: Way) -> tuple[list[float], Arrays]:
    """A step of an engine: its loss, in all ways to compute it, and its gradients by path."""
    objective = OBJECTIVES[name]
    network, keys, _ = load(made.folder, made.dora, is_reward(name))
    built = build_engine(
        network,
        keys,
        way.plan,
        packing=way.packed_tokens is not None,
        tensors=made.tensors,
        make_store=(lambda _: MemoryStore()) if way.cached else None,
        objective=objective,
        temperature=TEMPERATURES.get(name, 1.0),
        kept=way.kept,
    )
    assert (built.plan, built.notices) == (way.plan, ())
    examples, engine = make_examples(name), built.engine
    schedule = make_schedule(
        examples, way.rows, len(examples), 0, way.packed_tokens, objective.rows_together
    )
    total = HeldGradients()
    if "others" in objective.phases:
        batches = schedule.split_batches_of(0, lambda _: way.rows)
        denominator = objective.denominator(batches)
        weighed, sums = with_weights(engine, batches)  # all at once, as for a validation
        accumulate(engine, weighed, 1 / denominator, 0, whole := HeldGradients())
        baseline = with_baseline(engine, batches)
        found = accumulate(engine, baseline, 1 / denominator, 0, total)
        assert_gradients(total.arrays, whole.arrays)
        assert found.means() == pytest.approx(sums.means(), rel=1e-4, abs=1e-5)
        losses = [sums.loss, found.loss]
    elif way.split and objective.rows_together > 1:
        batches = schedule.split_batches_of(0, lambda _: way.rows)
        denominator = objective.denominator(batches)
        batches, sums = with_weights(engine, batches)
        accumulate(engine, batches, 1 / denominator, 0, total)
        losses = [sums.loss]
    else:
        batches = schedule.batches_of(0)
        denominator = objective.denominator(batches)
        sums = accumulate(engine, batches, 1 / denominator, 0, total)
        losses = [sums.loss, sum(engine.loss(batch).loss.item() for batch in batches)]
    return [loss / denominator for loss in losses], total.arrays


def compared(name: str, made: Made, way: Way, monkeypatch: pytest.MonkeyPatch) -> Arrays:
    """Assert that a step has the loss and gradients of the plain reading; the latter."""
    if way.tiled:
        cut(monkeypatch, 16)
    losses, grads = computed(name, made, way)
    expected_loss, expected_grads = made.expected(name)
    assert losses == pytest.approx([expected_loss] * len(losses), rel=TOLERANCE)
    assert_gradients(grads, expected_grads)
    return grads


WHOLE_WAYS = {
    **{way: WAYS[way] for way in ("fused", "tiled", "streamed", "packed", "split")},
    "kept": Way(plan="staged", kept=everything(99)),
    "kept and streamed": Way(plan="streamed", kept=Kept(1, 2, 0)),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("way", WHOLE_WAYS)
@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_gradients_of_whole_weights_are_those_of_a_plain_reading(
    made, monkeypatch, objective, way, name
):
    """Of linear weights, biases and norms; with MLPs cut into slices."""
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 32)
    monkeypatch.setattr(facts, "SLICE_STEP", 32)
    grads = compared(objective, made(name), WHOLE_WAYS[way], monkeypatch)
    assert any(path.endswith("norm.weight") for path in grads)


@pytest.mark.parametrize(("objective", "way", "name"), cases())
def test_loss_and_gradients_are_those_of_a_plain_reading(made, monkeypatch, objective, way, name):
    compared(objective, made(name), WAYS[way], monkeypatch)
