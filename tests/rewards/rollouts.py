"""Rollouts for tests."""

from __future__ import annotations

from typing import Any

from your_ai.rewards.rollout import Rollout


def rollout(completion: str = "yes", **changes: Any) -> Rollout:
    prompt = changes.pop("prompt", "Is it?")
    given = {
        "prompt": prompt,
        "messages": [{"role": "user", "content": prompt}],
        "completion": completion,
        "tokens": 10,
        "truncated": False,
        "expected": "yes",
        "row": {},
        "where": "train.jsonl:1",
        "group": 0,
    }
    return Rollout(**given | changes)
