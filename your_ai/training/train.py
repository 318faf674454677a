"""The recipe of a training run, top to bottom.

`process.py` runs it in a process of its own. It writes events to runs/RUN/events.jsonl and never
prints; other processes read and show them.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import takewhile

import mlx.core as mx

from your_ai.config import TrainConfig, is_due
from your_ai.config.defaults import recorded
from your_ai.data.batches import Batch
from your_ai.engine import prefix
from your_ai.errors import RunError, UserError
from your_ai.evaluation.teacher import STATES
from your_ai.files import clean
from your_ai.memory import allocator, probe
from your_ai.memory.governor import MemoryAction, Watch
from your_ai.nets import model
from your_ai.nets.layer_sizes import evened
from your_ai.objectives.chosen import needs_reference
from your_ai.rng import derive_seed
from your_ai.run import checkpoint, events, requests
from your_ai.run.checkpoint import TrainState
from your_ai.run.folder import RunFolder
from your_ai.run.rollout_files import FOLDER as ROLLOUTS
from your_ai.run.stopping import Stop
from your_ai.training import optimizer
from your_ai.training.distilling import TaughtSource, fill_teacher
from your_ai.training.distributed import ALONE, Ranks
from your_ai.training.joining import agreed_settings
from your_ai.training.memory_actions import Governor, Replan, govern
from your_ai.training.optimizer import Update
from your_ai.training.pausing import pause_all
from your_ai.training.prepare import prepare
from your_ai.training.reference import referenced
from your_ai.training.rollouts import GivenUp, RolloutSource, keep_first_adapters
from your_ai.training.saving import (
    check_unchanged,
    is_save_due,
    keep_settings,
    restore,
    save,
    saved_step,
    share_state,
    use_result,
)
from your_ai.training.soft_rollouts import SoftSource
from your_ai.training.steps import DataSource, StepSource
from your_ai.training.trainer import PREFIX, WORKING, Trainer
from your_ai.training.validation import is_enough, show_test_rows, validate
from your_ai.training.whole_result import write_result

MAX_SKIPPED_IN_A_ROW = 5


@dataclass(frozen=True)
class Loop:
    """A run that is ready for its steps."""

    folder: RunFolder
    trainer: Trainer
    source: StepSource
    governor: Governor
    update: Update
    log: events.EventLog
    heard: Stop
    """The stop signals of this process."""
    stop: Stop
    """The stop that all ranks see at the same place."""

    def is_over(self, state: TrainState) -> bool:
        """Return whether no step follows."""
        done = state.step >= self.trainer.steps or is_enough(self.trainer.config, state)
        return done or bool(self.stop)


def run(
    folder: RunFolder,
    config: TrainConfig,
    log: events.EventLog,
    stop: Stop,
    level: int,
    watch: Watch,
    sampler: probe.Sampler,
    begin_guard: Callable[[], None],
    ranks: Ranks = ALONE,
) -> events.Finished:
    """Train or resume the run in `folder`, and return how it ended.

    level: the number of faster plans that fit but are skipped.

    Raises UserError for bad input, before it writes anything except events. Raises Replan if the
    run must continue from the checkpoint just saved, under another plan. Raises RunError if it
    cannot continue.
    """
    began = time.perf_counter()
    clean(folder.path)
    clean(folder.checkpoints)
    clean(folder.path / ROLLOUTS)
    config = agreed_settings(ranks, config, recorded(config, folder.read_config()))
    ranks.share_files(folder, folder.start.name)
    trainer = prepare(config, log, folder.path, level, ranks, begin_guard)
    limit_bytes = trainer.budget.limit.limit_bytes
    wired = allocator.wired(limit_bytes) if config.wired else contextlib.nullcontext(True)
    with contextlib.closing(trainer), wired as has_effect:
        if not has_effect:
            log.write(events.Notice(text="--wired: has no effect, because there is no Metal"))
        loop, state = begin(folder, trainer, log, stop, watch, sampler)
        return end(loop, train_steps(loop, state), began)


def begin(
    folder: RunFolder,
    trainer: Trainer,
    log: events.EventLog,
    stop: Stop,
    watch: Watch,
    sampler: probe.Sampler,
) -> tuple[Loop, TrainState]:
    """Restore the run, or make its first checkpoint, and do all that comes before a step."""
    if needs_reference(trainer.config):
        check_unchanged(folder, trainer)  # before the reference, which may take long
        trainer = referenced(trainer, log)
    factors = optimizer.rate_factors(trainer.config, trainer.model)
    state = share_state(trainer, restore(folder, trainer, log))
    governor = govern(trainer, sampler, log, watch, state.step)
    source = source_of(trainer, folder, log, stop)
    update = optimizer.make_update(trainer.model, trainer.optimizer, factors, trainer.masters)
    keep_settings(folder, trainer, log)
    log.write(trainer.started_event(state.step))
    stop.graceful = True
    keep_first_adapters(trainer, folder, state.step)
    if state.step == 0:
        save(folder, trainer, state, log)  # from now on the run can be resumed
        show_test_rows("before", trainer, log, stop, source.meter)
    fill_prefix(trainer, state.step, log, stop)
    if isinstance(source, TaughtSource):
        fill_teacher(source, state.step, stop)
    if state.validation_due:
        state = validate(trainer, state, log, stop, source.meter)
        save(folder, trainer, state, log)
    agreed = trainer.ranks.begin(log, stop)
    return Loop(folder, trainer, source, governor, update, log, stop, agreed), state


def source_of(trainer: Trainer, folder: RunFolder, log: events.EventLog, stop: Stop) -> StepSource:
    """The source of the run's steps."""
    rollouts = None if trainer.rewards is None else RolloutSource(trainer, folder, log, stop)
    if trainer.teacher is not None:
        return TaughtSource(data_source(trainer), rollouts, trainer.teacher, trainer, log)
    if rollouts is None:
        return data_source(trainer)
    return rollouts if trainer.soft is None else SoftSource(rollouts, trainer.soft)


def data_source(trainer: Trainer) -> DataSource:
    return DataSource(trainer.engine, trainer.schedule, trainer.hidden, trainer.ranks)


def fill_prefix(trainer: Trainer, step: int, log: events.EventLog, stop: Stop) -> None:
    """Fill the prefix cache with the texts of the next epoch, if the engine streams weights."""
    if trainer.engine.fill is None or stop:
        return
    log.write(events.Stage(text="filling the prefix cache"))
    batches = data_source(trainer).batches_from(step, trainer.steps, trainer.rows_at)
    trainer.engine.fill(takewhile(lambda _: not stop, batches))


def train_steps(loop: Loop, state: TrainState) -> TrainState:
    """Train step after step; return the state after the last one, which is saved if it is good."""
    folder, ranks = loop.folder, loop.trainer.ranks
    if not loop.is_over(state):
        loop.log.write(events.Phase(text=loop.source.preparing))
    while not loop.is_over(state):
        try:
            state, batches = train_step(loop, state)
        except GivenUp:
            ranks.agree(loop.heard, loop.stop)
            break
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{folder.path}: {state.skipped_in_a_row} steps in a row were not finite, the last "
                f"was step {state.step}; the last good checkpoint is "
                f"{checkpoint.newest(folder.checkpoints)[0]}; lower --learning-rate or look at "
                "the data, and start a new run"
            )
        state = after_step(loop, state, batches)
    # The signal may have come after the check for saving.
    if loop.stop and saved_step(folder, ranks) != state.step:
        save(folder, loop.trainer, state, loop.log)
    return state


def train_step(loop: Loop, state: TrainState) -> tuple[TrainState, list[Batch]]:
    """One optimizer update: step `state.step`; return the new state and the micro-batches.

    If the loss or the gradients are not finite, or all rows have weight 0, neither the adapters
    nor the optimizer change, and no batches are returned. Raises GivenUp.
    """
    began = time.perf_counter()
    trainer, governor, log, index = loop.trainer, loop.governor, loop.log, state.step
    config, engine, gradients = trainer.config, trainer.engine, trainer.gradients
    governor.before_step()
    engine.waited()  # from now on, what this step waits
    gradients.clear()  # of a step that failed
    if trainer.periods is not None and trainer.periods.begins(index):
        trainer.enter_period(index)
    work = loop.source.step(index, governor.rows_at)
    done = replace(state, step=index + 1)
    if work.denominator == 0:
        done = replace(done, skipped=state.skipped + 1)
        log.write(skipped_event(done, "every weight is 0"))
        return done, []

    seed = derive_seed(config.seed, "dropout", index)
    own = work.add_gradients(state.loss_scale / work.denominator, seed, gradients)
    counts = token_counts(work.batches)
    # In no variable: the update frees old parameters while it computes new ones.
    sums, of_all = trainer.ranks.step_sums(
        own, gradients, trainer.model.trainable_parameters(), counts
    )
    loss = sums.loss / work.denominator
    norm = float(optimizer.global_norm(gradients)) / state.loss_scale
    if not (math.isfinite(loss) and math.isfinite(norm)):
        gradients.clear()
        done = optimizer.after_skipped_step(done, loss)
        log.write(skipped_event(done, f"the loss is {loss}, the gradient norm {norm}"))
        return done, []

    rate = optimizer.learning_rate(config, index, trainer.steps)
    clip = optimizer.clip_factor(norm, config.max_grad_norm)
    loop.update(gradients, clip / state.loss_scale, rate)
    mx.synchronize()  # device errors arrive late: wait for them before the step counts as done
    sample, highest_bytes = governor.look()
    seconds, limit_bytes = time.perf_counter() - began, trainer.budget.limit.limit_bytes
    held_bytes = highest_bytes or sample.process_bytes
    trainer.ranks.note_step(counts[0], seconds, held_bytes, limit_bytes)
    log.write(
        events.Step(
            step=done.step,
            steps=trainer.steps,
            epoch=trainer.schedule.epoch_of(index) + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=of_all[0],
            padded_tokens=of_all[1],
            trained_tokens=of_all[2],
            seconds=seconds,
            highest_bytes=highest_bytes,
            metrics={**work.metrics, **sums.means()},
            read_wait_s=engine.waited(),
            **asdict(sample),
        )
    )
    return optimizer.after_finite_step(done, trainer.opened.dtype), work.batches


def token_counts(batches: list[Batch]) -> list[int]:
    """Tokens of the texts, tokens with padding, and trained tokens."""
    return [
        sum(batch.real_tokens for batch in batches),
        sum(batch.tokens.size for batch in batches),
        sum(batch.trained_tokens for batch in batches),
    ]


def skipped_event(state: TrainState, reason: str) -> events.Skipped:
    return events.Skipped(
        step=state.step, reason=reason, in_a_row=state.skipped_in_a_row, total=state.skipped
    )


def after_step(loop: Loop, state: TrainState, batches: list[Batch]) -> TrainState:
    """Validate, act on memory, save and pause, as it is due. Raises Replan."""
    folder, trainer, log = loop.folder, loop.trainer, loop.log
    config, last = trainer.config, state.step == trainer.steps
    state, wanted = validated(loop, state, batches)
    pausing = requests.is_asked(folder, requests.PAUSE)
    due = is_save_due(folder, config, state.step)
    wanted, due, pausing = trainer.ranks.agree(loop.heard, loop.stop, wanted, due, pausing)
    trainer.ranks.write_figures(state.step, log)
    last = last or is_enough(config, state)
    best = config.keep_best and state.best_step == state.step
    if last or loop.stop or wanted or best or due:
        state = share_state(trainer, state)
        save(folder, trainer, state, log)
    if wanted and not (last or loop.stop):
        raise Replan(wanted, state.step, Watch(told=loop.governor.watch.told))
    if not last:
        pause_all(folder, trainer, state.step, log, loop.heard, loop.stop, pausing)
    return state


def validated(
    loop: Loop, state: TrainState, batches: list[Batch]
) -> tuple[TrainState, MemoryAction | None]:
    """The state after a validation, if it is due, and what the governor wants of the run."""
    trainer, step = loop.trainer, state.step
    due = step == trainer.steps or is_due(trainer.config.eval_every, step)
    state = replace(state, validation_due=due and trainer.valid is not None)
    try:
        wanted = loop.governor.after_step(step, batches) if batches else None
        return validate(trainer, state, loop.log, loop.heard, loop.source.meter), wanted
    except (RunError, UserError):  # the base cannot be read, or the user's metric failed
        save(loop.folder, trainer, state, loop.log)  # the adapters are good
        raise


def end(loop: Loop, state: TrainState, began: float) -> events.Finished:
    """Write the result of the run, if it was not stopped, and how it ended."""
    folder, trainer, log, stop = loop.folder, loop.trainer, loop.log, loop.stop
    is_early = state.step < trainer.steps
    if state.skipped == state.step and not (stop and is_early):
        raise RunError(f"{folder.path}: no step of {state.step:,} changed a weight")
    reason, adapter, result_step = "done", str(folder.adapter), None
    if stop:
        asked = requests.withdraw(folder, requests.STOP)
        reason, adapter = "stopped on request" if asked else f"stopped by {stop.name}", ""
    elif trainer.ranks.is_first:
        if is_early:
            log.write(events.Notice(text=reason_of_early_end(state)))
        log.write(events.Phase(text="loading the best adapter"))
        result_step = use_result(folder, trainer, state, log)
        show_test_rows("after", trainer, log, stop, loop.source.meter)
        adapter = save_result(loop, result_step)
    if not stop:
        for name in (PREFIX, STATES):  # a stopped run keeps them
            prefix.remove(folder.path / name)
    shutil.rmtree(folder.path / WORKING, ignore_errors=True)  # the checkpoint has its files
    finished = events.Finished(
        step=state.step,
        reason=reason,
        adapter=adapter,
        seconds=time.perf_counter() - began,
        adapter_step=result_step,
    )
    log.write(finished)
    return finished


def save_result(loop: Loop, step: int) -> str:
    """Write the adapter of the run, or the model whose weights it trained; return its folder."""
    folder, trainer, log = loop.folder, loop.trainer, loop.log
    if trainer.whole is not None:
        log.write(events.Phase(text="saving the model"))
        write_result(folder, trainer.opened, step, log)
        return str(folder.model)
    log.write(events.Phase(text="saving the adapter"))
    arrays, config = evened(model.adapter_arrays(trainer.model), trainer.adapters.config)
    checkpoint.save_adapter(folder.adapter, arrays, config, step)
    return str(folder.adapter)


def reason_of_early_end(state: TrainState) -> str:
    """Say why --patience ended the run."""
    text = f"stopped after {state.without_better} validations without improvement"
    return text if state.best_step is None else f"{text}; best at step {state.best_step}"
