"""Messages in the forms of other programs become the one form that templates expect."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest

from your_ai.data.turns import parse_message, parse_tools, parse_turns, turns_of_pairs
from your_ai.errors import UserError

OBJECT = {"a": 1}
CALL = {"type": "function", "function": {"name": "f", "arguments": OBJECT}}


def parsed(**message: Any) -> dict[str, Any]:
    return parse_message(message, "here")


@pytest.mark.parametrize(
    ("role", "meant"),
    [("Human", "user"), ("GPT", "assistant"), ("bot", "assistant"), ("System", "system"),
     ("tool-response", "tool_response"), ("Narrator", "Narrator")],
)  # fmt: skip
def test_roles_have_many_names_and_unknown_ones_stay(role, meant):
    assert parsed(role=role, content="x")["role"] == meant


def test_a_turn_of_sharegpt_keeps_all_its_keys():
    turn = {"from": "gpt", "value": "x", "weight": 0, "reasoning": "r", "name": "n"}
    assert parse_message(turn, "here") == {
        "role": "assistant", "content": "x", "weight": 0, "reasoning_content": "r", "name": "n",
    }  # fmt: skip


@pytest.mark.parametrize("role", ["role", "from", "speaker"])
@pytest.mark.parametrize("content", ["content", "value", "text"])
def test_role_and_content_have_other_names(role, content):
    assert parsed(**{role: "human", content: "x"}) == {"role": "user", "content": "x"}


def test_a_text_beside_a_content_stays_a_key():
    found = {"role": "user", "content": "x", "text": "y"}
    assert parsed(**found) == found


@pytest.mark.parametrize(
    "names", [("user", "assistant"), ("Human", "gpt"), ("input", "output"), ("Question", "answer")]
)
def test_an_object_of_texts_by_role_is_messages(names):
    turns = parse_turns([dict(zip(names, "ab", strict=True)), {"user": "c"}], "turns", "here")
    assert [(turn["role"], turn["content"]) for turn in turns] == [
        ("user", "a"), ("assistant", "b"), ("user", "c"),
    ]  # fmt: skip


def test_the_keys_of_an_object_of_texts_may_be_sorted():
    """As they are in Parquet and in sorted JSON, where an answer would precede its question."""
    for turn in ({"answer": "b", "question": "a"}, {"assistant": "b", "user": "a"}):
        assert [m["content"] for m in parse_turns([turn], "turns", "here")] == ["a", "b"]
    turn = {"input": "a", "output": "b", "system": "s"}
    assert [m["role"] for m in parse_turns([turn], "turns", "here")] == [
        "system", "user", "assistant",
    ]  # fmt: skip


@pytest.mark.parametrize("content", [{"mm": "5 é"}, [{"mm": 5}], ["a", 1], []])
def test_the_result_of_a_tool_may_be_an_object(content):
    text = json.dumps(content, ensure_ascii=False) if content else ""
    assert parsed(role="tool", content=content)["content"] == text
    parts = [{"type": "text", "text": "x"}]
    assert parsed(role="tool", content=parts)["content"] == "x"


def test_an_error_of_a_message_names_its_keys():
    with pytest.raises(UserError, match="found nothing; keys found: role, refusal"):
        parsed(role="assistant", refusal="No.")
    with pytest.raises(UserError, match='"role" and "content"; keys found: input, output'):
        parsed(input="a", output="b")


def test_parts_of_a_content_need_no_type():
    found = parsed(role="model", parts=[{"text": "a"}, {"text": "b"}])
    assert found == {"role": "assistant", "content": "ab"}


@pytest.mark.parametrize("arguments", [OBJECT, '{"a": 1}', '"{\\"a\\": 1}"'])
@pytest.mark.parametrize("flat", [True, False])
def test_arguments_of_a_call_are_an_object_whatever_they_were(arguments, flat):
    call = {"name": "f", "arguments": arguments}
    calls = [call if flat else {"type": "function", "function": call}]
    found = parsed(role="assistant", content=None, tool_calls=calls)
    assert found == {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("name", ["input", "args", "parameters"])
def test_arguments_of_a_call_may_have_another_name(name):
    found = parsed(role="assistant", content=None, tool_calls=[{"name": "f", name: OBJECT}])
    assert found["tool_calls"] == [CALL]


@pytest.mark.parametrize("nothing", ["", " ", "null", None, "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(nothing):
    calls = [{"name": "f", "arguments": nothing}]
    (call,) = parsed(role="assistant", content="", tool_calls=calls)["tool_calls"]
    assert call["function"]["arguments"] == {}


@pytest.mark.parametrize("none", [[], None, ""])
def test_no_calls_are_no_key(none):
    assert "tool_calls" not in parsed(role="assistant", content="x", tool_calls=none)


@pytest.mark.parametrize("role", ["function_call", "tool_call"])
def test_a_turn_that_is_a_call_is_a_call_of_the_assistant(role):
    for content in (
        '{"name": "f", "arguments": {"a": 1}}',
        '[{"name": "f", "arguments": "{\\"a\\": 1}"}]',
    ):
        assert parsed(role=role, content=content) == {
            "role": "assistant", "content": "", "tool_calls": [CALL],
        }  # fmt: skip
    with pytest.raises(UserError, match="expected a call as JSON"):
        parsed(role=role, content="f(a=1)")


def test_the_older_function_call_is_a_tool_call():
    call = {"name": "f", "arguments": '{"a": 1}'}
    assert parsed(role="assistant", content="", function_call=call)["tool_calls"] == [CALL]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name):
    assert parsed(role="assistant", content="x", **{name: "r"})["reasoning_content"] == "r"
    parts = [{"type": "thinking", "thinking": "r"}, {"type": "text", "text": "x"}]
    assert parsed(role="assistant", content=parts)["reasoning_content"] == "r"
    with pytest.raises(UserError, match="differ; keep one of them"):
        parsed(role="assistant", content="x", reasoning="r", thinking="s")


@pytest.mark.parametrize(
    ("flags", "weight"),
    [({"training": False}, 0), ({"train": True}, 1), ({"loss": 0}, 0), ({"masked": True}, 0),
     ({"weight": None}, None), ({"weight": 1, "trainable": False}, 0), ({}, None)],
)  # fmt: skip
def test_flags_say_whether_a_message_is_trained(flags, weight):
    assert parsed(role="assistant", content="x", **flags).get("weight") == weight


@pytest.mark.parametrize(
    "content",
    [
        {"a": 1}, 0.5, ["x"], [{"type": "image_url"}],
        [{"text": "a", "thought": True}],
    ],
)  # fmt: skip
def test_contents_that_are_no_text_are_refused(content):
    with pytest.raises(UserError, match=r"^here: content: "):
        parsed(role="user", content=content)


def test_tools_have_one_form():
    function = {"name": "f", "parameters": {}}
    whole = [{"type": "function", "function": function}]
    for row in ({"tools": [function]}, {"functions": [function]}, {"tools": whole}):
        assert parse_tools(row, "here") == whole
    assert parse_tools({"tools": "[]"}, "here") is parse_tools({"tools": ""}, "here") is None


def test_tools_may_be_json_texts():
    tool = {"type": "function", "function": {"name": "f"}}
    assert parse_tools({"tools": [json.dumps(tool), {"name": "f"}]}, "here") == [tool, tool]
    with pytest.raises(UserError, match="here: tools: is not valid JSON"):
        parse_tools({"tools": ["f"]}, "here")


OLDER = {"name": "f", "arguments": '{"a": 1}'}


@pytest.mark.parametrize(
    ("calls", "older"),
    [
        *(([CALL], older) for older in (OLDER, None, {}, {"name": None, "arguments": None})),
        *((calls, OLDER) for calls in (None, [], "", "[]", "null")),
    ],
)
def test_an_older_call_is_one_of_the_calls_or_the_only_one_or_empty(calls, older):
    assert parsed(role="assistant", tool_calls=calls, function_call=older)["tool_calls"] == [CALL]


def test_an_older_call_that_is_not_one_of_the_calls_is_refused():
    with pytest.raises(UserError, match="here: tool_calls and function_call differ; keep one"):
        parsed(role="assistant", tool_calls=[CALL], function_call={**OLDER, "name": "lost"})


def test_parts_that_are_calls_and_results_become_calls_and_messages_of_tools():
    """Anthropic's blocks, and Google's parts."""
    claude = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I look"},
            {"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1",
             "content": [{"type": "text", "text": "42"}]},
            {"type": "text", "text": "go on"}]},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = {"role": "assistant", "content": "I look", "reasoning_content": "hm"}
    assert parse_turns(claude, "messages", "here") == [
        {"role": "user", "content": "q"},
        {**said, "tool_calls": [{"id": "t1", **call}]},
        {"role": "tool", "content": "42", "tool_call_id": "t1"},
        {"role": "user", "content": "go on"},
    ]
    gemini = [
        {"role": "model", "parts": [{"functionCall": {"name": "f", "args": {"x": 1}}}]},
        {"role": "function",
         "parts": [{"functionResponse": {"name": "f", "response": {"y": 2}}}]},
    ]  # fmt: skip
    assert parse_turns(gemini, "contents", "here") == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": '{"y": 2}', "name": "f"},
    ]


def test_tools_in_other_forms_are_declared_alike():
    schema = {"type": "object", "properties": {}}
    wanted = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    for tool in (
        {"name": "f", "parameters": schema},
        {"name": "f", "input_schema": schema},
        {"functionDeclarations": [{"name": "f", "parameters": schema}]},
    ):
        assert parse_tools({"tools": [tool]}, "here") == wanted


def test_the_result_of_a_tool_comes_before_the_answer_of_the_same_object():
    turns = parse_turns([{"user": "q", "tool": "42", "assistant": "a"}], "conversations", "here")
    assert [turn["role"] for turn in turns] == ["user", "tool", "assistant"]


def test_lists_of_a_role_and_a_text_are_messages():
    assert turns_of_pairs([["user", "q"], ["assistant", "a"]], "messages", "here") == [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
    ]
    asked = turns_of_pairs([["q", "a"]], "messages", "here")
    assert [turn["content"] for turn in asked] == ["q", "a"]


def test_keys_of_parts_are_keys_of_the_message():
    part = {"type": "text", "text": "a", "citations": [1], "cache_control": None}
    message = parse_message({"role": "user", "content": [part]}, "here")
    assert message == {"role": "user", "content": "a", "content.citations": [1]}


@pytest.mark.parametrize("kind", ["tool_result", "functionResponse", "tool_use", "functionCall"])
@pytest.mark.parametrize("inner", [None, "a", 3, ["f"], {"name": ["f"]}])
def test_parts_with_anything_in_the_place_of_a_call_or_a_result_are_one_line(kind, inner):
    for part in ({"type": kind, kind: inner}, {kind: inner}):
        with contextlib.suppress(UserError):
            parse_turns([{"role": "user", "content": [part]}], "messages", "here")
