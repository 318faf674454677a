from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from tests.rewards.rollouts import rollout
from your_ai.errors import UserError
from your_ai.rewards.functions import FunctionFailed, RewardFunction, load_reward_function

ROLLOUTS = [
    rollout("a", prompt="p", expected="x", row={"prompt": "p", "level": 1}, where="t.jsonl:1"),
    rollout("bb", prompt="q", expected=None, row={"other": 2}, where="t.jsonl:2", group=1),
]


@pytest.fixture
def load(own_folder, monkeypatch):
    """A function that loads the reward function `f` of a module with this text."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_rewards", raising=False)

    def write(text: str) -> RewardFunction:
        Path("own_rewards.py").write_text(text)
        return load_reward_function("own_rewards:f")

    yield write
    sys.modules.pop("own_rewards", None)


def returning(value) -> RewardFunction:
    return RewardFunction("m:f", lambda **_: value, None)


def test_the_function_gets_the_arguments_of_trl(load):
    function = load("given = {}\ndef f(**kwargs):\n given.update(kwargs)\n return [1, None]")
    assert function.rewards(ROLLOUTS, 3) == [1.0, None]
    assert sys.modules["own_rewards"].given == {
        "prompts": ["p", "q"],
        "completions": ["a", "bb"],
        "messages": [[{"role": "user", "content": "p"}], [{"role": "user", "content": "q"}]],
        "expected": ["x", None],
        "level": [1, None],
        "other": [None, 2],
    }


def test_a_function_gets_messages_where_the_prompt_is_messages(load):
    """As from TRL: functions that were written for it read completion[0]["content"]."""
    turns = [{"role": "user", "content": "p"}]
    text = "def f(prompts, completions, **_): return [float(c[0]['content'] == p[-1]['content']"
    function = load(f"{text} + 'a') for p, c in zip(prompts, completions)]")
    asked = rollout(completion="pa", messages=turns, row={"prompt": turns})
    assert function.rewards([asked], 1) == [1.0]


def test_a_column_of_the_name_of_an_own_argument_is_not_passed(load):
    function = load("def f(completions, expected, **_): return [float(e == 'x') for e in expected]")
    assert function.rewards([rollout(expected="x", row={"expected": "y"})], 1) == [1.0]


def test_what_a_function_changes_stays_its_own(load):
    given = [rollout(row={"level": [1]}), rollout(row={"level": [2]})]
    text = "def f(completions, messages, level):\n for each in (*messages, *level): each.clear()\n"
    load(text + " completions.clear()\n return [1, 1]").rewards(given, 3)
    assert [each.row for each in given] == [{"level": [1]}, {"level": [2]}]
    assert all(each.messages for each in given)


def test_a_function_without_kwargs_gets_what_it_names(load):
    function = load("def f(completions, level): return [len(c) for c in completions]")
    assert function.rewards(ROLLOUTS, 3) == [1.0, 2.0]


def test_a_named_column_that_no_row_has_is_none_unless_it_has_a_default(load):
    function = load("def f(completions, a, *, b=4): return [b if x is None else 0 for x in a]")
    assert function.rewards(ROLLOUTS, 3) == [4.0, 4.0]


def test_async_functions_are_run(load):
    text = "import asyncio\nasync def f(completions):\n await asyncio.sleep(0)\n return [1, 2]"
    function = load(text)
    assert function.rewards(ROLLOUTS, 3) == [1.0, 2.0]

    async def inside() -> list:  # as in a notebook
        return function.rewards(ROLLOUTS, 3)

    assert asyncio.run(inside()) == [1.0, 2.0]


def test_objects_with_call_are_functions(load):
    function = load("class F:\n def __call__(self, completions): return [3, 4]\nf = F()")
    assert function.rewards(ROLLOUTS, 3) == [3.0, 4.0]


def test_prints_go_to_stderr(load, capsys):
    load("def f(completions):\n print('here')\n return [1, 1]").rewards(ROLLOUTS, 3)
    assert capsys.readouterr() == ("", "here\n")


@pytest.mark.parametrize(
    "value", [[1, 0.5], (True, 0.5), np.array([1, 0.5]), np.float32([1, 0.5]), [np.bool_(1), 0.5]]
)
def test_lists_tuples_and_arrays_are_accepted(value):
    assert returning(value).rewards(ROLLOUTS, 3) == [1.0, 0.5]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "step 3: returned NoneType None, not a list of numbers"),
        (0.5, "step 3: returned float 0.5, not a list"),
        ("ab", "step 3: returned str 'ab', not a list"),
        ({1: 2, 3: 4}, "step 3: returned dict"),
        (np.float32(1), "step 3: returned float 1.0, not a list"),
        ([1], "step 3: returned 1 number for 2 completions"),
        ([1, 2, 3], "step 3: returned 3 numbers for 2 completions"),
        ([1, "2"], "step 3: t.jsonl:2: returned str '2', not a number or None"),
        ([[1], [2]], r"step 3: t.jsonl:1: returned list \[1\], not a number"),
        ([1, float("nan")], "step 3: t.jsonl:2: returned nan, not a finite number"),
        ([1, float("-inf")], "step 3: t.jsonl:2: returned -inf, not a finite"),
        ([10**400, 1], "step 3: t.jsonl:1: returned inf, not a finite"),
    ],
)
def test_a_result_that_is_not_a_finite_number_per_completion_is_an_error(value, message):
    with pytest.raises(UserError, match=f"^--reward m:f: {message}"):
        returning(value).rewards(ROLLOUTS, 3)


@pytest.mark.parametrize("error", [ValueError("one\ntwo"), SystemExit("one")])
def test_an_error_of_the_function_is_reported_in_one_line(error):
    with pytest.raises(FunctionFailed, match=f"^{type(error).__name__}: one$"):
        RewardFunction("m:f", Mock(side_effect=error), None).rewards(ROLLOUTS, 3)


def test_ctrl_c_is_not_an_error_of_the_function():
    stop = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        RewardFunction("m:f", stop, None).rewards(ROLLOUTS, 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def g(completions): pass", "has no function f"),
        ("f = 3", "has no function f"),
        ("import absent_module_1", "cannot be imported .ModuleNotFoundError"),
        ("def f(answer, expected, row): pass", "has no parameter completions"),
        ("def f(completions, /): pass", "has positional-only parameters"),
    ],
)
def test_a_function_that_cannot_be_called_is_an_error(load, text, message):
    with pytest.raises(UserError, match=f"^--reward own_rewards:f: .*{message}"):
        load(text)


def test_a_mistyped_reward_that_looks_like_a_function_names_the_nearest():
    with pytest.raises(UserError, match=r"regx cannot be imported .*; did you mean regex\?$"):
        load_reward_function("regx:abc")
