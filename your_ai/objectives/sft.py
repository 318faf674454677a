"""Supervised fine-tuning: next-token cross-entropy on the trained tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from your_ai.data.batches import Batch
from your_ai.nets.numerics import sum_in_blocks
from your_ai.objectives.objective import Scores, Targets, TokenLoss, Weighed


@dataclass(frozen=True)
class SFT(TokenLoss):
    """The mean cross-entropy of the trained tokens, weighted by the weights of their rows."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        return Weighed(sum_in_blocks(-scores.current * targets.weights), targets.weights)

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of the trained tokens."""
        return sum(batch.weight for batch in batches)


SUPERVISED = SFT()
