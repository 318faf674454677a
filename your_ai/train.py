"""The recipe of a training run, top to bottom.

`python -m your_ai.train RUN` carries out the run whose folder holds a config.yaml. It
writes events and never prints: who shows them reads runs/RUN/events.jsonl.
"""

from __future__ import annotations

import math
import sys
import time
from dataclasses import asdict, replace
from itertools import chain, takewhile
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

from your_ai import evaluate, generate, model, optimizer
from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.engine import prefix
from your_ai.engine.fused import Engine
from your_ai.errors import RunError, UserError, explain
from your_ai.files import clean
from your_ai.memory import probe
from your_ai.optimizer import Update
from your_ai.prepare import PREFIX, Prepared, prepare
from your_ai.rng import derive_seed
from your_ai.run import checkpoint, events
from your_ai.run.checkpoint import Checkpoint, TrainState
from your_ai.run.folder import RunFolder, find, locked
from your_ai.run.stopping import Interrupted, Stop, stop_signals

MAX_SKIPPED_IN_A_ROW = 5
SAMPLE_TOKENS = 128


def run(
    folder: RunFolder, config: TrainConfig, log: events.EventLog, stop: Stop
) -> events.Finished:
    """Train, or go on training, the run in `folder`, and return how it ended.

    Raises UserError for bad input, before anything but the events is written, and
    RunError where the run cannot go on.
    """
    began = time.perf_counter()
    clean(folder.path)
    clean(folder.checkpoints)
    prepared = prepare(config, log, folder.path)
    state = restore(folder, prepared, log)
    update = optimizer.make_update(prepared.model, prepared.optimizer)
    before = folder.read_config()
    folder.change_config(config)
    if config.lr_schedule != "constant" and (before.max_steps, before.epochs) != (
        config.max_steps,
        config.epochs,
    ):
        text = f"the learning rate now falls to 0 at step {prepared.steps}, not where it did"
        log.write(events.Notice(text=text))
    log.write(prepared.started_event(state.step))
    stop.graceful = True
    if state.step == 0:
        save(folder, prepared, state, log)  # whatever happens next can be resumed
        show_test_rows("before", prepared, log, stop)

    fill_prefix(prepared, state.step, log, stop)
    while state.step < prepared.steps and not stop:
        state = train_step(prepared, update, state, log)
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{folder.path}: {state.skipped_in_a_row} steps in a row were not finite, the last "
                f"was step {state.step}; the last good checkpoint is "
                f"{checkpoint.newest(folder.checkpoints)[0]}; lower --learning-rate or look at "
                "the data, and begin a new run"
            )
        last = state.step == prepared.steps
        if last or due(config.eval_every, state.step):
            validate(prepared, state.step, log, stop)
        if last or stop or due(config.save_every, state.step):
            save(folder, prepared, state, log)

    if state.skipped == prepared.steps:
        raise RunError(f"{folder.path}: not one of {prepared.steps} steps changed a weight")
    if stop:
        reason, adapter = f"stopped by {stop.name}", ""
    else:
        show_test_rows("after", prepared, log, stop)
        arrays = model.adapter_arrays(prepared.model)
        checkpoint.save_adapter(folder.adapter, arrays, prepared.adapters.config, state.step)
        prefix.remove(folder.path / PREFIX)  # a run that is stopped keeps it
        reason, adapter = "done", str(folder.adapter)
    seconds = time.perf_counter() - began
    finished = events.Finished(step=state.step, reason=reason, adapter=adapter, seconds=seconds)
    log.write(finished)
    return finished


def fill_prefix(prepared: Prepared, step: int, log: events.EventLog, stop: Stop) -> None:
    """Fill the prefix cache with the texts of the next epoch, where that saves reading."""
    if prepared.engine.fill is None:
        return

    log.write(events.Stage(text="filling the prefix cache"))
    steps = range(step, min(prepared.steps, step + prepared.plan.steps_per_epoch))
    batches = map(prepared.plan.batches_of, takewhile(lambda _: not stop, steps))
    prepared.engine.fill(chain.from_iterable(batches))


def train_step(
    prepared: Prepared, update: Update, state: TrainState, log: events.EventLog
) -> TrainState:
    """One optimizer update over the rows of step `state.step`; the state after it.

    A step whose loss or gradients are not finite, or whose rows all have weight 0,
    changes neither the adapters nor the optimizer.
    """
    began = time.perf_counter()
    config, index = prepared.config, state.step
    batches = prepared.plan.batches_of(index)
    weight = sum(batch.weight for batch in batches)
    done = replace(state, step=index + 1)
    if weight == 0:
        log.write(skipped_event(replace(done, skipped=state.skipped + 1), "every weight is 0"))
        return replace(done, skipped=state.skipped + 1)

    seed = derive_seed(config.seed, "dropout", index)
    loss, grads = accumulate(prepared.engine, batches, state.loss_scale / weight, seed)
    loss /= weight
    norm = optimizer.global_norm(grads).item() / state.loss_scale
    if not (math.isfinite(loss) and math.isfinite(norm)):
        done = optimizer.after_skipped_step(done, loss)
        log.write(skipped_event(done, f"the loss is {loss}, the gradient norm {norm}"))
        return done

    rate = optimizer.learning_rate(config, index, prepared.steps)
    clip = optimizer.clip_factor(norm, config.max_grad_norm)
    update(grads, clip / state.loss_scale, rate)
    log.write(
        events.Step(
            step=done.step,
            steps=prepared.steps,
            epoch=prepared.plan.epoch_of(index) + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=sum(batch.real_tokens for batch in batches),
            padded_tokens=sum(batch.tokens.size for batch in batches),
            trained_tokens=sum(batch.trained_tokens for batch in batches),
            seconds=time.perf_counter() - began,
            **asdict(probe.read()),
        )
    )
    return optimizer.after_finite_step(done, prepared.dtype)


def accumulate(engine: Engine, batches: list[Batch], scale: float, seed: int) -> tuple[float, Any]:
    """The loss sum over all micro-batches, and the gradients of `scale` times it."""
    loss, total = 0.0, None
    for batch in batches:
        part, grads = engine.gradients(batch, scale, seed)
        total = grads if total is None else tree_map(mx.add, total, grads)
        del grads
        mx.eval(part, total)  # one micro-batch's graph at a time
        loss += part.item()
    return loss, total


def skipped_event(state: TrainState, reason: str) -> events.Skipped:
    return events.Skipped(
        step=state.step, reason=reason, in_a_row=state.skipped_in_a_row, total=state.skipped
    )


def restore(folder: RunFolder, prepared: Prepared, log: events.EventLog) -> TrainState:
    """The state to begin from: the newest whole checkpoint's, put in place, or a new one."""
    path, faults = checkpoint.newest(folder.checkpoints)
    for problem in faults:
        log.write(events.Notice(text=f"{problem}; going one checkpoint back"))
    if path is None:
        return optimizer.first_state(prepared.dtype)
    saved = checkpoint.load(path)
    for kind, now in prepared.depends_on.items():
        before = saved.depends_on[kind]
        changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if changed:
            raise UserError(
                f"--resume {folder.name}: the {kind} changed since the run began "
                f"({', '.join(changed)}); put it back, or begin a new run"
            )
    if saved.state.step > prepared.steps:
        raise UserError(f"{folder.path}: has done {saved.state.step} steps already; ask for more")
    model.set_adapters(prepared.model, saved.adapters)
    optimizer.set_optimizer_arrays(prepared.optimizer, saved.optimizer)
    return saved.state


def due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def validate(prepared: Prepared, step: int, log: events.EventLog, stop: Stop) -> None:
    if prepared.valid is None:
        return
    began = time.perf_counter()
    batch_size = prepared.config.batch_size
    measured = evaluate.mean_loss(prepared.engine, prepared.valid, batch_size, stop)
    if measured is not None:
        log.write(
            events.Validation(
                step=step,
                loss=measured.loss,
                trained_tokens=measured.trained_tokens,
                seconds=time.perf_counter() - began,
            )
        )


def show_test_rows(when: str, prepared: Prepared, log: events.EventLog, stop: Stop) -> None:
    """Answers to a few test prompts, and exact match over all test rows, where asked for."""
    answers = []
    for sample in prepared.samples:
        if stop:
            return
        limit = 2 * len(prepared.tokenizer.encode(sample.expected)) + SAMPLE_TOKENS
        answers.append(generate.answer(prepared.model, prepared.tokenizer, sample.rendered, limit))
    if answers:
        log.write(
            events.Samples(
                when=when,
                prompts=[sample.asked for sample in prepared.samples],
                answers=answers,
                expected=[sample.expected for sample in prepared.samples],
            )
        )
    if prepared.config.exact_match and prepared.test is not None:
        batch_size = prepared.config.batch_size
        correct = evaluate.exact_matches(prepared.engine, prepared.test, batch_size, stop)
        if correct is not None:
            log.write(events.ExactMatch(when=when, correct=correct, rows=len(prepared.test)))


def save(folder: RunFolder, prepared: Prepared, state: TrainState, log: events.EventLog) -> None:
    began = time.perf_counter()
    path = checkpoint.save(
        folder.checkpoints,
        Checkpoint(
            state=state,
            adapters=model.adapter_arrays(prepared.model),
            optimizer=optimizer.optimizer_arrays(prepared.optimizer),
            adapter_config=prepared.adapters.config,
            depends_on=prepared.depends_on,
        ),
    )
    checkpoint.prune(folder.checkpoints, state.step, prepared.config.keep)
    seconds = time.perf_counter() - began
    log.write(events.Checkpoint(step=state.step, folder=str(path), seconds=seconds))


def carry_out(folder: RunFolder, config: TrainConfig, stop: Stop) -> int:
    """Train `folder` with `config`, alone; the exit status."""
    with locked(folder):
        log = events.EventLog(folder.events)
        text = "stopping after this step; once more to leave at once"
        stop.on_first = lambda: log.write(events.Notice(text=text))
        try:
            finished = run(folder, config, log, stop)
        except RuntimeError as error:
            if type(error) is not RuntimeError:  # its subclasses are Python's, and our fault
                raise
            raise RunError(f"{folder.path}: {explain(model.first_line(error))}") from error
        finally:
            stop.on_first = lambda: None  # a late signal must not write to a closed file
            log.close()
    return 0 if finished.adapter else 128 + (stop.received or 0)


def main() -> None:
    """Carry out one run; errors are one line on stderr."""
    if len(sys.argv) != 2:
        sys.exit("usage: python -m your_ai.train RUN")
    try:
        with stop_signals() as stop:
            folder = find(sys.argv[1])
            sys.exit(carry_out(folder, folder.read_config(), stop))
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except Interrupted as interrupted:
        sys.exit(128 + interrupted.number)


if __name__ == "__main__":
    main()
