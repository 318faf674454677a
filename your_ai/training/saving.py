"""Save the state of a run to its folder, and restore it."""

from __future__ import annotations

import time
from dataclasses import asdict, replace

from your_ai.config import AUTO, TrainConfig, is_due
from your_ai.errors import UserError
from your_ai.gates.text import counted
from your_ai.nets import model
from your_ai.run import checkpoint, events, requests
from your_ai.run.checkpoint import SavedCheckpoint, TrainState
from your_ai.run.folder import RunFolder, check_resumable
from your_ai.training import optimizer
from your_ai.training.distributed import ALONE, Ranks, digest_of
from your_ai.training.trainer import Trainer


def restore(folder: RunFolder, trainer: Trainer, log: events.EventLog) -> TrainState:
    """Restore the newest intact checkpoint and return its state, or return a first state.

    Raises UserError if the run cannot be resumed, or not with this model and data.
    """
    check_resumable(folder)
    path, faults = checkpoint.newest(folder.checkpoints)
    for problem in faults:
        log.write(events.Notice(text=f"{problem}; using the checkpoint before it"))
    if path is None:
        if source := trainer.config.from_adapter:
            log.write(events.Notice(text=f"starting from the adapter {source}"))
        trainer.enter_period(0)
        return optimizer.first_state(trainer.opened.dtype)
    check_unchanged(folder, trainer)
    saved = checkpoint.load(path)
    if saved.state.step > trainer.steps:
        done = counted(saved.state.step, "step")
        raise UserError(f"{folder.path}: has done {done} already; set more steps")
    assert isinstance(saved.optimizer, dict)  # as it is read
    if trainer.whole is not None:
        trainer.whole.restore(path)
        trainer.enter_period(saved.state.step)
        if trainer.periods is None or not trainer.periods.begins(saved.state.step):
            optimizer.restore_files(trainer.optimizer, saved.optimizer, path)
        return saved.state
    model.set_adapters(trainer.model, saved.adapters)
    optimizer.restore_states(trainer.optimizer, saved.optimizer)
    return saved.state


def share_state(trainer: Trainer, state: TrainState) -> TrainState:
    """Rank 0's state, adapters and optimizer, on every rank.

    They are equal, bit for bit, unless the ranks' processors round differently.
    """
    ranks = trainer.ranks
    if ranks.size == 1:
        return state
    found = ranks.same_arrays(model.adapter_arrays(trainer.model))
    if found is not None:
        model.set_adapters(trainer.model, found)
    rule, states = trainer.optimizer.rule, trainer.optimizer.states
    found = ranks.same_arrays({"step": rule.state["step"]})
    if found is not None:
        rule.state.update(found)
    names = sorted({name.rpartition(".")[0] for name in states.names()})
    digests = ranks.gather([digest_of(states.get(name)) for name in names])
    for place, name in enumerate(names):  # one after the other: they may be on disk
        if len({of_rank[place] for of_rank in digests}) > 1:
            found = ranks.same_arrays(states.get(name))
            assert found is not None
            states.put({name: found})
    return TrainState(**ranks.of_first(lambda: asdict(state)))


def check_unchanged(folder: RunFolder, trainer: Trainer) -> None:
    """Raise UserError if the model, the data or a setting is not what the run began with."""
    path, _ = checkpoint.newest(folder.checkpoints)
    if path is None:
        return
    saved = checkpoint.load(path)
    for kind, now in trainer.depends_on.items():
        before = saved.depends_on[kind]
        changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
        if "objective" in changed:
            changed = ["objective"]  # other settings follow from it
        if changed:
            raise UserError(
                f"--resume {folder.name}: the {kind} changed since the run began "
                f"({', '.join(changed)}); restore it, or start a new run"
            )


def saved_step(folder: RunFolder, ranks: Ranks = ALONE) -> int:
    """The step of the newest checkpoint, of the rank that owns the run folder; 0 without one."""

    def newest() -> int:
        found = checkpoint.list_checkpoints(folder.checkpoints)
        return checkpoint.step_of(found[0]) if found else 0

    return ranks.of_first(newest)


def is_save_due(folder: RunFolder, config: TrainConfig, step: int) -> bool:
    """Return whether to save after `step`: by the settings, at a request, or before a pause."""
    asked = requests.withdraw(folder, requests.SAVE)
    return asked or requests.is_asked(folder, requests.PAUSE) or is_due(config.save_every, step)


def save(folder: RunFolder, trainer: Trainer, state: TrainState, log: events.EventLog) -> None:
    """Write a checkpoint, if this rank is the one that owns the run folder."""
    if not trainer.ranks.is_first:
        return
    began = time.perf_counter()
    log.write(events.Phase(text="saving"))
    saved = SavedCheckpoint(
        state=state,
        adapters={},
        optimizer=optimizer.saved_counters(trainer.optimizer),
        adapter_config=trainer.adapters.config,
        depends_on=trainer.depends_on,
    )
    if trainer.whole is not None:
        target = checkpoint.path_at(folder.checkpoints, state.step)
        files = trainer.whole.saved(target) | optimizer.saved_files(trainer.optimizer)
        saved = replace(saved, files=files)
    else:
        arrays = model.adapter_arrays(trainer.model)
        states = optimizer.saved_states(trainer.optimizer)
        saved = replace(saved, adapters=arrays, optimizer=states)
    path = checkpoint.save(folder.checkpoints, saved)
    best = state.best_step if trainer.config.keep_best else None
    checkpoint.prune(folder.checkpoints, state.step, trainer.config.keep, best)
    seconds = time.perf_counter() - began
    log.write(events.Checkpoint(step=state.step, folder=str(path), seconds=seconds))


def use_result(folder: RunFolder, trainer: Trainer, state: TrainState, log: events.EventLog) -> int:
    """Give the model the adapters that are the result of the run; return their step.

    These are the ones with the best validation loss, or the last ones: without validations, with
    --no-keep-best, and with a notice if the checkpoint of the best is damaged or gone.
    """
    best = state.best_step
    if not trainer.config.keep_best or best is None or best == state.step:
        return state.step
    path = checkpoint.path_at(folder.checkpoints, best)
    problem = checkpoint.fault(path)
    if problem is not None:
        text = f"{problem}; using the adapter of the last step, {state.step}, instead of the best"
        log.write(events.Notice(text=text))
        return state.step
    if trainer.whole is not None:
        trainer.whole.restore(path)
    else:
        model.set_adapters(trainer.model, checkpoint.load_adapters(path))
    return best


def keep_settings(folder: RunFolder, trainer: Trainer, log: events.EventLog) -> None:
    """Write what was chosen or changed, if this rank owns the run folder; notify if the end of the
    schedule of a run moves."""
    if not trainer.ranks.is_first:
        return
    config, steps = trainer.config, trainer.steps
    before = folder.read_config()
    folder.change_config(trainer.ranks.as_given(config))
    began = before.epochs != AUTO  # else nothing was recorded yet
    moved = began and (before.max_steps, before.epochs) != (config.max_steps, config.epochs)
    decays = config.lr_schedule != "constant" and config.warmup_steps < steps
    if decays and config.lr_decay_steps is None and moved:
        end = optimizer.learning_rate(config, steps, steps)
        reason = "because the run's length changed"
        text = f"the learning rate now falls to {end:g} at step {steps}, {reason}"
        log.write(events.Notice(text=text))
