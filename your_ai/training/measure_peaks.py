"""Before training: measure micro-batches, the smallest first, until the plan is known to fit.

The gradients of each are computed and discarded, so that training is the same as without it.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Literal

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch, make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.prefix import unchanged
from your_ai.gates.text import size_text
from your_ai.memory import allocator, probe
from your_ai.memory import calibration as measurements
from your_ai.memory.calibration import Calibration, Measurement, Shape
from your_ai.memory.calibration_steps import MicroBatchPeak, measure_and_choose
from your_ai.memory.governor import MemoryAction, Watch
from your_ai.memory.plan import DoesNotFit
from your_ai.memory.workload import Plan
from your_ai.nets.model import TRIED_TOKENS
from your_ai.run import events
from your_ai.training.memory_actions import Replan
from your_ai.training.planned import write_plan
from your_ai.training.trainer import Trainer

MEASURED: Literal["measured"] = "measured"  # the kind of an Action that requests another plan


def calibrated(
    trainer: Trainer, log: events.EventLog, level: int, watch: Watch, step: int
) -> Trainer:
    """Return `trainer` with the largest micro-batches that fit, by measurements.

    step: the step from which the run continues.

    Measures nothing if the limit is far away, if the shapes were measured before, or if the run
    continues under the plan it had. Raises Replan if another engine is the fastest that fits, or
    if nothing fits with these adapters.
    """
    budget = trainer.budget
    if budget.kept:
        return trainer
    plan = budget.choice.option.plan

    def measure(plan: Plan, shape: Shape) -> MicroBatchPeak:
        trainer.engine.keep(lambda rows, tokens: plan.kept)
        trainer.engine.hold(plan.resident, plan.blocks_ahead)
        return peak_of(trainer, shape, log)

    found = list(budget.workload.process.calibration.measurements)

    def note(measured: Measurement) -> None:
        found.append(measured)
        log.write(events.Measured(**asdict(measured)))
        if budget.measurements is not None:
            measurements.keep(budget.measurements, Calibration(tuple(found)))

    limit_bytes = budget.limit.limit_bytes
    try:
        workload, choice = measure_and_choose(
            budget.workload, budget.choice, limit_bytes, level, measure, note
        )
    except DoesNotFit as error:
        if len(found) == len(budget.workload.process.calibration.measurements):
            raise
        # `prepare` knows more now: it chooses smaller adapters where it may, or refuses the run.
        raise Replan(MemoryAction(kind=MEASURED, cause=str(error)), step, watch) from error
    if workload is budget.workload:
        return trainer
    option = choice.option
    if (option.plan.engine, option.plan.spill) != (plan.engine, plan.spill):
        least = size_text(option.needed_bytes)
        cause = f"measured: {option.plan.engine} needs a limit of at least {least}"
        raise Replan(MemoryAction(kind=MEASURED, cause=cause), step, watch)
    allocator.set_limits(limit_bytes, option.needed_bytes, option.estimate.beside_bytes)
    allocator.free()
    trainer.engine.keep(lambda rows, tokens: option.plan.kept)
    trainer.engine.hold(option.plan.resident, option.plan.blocks_ahead)
    budget = replace(budget, workload=workload, choice=choice)
    trainer.graphs.room_bytes = budget.graphs_room_bytes
    if option.plan != plan:
        write_plan(budget, trainer.config, log)
    return replace(trainer, budget=budget)


def peak_of(trainer: Trainer, shape: Shape, log: events.EventLog) -> MicroBatchPeak:
    """Compute the gradients of a micro-batch; return the memory that they needed."""
    log.write(events.Stage(text=f"measuring {shape.rows} x {shape.tokens} tokens"))
    batch = batch_of(shape, trainer.config.packing)
    objective = trainer.engine.objective
    if trainer.rewards is not None:  # completions, whose log-probabilities need not be known
        ones = np.ones_like(batch.weights)
        batch = batch.with_columns({"advantages": ones, "old": -ones, "reference": -ones})
    elif "others" in objective.phases:
        empty = np.zeros(len(batch.targets), np.float32)
        batch = batch.with_columns({"reference": empty, "baseline": empty, "labels": empty > 0})
    elif "scores" in objective.phases or shape.rows < objective.rows_together:
        batch = batch.with_columns({"given": batch.weights})
    allocator.return_freed_buffers()
    mx.set_cache_limit(0)  # cached buffers would add to the peak; `allocator.set_limits` resets it
    allocator.free(collect=False)
    mx.reset_peak_memory()
    with unchanged(trainer.built.store):
        mx.eval(trainer.engine.add_gradients(batch, 1.0, 0, trainer.gradients))
    trainer.gradients.clear()
    mx.synchronize()
    peak_bytes = max(mx.get_peak_memory(), mx.get_active_memory())
    allocator.free(collect=False)  # the C library keeps freed buffers, which the peak has counted
    process_bytes = probe.process_bytes()  # while the graphs are there
    beside = None if process_bytes is None else process_bytes - mx.get_active_memory()
    trainer.engine.drop()
    return MicroBatchPeak(peak_bytes, beside)


def batch_of(shape: Shape, packing: bool) -> Batch:
    """A micro-batch of this shape; all its tokens are trained."""
    rows, tokens = shape
    text = np.arange(rows * (tokens + 1), dtype=np.uint32) % TRIED_TOKENS
    starts = np.arange(rows + 1) * (tokens + 1)
    trained = np.ones(len(text), bool)
    weights = np.ones(rows, np.float32)
    examples = Examples(text, trained, starts, weights, RowCounts())
    packed = rows * tokens if packing else None
    return make_schedule(examples, rows, rows, 0, packed).batches_of(0)[0]
