"""Losses over pairs of a chosen and a rejected answer: DPO, IPO, SimPO and ORPO.

A pair is two consecutive texts, the chosen answer first. s is the sum of the log-probabilities of
an answer's tokens, and a (chosen) and b (rejected) their means. ref is the same under the
reference. The loss of a pair is multiplied by the weight of its row, and divided by the sum of the
weights of all pairs of the step.

Shapes: S target slots, P = S / 2 slots for pairs, of which the last may be empty.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Metrics, Phase, Scores, Targets, Weighed

TIE = 1e-5  # rewards that differ by less are equal up to rounding


class Pairs(NamedTuple):
    """Sums over the answers of each pair; arrays of (P,) float32, 0 for an empty slot."""

    chosen: mx.array
    """Sum of the log-probabilities."""
    rejected: mx.array
    chosen_ratio: mx.array
    """Sum of the differences from the log-probabilities under the reference, token by token: the
    difference of the sums of a long answer would lose digits. Without a reference, the sum."""
    rejected_ratio: mx.array
    chosen_tokens: mx.array
    rejected_tokens: mx.array
    weights: mx.array
    """The weight of each pair; 0 for an empty slot."""

    @staticmethod
    def of(scores: Scores, targets: Targets) -> Pairs:
        real = targets.is_real
        apart = scores.current
        if "reference" in targets.columns:
            apart = apart - targets.columns["reference"]
        tokens = real.astype(mx.float32)
        values = (mx.where(real, scores.current, 0), mx.where(real, apart, 0), tokens,
                  tokens * targets.weights)  # fmt: skip
        halves = [by_pair(targets.sum_by_text(value)) for value in values]
        (chosen, rejected), ratios, counts, weights = halves
        weight = weights[0] / at_least_one(counts[0])  # every target has the weight of its row
        return Pairs._make((chosen, rejected, *ratios, *counts, weight))

    @property
    def means(self) -> tuple[mx.array, mx.array]:
        """The mean log-probabilities of a token of both answers."""
        return (
            self.chosen / at_least_one(self.chosen_tokens),
            self.rejected / at_least_one(self.rejected_tokens),
        )


def at_least_one(counts: mx.array) -> mx.array:
    """Counts to divide by, also in empty slots."""
    return mx.maximum(counts, 1)


def by_pair(values: mx.array) -> tuple[mx.array, mx.array]:
    """(S,) values by text -> two arrays (P,): of the first and of the second text of each pair."""
    pairs = mx.pad(values, (0, len(values) % 2)).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


def to_targets(chosen: mx.array, rejected: mx.array, targets: Targets) -> mx.array:
    """Values of both answers of each pair, (P,), -> the value of each target's answer, (S,)."""
    by_text = mx.stack([chosen, rejected], axis=1).reshape(-1)
    return mx.where(targets.is_real, by_text[targets.texts], 0)


class PairLosses(NamedTuple):
    """The losses, slopes and rewards of pairs; arrays of (P,) float32."""

    losses: mx.array
    chosen_slopes: mx.array
    """-d loss / d s of the chosen answer: the weight of each of its tokens."""
    rejected_slopes: mx.array
    chosen_rewards: mx.array
    """What the loss compares, for the metrics."""
    rejected_rewards: mx.array


@dataclass(frozen=True, kw_only=True)
class PairObjective(ABC):
    """The part that all losses over pairs share."""

    sft_weight: float = 0.0
    """Weight of the chosen answers' mean cross-entropy, which is added to the loss."""
    rows_together: ClassVar[int] = 2
    token_local: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = ("gradients",)

    @abstractmethod
    def of_pairs(self, pairs: Pairs) -> PairLosses:
        """The loss of each pair, before its weight."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        pairs = Pairs.of(scores, targets)
        found = self.of_pairs(pairs)
        chosen_mean, _ = pairs.means
        losses = found.losses - self.sft_weight * chosen_mean
        chosen_slopes = found.chosen_slopes + self.sft_weight / at_least_one(pairs.chosen_tokens)
        weights = to_targets(
            pairs.weights * chosen_slopes, pairs.weights * found.rejected_slopes, targets
        )
        return Weighed((pairs.weights * losses).sum(), weights, metrics(pairs, found))

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of all pairs."""
        return weight_of_texts(batches) / self.rows_together


def metrics(pairs: Pairs, found: PairLosses) -> Metrics:
    """Means over pairs, with the names of TRL."""
    rewards = comparison(pairs.weights, found.chosen_rewards, found.rejected_rewards)
    logps = {"logps/chosen": pairs.chosen, "logps/rejected": pairs.rejected}
    return rewards | over_pairs(pairs.weights, logps)


def comparison(weights: mx.array, chosen: mx.array, rejected: mx.array) -> Metrics:
    """Means of the rewards of both answers over pairs; arrays of (P,).

    A tie, up to rounding, is half an accurate pair.
    """
    margins = chosen - rejected
    accurate = (margins > TIE) + 0.5 * (mx.abs(margins) <= TIE)
    values = {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": margins,
        "rewards/accuracies": accurate,
    }
    return over_pairs(weights, values)


def over_pairs(weights: mx.array, values: dict[str, mx.array]) -> Metrics:
    """The sums of (P,) values over the pairs whose weight is not 0."""
    there = weights > 0
    count = there.sum()
    return {name: (mx.where(there, value, 0).sum(), count) for name, value in values.items()}


def weight_of_texts(batches: Sequence[Batch]) -> float:
    """The sum of the weights of all texts."""
    firsts = [np.unique(b.texts[: b.trained_tokens], return_index=True)[1] for b in batches]
    weights = (b.weights[first] for b, first in zip(batches, firsts, strict=True))
    return sum(float(of_texts.sum(dtype=np.float64)) for of_texts in weights)


def minus_log_sigmoid(margins: mx.array, smoothing: float) -> tuple[mx.array, mx.array]:
    """-(1 - e) log sigmoid(h) - e log sigmoid(-h), and minus its derivative by h; both (P,)."""
    losses = -(1 - smoothing) * nn.log_sigmoid(margins) - smoothing * nn.log_sigmoid(-margins)
    return losses, (1 - smoothing) - mx.sigmoid(margins)
