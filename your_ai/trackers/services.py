"""wandb, SwanLab and TensorBoard behind the same two functions.

The packages queue, upload and retry by themselves. Each is imported when its tracker is
opened, and only in the trackers' process. Our settings are defaults of the packages' own
environment variables, so that what the user sets there wins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from your_ai.run.folder import RunFolder
from your_ai.trackers.rows import TextTable, TrackerRow

PROJECT = "your_ai"
PACKAGES = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "tensorboardX"}
DONE = "done"  # the reason of a run that finished all its steps
TENSORBOARD_FLUSH_S = 2  # the default of 120 s is too slow to watch


@dataclass(frozen=True)
class Tracker:
    """An open tracker. Both functions may raise whatever the package raises."""

    log: Callable[[TrackerRow], None]
    close: Callable[[str], None]
    """Takes the reason why the run ended, empty if it is not known."""


def open_wandb(folder: RunFolder, identity: str) -> Tracker:
    """wandb's own step may only increase by log calls, so our step is a metric."""
    set_defaults(
        WANDB_PROJECT=PROJECT,
        WANDB_NAME=folder.name,
        WANDB_RUN_ID=identity,
        WANDB_RESUME="allow",
        WANDB_DIR=str(folder.path.resolve()),
        WANDB_CONSOLE="off",  # the output of this process is not the run's
    )
    import wandb

    try:
        # A resumed run may have other settings.
        run = wandb.init(config=asdict(folder.read_config()), allow_val_change=True)
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except BaseException:
        wandb.teardown()  # else the next init fails: the id is in use
        raise

    def shown(value: float | TextTable) -> Any:
        if not isinstance(value, TextTable):
            return value
        return wandb.Table(columns=list(value.columns), data=[list(row) for row in value.rows])

    def log(row: TrackerRow) -> None:
        run.log({"step": row.step, **{name: shown(value) for name, value in row.values.items()}})

    return Tracker(log, lambda ended: run.finish(exit_code=int(ended != DONE)))


def open_swanlab(folder: RunFolder, identity: str) -> Tracker:
    set_defaults(
        SWANLAB_PROJ_NAME=PROJECT,
        SWANLAB_EXP_NAME=folder.name,
        SWANLAB_RUN_ID=identity,
        SWANLAB_RESUME="allow",
        SWANLAB_LOGDIR=str(folder.path.resolve() / "swanlog"),
        SWANLAB_TERMINAL_PROXY_TYPE="none",  # the output of this process is not the run's
    )
    import swanlab

    config = {n: value for n, value in asdict(folder.read_config()).items() if value is not None}
    run = swanlab.init(config=config, reinit=True)

    def shown(value: float | TextTable) -> Any:
        return swanlab.Text(markdown(value)) if isinstance(value, TextTable) else value

    def log(row: TrackerRow) -> None:
        run.log({name: shown(value) for name, value in row.values.items()}, step=row.step)

    def close(ended: str) -> None:
        if ended:
            run.finish(state="success" if ended == DONE else "aborted")
        else:
            run.finish(state="crashed", error="the run did not say how it ended")

    return Tracker(log, close)


def open_tensorboard(folder: RunFolder, identity: str) -> Tracker:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(
        str(folder.path.resolve() / "tensorboard"), flush_secs=TENSORBOARD_FLUSH_S
    )
    settings = tuple((name, str(value)) for name, value in asdict(folder.read_config()).items())
    writer.add_text("config", markdown(TextTable(("setting", "value"), settings)), 0)

    def log(row: TrackerRow) -> None:
        for name, value in row.values.items():
            if isinstance(value, TextTable):
                writer.add_text(name, markdown(value), row.step)
            else:
                writer.add_scalar(name, value, row.step)

    def close(ended: str) -> None:
        writer.add_text("status", ended or "unknown")
        writer.close()

    return Tracker(log, close)


# identity: the run's id in the tracker, which stays the same when the run is resumed.
OPEN: dict[str, Callable[[RunFolder, str], Tracker]] = {
    "wandb": open_wandb,
    "swanlab": open_swanlab,
    "tensorboard": open_tensorboard,
}


def set_defaults(**variables: str) -> None:
    """Set environment variables that are not set, or empty."""
    os.environ.update({name: v for name, v in variables.items() if not os.environ.get(name)})


def markdown(table: TextTable) -> str:
    """The table as Markdown, each row on one line."""

    def line(cells: tuple[str, ...]) -> str:
        texts = (cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    rule = f"|{' --- |' * len(table.columns)}"
    return "\n".join([line(table.columns), rule, *map(line, table.rows)])
