"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): answers that are good or bad, without pairs.

Each row is a group of two texts: its answer, and the answer of another row to the same prompt. The
second text is never trained. Its log-ratio estimates how far the model has moved from the
reference, z0, which is the baseline of all rewards of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import mlx.core as mx

from your_ai.config import BETAS
from your_ai.data.batches import Batch
from your_ai.objectives.objective import Metrics, Phase, Scores, Targets, Weighed
from your_ai.objectives.pairs import (
    TIE,
    at_least_one,
    by_pair,
    to_targets,
    weight_of_texts,
)


class Texts(NamedTuple):
    """Sums over answers; arrays of (P,) float32, 0 for an empty slot."""

    ratios: mx.array
    """s - ref."""
    logps: mx.array
    """s."""
    tokens: mx.array
    weights: mx.array
    """The weight of each row."""

    @staticmethod
    def of(scores: Scores, targets: Targets) -> Texts:
        """The texts of the targets, by their index: as many slots as targets."""
        real = targets.is_real
        tokens = real.astype(mx.float32)
        values = (
            mx.where(real, scores.current - targets.columns["reference"], 0),
            mx.where(real, scores.current, 0),
            tokens,
            tokens * targets.weights,
        )
        ratios, logps, tokens, weights = map(targets.sum_by_text, values)
        return Texts(ratios, logps, tokens, weights / at_least_one(tokens))


def mean_ratio(texts: Texts) -> mx.array:
    """(), the weighted mean of s - ref, at least 0."""
    mean = (texts.weights * texts.ratios).sum() / mx.maximum(texts.weights.sum(), TINY)
    return mx.maximum(mean, 0)


@dataclass(frozen=True, kw_only=True)
class KTO:
    """w (1 - sigmoid(v)), v = beta * (s - ref - z0) for a good answer, and -v for a bad one.

    s is the sum of the log-probabilities of the answer's tokens, and ref the same under the
    reference. z0 is the mean of s - ref over the second texts of the whole step, at least 0; it has
    no gradient. w is the weight of good or of bad answers.
    """

    beta: float = BETAS["kto"]
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    sft_weight: float = 0.0
    """Weight of the good answers' mean cross-entropy, which is added to the loss."""
    rows_together: ClassVar[int] = 2
    token_local: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = ("others", "gradients")

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        """The targets are those of a whole step or file; or first texts, with a baseline."""
        texts = Texts.of(scores, targets)
        good = (
            targets.sum_by_text((targets.is_real & targets.columns["labels"]).astype(mx.float32))
            > 0
        )
        if "baseline" in targets.columns:
            loss, slopes, found = self.judge(texts, good, targets.columns["baseline"][0])
            weights = mx.where(targets.is_real, slopes[targets.texts], 0)
            return Weighed(loss, weights, found)
        first, others = (Texts(*parts) for parts in zip(*map(by_pair, texts), strict=True))
        loss, slopes, found = self.judge(first, by_pair(good)[0], mean_ratio(others))
        return Weighed(loss, to_targets(slopes, mx.zeros_like(slopes), targets), found)

    def baseline(self, scores: Scores, targets: Targets) -> mx.array:
        """z0; the targets are the second texts of a whole step."""
        return mean_ratio(Texts.of(scores, targets))

    def judge(
        self, texts: Texts, good: mx.array, baseline: mx.array
    ) -> tuple[mx.array, mx.array, Metrics]:
        """The loss sum of answers, -d loss / d s of each, (P,), and their metrics."""
        side = mx.where(good, 1.0, -1.0)
        share = mx.sigmoid(side * self.beta * (texts.ratios - baseline))
        strength = mx.where(good, self.desirable_weight, self.undesirable_weight)
        losses = strength * (1 - share)
        slopes = strength * side * self.beta * share * (1 - share)
        imitated, tokens = self.sft_weight * good, at_least_one(texts.tokens)
        losses = losses - imitated * texts.logps / tokens
        slopes = slopes + imitated / tokens
        found = metrics(self.beta, texts.ratios, texts.logps, baseline, good, texts.weights > 0)
        return (texts.weights * losses).sum(), texts.weights * slopes, found

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of all rows."""
        return weight_of_texts(batches) / self.rows_together


TINY = 1e-30  # instead of a sum of weights that is 0


def metrics(
    beta: float,
    ratio: mx.array,
    logp: mx.array,
    baseline: mx.array,
    good: mx.array,
    there: mx.array,
) -> Metrics:
    """Means over the good answers (chosen) and over the bad ones (rejected), named as in TRL.

    Their margin, the difference of both means, is that of a whole step: see `Totals.means`. An
    answer is judged right if its reward is on its side of the baseline; a tie is half right.
    """
    chosen, rejected = good & there, ~good & there
    counts = (chosen.sum(), rejected.sum())
    rewards = [mx.where(those, beta * ratio, 0).sum() for those in (chosen, rejected)]
    distance = mx.where(good, 1.0, -1.0) * beta * (ratio - baseline)
    right = (distance > TIE) + 0.5 * (mx.abs(distance) <= TIE)
    return {
        "rewards/chosen": (rewards[0], counts[0]),
        "rewards/rejected": (rewards[1], counts[1]),
        "rewards/accuracies": (mx.where(there, right, 0).sum(), there.sum()),
        "logps/chosen": (mx.where(chosen, logp, 0).sum(), counts[0]),
        "logps/rejected": (mx.where(rejected, logp, 0).sum(), counts[1]),
        "kl": (baseline, mx.array(1)),
    }
