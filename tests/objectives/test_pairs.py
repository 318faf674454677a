"""Losses over pairs, against a plain reading of their formulas in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.objectives.dpo import DPO, IPO
from your_ai.objectives.objective import Scores, Targets
from your_ai.objectives.orpo import ORPO
from your_ai.objectives.pairs import PairObjective
from your_ai.objectives.simpo import SimPO

OBJECTIVES = [
    DPO(), DPO(beta=0.4, label_smoothing=0.2), DPO(sft_weight=0.7), IPO(beta=0.3), SimPO(),
    SimPO(beta=1.5, gamma=0.9, label_smoothing=0.1), ORPO(), ORPO(odds_weight=0.8, sft_weight=0.1),
]  # fmt: skip


def log_sigmoid(x: float) -> float:
    return -np.logaddexp(0, -x)


def plain_loss(objective: PairObjective, chosen, rejected, references) -> float:
    """The loss of one pair from the float64 log-probabilities of its tokens."""
    s_w, s_l, a, b = chosen.sum(), rejected.sum(), chosen.mean(), rejected.mean()
    ref_w, ref_l = references
    smoothing = getattr(objective, "label_smoothing", 0.0)
    if isinstance(objective, DPO):
        h = objective.beta * ((s_w - ref_w.sum()) - (s_l - ref_l.sum()))
        loss = -(1 - smoothing) * log_sigmoid(h) - smoothing * log_sigmoid(-h)
    elif isinstance(objective, IPO):
        loss = ((a - ref_w.mean()) - (b - ref_l.mean()) - 1 / (2 * objective.beta)) ** 2
    elif isinstance(objective, SimPO):
        u = objective.beta * (a - b) - objective.gamma
        loss = -(1 - smoothing) * log_sigmoid(u) - smoothing * log_sigmoid(-u)
    else:
        odds = [np.log(np.exp(x) / (1 - np.exp(x))) for x in (a, b)]
        loss = -a - objective.odds_weight * log_sigmoid(odds[0] - odds[1])
    return loss - objective.sft_weight * a


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


def total(objective, current, reference, texts, weights) -> float:
    found = 0.0
    for pair, weight in enumerate(weights):
        if weight:
            chosen, rejected = texts == 2 * pair, texts == 2 * pair + 1
            references = (reference[chosen], reference[rejected])
            found += weight * plain_loss(objective, current[chosen], current[rejected], references)
    return found


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
    loss = total(objective, current, reference, texts, weights)
    assert weighed.loss.item() == pytest.approx(loss, rel=2e-5, abs=1e-5)
    step = 1e-6
    slopes = []
    for index in range(len(current)):
        moved = [current.copy(), current.copy()]
        moved[0][index] += step
        moved[1][index] -= step
        up, down = (total(objective, m, reference, texts, weights) for m in moved)
        slopes.append(-(up - down) / (2 * step))
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
