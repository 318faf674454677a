"""What a step trains. A source makes it, and the recipe does not know which.

`DataSource` trains the rows of the data, `RolloutSource` (`rollouts.py`) the completions that the
model generates, `SoftSource` (`soft_rollouts.py`) trains through the tokens that it samples,
`TaughtSource` (`distilling.py`) trains rows or completions on the predictions of a teacher. On
several ranks, each makes what this process trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import mlx.core as mx

from your_ai.data.batches import Batch, RowsAt, Schedule
from your_ai.engine.gradients import Gradients
from your_ai.engine.protocol import Engine
from your_ai.engine.scoring import is_of_first_texts, with_baseline, with_weights
from your_ai.evaluation.dataset_scores import MeanLoss
from your_ai.objectives.objective import Totals
from your_ai.run.rollout_files import RolloutRecord
from your_ai.run.stopping import Stop
from your_ai.training.distributed import ALONE, Ranks


@dataclass(frozen=True)
class StepWork:
    """The work of this process in a step."""

    batches: list[Batch]
    """The micro-batches that are trained."""
    denominator: float
    """The number that divides the loss: of all that the step trains, on all ranks."""
    add_gradients: Callable[[float, int, Gradients], Totals]
    """(scale, seed, total): adds the gradients of `scale` times the loss to `total`, and returns
    the sums of this process. The seed is that of dropout and noise."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What to show of the step besides the means of the sums."""


class RewardMeter(Protocol):
    """Measures the answers of the model by their rewards."""

    judged: dict[str, float]
    """Counts of the judge in the last measurement."""

    def measured(self, split: str, most: int, step: int) -> list[RolloutRecord] | None:
        """The most likely completions of the first prompts of a split, rewarded; None if asked
        to stop. most: maximum number of prompts."""

    def loss_of(self, records: Sequence[RolloutRecord], split: str, stop: Stop) -> MeanLoss | None:
        """The loss that a validation minimizes, of these completions of a split; None if there is
        nothing to measure, or if asked to stop."""


class StepSource(Protocol):
    """Makes what the steps of a run train."""

    @property
    def preparing(self) -> str:
        """The work before the first step, in words."""

    @property
    def meter(self) -> RewardMeter | None:
        """The measure of the model; None for its loss."""

    def step(self, index: int, rows_at: RowsAt) -> StepWork:
        """The work of step `index` (from 0), a pure function of the adapters, the seed and the
        step. Raises GivenUp if a signal asked the run to stop before it was there.

        rows_at: the maximum number of rows of so many tokens in a micro-batch.
        """


@dataclass(frozen=True)
class DataSource:
    """Trains the rows of the data, with the passes that the objective asks for."""

    engine: Engine
    schedule: Schedule
    hidden: int
    """Hidden size of the model."""
    ranks: Ranks = ALONE
    meter: None = None
    preparing: str = "compiling the first step"

    def step(self, index: int, rows_at: RowsAt) -> StepWork:
        self.ranks.begin_step(index)
        objective, schedule = self.engine.objective, self.schedule
        others_first = "others" in objective.phases
        scored_first = (
            others_first
            or "scores" in objective.phases
            or not schedule.has_room_for_groups(index, rows_at)
        )
        batches_of = schedule.split_batches_of if scored_first else schedule.batches_of
        whole = batches_of(index, rows_at)
        own = self.ranks.own_batches(schedule, index, rows_at, self.hidden, whole, scored_first)
        denominator = objective.denominator(whole)
        if others_first:
            together = objective.rows_together
            firsts = [batch for batch in own if is_of_first_texts(batch, together)]
            of_all = whole if self.ranks.size > 1 else None
            return StepWork(firsts, denominator, partial(self.above_baseline, own, of_all))
        add = accumulate_weighed if scored_first and own else accumulate
        return StepWork(own, denominator, partial(add, self.engine, own))

    def above_baseline(
        self,
        batches: list[Batch],
        whole: list[Batch] | None,
        scale: float,
        seed: int,
        total: Gradients,
    ) -> Totals:
        """Accumulate as `accumulate`, once others among the texts gave the step's baseline."""
        firsts = with_baseline(self.engine, batches, whole, self.ranks.sum_values)
        return accumulate(self.engine, firsts, scale, seed, total)

    def batches_from(self, index: int, steps: int, rows_at: RowsAt) -> Iterator[Batch]:
        """The micro-batches of this process in an epoch from step `index` on, of `steps` steps."""
        for step in range(index, min(steps, index + self.schedule.steps_per_epoch)):
            yield from self.ranks.own_batches(self.schedule, step, rows_at, self.hidden)


def accumulate(
    engine: Engine, batches: Iterable[Batch], scale: float, seed: int, total: Gradients
) -> Totals:
    """Add the gradients of `scale` times the loss of all micro-batches to `total`; return their
    sums."""
    totals = Totals()
    for batch in batches:
        sums = engine.add_gradients(batch, scale, seed, total)
        mx.eval(sums)
        totals.add(sums)
    return totals


def accumulate_weighed(
    engine: Engine, batches: list[Batch], scale: float, seed: int, total: Gradients
) -> Totals:
    """Accumulate as `accumulate`, for an objective that weighs whole steps; scores texts first."""
    with_given, sums = with_weights(engine, batches)
    accumulate(engine, with_given, scale, seed, total)
    return sums
