"""`your_ai bench`."""

from __future__ import annotations

import dataclasses

from your_ai.commands.options import JsonObject, with_options
from your_ai.config import GRPO
from your_ai.config.requests import BenchRequest
from your_ai.errors import UserError
from your_ai.gates.console import echo_error, echo_json, open_console


@with_options
def bench(request: BenchRequest, as_json: JsonObject = False) -> None:
    """Compare memory and speed with mlx-lm or mlx-lm-lora here, on the same weights and tokens."""
    from your_ai.doctor import bench as measuring
    from your_ai.doctor.contest import Contest

    objective, processes = request.objective, request.processes
    peers = None if request.against is None else ",".join(request.against)
    if processes > 1:
        if peers not in (None, "none"):
            raise UserError("--against: only works without --processes, which measures our plans")
        peers = "none"
    contenders = measuring.contenders_of(",".join(request.plan), peers, objective)
    shares = {"sft": 1.0, GRPO: 0.75}
    weights = measuring.weights_of(
        request.shape, request.model, request.bits, request.dtype, echo_error
    )
    contest = Contest(
        folder=str(weights),
        dtype=request.dtype,
        seq_len=request.seq_len,
        batch_size=request.batch_size,
        lora_rank=request.lora_rank,
        lora_layers=request.lora_layers,
        lora_targets=",".join(request.lora_targets),
        optimizer_bits=request.optimizer_bits,
        adapter_dtype=request.adapter_dtype,
        supervised=(
            shares.get(objective, 0.5) if request.supervised is None else request.supervised
        ),
        steps=request.steps,
        max_memory=request.max_memory,
        objective=objective,
        rollouts=request.rollouts if objective == GRPO else 1,
        kl_beta=request.kl_beta if objective == GRPO else 0.0,
    )
    contest.train_config()  # raises UserError for invalid settings
    if processes > 1:
        from your_ai.doctor import scaling

        found = scaling.measured_scaling(contest, contenders, processes, echo_error)
        if as_json:
            echo_json({"rows": [dataclasses.asdict(row) for row in found]})
        else:
            open_console().print(scaling.scaling_table(found))
        return
    rows = measuring.compare_contenders(contest, contenders, echo_error)
    if as_json:
        echo_json({"rows": [dataclasses.asdict(row) for row in rows]})
    else:
        open_console().print(
            measuring.bench_table(rows, objective == GRPO),
            *measuring.over_limit(contest, rows),
            sep="\n",
        )
