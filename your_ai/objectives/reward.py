"""Reward models: a score r for each text, from its last hidden state.

Each text has one target, after its last token. The score takes the place of the log-probability
of the target, so the weights of the targets are -d loss / d r.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import mlx.core as mx

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Metrics, Phase, Scores, Targets, TokenLoss, Weighed
from your_ai.objectives.pairs import (
    by_pair,
    comparison,
    minus_log_sigmoid,
    to_targets,
    weight_of_texts,
)


@dataclass(frozen=True, kw_only=True)
class BradleyTerry:
    """-log sigmoid(r_w - r_l - margin) + center * (r_w + r_l)^2 for a chosen and a rejected text.

    Ouyang et al. (2022), arXiv:2203.02155; the margin of Touvron et al. (2023), arXiv:2307.09288;
    centering of Eisenstein et al. (2023), arXiv:2312.09244.
    """

    center: float = 0.0
    rows_together: ClassVar[int] = 2
    token_local: ClassVar[bool] = False
    phases: ClassVar[tuple[Phase, ...]] = ("gradients",)

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        real = targets.is_real
        chosen, rejected = by_pair(targets.sum_by_text(mx.where(real, scores.current, 0)))
        weights, _ = by_pair(targets.sum_by_text(mx.where(real, targets.weights, 0)))
        wanted: mx.array | float = 0.0
        if (ratings := targets.columns.get("ratings")) is not None:
            wanted, _ = by_pair(targets.sum_by_text(mx.where(real, ratings, 0)))
        losses, slopes = minus_log_sigmoid(chosen - rejected - wanted, 0.0)
        both = chosen + rejected
        losses = losses + self.center * both**2
        pull = 2 * self.center * both
        by_target = to_targets(weights * (slopes - pull), weights * (-slopes - pull), targets)
        metrics = comparison(weights, chosen, rejected)
        return Weighed((weights * losses).sum(), by_target, metrics | spread(scores, targets))

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of all pairs."""
        return weight_of_texts(batches) / self.rows_together


@dataclass(frozen=True, kw_only=True)
class ScoreRegression(TokenLoss):
    """(r - s)^2 for a text with the score s."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        real = targets.is_real
        wanted = targets.columns.get("ratings", 0.0)
        errors = mx.where(real, scores.current - wanted, 0)
        weights = mx.where(real, targets.weights, 0)
        metrics: Metrics = {"rewards/error": (mx.abs(errors).sum(), real.sum())}
        loss = (weights * errors**2).sum()
        return Weighed(loss, -2 * weights * errors, metrics | spread(scores, targets))

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of all rows."""
        return weight_of_texts(batches)


def spread(scores: Scores, targets: Targets) -> Metrics:
    """The sums from which `objective.Totals` computes mean and standard deviation of all scores."""
    real = targets.is_real
    found, count = mx.where(real, scores.current, 0), real.sum()
    return {"scores/mean": (found.sum(), count), "scores/square": ((found**2).sum(), count)}
