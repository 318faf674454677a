"""Recognize a run that has nothing left to do, without loading its model."""

from __future__ import annotations

from your_ai.config import FIELDS, TrainConfig, last_step
from your_ai.run import events
from your_ai.run.folder import RunFolder, is_running, with_absolute_paths

# Settings that decide only how long a run trains.
LENGTH = ("max_steps", "epochs", "patience")
AROUND = ("allow_sleep", "notify", "wait")  # what the computer does meanwhile


def already_finished(folder: RunFolder, config: TrainConfig) -> str:
    """Say in one line that a run has done all that `config` asks for; empty if not.

    It is only recognized if the other settings are those of the run, its adapter is intact, and
    it has no trackers or hub to send the rest to.
    """
    if (ends := ends_of_finished(folder)) is None:
        return ""
    start, end = ends
    if config.report_to or config.push_to or is_running(folder) or not is_same(folder, config):
        return ""
    from your_ai.run import checkpoint  # it loads MLX, which is not needed for a run that goes on

    there = checkpoint.list_checkpoints(folder.checkpoints)
    state = checkpoint.load_state(there[0]) if there else None
    result = end.step if end.adapter_step is None else end.adapter_step
    if state is None or state.step != end.step or state.validation_due:
        return ""
    enough = 0 < config.patience <= state.without_better
    if not enough and state.step != last_step(config, start.steps_per_epoch):
        return ""
    if checkpoint.adapter_step(folder.adapter) != result:
        return ""
    return (
        f"{folder.path}: already finished, with {end.step} steps; to train longer, resume it with "
        f"more {'--epochs' if config.max_steps is None else '--max-steps'}"
        f"{' or --patience 0' if enough else ''}"
    )


def ends_of_finished(folder: RunFolder) -> tuple[events.Started, events.Finished] | None:
    """The last start of a run and its end; None if it has not done all its steps."""
    kinds = (events.Started, events.Died, events.Finished)
    ends = [record.event for record in events.tail(folder.events, 0, kinds)[0]]
    starts = events.of(events.Started, ends)
    end = ends[-1] if starts else None
    if not isinstance(end, events.Finished) or end.reason != "done":
        return None
    return starts[-1], end


def is_same(folder: RunFolder, config: TrainConfig) -> bool:
    """Return whether a config is that of the run, except for how long it trains."""
    saved, wanted = folder.read_config(), with_absolute_paths(config)
    names = [name for name in FIELDS if name not in (*LENGTH, *AROUND)]
    return all(getattr(saved, name) == getattr(wanted, name) for name in names)
