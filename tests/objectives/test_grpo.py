"""GRPO: advantages, weights of completions, clipping and KL, beside their formulas in NumPy."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.batches import Batch
from your_ai.objectives.grpo import (
    GRPO,
    advantages_of,
    completion_weights,
    completions_of,
    spreads_of,
)
from your_ai.objectives.objective import Scores, Targets, Weighed
from your_ai.objectives.sft import SFT

REWARDS = st.floats(-10, 10, width=32) | st.just(math.nan) | st.sampled_from([0.0, 1.0])
GROUPS = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(REWARDS, min_size=size, max_size=size), min_size=1, max_size=4)
)

# -- advantages


def plain_advantages(group: list[float], kind: str) -> list[float]:
    """One number at a time."""
    known = [r for r in group if not math.isnan(r)]
    if len(known) < 2:
        return [0.0] * len(group)
    mean = sum(known) / len(known)
    spread = math.sqrt(sum((r - mean) ** 2 for r in known) / (len(known) - 1))
    found = []
    for reward in group:
        if math.isnan(reward):
            found.append(0.0)
        elif kind == "rloo":
            found.append(reward - (sum(known) - reward) / (len(known) - 1))
        else:
            found.append((reward - mean) / (spread + 1e-4 if kind == "group" else 1))
    return found


@pytest.mark.parametrize("kind", ["group", "dr", "rloo"])
@given(groups=GROUPS)
def test_advantages_are_those_of_the_formulas(kind, groups):
    expected = [plain_advantages(group, kind) for group in groups]
    found = advantages_of(np.array(groups), kind)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["group", "dr", "rloo"])
@given(st.floats(-1e6, 1e6), st.integers(1, 9))
def test_equal_rewards_have_no_advantage(kind, reward, size):
    """Not even by rounding, so that such groups need not be trained."""
    assert not advantages_of(np.full((1, size), reward), kind).any()
    assert not spreads_of(np.full((1, size), reward)).any()


@given(GROUPS)
def test_spreads_have_n_minus_1(groups):
    known = [[r for r in group if not math.isnan(r)] for group in groups]
    expected = [np.std(group, ddof=1) if len(group) > 1 else 0.0 for group in known]
    np.testing.assert_allclose(spreads_of(np.array(groups)), expected, atol=1e-9)


# -- the loss of a step


def completions(lengths: list[int], row_weights: np.ndarray, advantages: Any, **more: Any) -> Batch:
    """A batch of completions, with two empty target slots."""
    texts = np.repeat(np.arange(len(lengths)), lengths)
    slots = np.pad(texts, (0, 2)).astype(np.int32)
    real = np.arange(len(slots)) < len(texts)
    empty = np.zeros((1, 1), np.uint32)

    def by_token(values: Any) -> np.ndarray:
        return np.where(real, np.asarray(values, np.float32)[slots], 0)

    return Batch(
        tokens=np.zeros((len(lengths), max(lengths)), np.int32),
        positions=np.zeros(len(slots), np.int32),
        targets=np.zeros(len(slots), np.int32),
        weights=by_token(row_weights),
        texts=slots,
        rows=empty,
        places=empty,
        lengths=np.array(lengths),
        trained_tokens=len(texts),
        columns={
            "advantages": by_token(advantages),
            **{name: np.pad(np.float32(values), (0, 2)) for name, values in more.items()},
        },
    )


def weigh(objective: GRPO, batch: Batch, scores: np.ndarray) -> Weighed:
    """Scores in empty slots are as odd as those of an engine may be."""
    padded = np.pad(np.float32(scores), (0, 2), constant_values=-50)
    return objective.weigh(Scores(mx.array(padded)), Targets.of(batch))


LENGTHS, ADVANTAGES = [1, 4, 7], [1.5, -0.5, -1.0]
COUNT = sum(LENGTHS)
TEXTS = np.repeat(np.arange(3), LENGTHS)
MOST = 10  # maximum tokens of a completion


@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 0, 1]])
@pytest.mark.parametrize("normalization", ["dapo", "grpo", "dr"])
def test_the_loss_of_a_step_is_normalized_as_in_the_paper(normalization, counts):
    """dapo: by all tokens. grpo: by the length of each. dr: by the maximum length."""
    rng = np.random.default_rng(0)
    old, scores = -rng.exponential(1, (2, COUNT))
    used = np.array(counts, bool)
    weights = completion_weights(np.array(LENGTHS), used, normalization, MOST)
    batch = completions(LENGTHS, weights, ADVANTAGES, old=old)
    objective = GRPO(normalization=normalization)
    ratio = np.exp(scores - old)
    advantage = np.array(ADVANTAGES)[TEXTS]
    losses = -np.minimum(ratio * advantage, ratio.clip(0.8, 1.2) * advantage)
    sums = [losses[text == TEXTS].sum() for text in range(3) if used[text]]
    lengths = [length for length, each in zip(LENGTHS, used, strict=True) if each]
    expected = {
        "dapo": sum(sums) / sum(lengths),
        "grpo": np.mean([s / n for s, n in zip(sums, lengths, strict=True)]),
        "dr": sum(sums) / (len(sums) * MOST),
    }[normalization]
    found = weigh(objective, batch, scores).loss.item() / objective.denominator([batch])
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("normalization", ["dapo", "grpo", "dr"])
def test_the_denominator_adds_up_over_micro_batches(normalization):
    weights = completion_weights(np.array(LENGTHS), np.ones(3, bool), normalization, MOST)
    objective = GRPO(normalization=normalization)
    whole = completions(LENGTHS, weights, ADVANTAGES)
    parts = [completions([n], weights[i : i + 1], [1.0]) for i, n in enumerate(LENGTHS)]
    assert objective.denominator(parts) == objective.denominator([whole])


def test_completions_that_do_not_count_are_not_counted():
    batch = completions(LENGTHS, np.array([0.0, 1.0, 0.0]), ADVANTAGES)
    assert (completions_of(batch), GRPO(normalization="grpo").denominator([batch])) == (1, 1.0)
    nothing = completions(LENGTHS, np.zeros(3), ADVANTAGES)
    assert GRPO().denominator([nothing]) == GRPO(normalization="dr").denominator([nothing]) == 0


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_on_policy_it_is_sft_weighted_by_the_advantages(importance):
    scores = -np.random.default_rng(1).exponential(1, COUNT)
    weights = np.array([1.0, 0.25, 2.0], np.float32)
    batch = completions(LENGTHS, weights, ADVANTAGES)
    found = weigh(GRPO(importance=importance), batch, scores).weights
    weighted = completions(LENGTHS, weights * np.float32(ADVANTAGES), ADVANTAGES)
    padded = mx.array(np.pad(np.float32(scores), (0, 2)))
    expected = SFT().weigh(Scores(padded), Targets.of(weighted)).weights
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=1e-6)


@pytest.mark.parametrize("kl", ["reverse", "k3"])
@pytest.mark.parametrize("importance", ["token", "sequence"])
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_weights_are_the_derivatives_of_the_loss(kl, importance, beta):
    rng = np.random.default_rng(2)
    old, scores, reference = -rng.exponential(0.5, (3, COUNT))
    batch = completions(LENGTHS, np.array([1, 0, 2.0]), ADVANTAGES, old=old, reference=reference)
    objective = GRPO(kl_beta=beta, kl=kl, importance=importance)
    targets = Targets.of(batch)

    def loss(scores: mx.array) -> mx.array:
        return objective.weigh(Scores(scores), targets).loss

    padded = mx.array(np.pad(np.float32(scores), (0, 2)))
    found = objective.weigh(Scores(padded), targets).weights
    np.testing.assert_allclose(np.array(found), -np.array(mx.grad(loss)(padded)), atol=2e-6)


def test_tokens_that_do_not_count_are_not_in_the_metrics():
    old = np.full(COUNT, -1.0)
    old[TEXTS == 1] = -9  # its ratios are clipped, and its rows do not count
    batch = completions(LENGTHS, np.array([1.0, 0, 1.0]), ADVANTAGES, old=old, reference=old)
    metrics = weigh(GRPO(kl_beta=1.0), batch, np.full(COUNT, -1.0)).metrics
    values = {name: (value.item(), count.item()) for name, (value, count) in metrics.items()}
    counted = LENGTHS[0] + LENGTHS[2]
    assert values == {
        "entropy": (counted, counted),
        "clip_ratio/low_mean": (0, counted),
        "clip_ratio/high_mean": (0, counted),
        "kl": (0, counted),
    }


@pytest.mark.parametrize("importance", ["token", "sequence"])
def test_a_ratio_that_overflows_is_clipped_in_every_slot(importance):
    """Also in empty slots, where an infinite number times 0 would be none."""
    batch = completions([2, 2], np.ones(2), [1.0, 0.0], old=np.full(4, -200.0))
    found = weigh(GRPO(importance=importance), batch, np.zeros(4))
    assert found.weights.tolist() == [0.0] * 6
    assert found.loss.item() == pytest.approx(-2.4)


# -- clipping


@pytest.mark.parametrize(
    ("ratio", "advantage", "clipped"),
    [
        (1.31, 2.0, True),
        (1.29, 2.0, False),
        (0.1, 2.0, False),
        (0.79, -2.0, True),
        (0.81, -2.0, False),
        (9.0, -2.0, False),
    ],
)
def test_a_token_has_no_weight_where_it_is_clipped(ratio, advantage, clipped):
    batch = completions([1], np.ones(1), [advantage], old=[-1.0])
    found = weigh(GRPO(clip_low=0.2, clip_high=0.3), batch, np.array([math.log(ratio) - 1]))
    assert found.weights[0].item() == pytest.approx(0 if clipped else ratio * advantage, rel=1e-5)
    shares = [found.metrics[f"clip_ratio/{side}_mean"][0].item() for side in ("low", "high")]
    assert shares == [clipped and advantage < 0, clipped and advantage > 0]
    expected = -min(ratio * advantage, min(max(ratio, 0.8), 1.3) * advantage)
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_ratio_of_a_sequence_is_the_geometric_mean_of_its_tokens():
    """Here of a completion with two tokens, whose ratios 4 and 1/4 are both clipped alone."""
    moves = np.log([4.0, 0.25, 1.1, 1.1, 3.0])
    batch = completions([2, 2, 1], np.ones(3), [1.0, 2.0, 1.0], old=np.full(5, -2.0))
    found = weigh(GRPO(importance="sequence"), batch, moves - 2)
    np.testing.assert_allclose(found.weights[:5], [1, 1, 2.2, 2.2, 0], rtol=1e-5)


# -- KL

VOCABULARY = 5


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    return float((p * np.log(p / q)).sum())


def numeric_slope(value: Any, at: np.ndarray) -> np.ndarray:
    """The derivative of a function of a vector, by central differences."""
    steps = 1e-5 * np.eye(len(at))
    return np.array([(value(at + step) - value(at - step)) / 2e-5 for step in steps])


def expected_slope(
    objective: GRPO, theta: np.ndarray, sampled: np.ndarray, reference: np.ndarray
) -> np.ndarray:
    """The derivative of the loss, expected over tokens that were sampled from `sampled`.

    Each token of the vocabulary is a completion that weighs as much as it is likely.
    """
    scores = np.log(softmax(theta))
    batch = completions(
        [1] * VOCABULARY,
        sampled,
        np.zeros(VOCABULARY),
        old=np.log(sampled),
        reference=np.log(reference),
    )
    weights = np.array(weigh(objective, batch, scores).weights[:VOCABULARY], np.float64)
    return -weights @ (np.eye(VOCABULARY) - softmax(theta))  # of d log softmax / d theta


@pytest.fixture(params=range(3))
def thetas(request) -> np.ndarray:
    """Logits of the policy, of the one that sampled, and of the reference."""
    return np.random.default_rng(request.param).normal(size=(3, VOCABULARY))


@pytest.mark.parametrize("kl", ["reverse", "k3"])
@pytest.mark.parametrize("on_policy", [True, False])
def test_kl_has_no_slope_at_the_reference(kl, on_policy, thetas):
    policy, other, _ = thetas
    sampled = softmax(policy if on_policy else other)
    objective = GRPO(kl_beta=0.7, kl=kl)
    found = expected_slope(objective, policy, sampled, softmax(policy))
    np.testing.assert_allclose(found, 0, atol=1e-6)


@pytest.mark.parametrize(("kl", "on_policy"), [("reverse", True), ("reverse", False), ("k3", True)])
def test_reverse_has_the_slope_of_the_divergence_from_the_reference_and_k3_of_its(
    kl, on_policy, thetas
):
    policy, other, reference = thetas

    def value(theta: np.ndarray) -> float:
        distributions = softmax(theta), softmax(reference)
        return 0.7 * divergence(*distributions[:: 1 if kl == "reverse" else -1])

    sampled = softmax(policy if on_policy else other)
    found = expected_slope(GRPO(kl_beta=0.7, kl=kl), policy, sampled, softmax(reference))
    np.testing.assert_allclose(found, numeric_slope(value, policy), rtol=1e-4, atol=1e-6)


def test_kl_is_measured_by_k3(thetas):
    policy, _, reference = thetas
    scores, others = (np.log(softmax(theta)) for theta in (policy, reference))
    batch = completions([VOCABULARY], np.ones(1), [0.0], old=scores, reference=others)
    value, count = weigh(GRPO(kl_beta=1e-3), batch, scores).metrics["kl"]
    expected = np.exp(others - scores) - (others - scores) - 1
    assert value.item() / count.item() == pytest.approx(expected.mean(), rel=1e-5)
