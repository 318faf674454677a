from __future__ import annotations

import dataclasses
import math
from pathlib import Path

from tests.run.test_rollout_files import RECORD
from your_ai.run.rollout_files import RolloutRecord, rollout_file, write_rollouts
from your_ai.session.run_list import CHARACTERS, rollout_samples


def rewarded(*rewards: float | None) -> list[RolloutRecord]:
    return [
        dataclasses.replace(RECORD, sample=sample, reward=reward, completion=f"c{sample}")
        for sample, reward in enumerate(rewards)
    ]


def shown(run: Path) -> list[tuple[int, str, str]]:
    return [(s.step, s.which, s.completion) for s in rollout_samples(run)]


def test_best_and_worst_of_the_first_middle_and_last_step_are_shown(tmp_path):
    for step in range(1, 6):
        write_rollouts(rollout_file(tmp_path, step), rewarded(0.5, None, 1.0, 0.25, 1.0))
    expected = [(step, *pair) for step in (1, 3, 5) for pair in (("best", "c2"), ("worst", "c3"))]
    assert shown(tmp_path) == expected


def test_few_steps_and_few_rewards(tmp_path):
    assert shown(tmp_path) == []
    write_rollouts(rollout_file(tmp_path, 1), rewarded(None, math.nan))
    assert shown(tmp_path) == []
    write_rollouts(rollout_file(tmp_path, 2), rewarded(None, 0.0))
    assert shown(tmp_path) == [(2, "best", "c1")]


def test_damaged_files_are_left_out(tmp_path):
    write_rollouts(rollout_file(tmp_path, 1), rewarded(0.5, 0.25))
    rollout_file(tmp_path, 2).write_bytes(b"no")
    rollout_file(tmp_path, 3).mkdir()
    assert [step for step, *_ in shown(tmp_path)] == [1, 1]


def test_long_texts_are_shortened(tmp_path):
    long = dataclasses.replace(RECORD, completion="x" * 9999, expected=None)
    write_rollouts(rollout_file(tmp_path, 1), [long])
    (sample,) = rollout_samples(tmp_path)
    assert (len(sample.completion), sample.expected) == (CHARACTERS, "")
