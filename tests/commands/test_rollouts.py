"""`your_ai rollouts`."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.conftest import call, refused
from tests.run.test_rollout_files import RECORD
from your_ai.config import TrainConfig
from your_ai.run.folder import RunFolder, create
from your_ai.run.rollout_files import rollout_file, write_rollouts

REWARDS = {(0, 0): 0.25, (0, 1): 1.0, (1, 0): None, (1, 1): 0.5}


@pytest.fixture
def run(own_folder) -> RunFolder:
    """A run with rollouts of the steps 1 and 3: two prompts with two completions each."""
    folder = create(TrainConfig(model="models/m", data="data", run="r"))
    records = [
        dataclasses.replace(
            RECORD, row=row, sample=sample, where=f"train.jsonl:{row + 1}",
            question=f"question {row}", completion=f"answer {row}{sample}", reward=reward,
            rewards={"json_fields": reward}, stopped=sample == 0, reply="good \x1b[31m",
        )
        for (row, sample), reward in REWARDS.items()
    ]  # fmt: skip
    write_rollouts(rollout_file(folder.path, 1), records[:2])
    write_rollouts(rollout_file(folder.path, 3), records)
    return folder


def printed(capsys, *options: object) -> str:
    assert call("rollouts", "r", *options) == 0
    return capsys.readouterr().out


def answers(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("    answer")]


def test_the_last_step_is_shown_by_prompt(run, capsys):
    text = printed(capsys)
    assert text.startswith(
        "r: rollouts of step 3\n"
        "2 prompts, 4 completions, mean reward 0.5833, 1 missing reward, 2 cut off\n"
    )
    assert answers(text) == ["00", "01", "10", "11"]
    assert text.count("question 0") == text.count("question 1") == 1
    expected = "completion 2: reward 1, json_fields 1, advantage +0, 3 tokens, cut off"
    assert expected in " ".join(text.split())
    assert "reward missing, json_fields missing" in text


def test_a_run_of_soft_has_no_advantages(run, capsys):
    run.config.write_text(run.config.read_text().replace("objective: sft", "objective: soft"))
    assert "advantage" not in printed(capsys)
    found = json.loads(printed(capsys, "--json"))["rollouts"]
    assert [record["advantage"] for record in found] == [None] * 4


def test_control_characters_do_not_reach_the_terminal(run, capsys):
    text = printed(capsys)
    assert "\x1b" not in text
    assert "good ␛[31m" in text


def test_completions_are_sorted_by_reward_with_missing_ones_last(run, capsys):
    assert answers(printed(capsys, "--best")) == ["01", "11", "00", "10"]
    assert answers(printed(capsys, "--worst")) == ["00", "11", "01", "10"]


def test_limit_counts_prompts_or_completions(run, capsys):
    text = printed(capsys, "--limit", 1)
    assert answers(text) == ["00", "01"]
    assert text.endswith("\n1 more prompt: --limit 2 shows all\n")
    text = printed(capsys, "--limit", 1, "--best")
    assert answers(text) == ["01"]
    assert text.endswith("\n3 more completions: --limit 4 shows all\n")
    assert "more" not in printed(capsys, "--limit", 9)


def test_json_has_the_records(run, capsys):
    found = json.loads(printed(capsys, "--json", "--step", 1))
    assert (found["run"], found["step"]) == ("r", 1)
    assert [record["completion"] for record in found["rollouts"]] == ["answer 00", "answer 01"]


def test_what_cannot_be_shown_is_named_in_one_line(run, capsys):
    assert "no run named missing" in refused(capsys, "rollouts", "missing")
    assert "no rollouts of step 2; the nearest: 1 and 3" in refused(
        capsys, "rollouts", "r", "--step", 2
    )
    assert "no rollouts of step 9; the nearest: 3" in refused(capsys, "rollouts", "r", "--step", 9)
    assert "give one of them" in refused(capsys, "rollouts", "r", "--best", "--worst")
    path = rollout_file(run.path, 3)
    path.write_bytes(path.read_bytes()[:-9])
    assert "step-000003.jsonl.gz: is damaged" in refused(capsys, "rollouts", "r")
    path.unlink()
    path.mkdir()
    assert "is damaged" in refused(capsys, "rollouts", "r")


def test_a_run_without_rollouts_is_refused(own_folder, capsys):
    create(TrainConfig(model="models/m", data="data", run="plain"))
    assert "runs/plain: has no rollouts; only a run" in refused(capsys, "rollouts", "plain")
