"""Recorded speeds of machines, for tests of predicted seconds."""

from __future__ import annotations

from your_ai.memory.speed import KINDS, KnownSpeed, MachineSpeed

# One core of an x86 CPU with OpenBLAS, float32.
CORE = MachineSpeed(
    seconds=dict.fromkeys(KINDS, 0.0)
    | {
        "matmul": 1.9e-11,
        "weights": 7.3e-11,
        "quantized_matmul": 2.2e-11,
        "quantized_weights": 1.4e-9,
        "elements": 1.1e-9,
        "attention": 2.1e-11,
        "scores": 3.1e-9,
        "copied": 1.8e-9,
        "logits": 1.1e-9,
        "slices": 1.3e-3,
        "parameters": 3.2e-9,
        "arrays": 3.2e-5,
        "read": 1.4e-10,
        "embedded": 2e-5,
        "query_blocks": 1.3e-4,
        "calls": 2.3e-3,
        "steps": 5.9e-4,
    },
    float_bytes=4,
    machine=("cpu", "x86"),
    date="2026-01-01",
    lowest=-0.1,
    highest=0.1,
)
KNOWN = KnownSpeed(CORE)
