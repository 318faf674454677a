"""DPO (Rafailov et al. 2023, arXiv:2305.18290) and IPO (Azar et al. 2023, arXiv:2310.12036)."""

from __future__ import annotations

from dataclasses import dataclass

from your_ai.config import BETAS
from your_ai.objectives.pairs import (
    PairLosses,
    PairObjective,
    Pairs,
    at_least_one,
    minus_log_sigmoid,
)


@dataclass(frozen=True, kw_only=True)
class DPO(PairObjective):
    """-log sigmoid(h), h = beta * ((s_w - ref_w) - (s_l - ref_l)).

    With `label_smoothing` e it is -(1 - e) log sigmoid(h) - e log sigmoid(-h) (conservative DPO).
    """

    beta: float = BETAS["dpo"]
    label_smoothing: float = 0.0

    def of_pairs(self, pairs: Pairs) -> PairLosses:
        chosen, rejected = self.beta * pairs.chosen_ratio, self.beta * pairs.rejected_ratio
        losses, slopes = minus_log_sigmoid(chosen - rejected, self.label_smoothing)
        return PairLosses(losses, self.beta * slopes, -self.beta * slopes, chosen, rejected)


@dataclass(frozen=True, kw_only=True)
class IPO(PairObjective):
    """(d - 1 / (2 beta))^2, d the difference of the mean log-ratios of both answers.

    The means, and not the sums, are what the authors use and what TRL computes.
    """

    beta: float = BETAS["ipo"]

    def of_pairs(self, pairs: Pairs) -> PairLosses:
        chosen_tokens, rejected_tokens = pairs.chosen_tokens, pairs.rejected_tokens
        chosen = pairs.chosen_ratio / at_least_one(chosen_tokens)
        rejected = pairs.rejected_ratio / at_least_one(rejected_tokens)
        distances = chosen - rejected - 1 / (2 * self.beta)
        return PairLosses(
            distances**2,
            -2 * distances / at_least_one(chosen_tokens),
            2 * distances / at_least_one(rejected_tokens),
            self.beta * chosen,
            self.beta * rejected,
        )
