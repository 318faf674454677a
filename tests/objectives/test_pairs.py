"""Losses over pairs, against a plain reading of their formulas in float64."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.plain import Answer, pair_loss
from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.objective import Scores, Targets
from your_ai.objectives.orpo import ORPO
from your_ai.objectives.simpo import SimPO

OBJECTIVES = [
    DPO(), DPO(beta=0.4, label_smoothing=0.2), DPO(sft_weight=0.7), IPO(beta=0.3), SimPO(),
    SimPO(beta=1.5, gamma=0.9, label_smoothing=0.1), ORPO(), ORPO(odds_weight=0.8, sft_weight=0.1),
]  # fmt: skip


def make(lengths: list[tuple[int, int]], weights: list[float], seed: int, padding: int):
    """Scores and targets of pairs whose answers have these numbers of tokens."""
    rng = np.random.default_rng(seed)
    counts = [count for pair in lengths for count in pair]
    texts = np.repeat(np.arange(len(counts)), counts)
    by_text = np.repeat(weights, 2)
    current, reference = -rng.gamma(1.0, 2.0, (2, len(texts)))
    pad = lambda values: np.append(values, np.zeros(padding))  # noqa: E731
    targets = Targets(
        positions=mx.zeros(len(texts) + padding, mx.int32),
        tokens=mx.zeros(len(texts) + padding, mx.int32),
        weights=mx.array(pad(by_text[texts]).astype(np.float32)),
        texts=mx.array(pad(texts).astype(np.int32)),
        columns={"reference": mx.array(pad(reference).astype(np.float32))},
    )
    scores = Scores(mx.array(pad(current).astype(np.float32)))
    return scores, targets, texts, current, reference


def answers_of(current: mx.array, reference: np.ndarray, texts: np.ndarray) -> list[Answer]:
    """The answers of the texts, for `plain`."""
    places = [mx.array(np.flatnonzero(texts == text)) for text in range(texts.max() + 1)]
    return [Answer(current[at], mx.array(reference, mx.float64)[at]) for at in places]


def with_slopes(
    loss: Callable[[list[Answer]], mx.array], current: np.ndarray, *known: np.ndarray
) -> tuple[float, np.ndarray]:
    """The value of a loss in float64, and what weighs each of its log-probabilities."""

    def of(current: mx.array) -> mx.array:
        return 0 * current.sum() + loss(answers_of(current, *known))

    with mx.stream(mx.cpu):  # GPUs have no float64
        found, slopes = mx.value_and_grad(of)(mx.array(current, mx.float64))
        return found.item(), -np.array(slopes)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
    padding=st.integers(0, 3),
    data=st.data(),
)
def test_loss_and_weights_are_those_of_the_formula(objective, lengths, seed, padding, data):
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 2.5]), min_size=len(lengths), max_size=len(lengths))
    )
    scores, targets, texts, current, reference = make(lengths, weights, seed, padding)
    weighed = objective.weigh(scores, targets)

    def plain(answers: list[Answer]) -> mx.array:
        pairs = zip(weights, answers[::2], answers[1::2], strict=True)
        return sum(weight * pair_loss(objective, *pair) for weight, *pair in pairs)

    loss, slopes = with_slopes(plain, current, reference, texts)
    assert weighed.loss.item() == pytest.approx(loss, rel=2e-5, abs=1e-5)
    expected = np.append(slopes, np.zeros(padding))
    np.testing.assert_allclose(np.array(weighed.weights), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
def test_metrics_are_means_over_pairs_that_have_a_weight(objective):
    scores, targets, *_ = make([(3, 2), (1, 4), (2, 2)], [1.0, 0.0, 2.0], 7, 2)
    metrics = objective.weigh(scores, targets).metrics
    assert all(count.item() == 2 for _, count in metrics.values())
    chosen, rejected, margins = (
        metrics[f"rewards/{name}"][0].item() for name in ("chosen", "rejected", "margins")
    )
    assert margins == pytest.approx(chosen - rejected, rel=1e-5)
    sums = targets.sum_by_text(mx.where(targets.is_real, scores.current, 0)).tolist()
    assert metrics["logps/chosen"][0].item() == pytest.approx(sums[0] + sums[4], rel=1e-5)


def test_a_policy_equal_to_its_reference_is_undecided():
    scores, targets, *_ = make([(3, 2), (1, 4)], [1.0, 1.0], 7, 0)
    weighed = DPO().weigh(scores, targets._replace(columns={"reference": scores.current}))
    assert weighed.loss.item() == pytest.approx(2 * np.log(2), rel=1e-6)
    value, count = weighed.metrics["rewards/accuracies"]
    assert value.item() / count.item() == 0.5
    assert mx.abs(weighed.weights).min().item() == pytest.approx(0.05)
