"""Estimate the disk space of what a plan keeps in files without a name, in the run's folder."""

from __future__ import annotations

from your_ai.memory.estimate_adapters import float32_bytes, optimizer_bytes
from your_ai.memory.facts import ModelFacts
from your_ai.memory.workload import Plan, Training


def spilled_bytes(facts: ModelFacts, training: Training, plan: Plan, tokens: int) -> int:
    """Bytes of gradients, optimizer states and block inputs on disk.

    tokens: of a micro-batch, with padding; the inputs of one micro-batch are there at a time.
    """
    found = 0
    if plan.gradients_on_disk:
        found += float32_bytes(facts, training)
    if plan.states_on_disk:
        found += optimizer_bytes(facts, training)
    if plan.inputs_on_disk:
        found += inputs_bytes(facts, training, tokens)
    return found


def inputs_bytes(facts: ModelFacts, training: Training, tokens: int) -> int:
    """Bytes of the inputs of the trained blocks."""
    return training.blocks * tokens * (facts.hidden + facts.passed) * facts.float_bytes
