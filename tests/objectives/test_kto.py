"""KTO, against a plain reading of its formula in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.objectives.plain import Answer, Group, kto_loss
from tests.objectives.test_pairs import make, with_slopes
from your_ai.objectives.kto import KTO
from your_ai.objectives.objective import Sums, Targets, Totals

OBJECTIVES = [
    KTO(), KTO(beta=0.5, desirable_weight=2.0, undesirable_weight=0.5), KTO(sft_weight=0.3),
]  # fmt: skip


def labeled(targets: Targets, labels: np.ndarray, **columns: mx.array) -> Targets:
    return targets._replace(columns={**targets.columns, "labels": mx.array(labels), **columns})


def baseline(current, reference, texts, weights) -> float:
    moved = [(current - reference)[texts == 2 * row + 1].sum() for row in range(len(weights))]
    total = sum(weights)
    return max(0.0, float(np.dot(weights, moved)) / total) if total else 0.0


@pytest.mark.parametrize("objective", OBJECTIVES, ids=str)
@given(
    rows=st.lists(
        st.tuples(
            st.tuples(st.integers(1, 6), st.integers(1, 6)),
            st.sampled_from([0.0, 1.0, 2.5]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    seed=st.integers(0, 2**32 - 1),
    padding=st.integers(0, 3),
)
def test_loss_and_weights_are_those_of_the_formula(objective, rows, seed, padding):
    lengths, weights, good = zip(*rows, strict=True)
    scores, targets, texts, current, reference = make(list(lengths), list(weights), seed, padding)
    labels = np.append(np.repeat(good, 2)[texts], np.zeros(padding, bool)).astype(bool)
    weighed = objective.weigh(scores, labeled(targets, labels))
    z0 = baseline(current, reference, texts, weights)

    def plain(answers: list[Answer]) -> mx.array:
        groups = map(Group, zip(answers[::2], strict=True), weights, good)
        return sum(group.weight * kto_loss(objective, group, z0) for group in groups)

    loss, slopes = with_slopes(plain, current, reference, texts)
    assert weighed.loss.item() == pytest.approx(loss, rel=2e-5, abs=1e-5)
    expected = np.append(slopes, np.zeros(padding))
    np.testing.assert_allclose(np.array(weighed.weights), expected, rtol=2e-4, atol=2e-5)
    assert not np.array(weighed.weights)[: len(texts)][texts % 2 == 1].any()
    assert weighed.metrics["kl"][0].item() == pytest.approx(z0, rel=2e-5, abs=1e-5)


def test_metrics_separate_good_and_bad_answers():
    scores, targets, texts, current, reference = make([(3, 2), (1, 4), (2, 2)], [1.0] * 3, 7, 2)
    good = np.append(np.repeat([True, False, True], 2)[texts], [False, False])
    found = KTO(beta=0.5).weigh(scores, labeled(targets, good)).metrics
    rewards = [0.5 * (current - reference)[texts == 2 * row].sum() for row in range(3)]
    means = {name: value.item() / count.item() for name, (value, count) in found.items()}
    assert means["rewards/chosen"] == pytest.approx((rewards[0] + rewards[2]) / 2, rel=1e-4)
    assert means["rewards/rejected"] == pytest.approx(rewards[1], rel=1e-4)
    margin = (rewards[0] + rewards[2]) / 2 - rewards[1]
    totals = Totals()
    totals.add(Sums(mx.array(0.0), found))
    assert totals.means()["rewards/margins"] == pytest.approx(margin, rel=1e-4)
    assert [found[f"logps/{name}"][1].item() for name in ("chosen", "rejected")] == [2, 1]


def test_a_margin_needs_answers_of_both_kinds():
    scores, targets, texts, *_ = make([(3, 2), (1, 4)], [1.0, 1.0], 7, 0)
    totals = Totals()
    totals.add(KTO().weigh(scores, labeled(targets, np.ones(len(texts), bool))).sums)
    assert "rewards/margins" not in totals.means()


def test_a_policy_equal_to_its_reference_is_undecided():
    scores, targets, texts, *_ = make([(3, 2), (1, 4)], [1.0, 1.0], 7, 0)
    same = labeled(targets, texts < 2, reference=scores.current)
    weighed = KTO().weigh(scores, same)
    assert weighed.loss.item() == pytest.approx(1.0)
    value, count = weighed.metrics["rewards/accuracies"]
    assert value.item() / count.item() == 0.5
    assert np.array(weighed.weights)[texts == 0] == pytest.approx(0.025)
