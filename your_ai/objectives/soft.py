"""Training through sampled tokens: the loss is no function of log-probabilities.

`your_ai.soft` computes it, with its gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Scores, Targets, TokenLoss, Weighed
from your_ai.objectives.pairs import weight_of_texts


@dataclass(frozen=True)
class SoftTokens(TokenLoss):
    """-reward + kl_beta * KL of each completion; see `your_ai.soft.engine`."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        raise TypeError("the loss is no function of log-probabilities")

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The sum of the weights of the completions."""
        return weight_of_texts(batches)


SOFT_TOKENS = SoftTokens()
