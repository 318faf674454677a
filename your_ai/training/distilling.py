"""The steps of a distillation: rows of the data or completions of the student, seen by a teacher.

Which of both a step trains is a pure function of the seed and the step. Completions are made and
written as those of GRPO, without rewards. What the teacher makes of all texts of a step is computed
before their gradients, so that its weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, takewhile

import numpy as np

from your_ai.data.batches import Batch, RowsAt, in_order_of_length, micro_batches
from your_ai.data.examples import Examples
from your_ai.evaluation.dataset_scores import MeanLoss, mean_loss
from your_ai.evaluation.teacher import Teacher
from your_ai.gates.text import counted
from your_ai.rng import derive_seed
from your_ai.run import events
from your_ai.run.rollout_files import RolloutRecord
from your_ai.run.stopping import Stop
from your_ai.training.rollouts import (
    RolloutSource,
    completed,
    completion_examples,
    own_batches,
    prompt_of,
)
from your_ai.training.steps import DataSource, RewardMeter, StepWork, accumulate
from your_ai.training.trainer import Trainer


def is_of_student(seed: int, share: float, index: int) -> bool:
    """Return whether step `index` (from 0) trains completions of the student.

    share: of the steps.
    """
    return derive_seed(seed, "student", index) / 2**64 < share


@dataclass
class TaughtSource:
    """Makes the steps of a distillation."""

    data: DataSource
    rollouts: RolloutSource | None
    """Makes completions of the student, if some steps train them."""
    teacher: Teacher
    trainer: Trainer
    log: events.EventLog
    preparing: str = "compiling the first step"
    judged: dict[str, float] = field(default_factory=dict)

    @property
    def meter(self) -> RewardMeter | None:
        """None where the rows of the data have answers that are compared."""
        return self if self.trainer.config.generates else None

    def step(self, index: int, rows_at: RowsAt) -> StepWork:
        """The work of step `index` (from 0). Raises GivenUp."""
        config = self.trainer.config
        self.teacher.begin_step()
        if self.rollouts is not None and is_of_student(config.seed, config.student_share, index):
            work = self.of_completions(self.rollouts, index, rows_at)
        else:
            work = self.data.step(index, rows_at)
        self.look(work.batches)
        return work

    def look(self, batches: Sequence[Batch]) -> None:
        self.teacher.look(text for batch in batches for text in self.teacher.seen_in(batch))

    def of_completions(self, source: RolloutSource, index: int, rows_at: RowsAt) -> StepWork:
        """Completions of the student, which are written before they are trained."""
        source.begin()
        self.trainer.ranks.begin_step(index)
        records = source.records_of(index)
        source.show_best(records, index + 1)
        examples = self.examples(source, records)
        edges = source.edges(examples)
        order = np.argsort(-examples.lengths, kind="stable")
        every = list(micro_batches(examples, order, rows_at, edges))
        denominator = self.trainer.engine.objective.denominator(every)
        ranks, hidden = self.trainer.ranks, self.trainer.hidden
        batches = every
        if ranks.size > 1:
            batches = own_batches(ranks, examples, order, rows_at, edges, hidden)
        source.in_step("computing gradients")
        add = partial(accumulate, self.trainer.engine, batches)
        return StepWork(batches, denominator, add, source.metrics(records))

    def examples(
        self, source: RolloutSource, records: Sequence[RolloutRecord], split: str = "train"
    ) -> Examples:
        """The prompts with their completions; the teacher reads them after its own prompts."""
        texts = source.texts(records, split)
        data = source.examples_of(split)
        weights = data.weights[[record.row for record in records]]
        found = completion_examples(texts, weights, {})
        seen = self.trainer.job.data.seen
        if seen:
            prompts = [prompt_of(seen[split], record.row) for record in records]
            answers = [tokens[trained] for tokens, trained in texts]
            pairs = [completed(p, answer) for p, answer in zip(prompts, answers, strict=True)]
            self.teacher.reads(found, completion_examples(pairs, weights, {}), in_step=True)
        return found

    def measured(self, split: str, most: int, step: int) -> list[RolloutRecord] | None:
        """The most likely completions, as of `RolloutSource`, without rewards."""
        assert self.rollouts is not None
        return self.rollouts.measured(split, most, step)

    def loss_of(self, records: Sequence[RolloutRecord], split: str, stop: Stop) -> MeanLoss | None:
        """The mean divergence over completions."""
        assert self.rollouts is not None
        self.teacher.begin_step()
        examples = self.examples(self.rollouts, records, split)
        return mean_loss(self.trainer.engine, examples, self.trainer.rows_at, stop)


def fill_teacher(source: TaughtSource, step: int, stop: Stop) -> None:
    """Let the teacher read the rows of the steps from `step` on, and those of validation, if what
    it makes of them is kept."""
    teacher, trainer = source.teacher, source.trainer
    if not teacher.kept or trainer.ranks.size > 1 or trainer.config.generates:
        return
    log = source.log
    log.write(events.Stage(text="the teacher reads the rows"))
    every = [source.data.batches_from(step, trainer.steps, trainer.rows_at)]
    if trainer.valid is not None:
        every.append(in_order_of_length(trainer.valid, trainer.rows_at))
    batches = takewhile(lambda _: not stop, chain.from_iterable(every))
    for done in teacher.fill(text for batch in batches for text in teacher.seen_in(batch)):
        log.write(events.Stage(text=f"the teacher reads: {counted(done, 'text')}"))
