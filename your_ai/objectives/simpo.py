"""SimPO (Meng et al. 2024, arXiv:2405.14734)."""

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
class SimPO(PairObjective):
    """-log sigmoid(u), u = beta * (a - b) - gamma, with mean log-probabilities; no reference."""

    beta: float = BETAS["simpo"]
    gamma: float = 0.5
    """The margin that is wanted, in the units of u: it is not multiplied by beta."""
    label_smoothing: float = 0.0

    def of_pairs(self, pairs: Pairs) -> PairLosses:
        chosen, rejected = (self.beta * mean for mean in pairs.means)
        losses, slopes = minus_log_sigmoid(chosen - rejected - self.gamma, self.label_smoothing)
        return PairLosses(
            losses,
            self.beta * slopes / at_least_one(pairs.chosen_tokens),
            -self.beta * slopes / at_least_one(pairs.rejected_tokens),
            chosen,
            rejected,
        )
