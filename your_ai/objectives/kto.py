"""KTO (Ethayarajh et al. 2024, arXiv:2402.01306): answers that are good or bad, without pairs.

Each row is a group of two texts: its answer, and the answer of another row to the same prompt. The
second text is never trained. Its log-ratio estimates how far the model has moved from the
reference, z0, which is the baseline of all rewards of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    rows_together: int = 2
    token_local: bool = False
    phases: tuple[Phase, ...] = ("scores", "gradients")

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        """The targets are those of a whole step, or of a whole file."""
        assert targets.reference is not None
        assert targets.good is not None
        real = targets.is_real
        ratios = mx.where(real, scores.current - targets.reference, 0)
        logps = mx.where(real, scores.current, 0)
        tokens = real.astype(mx.float32)
        values = (ratios, logps, tokens, tokens * targets.weights, real & targets.good)
        (ratio, other), (logp, _), (count, _), (weight, _), (good, _) = (
            by_pair(targets.sum_by_text(value.astype(mx.float32))) for value in values
        )
        weight, good = weight / at_least_one(count), good > 0
        baseline = (weight * other).sum() / mx.maximum(weight.sum(), TINY)
        baseline = mx.maximum(baseline, 0)

        side = mx.where(good, 1.0, -1.0)
        share = mx.sigmoid(side * self.beta * (ratio - baseline))
        strength = mx.where(good, self.desirable_weight, self.undesirable_weight)
        losses = strength * (1 - share)
        slopes = strength * side * self.beta * share * (1 - share)
        imitated = self.sft_weight * good
        losses = losses - imitated * logp / at_least_one(count)
        slopes = slopes + imitated / at_least_one(count)
        found = metrics(self.beta, ratio, logp, baseline, good, weight > 0)
        weights = to_targets(weight * slopes, mx.zeros_like(slopes), targets)
        return Weighed((weight * losses).sum(), weights, found)

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of all rows."""
        return sum(weight_of_texts(batch) for batch in batches) / self.rows_together


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

    An answer is judged right if its reward is on its side of the baseline; a tie is half right.
    """
    chosen, rejected = good & there, ~good & there
    counts = (chosen.sum(), rejected.sum())
    rewards = [mx.where(those, beta * ratio, 0).sum() for those in (chosen, rejected)]
    means = [total / at_least_one(count) for total, count in zip(rewards, counts, strict=True)]
    both = (counts[0] > 0) & (counts[1] > 0)
    distance = mx.where(good, 1.0, -1.0) * beta * (ratio - baseline)
    right = (distance > TIE) + 0.5 * (mx.abs(distance) <= TIE)
    return {
        "rewards/chosen": (rewards[0], counts[0]),
        "rewards/rejected": (rewards[1], counts[1]),
        "rewards/margins": (mx.where(both, means[0] - means[1], 0), both),
        "rewards/accuracies": (mx.where(there, right, 0).sum(), there.sum()),
        "logps/chosen": (mx.where(chosen, logp, 0).sum(), counts[0]),
        "logps/rejected": (mx.where(rejected, logp, 0).sum(), counts[1]),
        "kl": (baseline, mx.array(1)),
    }
