"""`your_ai bench`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from your_ai.commands.options import joined, memory_option
from your_ai.config import ALL_LINEAR, GRPO
from your_ai.errors import UserError
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
        list[str] | None,
        typer.Option(
            help="Layers to adapt, as for `train`. [default: all-linear]", metavar="NAMES"
        ),
    ] = None,
    optimizer_bits: Annotated[
        int, typer.Option(help="Bits of the optimizer's states of our plans, 32 or 8.")
    ] = 32,
    adapter_dtype: Annotated[
        str, typer.Option(help="Data type of the adapters of our plans, float32 or bfloat16.")
    ] = "float32",
    plan: Annotated[
        list[str] | None,
        typer.Option(
            help="Plans of your_ai to measure, separated by commas; auto@1.4: the fastest with an "
            "estimated MLX peak of at most 1.4 GB. [default: fused]",
            metavar="NAMES",
        ),
    ] = None,
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
        list[str] | None,
        typer.Option(
            help="What to compare with, separated by commas: mlx-lm, mlx-lm-checkpoint, "
            "mlx-lm-lora, mlx-lm-lora-checkpoint; or none; default: the first two, or none for "
            "pairs.",
            metavar="NAMES",
        ),
    ] = None,
    max_memory: Annotated[
        float | None, memory_option("Memory limit of each process, in GB.")
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure the speed of this machine, in 20 seconds, so that plans predict seconds.",
        ),
    ] = False,
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
    from your_ai.doctor.contest import Contest

    if calibrate:
        if shape is not None or model is not None:
            raise UserError("--calibrate: has models of its own; leave --shape and --model out")
        calibrate_machine(as_json)
        return
    peers = None if against is None else joined(against)
    if processes > 1:
        if peers not in (None, "none"):
            raise UserError("--against: only works without --processes, which measures our plans")
        peers = "none"
    contenders = measuring.contenders_of(joined(plan or ["fused"]), peers, objective)
    if supervised is None:
        supervised = {"sft": 1.0, GRPO: 0.75}.get(objective, 0.5)
    contest = Contest(
        folder=str(measuring.weights_of(shape, model, bits, dtype, echo_error)),
        dtype=dtype,
        seq_len=seq_len,
        batch_size=batch_size,
        lora_rank=lora_rank,
        lora_layers=lora_layers,
        lora_targets=joined(lora_targets or [ALL_LINEAR]),
        optimizer_bits=optimizer_bits,
        adapter_dtype=adapter_dtype,
        supervised=supervised,
        steps=steps,
        max_memory=max_memory,
        objective=objective,
        rollouts=rollouts if objective == GRPO else 1,
        kl_beta=kl_beta if objective == GRPO else 0.0,
    )
    contest.train_config()  # raises UserError for invalid settings
    if processes > 1:
        from your_ai.doctor import scaling

        found = scaling.measured(contest, contenders, processes, echo_error)
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


def calibrate_machine(as_json: bool) -> None:
    """Measure the speed of this machine and keep it; one that was kept stays until the end."""
    from your_ai.doctor import measure_speed as measuring

    measured = measuring.measured_times(echo_error)
    found = measuring.calibrated(measured)
    try:
        path = measuring.keep_speed(found, measured)
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror})") from error
    if as_json:
        echo_json({**dataclasses.asdict(found), "file": str(path)})
    else:
        open_console().print(measuring.speed_table(found, measured, path))
