"""The DPO loss (Rafailov et al. 2023, arXiv:2305.18290), as a second objective for tests.

-log sigmoid(h) with h = beta * ((s_w - ref_w) - (s_l - ref_l)), where s is the sum of a row's
log-probabilities. A pair is a chosen row followed by the rejected row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Phase, Scores, Targets, Weighed


@dataclass(frozen=True)
class DPO:
    beta: float = 0.1
    rows_together: int = 2
    token_local: bool = False
    phases: tuple[Phase, ...] = ("gradients", "scores")

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        differences = mx.where(targets.is_real, scores.current - targets.reference, 0)
        by_pair = targets.sum_by_text(differences)
        by_pair = mx.pad(by_pair, (0, len(by_pair) % 2)).reshape(-1, 2)
        margins = self.beta * (by_pair[:, 0] - by_pair[:, 1])
        tokens = targets.sum_by_text(targets.is_real.astype(mx.float32))
        there = mx.pad(tokens, (0, len(tokens) % 2)).reshape(-1, 2)[:, 0] > 0
        slopes = there * self.beta * mx.sigmoid(-margins)
        weights = mx.stack([slopes, -slopes], axis=1).reshape(-1)[targets.texts]
        pairs = there.sum()
        return Weighed(
            loss=-(there * nn.log_sigmoid(margins)).sum(),
            weights=weights * targets.is_real,
            metrics={
                "rewards/margins": ((there * margins).sum(), pairs),
                "rewards/accuracies": ((there * (margins > 0)).sum(), pairs),
            },
        )

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The number of pairs."""
        rows = (len(set(batch.texts[: batch.trained_tokens].tolist())) for batch in batches)
        return sum(rows) / self.rows_together
