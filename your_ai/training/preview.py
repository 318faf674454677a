"""`your_ai plan`: show the memory and the plan of a run before it starts."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from your_ai.errors import UserError
from your_ai.gates.text import counted, size_text
from your_ai.memory.demand import Budget
from your_ai.memory.estimate import read_bytes
from your_ai.memory.limit import text
from your_ai.memory.longest import BUDGETS_GB, MOST, LongestRow, longest_rows
from your_ai.memory.plan import Demand, Option, rows_of, words

# What a demand is asked for that is the same for any length and limit.
SHORT_TOKENS, ANY_GB = 64, 1e6


def described(budget: Budget, option: Option) -> dict[str, Any]:
    """A plan as data for programs, in bytes; step_cost is relative to the fused engine."""
    plan, demand = option.plan, budget.demand
    return {
        "plan": plan.engine,
        "rows_at_once": rows_of(demand, plan, max(demand.lengths)),
        "spill": plan.spill,
        "text": words(plan, max(demand.lengths)),
        "rank": demand.training.rank,
        "blocks": demand.training.blocks,
        "components": option.estimate.components,
        "phases": option.estimate.phases,
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


ABOVE = (
    "above the limit by its safety margin, or by what other plans measured here: the run measures "
    "itself before it trains, and is refused if it does not fit"
)


def table(budget: Budget) -> RenderableType:
    """The chosen plan, its bytes by component, and the next smaller and larger plans."""
    choice = budget.choice
    longest = max(budget.demand.lengths)
    parts = Table(box=None, pad_edge=False)
    parts.add_column("")
    parts.add_column("MB", justify="right")
    parts.add_column("")
    for name, size in choice.option.estimate.components.items():
        if size:
            parts.add_row(name, f"{size / 1e6:,.0f}")
    phases = choice.option.estimate.phases
    if phases:
        parts.add_row("reference", "0", "the same weights, with the first adapters")
    peak, needed = choice.option.estimate.process_bytes, choice.option.needed_bytes
    parts.add_row("estimated peak", f"{peak / 1e6:,.0f}")
    for phase, size in phases.items():
        parts.add_row(f"  of phase {phase}", f"{size / 1e6:,.0f}")
    parts.add_row("safety margin", f"{(needed - peak) / 1e6:,.0f}")
    parts.add_row("needs", f"{needed / 1e6:,.0f}")
    beside = Table(box=None, pad_edge=False)
    for header in ("", "plan", "needs", "step cost"):
        beside.add_column(header, justify="left" if header in ("", "plan") else "right")
    named = (("larger", choice.larger), ("chosen", choice.option), ("smaller", choice.smaller))
    for name, option in named:
        if option is not None:
            row = (
                words(option.plan, longest),
                size_text(option.needed_bytes),
                f"{option.cost:.2f}",
            )
            beside.add_row(name, *row)
    reads = read_bytes(budget.demand.facts, budget.demand.training, choice.option.plan)
    lines: list[RenderableType] = [text(budget.limit), *budget.limit.notices]
    lines += [adapters_text(budget.demand), "", parts, "", beside]
    if choice.option.needed_bytes > budget.limit.limit_bytes:
        lines.append(ABOVE)
    if reads:
        lines.append(f"reads {size_text(reads)} of the model's files per micro-batch")
    return Group(*lines)


def longest_shown(demand: Demand, max_memory_gb: float | None) -> list[LongestRow]:
    """The longest row that fits into the limit, or into each of some usual ones.

    Raises UserError for a run whose rows are completions that it generates.
    """
    if demand.rollouts is not None:
        raise UserError(
            "--longest: with this objective rows are generated; --max-new-tokens says how long"
        )
    budgets = BUDGETS_GB if max_memory_gb is None else (max_memory_gb,)
    return list(longest_rows(demand, (int(gb * 1e9) for gb in budgets)))


def longest_as_json(rows: list[LongestRow]) -> list[dict[str, Any]]:
    return [
        {
            "limit_bytes": row.limit_bytes,
            "tokens": row.tokens,
            "plan": row.choice and words(row.choice.option.plan, row.tokens),
            "needed_bytes": row.choice and row.choice.option.needed_bytes,
            "step_cost": row.choice and row.choice.option.cost,
        }
        for row in rows
    ]


def longest_table(demand: Demand, rows: list[LongestRow]) -> RenderableType:
    """The longest rows, each with the plan that makes them fit."""
    found = Table(box=None, pad_edge=False)
    for header in ("budget", "longest row", "plan", "needs"):
        found.add_column(header, justify="left" if header == "plan" else "right")
    for row in rows:
        tokens = f"{row.tokens:,} tokens" if row.tokens else "none"
        plan, needs = "nothing fits", ""
        if row.choice is not None:
            option = row.choice.option
            plan, needs = words(option.plan, row.tokens), size_text(option.needed_bytes)
        found.add_row(size_text(row.limit_bytes), tokens, plan, needs)
    lines: list[RenderableType] = [adapters_text(demand), "", found]
    if any(row.is_most for row in rows):
        lines.append(f"longer rows than {MOST:,} tokens were not tried")
    return Group(*lines)


def adapters_text(demand: Demand) -> str:
    training, blocks = demand.training, demand.facts.blocks
    which = "all" if training.blocks == blocks else f"the last {training.blocks} of"
    return f"adapters: rank {training.rank} in {which} {counted(blocks, 'block')}"
