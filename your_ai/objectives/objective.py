"""The interface of training objectives: log-probabilities in, weights out.

If a loss L depends on the adapters only through the log-probabilities p of target tokens, its
gradient equals that of a cross-entropy whose tokens have the constant weights -dL/dp, which may
be negative. So an objective never sees logits, engines or memory plans, and a plan that is exact
for one objective is exact for all.

Shapes: S target slots of a micro-batch; the last slots may be padding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import mlx.core as mx

from your_ai.config.divergences import DivergenceKind
from your_ai.data.batches import Batch
from your_ai.data.target_columns import ColumnName

# A pass of a step over its texts: log-probabilities without gradients, of all texts (scores) or of
# the texts of each group but the first (others); and gradients, after `others` of the first ones.
Phase = Literal["scores", "others", "gradients"]


class Targets(NamedTuple):
    """The target tokens of a micro-batch, whose log-probabilities an objective receives."""

    positions: mx.array
    """(S,) int32, the index in the flattened (B x T) hidden states that predicts each target."""
    tokens: mx.array
    """(S,) int32, the token ids."""
    weights: mx.array
    """(S,) float32, the weight of the row of each target; 0 for padding."""
    texts: mx.array
    """(S,) int32, the index, from 0, of the text of each target in the micro-batch. The texts of
    a group, such as a pair, are consecutive."""
    columns: Mapping[ColumnName, mx.array] = {}
    """(S,) each, as of `COLUMNS`, those that the targets have."""
    teacher: mx.array | None = None
    """(S, D) hidden states of a teacher that predict the targets, for jsd with the softmax beside
    them (`Softmax.beside`); None without a teacher."""

    @staticmethod
    def of(batch: Batch) -> Targets:
        return Targets(
            mx.array(batch.positions),
            mx.array(batch.targets),
            mx.array(batch.weights),
            mx.array(batch.texts),
            {name: mx.array(array) for name, array in batch.columns.items()},
            batch.teacher,
        )

    def part(self, part: slice | mx.array) -> Targets:
        """Some of the targets: a slice, or an array of their indices."""
        return Targets(
            self.positions[part],
            self.tokens[part],
            self.weights[part],
            self.texts[part],
            {name: array[part] for name, array in self.columns.items()},
            None if self.teacher is None else self.teacher[part],
        )

    def sum_by_text(self, values: mx.array) -> mx.array:
        """(S,): at index i, the sum of the (S,) values over text i; 0 past the last text."""
        return mx.zeros(values.shape, values.dtype).at[self.texts].add(values)

    @property
    def is_real(self) -> mx.array:
        """(S,) bool, False for padding and for targets of rows with weight 0."""
        return self.weights != 0


class Scores(NamedTuple):
    """(S,) float32 log-probabilities of the targets; of a reward model, its scores of the texts."""

    current: mx.array
    """Under the current adapters."""


ROUNDING = 1e-6  # of sums in float32, relative
# name -> (the sum of a value over some targets, the count to divide it by), both of shape (). Pairs
# of (S,) arrays, of targets that are to be known one by one, are joined and not added.
Metrics = dict[str, tuple[mx.array, mx.array]]


class Sums(NamedTuple):
    """Sums that add up over the micro-batches of a step: the loss, (), and metrics."""

    loss: mx.array
    metrics: Metrics

    @staticmethod
    def over(parts: Sequence[Sums]) -> Sums:
        metrics: Metrics = {}
        for part in parts:
            for name, (value, count) in part.metrics.items():
                if name not in metrics:
                    metrics[name] = (value, count)
                    continue
                before, add = metrics[name], joined if value.ndim else mx.add
                metrics[name] = (add(before[0], value), add(before[1], count))
        return Sums(mx.stack([part.loss for part in parts]).sum(), metrics)


def joined(first: mx.array, second: mx.array) -> mx.array:
    return mx.concatenate([first, second])


@dataclass
class Totals:
    """Sums over several micro-batches."""

    loss: float = 0.0
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """(sum, count) of each metric, by name."""

    def add(self, sums: Sums) -> None:
        metrics = {n: (float(value), float(count)) for n, (value, count) in sums.metrics.items()}
        self.add_sums(float(sums.loss), metrics)

    def add_sums(self, loss: float, metrics: Mapping[str, Sequence[float]]) -> None:
        """Add a loss, and (sum, count) of each metric, by name."""
        self.loss += loss
        for name, (value, count) in metrics.items():
            before = self.metrics.get(name, (0.0, 0.0))
            self.metrics[name] = (before[0] + value, before[1] + count)

    def means(self) -> dict[str, float]:
        """The mean of each metric, without those whose count is 0.

        Where chosen and rejected answers are no pairs, the margin is the difference of the means.
        The mean square of scores becomes their standard deviation.
        """
        found = {name: value / count for name, (value, count) in self.metrics.items() if count}
        chosen, rejected = found.get("rewards/chosen"), found.get("rewards/rejected")
        if chosen is not None and rejected is not None:
            found.setdefault("rewards/margins", chosen - rejected)
        if (square := found.pop("scores/square", None)) is not None:
            variance = square - found["scores/mean"] ** 2
            found["scores/std"] = math.sqrt(variance) if variance > ROUNDING * square else 0.0
        return found


@dataclass(frozen=True)
class Weighed:
    """The result of an objective for the scores of a micro-batch."""

    loss: mx.array
    """(), the loss sum to minimize, before the division by the denominator."""
    weights: mx.array
    """(S,) float32, -d loss / d log-probability of each target."""
    metrics: Metrics = field(default_factory=dict)
    """Shown for a step in addition to its loss."""

    @property
    def sums(self) -> Sums:
        return Sums(self.loss, self.metrics)


class Objective(Protocol):
    """A loss that is a function of log-probabilities. An engine is built for one objective."""

    @property
    def rows_together(self) -> int:
        """Number of texts in a group, which are weighed together: 1, or 2 for pairs."""

    @property
    def token_local(self) -> bool:
        """True if the loss is a sum over tokens of a function of each token's log-probability.

        If so, `weigh` may be called on any part of the targets.
        """

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The passes of a step; the memory plan covers the largest.

        With "scores", the weights depend on the whole step: all its texts are scored first, and
        weighed together. With "others", they depend on it through one number,
        `ObjectiveWithBaseline.baseline`. Without both, texts are only scored first for groups that
        are too large for a micro-batch.
        """

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        """Compute the loss and weights. Must be pure and use only MLX operations, because it is
        compiled into the engine's graph."""

    def denominator(self, batches: Sequence[Batch]) -> float:
        """The number that divides the loss of a step, computed from the whole step before its
        gradients."""


class ObjectiveWithBaseline(Objective, Protocol):
    """An objective whose groups have first texts, which are trained, and others, which are not."""

    def baseline(self, scores: Scores, targets: Targets) -> mx.array:
        """(), what the other texts of a whole step say to the first ones; has no gradient."""


@runtime_checkable
class ObjectiveWithTeacher(Objective, Protocol):
    """An objective whose targets are distributions, those that a teacher predicts, and not tokens.

    In its `weigh`, the negative loss of each target takes the place of its log-probability: the
    divergence, and `sft_weight` times the cross-entropy. It is token-local.
    """

    @property
    def divergence(self) -> DivergenceKind: ...

    @property
    def temperature(self) -> float:
        """Divides the logits of both models."""

    @property
    def sft_weight(self) -> float: ...


@dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """The common part of objectives whose loss is a sum over tokens, each weighed by itself."""

    rows_together: ClassVar[int] = 1
    token_local: ClassVar[bool] = True
    phases: ClassVar[tuple[Phase, ...]] = ("gradients",)


@dataclass(frozen=True)
class GivenWeights(TokenLoss):
    """The gradients of targets whose weights are known from a pass that scored them."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        given = targets.columns["given"]
        return Weighed(-(scores.current * given).sum(), given)

    def denominator(self, batches: Sequence[Batch]) -> float:
        """Not used: the weights are divided by the denominator of their objective."""
        return 1.0
