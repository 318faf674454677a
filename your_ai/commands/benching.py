"""`your_ai bench`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from your_ai.config import GRPO
from your_ai.gates.console import echo_error, echo_json, open_console


def bench(
    objective: Annotated[
        str, typer.Option(help="What is learned: sft, dpo, ipo, simpo, orpo or grpo.")
    ] = "sft",
    shape: Annotated[
        str | None,
        typer.Option(
            help="Shape of a model that is made with random weights; large ones take gigabytes on "
            "the disk."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model to measure instead of a shape.")] = None,
    bits: Annotated[
        int, typer.Option(help="Bits the shape is quantized to: 4 or 8; 0 = not quantized.")
    ] = 4,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    seq_len: Annotated[int, typer.Option(help="Sequence length, in tokens.", min=2)] = 256,
    batch_size: Annotated[
        int, typer.Option(help="Rows, pairs of rows, or prompts per step.", min=1)
    ] = 1,
    rollouts: Annotated[
        int, typer.Option(help="Completions of each prompt, with grpo.", min=2)
    ] = 4,
    kl_beta: Annotated[
        float, typer.Option(help="Weight of the KL divergence, with grpo.", min=0.0)
    ] = 0.1,
    lora_rank: Annotated[int, typer.Option(help="Rank of the adapters.", min=1)] = 16,
    lora_layers: Annotated[
        str, typer.Option(help="Number of last blocks to adapt, or all.")
    ] = "all",
    lora_targets: Annotated[
        str, typer.Option(help="Layers to adapt, as for `train`.")
    ] = "all-linear",
    plan: Annotated[
        str, typer.Option(help="Plans of your_ai to measure, separated by commas.")
    ] = "fused",
    supervised: Annotated[
        float | None,
        typer.Option(
            help="Fraction of each row's tokens that is trained on, or generated; default: 1, or "
            "0.5 for pairs, 0.75 for grpo.",
            min=0.0,
            max=1.0,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps in each of two rounds.", min=2)] = 4,
    against: Annotated[
        str | None,
        typer.Option(
            help="What to compare with, separated by commas: mlx-lm, mlx-lm-checkpoint, "
            "mlx-lm-lora, mlx-lm-lora-checkpoint; or none; default: the first two, or none for "
            "pairs."
        ),
    ] = None,
    max_memory: Annotated[
        float | None, typer.Option(help="Memory limit of each process, in GB.", min=0.0)
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            help="Measure how a step scales from one process to this many, without peers.", min=1
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare memory and speed with mlx-lm or mlx-lm-lora here, on the same weights and tokens."""
    from your_ai.doctor import bench as measuring

    contenders = measuring.contenders_of(plan, against, objective)
    if supervised is None:
        supervised = {"sft": 1.0, GRPO: 0.75}.get(objective, 0.5)
    contest = measuring.Contest(
        folder=str(measuring.weights_of(shape, model, bits, dtype, echo_error)),
        dtype=dtype,
        seq_len=seq_len,
        batch_size=batch_size,
        lora_rank=lora_rank,
        lora_layers=lora_layers,
        lora_targets=lora_targets,
        supervised=supervised,
        steps=steps,
        max_memory=max_memory,
        objective=objective,
        **({"rollouts": rollouts, "kl_beta": kl_beta} if objective == GRPO else {}),
    )
    contest.train_config()  # raises UserError for invalid settings
    if processes > 1:
        from your_ai.doctor import scaling

        found = scaling.measured(contest, plan, processes, echo_error)
        if as_json:
            echo_json({"rows": [dataclasses.asdict(row) for row in found]})
        else:
            open_console().print(scaling.scaling_table(found))
        return
    rows = measuring.compare(contest, contenders, echo_error)
    if as_json:
        echo_json({"rows": [dataclasses.asdict(row) for row in rows]})
    else:
        open_console().print(
            measuring.table(rows, objective == GRPO), *measuring.over_limit(contest, rows), sep="\n"
        )
