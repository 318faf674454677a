"""Events for the tests of the views."""

from __future__ import annotations

from typing import Any

from your_ai.run import events
from your_ai.run.events import Event, Record


def record(event: Event) -> Record:
    return Record(0.0, event)


def step(number: int, **changes: Any) -> events.Step:
    fields = {
        "step": number,
        "steps": 10,
        "epoch": 1,
        "loss": 1.25,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "tokens": 200,
        "padded_tokens": 256,
        "trained_tokens": 100,
        "seconds": 2.0,
        "active_bytes": 412_000_000,
        "peak_bytes": 4_730_000_000,
        "cache_bytes": 0,
        "process_bytes": 5_000_000_000,
    }
    return events.Step(**{**fields, **changes})
