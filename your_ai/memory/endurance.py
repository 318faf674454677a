"""The bytes that a run of whole weights writes, and those that a disk usually bears. Pure.

Makers of SSDs usually guarantee about 600 terabytes written (TBW) for each terabyte of a disk. That
is a rule of thumb: the data sheet of a disk has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from your_ai.gates.text import counted, size_text
from your_ai.memory.estimate import hidden_bytes
from your_ai.memory.estimate_adapters import float32_bytes, optimizer_bytes, working_bytes
from your_ai.memory.plan import rows_of
from your_ai.memory.workload import Plan, Workload

FULL_WRITES = 600  # of all of a disk
MOST_SHARE = 0.1  # of them, that a run may use without being asked to


@dataclass(frozen=True)
class Writes:
    """Bytes that a run writes."""

    step_bytes: int
    checkpoint_bytes: int
    """Of a checkpoint, beside links to files that are there already."""
    kept_bytes: int
    """That a checkpoint holds, with those files."""
    total_bytes: int
    steps: int

    def share(self, disk_bytes: int) -> float:
        """The share of what a disk of this size usually bears."""
        return self.total_bytes / (FULL_WRITES * disk_bytes)

    def text(self, disk_bytes: int) -> str:
        """`a step writes 3.1 GB, and 100 steps 310 GB: 0.1% of ...`"""
        return (
            f"a step writes {size_text(self.step_bytes)}, and {counted(self.steps, 'step')} "
            f"{size_text(self.total_bytes)}: {self.share(disk_bytes):.2%} of what a disk of "
            f"{size_text(disk_bytes)} usually bears, {FULL_WRITES} times its size; each checkpoint "
            f"that is kept holds {size_text(self.kept_bytes)}"
        )


def writes_of(workload: Workload, plan: Plan, steps: int, save_every: int) -> Writes:
    """The bytes that a run of whole weights writes. save_every: steps between checkpoints, or 0.

    Temporary files count, too: the system writes most of them to the disk.
    """
    facts, training, longest = workload.facts, workload.training, max(workload.lengths)
    rows = rows_of(workload, plan, longest)
    micro_batches = -(-workload.rows_per_step // rows)
    states, weights = optimizer_bytes(facts, training), working_bytes(facts, training)
    changed = working_bytes(facts, training.active)
    step = micro_batches * plan.gradients_on_disk * float32_bytes(facts, training.active)
    step += plan.states_on_disk * states + plan.weights_on_disk * changed
    if plan.inputs_on_disk:
        inputs = training.blocks * hidden_bytes(facts, rows, longest)
        step += micro_batches * inputs
    saved = (not plan.states_on_disk) * states + (not plan.weights_on_disk) * weights
    count = 1 + (steps // save_every if save_every else 0)
    total = steps * step + count * saved + facts.weights_bytes
    return Writes(step, saved, states + weights, total, steps)
