"""Events for the tests of the views."""

from __future__ import annotations

from typing import Any

from your_ai.run import events
from your_ai.run.events import Event, Record


def record(event: Event) -> Record:
    return Record(0.0, event)


def started(at: int = 0, **changes: Any) -> events.Started:
    fields = {
        "steps": 10, "steps_per_epoch": 5, "model": "m", "rows": 9, "trainable_parameters": 65536,
        "dtype": "float32", "plan": "fused",
    }  # fmt: skip
    return events.Started(step=at, **{**fields, **changes})


def validation(at: int, loss: float = 2.0, **changes: Any) -> events.Validation:
    return events.Validation(step=at, loss=loss, trained_tokens=9, seconds=1.0, **changes)


def step(number: int, **changes: Any) -> events.Step:
    fields = {
        "step": number, "steps": 10, "epoch": 1, "loss": 1.25, "grad_norm": 0.5,
        "learning_rate": 1e-4, "tokens": 200, "padded_tokens": 256, "trained_tokens": 100,
        "seconds": 2.0, "active_bytes": 412_000_000, "peak_bytes": 4_730_000_000, "cache_bytes": 0,
        "process_bytes": 5_000_000_000,
    }  # fmt: skip
    return events.Step(**{**fields, **changes})


def rewarded(number: int, reward: float | None = None, **changes: Any) -> events.Step:
    """A step of a run that trains on rewards."""
    reward = 0.3 + 0.05 * number if reward is None else reward
    metrics = {
        "reward": reward, "reward_std": 0.2, "frac_reward_zero_std": 0.25,
        "rewards/json_fields/mean": reward, "rewards/json_fields/std": 0.35,
        "rewards/length:200/mean": 0.5, "rewards/length:200/std": 0.1,
        "completions/mean_length": 25.5, "completions/clipped_ratio": 0.125, "judge/calls": 12.0,
        "judge/cache_hits": 4.0, "generation/tokens_per_s": 530.3, "seconds/generate": 1.25,
        "seconds/reward": 0.0009, "peak_bytes/generate": 2.5e9, "peak_bytes/reward": 0.0,
        "kl": 0.0125, "entropy": 0.75, "clip_ratio/low_mean": 0.0, "clip_ratio/high_mean": 0.004,
    }  # fmt: skip
    return step(number, loss=0.001 * number, **{"metrics": metrics, **changes})


def reward_validation(at: int, reward: float, **others: float) -> events.Validation:
    return validation(at, -reward, metrics={"reward": reward, **others})
