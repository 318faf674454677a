"""Options that commands share, and the options made from the settings in TrainConfig."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Annotated, Any

import typer

from your_ai.config import FIELDS, OBJECTIVES_WITH, TYPES, default_text, describe, flag, negated
from your_ai.gates.console import echo_error

if TYPE_CHECKING:
    from your_ai.nets.saved_adapter import Trained

METAVARS = {
    "a whole number": "N",
    "a number": "X",
    "a text": "TEXT",
    "a list of names": "NAMES",
    " or ": "|",
}
# Panels of the help, and the settings in them.
OBJECTIVE = "Objective: all but --objective only with one other than sft"
PANELS = {
    "Model and data": (
        *("model", "data", "valid", "columns", "prompt_template", "from_adapter"),
        *("max_seq_length", "too_long", "max_row_bytes", "packing", "mask_prompt"),
    ),
    OBJECTIVE: ("objective", *OBJECTIVES_WITH),
    "Adapters": (
        *("lora_rank", "lora_alpha", "use_rslora", "lora_layers", "lora_targets", "lora_experts"),
        *("lora_dropout", "use_dora"),
    ),
    "Optimization": (
        *("max_steps", "epochs", "batch_size", "grad_accumulation", "optimizer", "learning_rate"),
        *("loraplus_ratio", "layerwise_lr_decay", "lr_schedule", "lr_end", "lr_decay_steps"),
        *("lr_decay_rate", "warmup_steps", "warmup_init", "weight_decay", "adam_beta1"),
        *("adam_beta2", "adam_epsilon", "adam_bias_correction", "max_grad_norm"),
        *("neftune_alpha", "seed"),
    ),
    "Memory": (
        *("max_memory", "force", "plan", "spill", "prefix_cache", "prefix_cache_folder", "dtype"),
        *("quantize", "reload_interval", "reload_at", "clear_cache_every", "leak_threshold_mb"),
        "leak_warmup",
    ),
    "Validation and output": (
        *("run", "eval_every", "save_every", "keep", "keep_best", "best_metric"),
        *("patience", "samples", "exact_match", "supervise", "allow_sleep", "notify", "report_to"),
        "push_to",
    ),
    "Several processes or machines": (
        *("processes", "hosts", "hostfile", "sync", "heartbeat_timeout_s"),
    ),
}
PANEL_OF = {name: panel for panel, names in PANELS.items() for name in names}


def names_of_runs(incomplete: str) -> list[str]:
    """The runs in runs/ whose names start so, for the completion of a shell."""
    from your_ai.run.folder import NAME, RUNS

    try:
        names = sorted(path.name for path in RUNS.iterdir() if path.is_dir())
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete) and NAME.fullmatch(name)]


# For commands that use the adapter of a run.
RUN = typer.Argument(
    help="The run: its name in runs/, or its folder.",
    metavar="RUN",
    autocompletion=names_of_runs,
)
NEWEST = typer.Argument(
    help="The run: its name in runs/, or its folder; default: the newest.",
    metavar="RUN",
    autocompletion=names_of_runs,
)
LATEST = typer.Argument(help="The run; default: the newest.", autocompletion=names_of_runs)
CHECKPOINT = typer.Option(
    help="Use this checkpoint: step-000120, best, or latest; default: the finished adapter."
)
MODEL = typer.Option(help="Folder of the run's model, if it was moved.")


def text_of(name: str) -> str:
    """The help of a setting."""
    return FIELDS[name].metadata["help"]


def option(name: str, declaration: str, kind: Any, help: str, **more: Any) -> inspect.Parameter:
    annotation = Annotated[kind, typer.Option(declaration, help=help, **more)]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
    )


def with_settings(*first: inspect.Parameter) -> inspect.Signature:
    """Return the parameters of a command that takes every setting as an option."""
    config = option(
        "config",
        "--config",
        str | None,
        "YAML file, also one of mlx-lm, or the name of a preset; command-line options override it.",
        metavar="FILE",
    )
    parameters = [config, *first]
    for name in FIELDS:
        help = f"{text_of(name)}{default_text(name)}"
        panel = {"rich_help_panel": PANEL_OF[name]}
        if TYPES[name] is bool:
            names = f"{flag(name)}/{negated(name)}"
            parameters.append(option(name, names, bool | None, help, **panel))
        else:
            metavar = describe(TYPES[name])
            for words, short in METAVARS.items():
                metavar = metavar.replace(words, short)
            parameters.append(option(name, flag(name), str | None, help, metavar=metavar, **panel))
    return inspect.Signature(parameters)


def run_or_newest(run: str | None) -> str:
    """Return `run`, or else the newest run with an adapter or a checkpoint, named on stderr.

    Raises UserError if there is no such run.
    """
    from your_ai.session.run_list import newest_trained

    if run is not None:
        return run
    folder, is_newest = newest_trained()
    which = "the newest" if is_newest else "the newest with an adapter or a checkpoint"
    echo_error(f"run: {folder.name} ({which})")
    return folder.name


def open_trained_with_note(run: str, checkpoint: str | None, model: str | None) -> Trained:
    """Call `open_trained`, and print its note for the user on stderr."""
    from your_ai.nets.saved_adapter import open_trained

    trained = open_trained(run, checkpoint, model)
    if trained.note:
        echo_error(f"note: {trained.note}")
    return trained
