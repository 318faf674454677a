"""GRPO (Shao et al. 2024, arXiv:2402.03300) and its relatives, on completions with advantages.

r is the probability of a token divided by its probability when the completions were generated
(the importance ratio), A the advantage of its completion, and d = log(reference / current
probability). The loss of a token is

    -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + kl_beta * KL

With `importance` sequence, r is the geometric mean over the completion (GSPO, Zheng et al. 2025,
arXiv:2507.18071). KL is an estimate of the divergence from the reference: exp(d) - d - 1 with
`kl` k3 (Schulman 2020), and r (exp(d) - d - 1) with `kl` reverse, whose gradient is that of
the reverse KL divergence (DeepSeek-V3.2, arXiv:2512.02556).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch
from your_ai.nets.numerics import sum_in_blocks
from your_ai.objectives.objective import Metrics, Phase, Scores, Targets, Weighed

AdvantageKind = Literal["group", "dr", "rloo"]
Normalization = Literal["dapo", "grpo", "dr"]
SPREAD_FLOOR = 1e-4  # added to the standard deviation of a group, as in TRL
MOST_LOG_RATIO = 20.0  # larger ones count as this one, so that no ratio is infinite, as in verl


@dataclass(frozen=True, kw_only=True)
class GRPO:
    """The clipped policy gradient of completions with advantages, with a KL penalty."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    kl_beta: float = 0.0
    kl: Literal["reverse", "k3"] = "reverse"
    importance: Literal["token", "sequence"] = "token"
    normalization: Normalization = "dapo"
    rows_together: ClassVar[int] = 1
    phases: ClassVar[tuple[Phase, ...]] = ("gradients",)

    @property
    def token_local(self) -> bool:
        return self.importance == "token"

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        """The loss and weights. Without the column "old", the completions are new and r is 1."""
        real, advantages = targets.is_real, targets.columns["advantages"]
        current = mx.where(real, scores.current, 0)
        old = mx.where(real, targets.columns["old"], 0) if "old" in targets.columns else current
        log_ratios = current - old
        ratios = token_ratios = exp(log_ratios)
        if not self.token_local:
            count = mx.maximum(targets.sum_by_text(real.astype(mx.float32)), 1)
            ratios = exp(targets.sum_by_text(log_ratios) / count)[targets.texts]

        low, high = 1 - self.clip_low, 1 + self.clip_high
        losses = -mx.minimum(ratios * advantages, mx.clip(ratios, low, high) * advantages)
        is_low = (ratios < low) & (advantages < 0) & real
        is_high = (ratios > high) & (advantages > 0) & real
        slopes = mx.where(is_low | is_high, 0, ratios * advantages)
        if not self.token_local:  # each token moves the one ratio, whatever its own advantage is
            slopes = (targets.sum_by_text(mx.where(real, slopes, 0)) / count)[targets.texts]
        metrics = self._metrics(current, real, is_low, is_high)
        if self.kl_beta:
            distance = mx.where(real, targets.columns["reference"], 0) - current
            estimate = exp(distance) - distance - 1
            metrics["kl"] = (mx.where(real, estimate, 0).sum(), real.sum())
            if self.kl == "k3":
                losses = losses + self.kl_beta * estimate
                slopes = slopes + self.kl_beta * (exp(distance) - 1)
            else:
                losses = losses + self.kl_beta * token_ratios * estimate
                slopes = slopes + self.kl_beta * token_ratios * distance
        weights = mx.where(real, targets.weights, 0)
        return Weighed(sum_in_blocks(weights * losses), weights * slopes, metrics)

    def _metrics(
        self, current: mx.array, real: mx.array, is_low: mx.array, is_high: mx.array
    ) -> Metrics:
        """Means over tokens, with the names of TRL. The entropy is estimated from the tokens."""
        count = real.sum()
        return {
            "entropy": (-current.sum(), count),
            "clip_ratio/low_mean": (is_low.sum(), count),
            "clip_ratio/high_mean": (is_high.sum(), count),
        }

    def denominator(self, batches: Sequence[Batch]) -> float:
        """With `normalization` dapo the number of tokens, else of completions, that count."""
        if self.normalization == "dapo":
            return sum(batch.weight for batch in batches)
        return float(sum(completions_of(batch) for batch in batches))


def exp(log_ratios: mx.array) -> mx.array:
    return mx.exp(mx.minimum(log_ratios, MOST_LOG_RATIO))


def completions_of(batch: Batch) -> int:
    """The number of texts of a batch whose weight is not 0."""
    return len(np.unique(batch.texts[batch.weights != 0]))


def completion_weights(
    lengths: np.ndarray, counts: np.ndarray, normalization: Normalization, max_new_tokens: int
) -> np.ndarray:
    """(n,) float32, the weight of each token of n completions, for their row in a batch.

    lengths: (n,) tokens. counts: (n,) bool, whether the completion counts.
    dapo: all tokens of the step weigh the same (Yu et al. 2025, arXiv:2503.14476).
    grpo: all completions weigh the same. dr: as dapo, but the loss is divided by
    `max_new_tokens` for each completion (Liu et al. 2025, arXiv:2503.20783).
    """
    if normalization == "grpo":
        weights = 1 / np.maximum(lengths, 1)
    else:
        weights = np.full(len(lengths), 1.0 if normalization == "dapo" else 1 / max_new_tokens)
    return np.where(counts, weights, 0).astype(np.float32)


def discounted(rewards: np.ndarray, discount: float) -> np.ndarray:
    """(n,) the rewards from each of n turns on, of which each counts `discount` times as much one
    turn earlier."""
    found = np.zeros(len(rewards))
    after = 0.0
    for turn in reversed(range(len(rewards))):
        after = found[turn] = rewards[turn] + discount * after
    return found


def advantages_of(rewards: np.ndarray, kind: AdvantageKind) -> np.ndarray:
    """(P, G) float32, how much better each completion is than the others to its prompt.

    rewards: (P, G); NaN where a reward is missing. Missing ones have advantage 0 and do not
    count for the others.
    group: (reward - mean) / (standard deviation + 1e-4). dr: reward - mean (Dr. GRPO).
    rloo: reward - mean of the others (Ahmadian et al. 2024, arXiv:2402.14740).
    """
    centered = centered_in_groups(rewards)
    count = np.isfinite(rewards).sum(axis=1, keepdims=True)
    found = centered
    if kind == "group":
        found = centered / (spreads_of(rewards)[:, None] + SPREAD_FLOOR)
    elif kind == "rloo":
        found = centered * count / np.maximum(count - 1, 1)
    return found.astype(np.float32)


def spreads_of(rewards: np.ndarray) -> np.ndarray:
    """(P,) the standard deviation of each group, with n - 1; 0 if fewer than two are known."""
    count = np.isfinite(rewards).sum(axis=1)
    squares = (centered_in_groups(rewards) ** 2).sum(axis=1)
    return np.asarray(np.sqrt(squares / np.maximum(count - 1, 1)))


def centered_in_groups(rewards: np.ndarray) -> np.ndarray:
    """(P, G) float64 reward - mean; 0 where it is missing, and exactly 0 if all are equal."""
    known = np.isfinite(rewards)
    values = np.where(known, rewards, 0).astype(np.float64)
    first = np.take_along_axis(values, np.argmax(known, axis=1)[:, None], axis=1)
    moved = np.where(known, values - first, 0)  # the differences of equal ones are exactly 0
    mean = moved.sum(axis=1, keepdims=True) / np.maximum(known.sum(axis=1, keepdims=True), 1)
    return np.asarray(np.where(known, moved - mean, 0))
