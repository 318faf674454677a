"""`your_ai plan`: show the memory and the plan of a run before it starts."""

from __future__ import annotations

import shutil
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from your_ai.config import defaults
from your_ai.dashboard.view import duration
from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.memory import limit as limits
from your_ai.memory.endurance import writes_of
from your_ai.memory.estimate import read_bytes, spilled_bytes, teacher_read_bytes
from your_ai.memory.limit import text
from your_ai.memory.plan import (
    BUDGETS_GB,
    MOST,
    Budget,
    Choice,
    LongestRow,
    Option,
    front_of,
    longest_rows,
    not_predicted,
    options,
    rows_of,
    seconds_of,
)
from your_ai.memory.sizes import SOFTMAX_BYTES
from your_ai.memory.workload import Plan, Workload, words
from your_ai.run.folder import RUNS

# What a workload has that is the same for any length and limit.
SHORT_TOKENS, ANY_GB = 4096, 1e6
LEAST = "least\nlimit"  # the header of the least limits of plans


def described(budget: Budget, option: Option) -> dict[str, Any]:
    """A plan as data, in bytes and seconds; step_cost is relative to the fused engine."""
    plan, workload = option.plan, budget.workload
    return {
        "plan": plan.engine,
        "rows_at_once": rows_of(workload, plan, max(workload.lengths)),
        "spill": plan.spill,
        "text": words(plan, max(workload.lengths)),
        "rank": workload.training.rank,
        "blocks": workload.training.blocks,
        "components": option.estimate.components,
        "phases": option.estimate.phases,
        "mlx_peak_bytes": option.estimate.mlx_bytes,
        "process_peak_bytes": option.estimate.process_bytes,
        "needed_bytes": option.needed_bytes,
        "step_cost": option.cost,
        "seconds_a_step": option.seconds,
        "read_bytes_a_micro_batch": read_bytes(workload.facts, workload.training, plan),
        "teacher_read_bytes": teacher_read_bytes(workload, plan),
    }


def as_json(budget: Budget) -> dict[str, Any]:
    choice = budget.choice
    return {
        "limit_bytes": budget.limit.limit_bytes,
        "limit_reason": budget.limit.reason,
        "notices": list(budget.limit.notices),
        **described(budget, choice.option),
        "measured": budget.workload.costs is not None,
        "seconds_by_term": by_term(budget),
        "seconds_note": not_predicted(budget.workload),
        "steps": budget.workload.steps.steps,
        "smaller": choice.smaller and described(budget, choice.smaller),
        "larger": choice.larger and described(budget, choice.larger),
    }


def by_term(budget: Budget) -> dict[str, float]:
    """The predicted seconds of a step under the chosen plan; none if they are not predicted."""
    if not_predicted(budget.workload):
        return {}
    return seconds_of(budget.workload, budget.choice.option.plan)


def front_json(budget: Budget) -> list[dict[str, Any]]:
    """The plans that no other beats in both memory and time, the fastest first, as data."""
    return [
        {**described(budget, option), "chosen": option.plan == budget.choice.option.plan}
        for option in front_of(options(budget.workload))
    ]


def seconds_text(seconds: float) -> str:
    """Seconds of a step: `3.2 s`, `0.085 s`, `2:05`."""
    return f"{seconds:.2g} s" if seconds < 100 else duration(seconds)


def about_seconds(option: Option) -> str:
    """`, about 3.2 s / step`; empty if no seconds are predicted."""
    return "" if option.seconds is None else f", about {seconds_text(option.seconds)} / step"


def time_text(budget: Budget) -> str:
    """One line about the time of the chosen plan, or about why it is not known; may be empty."""
    seconds, steps = budget.choice.option.seconds, budget.workload.steps.steps
    if seconds is None:
        return "" if budget.workload.costs is None else not_predicted(budget.workload)
    whole = f", {duration(steps * seconds)} in all ({steps:,} steps)" if steps else ""
    return f"about {seconds_text(seconds)} / step{whole}, as its blocks took on this machine"


def front_table(budget: Budget) -> RenderableType:
    """The plans that no other beats in both memory and time, the fastest first."""
    front, longest = front_of(options(budget.workload)), max(budget.workload.lengths)
    known = all(option.seconds is not None for option in front)
    drawn = Table(box=None, pad_edge=False)
    for header in ("", "uses", LEAST, "s / step" if known else "step cost", "plan"):
        drawn.add_column(header, justify="left" if header in ("", "plan") else "right")
    for option in front:
        chosen = "chosen" if option.plan == budget.choice.option.plan else ""
        if option.needed_bytes > budget.limit.limit_bytes:
            chosen = "too large"
        drawn.add_row(chosen, *sizes(option), time_of_row(option), words(option.plan, longest))
    note = time_text(budget)
    lines: list[RenderableType] = [text(budget.limit), *budget.limit.notices, "", drawn]
    return Group(*lines, *(["", note] if note else []))


def time_of_row(option: Option) -> str:
    return f"{option.cost:.2f}" if option.seconds is None else seconds_text(option.seconds)


def sizes(option: Option) -> tuple[str, str]:
    """The estimated peak of a plan, and the least limit that it needs: with the safety margin."""
    return size_text(option.estimate.process_bytes), size_text(option.needed_bytes)


def neighbors(choice: Choice, longest: int) -> Table:
    """The chosen plan, between the next larger and the next smaller one."""
    named = (("larger", choice.larger), ("chosen", choice.option), ("smaller", choice.smaller))
    known = choice.option.seconds is not None
    beside = Table(box=None, pad_edge=False)
    for header in ("", "plan", "uses", LEAST, "s / step" if known else "step cost"):
        beside.add_column(header, justify="left" if header in ("", "plan") else "right")
    for name, option in named:
        if option is not None:
            beside.add_row(name, words(option.plan, longest), *sizes(option), time_of_row(option))
    return beside


GUESSED = "a guess from sizes: this model's work was not measured here"


def table(budget: Budget) -> RenderableType:
    """The chosen plan, its bytes by component, and the next smaller and larger plans."""
    choice = budget.choice
    longest = max(budget.workload.lengths)
    parts = Table(box=None, pad_edge=False)
    parts.add_column("")
    parts.add_column("MB", justify="right")
    parts.add_column("")
    for name, size in choice.option.estimate.components.items():
        if size:
            parts.add_row(name, f"{size / 1e6:,.0f}")
    phases = choice.option.estimate.phases
    if phases and budget.workload.teacher is None:
        parts.add_row("reference", "0", "the same weights, with the first adapters")
    peak, needed = choice.option.estimate.process_bytes, choice.option.needed_bytes
    parts.add_row("estimated peak", f"{peak / 1e6:,.0f}")
    for phase, size in phases.items():
        parts.add_row(f"  of phase {phase}", f"{size / 1e6:,.0f}")
    parts.add_row("safety margin", f"{(needed - peak) / 1e6:,.0f}")
    parts.add_row("least limit", f"{needed / 1e6:,.0f}")
    reads = read_bytes(budget.workload.facts, budget.workload.training, choice.option.plan)
    lines: list[RenderableType] = [text(budget.limit), *budget.limit.notices]
    lines += [adapters_line(budget.workload), "", parts, "", neighbors(choice, longest)]
    if budget.workload.costs is None:
        lines.append(GUESSED)
    if reads:
        lines.append(f"reads {size_text(reads)} of the model's files per micro-batch")
    lines += teacher_lines(budget.workload, choice.option.plan)
    size = rows_of(budget.workload, choice.option.plan, longest) * longest
    if written := disk_bytes(budget.workload, choice.option, size):
        lines.append(f"keeps {size_text(written)} in the run's folder while it trains")
        if note := disk_text(written):
            lines.append(note)
    if budget.workload.training.adapter.is_whole:
        writes = writes_of(
            budget.workload, choice.option.plan, max(1, budget.workload.steps.steps), 0
        )
        lines.append(writes.text(shutil.disk_usage(RUNS if RUNS.is_dir() else ".").total))
    if note := time_text(budget):
        lines.append(note)
    return Group(*lines)


READ_GB_S = (3, 6)  # what the disks of Macs read in a second


def teacher_lines(workload: Workload, plan: Plan) -> list[str]:
    """Lines about what a teacher reads, and what is kept of it."""
    teacher, found = workload.teacher, []
    if teacher is None:
        return []
    facts = teacher.facts or workload.facts
    state_bytes = facts.hidden * facts.float_bytes + SOFTMAX_BYTES * teacher.softmax
    when = "in each step" if teacher.again else "for the texts that go through it together"
    if read := teacher_read_bytes(workload, plan):
        seconds = ", ".join(f"{read / (speed * 1e9):.2g} s at {speed} GB/s" for speed in READ_GB_S)
        found.append(f"the teacher reads {size_text(read)} of its files {when} ({seconds})")
    if not teacher.again:
        every = f"{state_bytes:,} bytes a trained token"
        if workload.steps.rows_of_length:
            slots = sum(tokens * rows for tokens, rows in workload.steps.rows_of_length)
            most = int(slots * workload.steps.trained_share * state_bytes)
            every += f", at most {size_text(most)} for the training rows"
        found.append(f"keeps what the teacher makes of the texts in the run's folder: {every}")
    return found


def limit_of_mac_gb(memory_gb: float, max_memory_gb: float | None, force: bool) -> float:
    """The limit of a run on an idle Mac with this much RAM. Raises UserError."""
    found = limits.find_limit(limits.idle_mac(memory_gb), max_memory_gb, force)
    return found.limit_bytes / limits.GB


def longest_shown(workload: Workload, max_memory_gb: float | None) -> list[LongestRow]:
    """The longest row that fits into the limit, or into each of some usual ones.

    Raises UserError for a run whose rows are completions that it generates.
    """
    if workload.rollouts is not None:
        raise UserError(
            "--longest: with this objective rows are generated; --max-new-tokens says how long"
        )
    budgets = BUDGETS_GB if max_memory_gb is None else (max_memory_gb,)
    return list(longest_rows(workload, (int(gb * 1e9) for gb in budgets)))


def disk_bytes(workload: Workload, option: Option, tokens: int) -> int:
    """Bytes that a plan writes to the disk; tokens: of a micro-batch, with padding."""
    if workload.soft is not None:  # its engines keep these in memory
        return 0
    return spilled_bytes(workload.facts, workload.training, option.plan, tokens)


def disk_of_row(workload: Workload, row: LongestRow) -> int:
    """Bytes that the plan for the longest row writes, or for its group; 0 without a plan."""
    if row.choice is None:
        return 0
    return disk_bytes(workload, row.choice.option, workload.rows_together * row.tokens)


def disk_text(size: int, asked: str = "this") -> str:
    """A warning if the disk has less room than a plan writes; empty if it has enough."""
    free = shutil.disk_usage(RUNS if RUNS.is_dir() else ".").free
    if size <= free:
        return ""
    return f"the disk of {RUNS}/ has only {size_text(free)} free, and {asked} needs more"


def longest_as_json(workload: Workload, rows: list[LongestRow]) -> list[dict[str, Any]]:
    return [
        {
            "limit_bytes": row.limit_bytes,
            "tokens": row.tokens,
            "plan": row.choice and words(row.choice.option.plan, row.tokens),
            "needed_bytes": row.choice and row.choice.option.needed_bytes,
            "step_cost": row.choice and row.choice.option.cost,
            "disk_bytes": row.choice and disk_of_row(workload, row),
        }
        for row in rows
    ]


def longest_table(workload: Workload, rows: list[LongestRow]) -> RenderableType:
    """The longest rows, each with the plan that makes them fit."""
    found = Table(box=None, pad_edge=False)
    for header in ("budget", "longest row", "plan", "uses", LEAST, "disk"):
        found.add_column(header, justify="left" if header == "plan" else "right")
    written = [0]
    for row in rows:
        tokens = f"{row.tokens:,} tokens" if row.tokens else "none"
        plan, memory, disk = "nothing fits", ("", ""), ""
        if row.choice is not None:
            option = row.choice.option
            plan, memory = words(option.plan, row.tokens), sizes(option)
            written.append(disk_of_row(workload, row))
            disk = size_text(written[-1]) if written[-1] else ""
        found.add_row(size_text(row.limit_bytes), tokens, plan, *memory, disk)
    lines: list[RenderableType] = [adapters_line(workload), "", found]
    if note := disk_text(max(written), "a row of this table"):
        lines.append(note)
    if any(row.is_most for row in rows):
        lines.append(f"longer rows than {MOST:,} tokens were not tried")
    return Group(*lines)


def adapters_line(workload: Workload) -> str:
    training, blocks = workload.training, workload.facts.blocks
    if training.adapter.is_whole:
        return f"trained: {defaults.whole_text(training.rank, training.blocks, blocks)}"
    return f"adapters: {defaults.adapters_text(training.ranks.text, training.blocks, blocks)}"
