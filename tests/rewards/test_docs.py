"""The examples of docs/rewards.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

import your_ai
from your_ai.gates.text import split_outside_brackets
from your_ai.rewards.functions import RewardFunction
from your_ai.rewards.names import PLAIN, WITH_ARGUMENT, parse_rewards
from your_ai.rewards.rubric import read_rubric

PAGE = Path(your_ai.__file__).parent.parent / "docs" / "rewards.md"
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_rubric_gives_a_reward_between_0_and_1(own_folder):
    [text] = [text for kind, text in BLOCKS if kind == "yaml" and "criteria:" in text]
    Path("rubric.yaml").write_text(text)
    rubric = read_rubric(Path("rubric.yaml"))
    names = [criterion.name for criterion in rubric.criteria]
    assert rubric.total(dict.fromkeys(names, 10)) == pytest.approx(1)
    assert rubric.total(dict.fromkeys(names, 0)) == 0
    assert rubric.total({"correctness": 6, "completeness": 5, "tone": 10}) == pytest.approx(0.61)


def test_the_lists_of_rewards_are_valid():
    [text] = [text for kind, text in BLOCKS if kind == "yaml" and "reward:" in text]
    names = [each.name for each in parse_rewards(yaml.safe_load(text)["reward"])]
    assert names == ["json_fields", "regex:^\\{.*\\}$", "my_rewards:brevity"]
    [options] = re.findall(r"^    --reward (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [each.weight for each in parse_rewards(split_outside_brackets(options))] == [1, 0.1]


def test_the_function_returns_a_number_for_each_completion():
    [text] = [text for kind, text in BLOCKS if kind == "python"]
    defined: dict = {}
    exec(text, defined)
    function = RewardFunction("m:f", defined["brevity"], None)
    assert function.function(completions=["a b c", ""], prompts=["p", "q"]) == [0.25, 1]


def test_each_reward_is_described():
    table = re.findall(r"^\| `(\w+)", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(PLAIN) | set(WITH_ARGUMENT) - {"run"} <= set(table)
