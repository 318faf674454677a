"""The recipe of a training run, top to bottom.

`your_ai.session.supervisor` starts `python -m your_ai.training RUN`, which trains the run
with the config.yaml in its folder. It writes events to runs/RUN/events.jsonl and never prints;
other processes read and show them.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, takewhile
from pathlib import Path

import mlx.core as mx

from your_ai.config import TrainConfig, build, is_due
from your_ai.config.defaults import recorded
from your_ai.data.batches import Batch
from your_ai.data.examples import Examples
from your_ai.engine import prefix
from your_ai.engine.gradients import Gradients
from your_ai.engine.protocol import Engine
from your_ai.engine.scoring import with_baseline, with_weights
from your_ai.errors import RunError, UserError, explain, first_line, is_memory_error
from your_ai.files import clean
from your_ai.gates.console import echo_error, echo_traceback
from your_ai.hub.find import store
from your_ai.memory import allocator, probe
from your_ai.memory.governor import MemoryAction, Watch
from your_ai.nets import model
from your_ai.objectives.chosen import needs_reference
from your_ai.objectives.objective import Totals
from your_ai.rng import derive_seed
from your_ai.run import checkpoint, events, exits, host, requests
from your_ai.run.checkpoint import TrainState
from your_ai.run.folder import RunFolder, find, locked
from your_ai.run.heartbeat import LOST, end_process, write_report
from your_ai.run.parent import watch_parent, watch_pid
from your_ai.run.rollout_files import FOLDER as ROLLOUTS
from your_ai.run.stopping import SHOW_STACK, Interrupted, Stop, stop_signals
from your_ai.training import optimizer
from your_ai.training.distributed import ALONE, PeerLost, Ranks
from your_ai.training.joining import DEFAULT_TIMEOUT_S, agreed_settings, join, telling_others
from your_ai.training.measure_peaks import calibrated
from your_ai.training.memory_actions import (
    Governor,
    Replan,
    action_event,
    govern,
    telling_gauges,
    within_limit,
)
from your_ai.training.optimizer import Update
from your_ai.training.pausing import pause_all
from your_ai.training.prepare import PREFIX, Prepared, prepare
from your_ai.training.reference import with_reference
from your_ai.training.rollouts import REFERENCE, GivenUp, RolloutSource, keep_first_adapters
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
from your_ai.training.validation import is_enough, show_test_rows, validate

MAX_SKIPPED_IN_A_ROW = 5
OUT_OF_ROOM = ("ran out of memory", exits.OUT_OF_MEMORY)
MAX_OUT_OF_MEMORY = 3  # in a row, without a checkpoint in between


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
    prepared = prepare(config, log, folder.path, level, ranks, begin_guard)
    ranks.check_same({"adapter": json.dumps(prepared.adapters.config, sort_keys=True)})
    try:
        with contextlib.ExitStack() as stack:
            limit_bytes = prepared.budget.limit.limit_bytes
            if config.wired and not stack.enter_context(allocator.wired(limit_bytes)):
                log.write(events.Notice(text="--wired: has no effect, because there is no Metal"))
            return run_prepared(folder, prepared, log, stop, level, watch, sampler, began)
    finally:
        if prepared.rewards is not None:
            prepared.rewards.close()


def run_prepared(
    folder: RunFolder,
    prepared: Prepared,
    log: events.EventLog,
    stop: Stop,
    level: int,
    watch: Watch,
    sampler: probe.Sampler,
    began: float,
) -> events.Finished:
    """Train a run that is checked and loaded; began: when that began, by time.perf_counter."""
    config, ranks = prepared.config, prepared.ranks
    if prepared.soft is None:
        step = ranks.of_first(lambda: saved_step(folder))
        prepared = calibrated(prepared, log, level, watch, step)
    if needs_reference(config):
        check_unchanged(folder, prepared)  # before the reference, which may take long
        prepared = referenced(prepared, log)
    state = share_state(prepared, restore(folder, prepared, log))
    governor = govern(prepared, sampler, log, watch, state.step)
    rollouts: RolloutSource | SoftSource | None = None
    if prepared.rewards is not None:
        rollouts = RolloutSource(prepared, folder, log, stop)
    if prepared.soft is not None:
        rollouts = SoftSource(rollouts, prepared.soft)
    factors = optimizer.rate_factors(config, prepared.model)
    update = optimizer.make_update(prepared.model, prepared.optimizer, factors)
    if ranks.is_first:
        keep_settings(folder, ranks.as_given(config), prepared.steps, log)
    log.write(prepared.started_event(state.step))
    stop.graceful = True
    if state.step == 0:
        keep_first_adapters(prepared, folder)
        save(folder, prepared, state, log)  # from now on the run can be resumed
        if ranks.is_first:
            show_test_rows("before", prepared, log, stop, rollouts)
    ranks.share_files(folder, REFERENCE)

    fill_prefix(prepared, state.step, log, stop)
    if state.validation_due:
        state = validate(prepared, state, log, stop, rollouts)
        save(folder, prepared, state, log)
    ranks.recall(lambda: [record.event for record in events.tail(log.path)[0]])
    heard, stop = stop, ranks.agreed_stop(stop)
    ranks.agree(heard, stop)
    compiles = "compiling the first step" if rollouts is None else "preparing the first step"
    if state.step < prepared.steps and not (stop or is_enough(config, state)):
        log.write(events.Phase(text=compiles))
    while state.step < prepared.steps and not (stop or is_enough(config, state)):
        try:
            state, batches = train_step(prepared, governor, update, state, log, rollouts)
        except GivenUp:
            ranks.agree(heard, stop)
            break
        if state.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise RunError(
                f"{folder.path}: {state.skipped_in_a_row} steps in a row were not finite, the last "
                f"was step {state.step}; the last good checkpoint is "
                f"{checkpoint.newest(folder.checkpoints)[0]}; lower --learning-rate or look at "
                "the data, and start a new run"
            )
        last = state.step == prepared.steps
        due = prepared.valid is not None and (last or is_due(config.eval_every, state.step))
        state = replace(state, validation_due=due)
        try:
            wanted = governor.after_step(state.step, batches) if batches else None
            state = validate(prepared, state, log, heard, rollouts)
        except (RunError, UserError):  # the base cannot be read, or the user's metric failed
            save(folder, prepared, state, log)  # the adapters are good
            raise
        pausing = requests.is_asked(folder, requests.PAUSE)
        due = is_save_due(folder, config, state.step)
        wanted, due, pausing = ranks.agree(heard, stop, wanted, due, pausing)
        if (figures := ranks.event(state.step)) is not None:
            log.write(figures)
            if (shares := ranks.learn(state.step)) is not None:
                log.write(shares)
        last = last or is_enough(config, state)
        best = config.keep_best and state.best_step == state.step
        if last or stop or wanted or best or due:
            state = share_state(prepared, state)
            save(folder, prepared, state, log)
        if wanted and not (last or stop):
            raise Replan(wanted, state.step, Watch(told=governor.watch.told))
        if not last:
            pause_all(folder, prepared, state.step, log, heard, pausing)
            if pausing:
                ranks.agree(heard, stop)
    # The signal may have come after the check for saving.
    if stop and ranks.of_first(lambda: saved_step(folder)) != state.step:
        save(folder, prepared, state, log)

    is_early = state.step < prepared.steps
    if state.skipped == state.step and not (stop and is_early):
        raise RunError(f"{folder.path}: no step of {state.step:,} changed a weight")
    if stop:
        asked = requests.withdraw(folder, requests.STOP)
        reason, adapter = "stopped on request" if asked else f"stopped by {stop.name}", ""
        result_step = None
    elif not ranks.is_first:
        prefix.remove(folder.path / PREFIX)
        reason, adapter, result_step = "done", str(folder.adapter), None
    else:
        if is_early:
            log.write(events.Notice(text=reason_of_early_end(state)))
        log.write(events.Phase(text="loading the best adapter"))
        result_step = use_result(folder, prepared, state, log)
        show_test_rows("after", prepared, log, stop, rollouts)
        log.write(events.Phase(text="saving the adapter"))
        arrays = model.adapter_arrays(prepared.model)
        checkpoint.save_adapter(folder.adapter, arrays, prepared.adapters.config, result_step)
        prefix.remove(folder.path / PREFIX)  # a stopped run keeps it
        reason, adapter = "done", str(folder.adapter)
    finished = events.Finished(
        step=state.step,
        reason=reason,
        adapter=adapter,
        seconds=time.perf_counter() - began,
        adapter_step=result_step,
    )
    log.write(finished)
    return finished


def referenced(prepared: Prepared, log: events.EventLog) -> Prepared:
    """The rows with the log-probabilities of their answers under the model as the run starts."""
    depends_on = {
        **prepared.depends_on["model"],
        **prepared.depends_on.get("first adapter", {}),
        "--quantize": str(prepared.config.quantize),
        "dtype": str(prepared.dtype),
    }
    if prepared.config.adapter_dtype != "float32":  # rounds the first adapter
        depends_on["--adapter-dtype"] = prepared.config.adapter_dtype

    def with_values(examples: Examples) -> Examples:
        return with_reference(
            examples,
            prepared.engine,
            prepared.rows_at,
            depends_on,
            store() / "cache",
            lambda text: log.write(events.Stage(text=text)),
        )

    log.write(events.Stage(text="computing the reference"))
    schedule = replace(prepared.schedule, examples=with_values(prepared.schedule.examples))
    valid = None if prepared.valid is None else with_values(prepared.valid)
    return replace(prepared, schedule=schedule, valid=valid)


def reason_of_early_end(state: TrainState) -> str:
    """Why --patience ended the run."""
    text = f"stopped after {state.without_better} validations without improvement"
    return text if state.best_step is None else f"{text}; best at step {state.best_step}"


def fill_prefix(prepared: Prepared, step: int, log: events.EventLog, stop: Stop) -> None:
    """Fill the prefix cache with the texts of the next epoch, if the engine streams weights."""
    if prepared.engine.fill is None or stop:
        return

    log.write(events.Stage(text="filling the prefix cache"))
    steps = range(step, min(prepared.steps, step + prepared.schedule.steps_per_epoch))
    left = takewhile(lambda _: not stop, steps)
    schedule, hidden = prepared.schedule, prepared.budget.demand.facts.hidden
    own, rows_at = prepared.ranks.own_batches, prepared.rows_at
    batches = (own(schedule, index, rows_at, hidden) for index in left)
    prepared.engine.fill(chain.from_iterable(batches))


def train_step(
    prepared: Prepared,
    governor: Governor,
    update: Update,
    state: TrainState,
    log: events.EventLog,
    rollouts: RolloutSource | SoftSource | None = None,
) -> tuple[TrainState, list[Batch]]:
    """One optimizer update over the rows of step `state.step`; return the new state and batches.

    rollouts: makes what the step trains, if it does not train the rows of the data.

    If the loss or the gradients are not finite, or all rows have weight 0, neither the adapters
    nor the optimizer change, and no batches are returned.
    """
    began = time.perf_counter()
    config, index = prepared.config, state.step
    governor.before_step()
    prepared.engine.waited()  # from now on, what this step waits
    engine, schedule, gradients = prepared.engine, prepared.schedule, prepared.gradients
    gradients.clear()  # of a step that failed
    ranks = prepared.ranks
    ranks.begin_step(index)
    whole: list[Batch] | None = None
    others_first = scored_first = False
    own_gradients = None
    metrics: dict[str, float] = {}
    if rollouts is not None:
        found = rollouts.of_step(index, governor.rows_at)
        batches, denominator, metrics = found.batches, found.denominator, found.metrics
        own_gradients = found.gradients
    else:
        others_first = "others" in engine.objective.phases
        scored_first = others_first or "scores" in engine.objective.phases
        scored_first = scored_first or not schedule.has_room_for_groups(index, governor.rows_at)
        batches_of = schedule.split_batches_of if scored_first else schedule.batches_of
        whole, hidden = batches_of(index, governor.rows_at), prepared.budget.demand.facts.hidden
        denominator = engine.objective.denominator(whole)
        batches = ranks.own_batches(
            schedule, index, governor.rows_at, hidden, whole, split=scored_first
        )
    done = replace(state, step=index + 1)
    if denominator == 0:
        log.write(skipped_event(replace(done, skipped=state.skipped + 1), "every weight is 0"))
        return replace(done, skipped=state.skipped + 1), []

    seed = derive_seed(config.seed, "dropout", index)
    scale = state.loss_scale / denominator
    if own_gradients is not None:
        sums = own_gradients(scale, gradients)
    elif others_first:
        whole = whole if ranks.size > 1 else None
        batches = with_baseline(engine, batches, whole, ranks.sum_values)
        sums = accumulate(engine, batches, scale, seed, gradients)
    elif scored_first and batches:
        weighed, sums = with_weights(engine, batches)
        accumulate(engine, weighed, scale, seed, gradients)
    else:
        sums = accumulate(engine, batches, scale, seed, gradients)
    counts = own_counts = [
        sum(batch.real_tokens for batch in batches),
        sum(batch.tokens.size for batch in batches),
        sum(batch.trained_tokens for batch in batches),
    ]
    sums, counts = ranks.step_sums(sums, gradients, prepared.model.trainable_parameters(), counts)
    loss = sums.loss / denominator
    norm = optimizer.global_norm(gradients).item() / state.loss_scale
    if not (math.isfinite(loss) and math.isfinite(norm)):
        gradients.clear()
        done = optimizer.after_skipped_step(done, loss)
        log.write(skipped_event(done, f"the loss is {loss}, the gradient norm {norm}"))
        return done, []

    rate = optimizer.learning_rate(config, index, prepared.steps)
    clip = optimizer.clip_factor(norm, config.max_grad_norm)
    update(gradients, clip / state.loss_scale, rate)
    mx.synchronize()  # device errors arrive late: wait for them before the step counts as done
    sample, highest_bytes = governor.look()
    seconds, limit_bytes = time.perf_counter() - began, prepared.budget.limit.limit_bytes
    ranks.note_step(own_counts[0], seconds, highest_bytes or sample.process_bytes, limit_bytes)
    log.write(
        events.Step(
            step=done.step,
            steps=prepared.steps,
            epoch=prepared.schedule.epoch_of(index) + 1,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=counts[0],
            padded_tokens=counts[1],
            trained_tokens=counts[2],
            seconds=seconds,
            highest_bytes=highest_bytes,
            metrics={**metrics, **sums.means()},
            read_wait_s=engine.waited(),
            **asdict(sample),
        )
    )
    return optimizer.after_finite_step(done, prepared.dtype), batches


def accumulate(
    engine: Engine, batches: list[Batch], scale: float, seed: int, total: Gradients
) -> Totals:
    """Add the gradients of `scale` times the loss of all micro-batches to `total`; return their
    sums."""
    totals = Totals()
    for batch in batches:
        sums = engine.add_gradients(batch, scale, seed, total)
        mx.eval(sums)
        totals.add(sums)
    return totals


def skipped_event(state: TrainState, reason: str) -> events.Skipped:
    return events.Skipped(
        step=state.step, reason=reason, in_a_row=state.skipped_in_a_row, total=state.skipped
    )


def train_until_done(
    folder: RunFolder,
    config: TrainConfig,
    stop: Stop,
    level: int = 0,
    begin_guard: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> int:
    """Train `folder` with `config`, under one plan after another; return the exit status.

    level: the number of faster plans that fit but are skipped.
    begin_guard: is called once the run is known to fit.

    After an out-of-memory error the run continues from its last checkpoint under the next smaller
    plan.
    """
    with locked(folder), contextlib.closing(events.EventLog(folder.events)) as log:
        rest = "stopping after this step"
        if config.generates:
            rest += ", or before it if its completions are not there yet"
        text = f"{rest}; signal again to stop immediately"
        stop.on_first = lambda: log.write(events.Stopping(text=text))
        failed_at, watch = [], Watch()
        try:
            while True:
                wanted = train_under_plan(
                    folder, config, log, stop, level, watch, begin_guard, ranks
                )
                if isinstance(wanted, events.Finished):
                    return 0 if wanted.adapter else 128 + (ranks.stopped_by(stop) or 0)
                if wanted.action.kind == "restart":
                    if config.supervise:
                        return exits.RESTART
                    raise RunError(
                        f"{folder.path}: {wanted.action.cause}; everything is saved, but only a "
                        "new process can free this memory: your_ai train --resume "
                        f"{folder.reference}"
                    )
                if wanted.failed and ranks.size > 1:  # the others wait in the step
                    ranks.fail(wanted.action.cause, exits.OUT_OF_MEMORY)
                    return exits.OUT_OF_MEMORY
                watch = wanted.watch
                level += {"smaller_plan": 1, "larger_plan": -1}.get(wanted.action.kind, 0)
                failed_at = [*failed_at, wanted.step] if wanted.failed else []
                if failed_at.count(wanted.step) > MAX_OUT_OF_MEMORY:
                    echo_error(f"error: {folder.path}: {wanted.action.cause}")
                    return exits.OUT_OF_MEMORY
        finally:
            stop.on_first = lambda: None  # a late signal must not write to a closed file


def train_under_plan(
    folder: RunFolder,
    config: TrainConfig,
    log: events.EventLog,
    stop: Stop,
    level: int,
    watch: Watch,
    begin_guard: Callable[[], None],
    ranks: Ranks,
) -> events.Finished | Replan:
    """Call `run` under one plan; return how it ended, or how to continue. Frees its memory."""
    try:
        with probe.Sampler() as sampler, telling_gauges(folder, log):
            return run(folder, config, log, stop, level, watch, sampler, begin_guard, ranks)
    except Replan as replan:
        before, wanted = probe.read(), Replan(replan.action, replan.step, replan.watch)
    except (RuntimeError, MemoryError) as error:
        reason = explain(first_line(error))
        if not is_memory_error(error):
            if type(error) is not RuntimeError:  # Python's subclasses of it are bugs of this code
                raise
            raise RunError(f"{folder.path}: {reason}") from error
        action, before = MemoryAction(kind="smaller_plan", cause=reason), probe.read()
        wanted = Replan(action, saved_step(folder), watch, failed=True)
    began = time.perf_counter()
    log.write(events.Phase(text="freeing memory for another plan"))
    allocator.free()  # nothing refers to the model any more: the exception is gone
    after = probe.read()
    log.write(action_event(wanted.action, wanted.step, before, after, time.perf_counter() - began))
    return wanted


def awake_elsewhere(ranks: Ranks, config: TrainConfig) -> contextlib.AbstractContextManager[None]:
    """Keep the Mac of another rank than 0 awake; that of rank 0 is the supervisor's care."""
    return host.kept_awake(os.getpid(), not ranks.is_first and not config.allow_sleep)


def main() -> None:
    """Train one run; print errors as one line on stderr."""
    parser = argparse.ArgumentParser(prog="python -m your_ai.training")
    parser.add_argument("run")
    parser.add_argument("--level", type=int, default=0, help="number of plans to skip")
    parser.add_argument("--settings", help="all settings as JSON, instead of config.yaml")
    parser.add_argument("--parent-fd", type=int, help="a pipe that closes with the supervisor")
    parser.add_argument("--memory-of-ranks", help="limit of each rank in GB, as JSON")
    parser.add_argument("--report", help="file for the exit status of rank 0")
    parser.add_argument("--parent-pid", type=int, help="supervisor of rank 0, on its machine")
    given = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(SHOW_STACK)
    ranks = ALONE
    try:
        with stop_signals() as stop, contextlib.ExitStack() as keeps_awake:
            if given.parent_fd is not None:
                watch_parent(given.parent_fd)
            settings = build(json.loads(given.settings), "--settings") if given.settings else None
            ranks = join(settings.heartbeat_timeout_s if settings else DEFAULT_TIMEOUT_S)
            if given.report is not None and ranks.beats is not None:
                ranks.beats.on_loss = partial(end_process, report=Path(given.report))
            with telling_others(ranks):
                folder = find(given.run) if ranks.is_first else RunFolder(Path(given.run))
                config = settings or folder.read_config()
                if given.memory_of_ranks:
                    ranks.limit_gb = json.loads(given.memory_of_ranks)[ranks.rank]
                if given.parent_pid is not None and ranks.is_first:
                    watch_pid(given.parent_pid)
                if given.parent_fd is None:
                    keeps_awake.enter_context(awake_elsewhere(ranks, config))
                folder = ranks.folder_of(folder, config)
                last_word = partial(ranks.fail, *OUT_OF_ROOM)
                limited = ranks.with_own_limit(config) if ranks.size > 1 else config
                with within_limit(folder, limited, last_word) as begin_guard:
                    status = train_until_done(folder, config, stop, given.level, begin_guard, ranks)
    except (UserError, RunError) as error:
        status = exits.USER if isinstance(error, UserError) else exits.FAILED
        if ranks.is_first:  # else rank 0 says it, with the name of this rank
            echo_error(f"error: {error}")
    except PeerLost as error:
        echo_error(f"{LOST}{error}")
        status = exits.PEER_LOST
    except Interrupted as interrupted:
        status = 128 + interrupted.number
    except Exception:
        echo_traceback()
        status = exits.CRASHED
    if given.report is not None and ranks.is_first:
        write_report(Path(given.report), status)
    sys.exit(status)
