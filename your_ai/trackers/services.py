"""wandb, SwanLab and TensorBoard, behind the same three functions.

Each package is imported when its tracker is opened, in the trackers' process alone. What its
users set in its environment variables wins over what is said here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.trackers.rows import StepFigures, Texts

PROJECT = "your_ai"
PACKAGES = {"wandb": "wandb", "swanlab": "swanlab", "tensorboard": "tensorboardX"}
DONE = "done"  # how a run ends that did all its steps
TENSORBOARD_FLUSH_S = 2


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run first.

    folder: of the run, for the tracker's own files; identity: the same for as long as the
    run lives, through every resumption.
    """

    folder: Path
    name: str
    identity: str
    config: Mapping[str, Any]


@dataclass(frozen=True)
class Tracker:
    """An open tracker; each function may raise whatever its package does.

    close: with how the run ended, empty where that is not known.
    """

    figures: Callable[[StepFigures], None]
    texts: Callable[[Texts], None]
    close: Callable[[str], None]


def open_wandb(about: About) -> Tracker:
    """Steps are a figure of their own: wandb's count only grows, also over resumptions."""
    import wandb

    def chosen(variable: str, default: str) -> str:
        return os.environ.get(variable) or default

    try:
        run = wandb.init(
            project=chosen("WANDB_PROJECT", PROJECT),
            name=chosen("WANDB_NAME", about.name),
            id=chosen("WANDB_RUN_ID", about.identity),
            resume=chosen("WANDB_RESUME", "allow"),
            dir=chosen("WANDB_DIR", str(about.folder)),
            config=dict(about.config),
            allow_val_change=True,  # what may differ on a resumption
            settings=wandb.Settings(console="off"),  # this process' output is not the run's
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
    except BaseException:
        wandb.teardown()  # its service takes the id for one in use otherwise
        raise

    def texts(table: Texts) -> None:
        rows = [list(row) for row in table.rows]
        content = wandb.Table(columns=list(table.columns), data=rows)
        run.log({"step": table.step, table.name: content})

    return Tracker(
        figures=lambda row: run.log({"step": row.step, **row.values}),
        texts=texts,
        close=lambda ended: run.finish(exit_code=int(ended != DONE)),
    )


def open_swanlab(about: About) -> Tracker:
    os.environ.setdefault("SWANLAB_TERMINAL_PROXY_TYPE", "none")  # as for wandb's console
    import swanlab

    defaults = {
        "project": (PROJECT, "SWANLAB_PROJECT_NAME", "SWANLAB_PROJ_NAME"),
        "name": (about.name, "SWANLAB_EXPERIMENT_NAME", "SWANLAB_EXP_NAME"),
        "id": (about.identity, "SWANLAB_RUN_ID"),
        "resume": ("allow", "SWANLAB_RUN_RESUME", "SWANLAB_RESUME"),
        "log_dir": (str(about.folder / "swanlog"), "SWANLAB_LOG_DIR", "SWANLAB_LOGDIR"),
    }
    chosen = {
        name: value
        for name, (value, *variables) in defaults.items()
        if not any(os.environ.get(variable) for variable in variables)
    }
    config = {name: value for name, value in about.config.items() if value is not None}
    run = swanlab.init(config=config, reinit=True, **chosen)

    def close(ended: str) -> None:
        if ended == DONE:
            run.finish()
        elif ended:
            run.finish(state="aborted")
        else:
            run.finish(state="crashed", error="the run did not say how it ended")

    return Tracker(
        figures=lambda row: run.log(row.values, step=row.step),
        texts=lambda table: run.log({table.name: swanlab.Text(markdown(table))}, step=table.step),
        close=close,
    )


def open_tensorboard(about: About) -> Tracker:
    from tensorboardX import SummaryWriter

    writer = SummaryWriter(str(about.folder / "tensorboard"), flush_secs=TENSORBOARD_FLUSH_S)
    settings = tuple((name, str(value)) for name, value in about.config.items())
    writer.add_text("config", markdown(Texts(0, "config", ("setting", "value"), settings)), 0)

    def figures(row: StepFigures) -> None:
        for name, value in row.values.items():
            writer.add_scalar(name, value, row.step)

    def close(ended: str) -> None:
        writer.add_text("status", ended or "unknown")
        writer.close()

    return Tracker(
        figures=figures,
        texts=lambda table: writer.add_text(table.name, markdown(table), table.step),
        close=close,
    )


OPEN: dict[str, Callable[[About], Tracker]] = {
    "wandb": open_wandb,
    "swanlab": open_swanlab,
    "tensorboard": open_tensorboard,
}


def markdown(table: Texts) -> str:
    """The table as Markdown, each row on one line."""

    def line(cells: tuple[str, ...]) -> str:
        texts = (cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells)
        return f"| {' | '.join(texts)} |"

    rule = f"|{' --- |' * len(table.columns)}"
    return "\n".join([line(table.columns), rule, *map(line, table.rows)])
