"""`your_ai plan`: what a run would hold, and how it would be computed, before it is begun."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from your_ai import model
from your_ai.budget import Budget
from your_ai.config import TrainConfig
from your_ai.engine.weights import can_stream, tensors_of
from your_ai.errors import UserError
from your_ai.hub.fingerprint import fingerprint
from your_ai.memory.estimate import read_bytes
from your_ai.memory.limit import text
from your_ai.memory.plan import Option, words
from your_ai.memory.sample import in_gb
from your_ai.prepare import SAMPLE_TOKENS, RunData, budget_of_run, read_data
from your_ai.quantize.convert import quantized_lazily


def preview(config: TrainConfig, folder: Path, seq_len: int | None) -> Budget:
    """The budget of a run of the model in `folder`; no weight is read.

    seq_len: T of all rows. Without it they are those of --data, and without data as long as
    --max-seq-length allows. Raises UserError where nothing fits.
    """
    if seq_len is not None and seq_len < 1:
        raise UserError(f"--seq-len {seq_len}: must be at least 1")
    dtype = model.compute_dtype(config.dtype)
    if config.quantize is None:
        network, _ = model.load_network(folder, dtype)  # lazily
        streamable = can_stream(network, tensors_of(network, folder))
    else:
        network, *_ = quantized_lazily(folder, config.quantize)
        streamable = True  # the copy that is trained has the weights as they are held
    tokenizer = None
    if any(folder.glob("tokenizer*")):  # what it takes counts; shapes of `bench` have none
        tokenizer = model.load_tokenizer_of(folder)
    model.add_adapters(network, config)  # whose faults are the user's
    if seq_len is None and config.data:
        files = fingerprint(folder)
        data = read_data(config, network, tokenizer, files, lambda _: None)
    else:
        longest = config.max_seq_length if seq_len is None else seq_len
        answers = longest + SAMPLE_TOKENS if config.samples else 0
        data = RunData({}, [], [longest], 0, answers)
    return budget_of_run(config, folder, dtype, data, streamable)


def described(budget: Budget, option: Option) -> dict[str, Any]:
    """A plan for programs, in bytes; cost: arithmetic of a step over that of a fused one."""
    plan, demand = option.plan, budget.demand
    return {
        "plan": plan.engine,
        "rows_at_once": plan.rows(max(demand.lengths), demand.batch_size),
        "spill": plan.spill,
        "text": words(plan, max(demand.lengths)),
        "components": option.estimate.components,
        "mlx_peak_bytes": option.estimate.mlx_bytes,
        "process_peak_bytes": option.estimate.process_bytes,
        "needed_bytes": option.needed_bytes,
        "step_cost": option.cost,
        "read_bytes_a_micro_batch": read_bytes(demand.facts, demand.training, plan),
    }


def as_json(budget: Budget) -> dict[str, Any]:
    choice = budget.choice
    return {
        "limit_bytes": budget.limit.limit_bytes,
        "limit_reason": budget.limit.reason,
        "notices": list(budget.limit.notices),
        **described(budget, choice.option),
        "smaller": choice.smaller and described(budget, choice.smaller),
        "larger": choice.larger and described(budget, choice.larger),
    }


def table(budget: Budget) -> RenderableType:
    """The plan in force, its bytes by component, and the plans beside it."""
    choice = budget.choice
    longest = max(budget.demand.lengths)
    parts = Table(box=None, pad_edge=False)
    parts.add_column("")
    parts.add_column("MB", justify="right")
    for name, size in choice.option.estimate.components.items():
        if size:
            parts.add_row(name, f"{size / 1e6:,.0f}")
    parts.add_row("estimated peak", f"{choice.option.estimate.process_bytes / 1e6:,.0f}")
    beside = Table(box=None, pad_edge=False)
    for header in ("", "plan", "needs", "step cost"):
        beside.add_column(header, justify="left" if header in ("", "plan") else "right")
    named = (("larger", choice.larger), ("chosen", choice.option), ("smaller", choice.smaller))
    for name, option in named:
        if option is not None:
            row = (words(option.plan, longest), in_gb(option.needed_bytes), f"{option.cost:.2f}")
            beside.add_row(name, *row)
    reads = read_bytes(budget.demand.facts, budget.demand.training, choice.option.plan)
    lines: list[RenderableType] = [text(budget.limit), *budget.limit.notices, "", parts, "", beside]
    if reads:
        lines.append(f"reads {in_gb(reads)} of the model's files a micro-batch")
    return Group(*lines)
