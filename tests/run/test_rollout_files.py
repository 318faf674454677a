"""Files of rollouts: what was written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest

from your_ai.run.rollout_files import (
    RolloutRecord,
    by_reward,
    read_rollouts,
    rollout_file,
    rollout_steps,
    write_rollouts,
)

RECORD = RolloutRecord(
    row=3, sample=0, where="train.jsonl:4", question="2 + 2?", expected="4", completion="4",
    tokens=[5, 1], stopped=True, rewards={"exact_match": 1.0}, reward=1.0, advantage=0.5,
)  # fmt: skip


@pytest.mark.parametrize("text", ["", "a\nb\r\nc", "a\u2028b\u2029c\x85d\x0be\x1cf", "\ud800"])
def test_texts_are_read_as_they_were_written(tmp_path, text):
    path = rollout_file(tmp_path, 1)
    records = [dataclasses.replace(RECORD, completion=text, reply=text), RECORD]
    write_rollouts(path, records)
    assert read_rollouts(path) == records
    assert rollout_steps(tmp_path) == [1]


@pytest.mark.parametrize(
    "changes",
    [
        {"rewards": None},
        {"rewards": [1.0]},
        {"rewards": {"a": "1"}},
        {"expected": 4},
        {"reply": {}},
        {"row": "3"},
        {"sample": None},
        {"stopped": "yes"},
        {"tokens": []},
        {"reward": "1"},
    ],
)
def test_lines_that_are_no_rollouts_make_a_file_damaged(tmp_path, changes):
    path = tmp_path / "f.gz"
    path.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(RECORD) | changes).encode()))
    assert read_rollouts(path) is None


def test_missing_rewards_come_last_in_both_orders():
    rewards = [None, 0.5, float("nan"), 1.0, 0.5]
    records = [dataclasses.replace(RECORD, sample=i, reward=r) for i, r in enumerate(rewards)]
    assert [r.sample for r in by_reward(records, highest=True)] == [3, 1, 4, 0, 2]
    assert [r.sample for r in by_reward(records, highest=False)] == [1, 4, 3, 0, 2]
