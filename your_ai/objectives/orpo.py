"""ORPO (Hong et al. 2024, arXiv:2403.07691)."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from your_ai.objectives.pairs import PairLosses, PairObjective, Pairs, at_least_one

# A mean log-probability of 0 would be a certain answer with infinite odds.
LARGEST_MEAN = -1e-6


@dataclass(frozen=True, kw_only=True)
class ORPO(PairObjective):
    """-a - lambda log sigmoid(z), z = g(a) - g(b), g(x) = x - log(1 - e^x); no reference.

    g is the logarithm of the odds of an answer, whose probability is that of its mean token.
    """

    odds_weight: float = 0.1
    """lambda; TRL calls it beta."""

    def of_pairs(self, pairs: Pairs) -> PairLosses:
        chosen, rejected = (mx.minimum(mean, LARGEST_MEAN) for mean in pairs.means)
        log_not_chosen, log_not_rejected = (mx.log(-mx.expm1(mean)) for mean in (chosen, rejected))
        odds = chosen - log_not_chosen - (rejected - log_not_rejected)
        losses = -pairs.means[0] - self.odds_weight * nn.log_sigmoid(odds)
        slopes = self.odds_weight * mx.sigmoid(-odds)
        return PairLosses(
            losses,
            (1 + slopes * mx.exp(-log_not_chosen)) / at_least_one(pairs.chosen_tokens),
            -slopes * mx.exp(-log_not_rejected) / at_least_one(pairs.rejected_tokens),
            self.odds_weight * pairs.means[0],
            self.odds_weight * pairs.means[1],
        )
