"""What a run learns, as engines see it: log-probabilities in, weights out.

If the adapters enter a loss only through the log-probabilities p of target tokens, its gradient
is that of a cross-entropy whose tokens have the constant weights -dL/dp, of either sign. So an
objective never sees logits, engines or memory plans, and every plan that is exact for one
objective is exact for all.

Shapes: S targets of a micro-batch, in slots of which the last ones may be padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

import mlx.core as mx

from your_ai.data.batches import Batch

Phase = Literal["gradients", "scores"]  # scores: log-probabilities without gradients


class Targets(NamedTuple):
    """The tokens of a micro-batch whose log-probabilities an objective is given.

    positions: (S,) int32, where in the flattened (B x T) hidden states each is predicted.
    tokens: (S,) int32, the tokens themselves.
    weights: (S,) float32, of the rows that they belong to; 0 where a slot is padding.
    texts: (S,) int32, which text of the micro-batch, from 0, each belongs to. The texts of a
        group, such as a pair, follow one another.
    reference: (S,) float32 log-probabilities under the reference, for objectives that need them.
    """

    positions: mx.array
    tokens: mx.array
    weights: mx.array
    texts: mx.array
    reference: mx.array | None = None

    @staticmethod
    def of(batch: Batch) -> Targets:
        arrays = map(mx.array, (batch.positions, batch.targets, batch.weights, batch.texts))
        return Targets(*arrays, None if batch.reference is None else mx.array(batch.reference))

    def part(self, part: slice) -> Targets:
        """Some of the targets."""
        return Targets(*(None if array is None else array[part] for array in self))

    def sum_by_text(self, values: mx.array) -> mx.array:
        """(S,) the sum of (S,) values over each text; 0 where there are fewer texts than S."""
        return mx.zeros(values.shape, values.dtype).at[self.texts].add(values)

    @property
    def is_real(self) -> mx.array:
        """(S,) bool, False where a slot is padding, and where its row has weight 0."""
        return self.weights != 0


class Scores(NamedTuple):
    """(S,) float32 log-probabilities of the targets.

    current: under the adapters as they are now.
    """

    current: mx.array


# By name, the sum of a figure over some targets, and the count that it is divided by: () each.
Metrics = dict[str, tuple[mx.array, mx.array]]


class Sums(NamedTuple):
    """What adds up over micro-batches: the loss, (), and metrics."""

    loss: mx.array
    metrics: Metrics

    @staticmethod
    def over(parts: Sequence[Sums]) -> Sums:
        metrics: Metrics = {}
        for part in parts:
            for name, (value, count) in part.metrics.items():
                before = metrics.get(name, (0, 0))
                metrics[name] = (before[0] + value, before[1] + count)
        return Sums(mx.stack([part.loss for part in parts]).sum(), metrics)


@dataclass(frozen=True)
class Weighed:
    """What an objective makes of the scores of a micro-batch.

    loss: (), the sum that is minimized, before it is divided by the denominator.
    weights: (S,) float32, -d loss / d log-probability of each target.
    metrics: shown of a step beside its loss.
    """

    loss: mx.array
    weights: mx.array
    metrics: Metrics = field(default_factory=dict)

    @property
    def sums(self) -> Sums:
        return Sums(self.loss, self.metrics)


class Objective(Protocol):
    """A loss of log-probabilities. An engine is built for one."""

    rows_together: int
    """How many rows are one group, which is never split: 1, or 2 for pairs."""

    token_local: bool
    """Whether the loss is a sum over tokens, each of a function of its own log-probability.

    If so, `weigh` may be given any part of the targets.
    """

    phases: tuple[Phase, ...]
    """What a step computes of its rows: memory is planned for the largest."""

    def weigh(self, scores: Scores, targets: Targets) -> Weighed:
        """Pure, of MLX operations alone: it is compiled into the engine's graph."""

    def denominator(self, batches: Sequence[Batch]) -> float:
        """What the loss of a step is divided by: known before its gradients, from all of it."""
