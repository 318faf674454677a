"""The losses that a training loop of other people names, as in the API of Tinker.

With the log-probability x of a token, the one under which it was sampled y, r = exp(x - y), and the
advantage A, which is a weight for cross_entropy:

    cross_entropy         -A x                              -d/dx: A
    importance_sampling   -A r                                     A r
    ppo                   -min(A r, A clip(r, low, high))          A r where the first is smaller
    cispo                 -A clip(r, low, high) x                  A clip(r, low, high)
    dro                   -A x + beta / 2 (x - y)^2                A - beta (x - y)

Each is a sum over tokens, and divided by nothing. In cispo, the clipped ratio is a constant. Which
one a token has is a column, so one graph computes all of them. Sources: PPO, Schulman et al. 2017,
arXiv:1707.06347; CISPO, MiniMax 2025, arXiv:2506.13585; DRO, Richemond et al. 2024,
arXiv:2405.19107; GSPO, Zheng et al. 2025, arXiv:2507.18071.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch
from your_ai.data.target_columns import Columns
from your_ai.objectives.grpo import exp
from your_ai.objectives.objective import Scores, Targets, TokenLoss, Weighed

TOKEN_LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")
GSPO = "gspo"  # of whole texts: weighed once their log-probabilities are known
LOSSES = (*TOKEN_LOSSES, GSPO)
CLIP_LOW, CLIP_HIGH, BETA = 0.8, 1.2, 0.05  # where none are given
LOGPROBS = "logprobs"  # the metric with the log-probabilities of the targets, and their slots


@dataclass(frozen=True)
class OutsideLosses(TokenLoss):
    """The sum of the losses that the columns of the targets name."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        real, columns = targets.is_real, targets.columns
        current = mx.where(real, scores.current, 0)
        advantages, kind = columns["advantages"], columns["loss"]
        distance = current - mx.where(real, columns["old"], 0)
        ratios = exp(distance)
        low, high = columns["clip_low"], columns["clip_high"]
        clipped = mx.clip(ratios, low, high)
        product, least = advantages * ratios, advantages * clipped
        beta = low  # dro has no other threshold
        of_kind = (
            (-advantages * current, advantages),
            (-product, product),
            (-mx.minimum(product, least), mx.where(product <= least, product, 0)),
            (-least * current, least),
            (-advantages * current + beta / 2 * mx.square(distance), advantages - beta * distance),
        )
        losses = weights = mx.zeros_like(current)
        for number, (loss, weight) in enumerate(of_kind):
            losses = mx.where(kind == number, loss, losses)
            weights = mx.where(kind == number, weight, weights)
        losses, weights = mx.where(real, losses, 0), mx.where(real, weights, 0)
        return Weighed(
            losses.sum(), weights, {LOGPROBS: (current, mx.where(real, columns["slot"], -1))}
        )

    def denominator(self, batches: Sequence[Batch]) -> float:
        return 1.0


OUTSIDE = OutsideLosses()


def gspo_weights(
    current: np.ndarray, columns: Columns, counts: np.ndarray
) -> tuple[float, np.ndarray]:
    """The loss of a text, and (m,) the weight of each of its tokens, -d loss / dx.

    The loss is -sum A min(s, clip(s)), with the ratio of the text s = exp(mean of x - y) over the
    tokens that count. current: (m,) log-probabilities. counts: (m,) bool.
    """
    advantages, number = columns["advantages"].astype(np.float64), max(1, int(counts.sum()))
    distance = (current.astype(np.float64) - columns["old"])[counts].sum() / number
    ratio = float(np.exp(min(distance, 20.0)))
    products = advantages * ratio
    least = advantages * np.clip(ratio, columns["clip_low"], columns["clip_high"])
    losses = -np.minimum(products, least)[counts]
    slope = products[counts & (products <= least)].sum() / number
    return float(losses.sum()), np.where(counts, slope, 0).astype(np.float32)
