"""Distillation: a student learns the predictions of a teacher.

`Distillation` compares both over the whole vocabulary, at each trained token (Hinton et al. 2015,
arXiv:1503.02531; on completions of the student, GKD, Agarwal et al. 2023, arXiv:2306.13649).
`SampledDivergence` only looks at the tokens that the student sampled: the gradient of the reverse
KL divergence is the mean over them of log(q / p) times that of log q, which is a policy gradient
with the advantage log p - log q of each token (Lu et al. 2025, "On-policy distillation").
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from your_ai.config.divergences import DivergenceKind
from your_ai.data.batches import Batch
from your_ai.nets.numerics import sum_in_blocks
from your_ai.objectives.objective import Scores, Targets, TokenLoss, Weighed
from your_ai.objectives.sft import SUPERVISED


@dataclass(frozen=True, kw_only=True)
class Distillation(TokenLoss):
    """The mean divergence of the student from the teacher at the trained tokens, weighted by the
    weights of their rows."""

    divergence: DivergenceKind
    temperature: float = 1.0
    sft_weight: float = 0.0

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        return SUPERVISED.weigh(scores, targets)  # of negative losses

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of the trained tokens."""
        return SUPERVISED.denominator(batches)


@dataclass(frozen=True)
class SampledDivergence(TokenLoss):
    """The reverse KL divergence, estimated from the tokens that the student sampled.

    The log-probabilities of the teacher are in the column `reference`.
    """

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        real = targets.is_real
        current = mx.where(real, scores.current, 0)
        teacher = targets.columns.get("reference", scores.current)
        gap = current - mx.where(real, teacher, 0)
        weights, count = mx.where(real, targets.weights, 0), real.sum()
        metrics = {"divergence": (gap.sum(), count), "entropy": (-current.sum(), count)}
        return Weighed(sum_in_blocks(weights * gap), -weights * gap, metrics)

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of the trained tokens."""
        return SUPERVISED.denominator(batches)
