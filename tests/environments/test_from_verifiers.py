"""Environments of `verifiers`, as their authors write them."""

from __future__ import annotations

import json
import re

import pytest

from tests.environments.conftest import message_with
from your_ai.environments.from_verifiers import completion_of
from your_ai.environments.pool import EnvironmentPool
from your_ai.environments.protocol import EnvironmentFailed, HostOptions
from your_ai.errors import UserError

OWN = '''
import verifiers as vf
from datasets import Dataset

def price(name: str) -> int:
    """Look up a price.

    Args:
        name: The thing.
    """
    return {"apple": 3}[name]

def right(completion, answer) -> float:
    return float(answer in completion[-1]["content"])

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        said = messages[-1]["content"]
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"Not {said}."}]

def load_environment():
    data = Dataset.from_list([{"question": f"Price {n}?", "answer": str(n)} for n in range(3)])
    given = dict(dataset=data, system_prompt="Be brief.", rubric=vf.Rubric(funcs=[right]))
    return MAKE
'''
KINDS = {
    "tool": "vf.ToolEnv(tools=[price], max_turns=3, **given)",
    "single": "vf.SingleTurnEnv(**given)",
    "turns": "Guess(max_turns=4, **given)",
}
OPTIONS = {"environment": "verifiers:own", "tools": (), "timeout_s": 60.0, "memory_mb": 2048}


@pytest.fixture
def verifiers_of(pool_of):
    pytest.importorskip("verifiers", reason="needs verifiers: pip install 'your_ai[verifiers]'")
    return lambda kind: pool_of(OWN.replace("MAKE", KINDS[kind]), **OPTIONS)


def test_an_environment_with_tools(verifiers_of):
    own = verifiers_of("tool")
    assert own.pool.rows == 3
    seen = own.pool.start(0, {"example": 2}, 0).result()
    assert seen.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Price 2?"},
    ]
    (tool,) = seen.tools
    assert tool["function"]["name"] == "price"
    assert tool["function"]["parameters"]["required"] == ["name"]
    seen = own.calls(("price", {"name": "apple"}), ("price", {"name": "pear"}))
    assert seen.messages == [
        {"role": "tool", "content": "3", "tool_call_id": "call-0"},
        {"role": "tool", "content": "'pear'", "tool_call_id": "call-1"},
    ]
    assert (seen.reward, seen.done) == (None, False)
    seen = own.say("It is 2.")
    assert (seen.messages, seen.reward, seen.done) == ([], 1.0, True)
    assert seen.info["metrics"]["price_calls"] == 2
    assert seen.info["stopped_by"] == "no_tools_called"


def test_a_single_turn_of_a_row_of_the_data(verifiers_of):
    own = verifiers_of("single")
    seen = own.start(prompt="q", answer="42")
    assert [m["content"] for m in seen.messages] == ["Be brief.", "q"]
    seen = own.say("41")
    assert (seen.messages, seen.reward, seen.done) == ([], 0.0, True)


def test_turns_until_the_environment_ends(verifiers_of):
    own = verifiers_of("turns")
    own.pool.start(0, {"example": 1}, 0).result()
    assert own.say("0").messages == [{"role": "user", "content": "Not 0."}]
    seen = own.say("1")
    assert seen.messages == [{"role": "user", "content": "Yes."}]
    assert (seen.reward, seen.done) == (0.0, True)  # its rubric reads the last message


@pytest.mark.parametrize("number", [3, -1, "1"])
def test_an_example_that_is_not_there_ends_the_conversation(verifiers_of, number):
    own = verifiers_of("single")
    with pytest.raises(EnvironmentFailed, match=r"it has no example -?\d of 3$"):
        own.pool.start(0, {"example": number}, 0).result()


def test_a_missing_environment_is_one_line_at_the_start():
    where = "--environment verifiers:no-such"
    with pytest.raises(UserError) as error:
        EnvironmentPool(HostOptions(environment="verifiers:no-such"))
    assert re.match(f"{where}: (needs verifiers; |no_such cannot)", str(error.value))


def test_arguments_of_calls_become_text():
    pytest.importorskip("openai")
    calls = completion_of(message_with(("f", {"a": 1}), ("g", '{"b": 2}'))).choices[0].message
    assert [json.loads(each.function.arguments) for each in calls.tool_calls] == [
        {"a": 1},
        {"b": 2},
    ]
