"""Which rows each step of a run trains, and what that says about the time of a step."""

from __future__ import annotations

import numpy as np

from your_ai.config import TrainConfig, defaults, last_step
from your_ai.data.batches import TARGET_LEVELS, Schedule, make_schedule
from your_ai.memory.workload import StepSizes
from your_ai.objectives.chosen import objective_of
from your_ai.training.run_data import RunData


def schedule_of(config: TrainConfig, data: RunData) -> Schedule:
    """Which rows each step trains."""
    packed_tokens = config.max_seq_length if config.packing else None
    examples = data.examples["train"]
    together = objective_of(config).rows_together
    rows = len(examples) // together
    return make_schedule(
        examples,
        defaults.batch_size(config, rows) * together,
        defaults.rows_per_step(config, rows) * together,
        config.seed,
        packed_tokens,
        together,
        config.updates_per_batch,
    )


def step_sizes(config: TrainConfig, data: RunData) -> StepSizes:
    """What the training rows say about the time of steps; nothing without rows."""
    if config.generates or "train" not in data.examples or not len(data.examples["train"]):
        return StepSizes()
    schedule = schedule_of(config, data)
    counts = np.bincount(schedule.buckets, minlength=len(schedule.edges))
    lengths = [
        (int(t), int(n) * schedule.rows_together)
        for t, n in zip(schedule.edges, counts, strict=True)
        if n
    ]
    padded, tally = sum(t * n for t, n in lengths), data.examples["train"].tally
    share = tally.trained_tokens / padded if tally.trained_tokens else 1.0
    return StepSizes(
        rows_of_length=tuple(lengths),
        trained_share=min(1.0, float(np.ceil(TARGET_LEVELS * share)) / TARGET_LEVELS),
        steps=last_step(config, schedule.steps_per_epoch),
    )
