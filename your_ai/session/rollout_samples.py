"""Completions of a run that trains on rewards: the best and the worst of some steps."""

from __future__ import annotations

from pathlib import Path

from your_ai.dashboard.report import RolloutSample
from your_ai.gates.text import shortened
from your_ai.run.rollout_files import (
    RolloutRecord,
    by_reward,
    known_reward,
    read_rollouts,
    rollout_file,
    rollout_steps,
)

CHARACTERS = 2000  # maximum length of each text


def rollout_samples(run: Path) -> list[RolloutSample]:
    """The best and the worst completion of the first, the middle and the last step of a run.

    Files that cannot be read are left out.
    """
    try:
        steps = rollout_steps(run)
    except OSError:
        return []
    found = []
    for step in dict.fromkeys([*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]]):
        path = rollout_file(run, step)
        records = (read_rollouts(path) if path.is_file() else None) or []
        rewarded = [record for record in records if known_reward(record.reward) is not None]
        if rewarded:
            found.append(sample_of(step, "best", by_reward(rewarded, highest=True)[0]))
        if len(rewarded) > 1:
            found.append(sample_of(step, "worst", by_reward(rewarded, highest=False)[0]))
    return found


def sample_of(step: int, which: str, record: RolloutRecord) -> RolloutSample:
    texts = (record.question, record.completion, record.expected or "")
    question, completion, expected = (shortened(text, CHARACTERS) for text in texts)
    return RolloutSample(step, which, question, completion, expected, record.reward or 0.0)
