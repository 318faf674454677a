"""A memory plan in words."""

from __future__ import annotations

from your_ai.gates.text import counted
from your_ai.memory.workload import Kept, Plan


def words(plan: Plan, longest: int) -> str:
    """A plan as text: `streamed, micro-batches of 2 x 512 tokens`."""
    rows = max(1, plan.micro_tokens // longest)
    disk = ", optimizer on disk" if plan.spill else ""
    kept = f", {kept_words(plan.kept)}" if plan.kept else ""
    stay = f", weights of {counted(plan.resident, 'block')} in memory" if plan.resident else ""
    alone = "" if plan.blocks_ahead else ", one block read at a time"
    waves = f", {counted(plan.wave, 'completion')} at a time" if plan.wave else ""
    return (
        f"{plan.engine}, micro-batches of {rows} x {longest} tokens{disk}{kept}{stay}{alone}{waves}"
    )


def kept_words(kept: Kept) -> str:
    """`attention of 16 and linear layers of 4 blocks kept`"""
    counts = {
        "attention": kept.attention,
        "linear layers": kept.linear,
        "activations": kept.activations,
    }
    *most, last = [f"{name} of {count:,}" for name, count in counts.items() if count]
    text = f"{', '.join(most)} and {last}" if most else last
    return f"{text} {'block' if set(kept) <= {0, 1} else 'blocks'} kept"
