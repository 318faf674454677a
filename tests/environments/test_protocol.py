from __future__ import annotations

import json
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.environments.protocol import (
    GRACE_S,
    MOST_CALLS,
    EnvironmentFailed,
    HostOptions,
    Observation,
    answer_of,
    line_of,
    observation_of,
)

MESSAGE = {"role": "user", "content": "c"}


def test_a_dict_and_an_observation_mean_the_same():
    fields = {"messages": [MESSAGE], "reward": 1, "done": True, "info": {"a": 1}}
    found = observation_of(fields)
    assert found == observation_of(Observation(**fields))
    assert found == Observation([MESSAGE], [], 1.0, True, {"a": 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "returned None, not an Observation or a dict"),
        ({"message": []}, "returned an unknown key 'message'; did you mean messages?"),
        ({}, "messages: None is not a list of dicts"),
        ({"messages": "x"}, "messages: x is not a list of dicts"),
        ({"messages": [3]}, "messages: a list is not a list of dicts"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages: content: 3 is not text"),
        ({"messages": [{**MESSAGE, "tool_calls": ["x"]}]}, "messages: tool_calls: a list is not"),
        ({"messages": [{**MESSAGE, "text": ""}]}, "messages: unknown key 'text'"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages: expected a role (system"),
        ({"messages": [{"role": "user"}]}, "messages: expected a role (system"),
        ({"messages": [], "reward": math.nan}, "reward: nan is not a number of at"),
        ({"messages": [], "reward": 1e300}, "reward: 1e+300 is not a number of at most 1e+12"),
        ({"messages": [], "info": {"x": 10**400}}, "info: 'x': "),
        ({"messages": [], "info": {"x": math.inf}}, "info: 'x': inf is not a number of"),
        ({"messages": [], "reward": "1"}, "reward: '1' is not a number of at most 1e+12, or None"),
        ({"messages": [], "reward": 10**400}, "reward: 1"),
        ({"messages": [], "reward": True}, "reward: True is not a number of"),
        ({"messages": [], "done": 1}, "done: 1 is not True or False"),
        ({"messages": [], "info": []}, "info: a list is not a dict"),
        ({"messages": [], "tools": {}}, "tools: a dict is not a list of dicts"),
    ],
)
def test_what_is_no_observation_is_refused(value, text):
    with pytest.raises(EnvironmentFailed, match=f"^{re.escape(text)}"):
        observation_of(value)


texts = st.text(st.characters(), max_size=8)  # also halves of surrogate pairs
messages = st.fixed_dictionaries({"role": st.just("tool"), "content": texts, "name": texts})


@given(st.lists(messages, max_size=3), st.none() | st.floats(-1e12, 1e12))
def test_an_observation_survives_the_way_between_processes(given_messages, reward):
    line = line_of({"observation": {"messages": given_messages, "reward": reward}})
    assert line.count(b"\n") == 1
    found = answer_of(line)
    clean = [
        {key: value.encode("utf-8", "replace").decode() for key, value in message.items()}
        for message in given_messages
    ]
    assert (found.messages, found.reward) == (clean, reward)


@given(st.binary(max_size=40) | st.recursive(
    st.none() | st.text(max_size=3) | st.floats(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["observation", "error", "messages", "role"]), inner),
).map(lambda value: json.dumps(value).encode()))  # fmt: skip
def test_any_line_is_an_observation_or_one_line_of_an_error(line):
    try:
        text = "".join(message["content"] for message in answer_of(line).messages)
    except EnvironmentFailed as error:
        text = str(error)
    assert type(text) is str
    assert "\n" not in text
    assert len(text) < 2000


def test_an_escaped_half_of_a_surrogate_pair_becomes_a_question_mark():
    line = b'{"observation": {"messages": [{"role": "tool", "content": "a\\ud800b"}]}}\n'
    assert answer_of(line).messages == [{"role": "tool", "content": "a?b"}]


@pytest.mark.parametrize("value", [math.nan, object(), {1, 2}, {"a": b""}])
def test_what_is_not_json_is_refused(value):
    with pytest.raises(EnvironmentFailed, match=r"^returned what is not JSON"):
        line_of(value)


def test_deep_nesting_is_refused_on_both_sides():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EnvironmentFailed, match="not JSON"):
        line_of(deep)
    line = b'{"observation": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(EnvironmentFailed, match="nested deeper"):
        answer_of(line)


def test_tools_have_the_time_of_all_calls_of_a_message():
    tools, own = HostOptions(timeout_s=2), HostOptions(environment="m:C", timeout_s=2)
    for calls, counted in ((None, 1), ([{}] * 3, 3), ([{}] * 1000, MOST_CALLS)):
        assert tools.seconds_of({"tool_calls": calls}) == 2 * counted + GRACE_S
        assert own.seconds_of({"tool_calls": calls}) == 2
