from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.server import CompletionRequest

from your_ai.serving.admission import DEPTH, VALUES, check, parse, prompt_ids

GOOD = {
    "model": "r", "messages": [{"role": "user", "content": "a"}], "max_tokens": 5,
    "temperature": 0.5, "top_p": 1, "top_k": 9,
    "stop": ["a", ""], "seed": (1 << 64) - 1, "logit_bias": {"0": -100, "9": 1.5}, "n": 1,
    "xtc_threshold": 0.5, "stream": True, "stream_options": {"include_usage": True},
    "chat_template_kwargs": {"enable_thinking": False}, "user": "u",
}  # fmt: skip


def test_valid_requests_pass():
    check(GOOD, 10)
    check({}, 10)
    check({"stop": "end", "seed": None, "stream_options": None, "n": None}, 10)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", ["a"]), ("temperature", float("nan")), ("top_p", float("inf")),
        ("max_tokens", 10**30), ("repetition_penalty", -(10**30)), ("stop", 3), ("stop", [3]),
        ("stop", {"a": "b"}), ("logit_bias", [1]), ("logit_bias", {"10": 1}),
        ("logit_bias", {"-1": 1}), ("logit_bias", {"1": "x"}), ("logit_bias", {"1": float("nan")}),
        ("logit_bias", {"1": None}), ("presence_context_size", 10**30),
        ("chat_template_kwargs", {"return_tensors": "np"}), ("top_k", 10), ("xtc_threshold", 0.51),
        ("n", 2), ("seed", -1), ("seed", 1 << 64), ("chat_template_kwargs", 3),
        ("chat_template_kwargs", {"chat_template": ""}), ("stream_options", 3),
    ],
)  # fmt: skip
def test_field_that_would_end_the_server_is_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} "):
        check(GOOD | {name: value}, 10)


USER = {"role": "user", "content": "a"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


@pytest.mark.parametrize(
    "message",
    [
        USER,
        {"role": "user", "content": ""},
        {"role": "developer", "content": "a", "name": "b"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]},
        {"role": "tool", "tool_call_id": "1", "content": "a"},
    ],
    ids=str,
)
def test_messages_that_clients_send_pass(message):
    check({"messages": [USER, message]}, 10, is_chat=True)


@pytest.mark.parametrize(
    "message",
    [
        None,
        "a",
        {"role": "user"},
        {"content": "a"},
        {"role": "", "content": "a"},
        {"role": ["user"], "content": "a"},
        {"role": "user", "content": "a", "tool_calls": "a"},
        {"role": "assistant", "content": None},
        {"role": "user", "content": 3},
        {"role": "user", "content": None},
        {"role": "user", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": []},
        {"role": "assistant", "content": None, "tool_calls": [{}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
        {"role": "user", "content": []},
        {"role": "user", "content": {}},
        {"role": "user", "content": ["a"]},
        {"role": "user", "content": [{"type": "text"}]},
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
    ],
    ids=str,
)
def test_invalid_message_is_named(message):
    with pytest.raises(ValueError, match=r"^messages\[1\]"):
        check({"messages": [USER, message]}, 10, is_chat=True)


@pytest.mark.parametrize(
    ("body", "is_chat"),
    [
        ({}, True),
        ({"messages": []}, True),
        ({"messages": "a"}, True),
        ({}, False),
        ({"prompt": 3}, None),
    ],
)
def test_request_without_messages_or_prompt_is_refused(body, is_chat):
    with pytest.raises(ValueError, match=r"^(messages|prompt) must be"):
        check(body, 10, is_chat)


def test_null_fields_count_as_missing():
    assert parse(b'{"temperature": null, "seed": 0}') == {"seed": 0}


@pytest.mark.parametrize(
    "data",
    [
        b"", b"[]", b"\xff", b"{", b'{"a": 1, "a": 1}', b'{"a": NaN}',
        b'{"a": ' + b"9" * 5000 + b"}", b'{"a": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"a": [' + b"[]," * VALUES + b"1]}", b'{"a": ["' + b'","' * 4 * VALUES + b'"]}',
    ],
    ids=lambda data: data[:20],
)  # fmt: skip
def test_invalid_bodies_are_refused(data):
    with pytest.raises(ValueError, match=r"."):
        parse(data)


def test_long_string_counts_as_one_value():
    text = json.dumps([{"a": '[{,"\\'}] * VALUES)
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "value", [nested(DEPTH), {"a": math.inf}, [math.nan], {"\ud800": 1}, ["\udfff"]], ids=repr
)
def test_values_that_cannot_be_processed_are_refused(value):
    with pytest.raises(ValueError, match=r"^other (contains|is nested)"):
        check({**GOOD, "other": value}, 10)


def test_nesting_below_the_limit_passes():
    check({**GOOD, "other": nested(DEPTH - 1)}, 10)


KEYS = st.sampled_from([*GOOD, "prompt", "tools", "role_mapping", "response_format", "logprobs"])
VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)  # of any type
MESSAGES = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls", "name"]), VALUE, max_size=4),
    max_size=3,
)


@given(
    st.dictionaries(KEYS, VALUE, max_size=2),
    st.just([USER]) | MESSAGES | VALUE,
    st.sampled_from([True, False, None]),
)
def test_any_request_passes_or_is_refused_with_a_reason(body, messages, is_chat):
    body = {**body, "messages": messages}
    reason = refusal(lambda: check(body, 10, is_chat))
    if reason is not None:
        assert 0 < len(reason) < 2000
        return
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    for message in messages or ():
        assert message["role"]
        assert message.get("tool_calls") or isinstance(message["content"], str | list)
    assert isinstance(body.get("stream") or False, bool)
    assert type(body.get("max_tokens") or 1) is int


def refusal(judge: Callable[[], Any]) -> str | None:
    try:
        judge()
    except ValueError as error:
        return str(error)
    return None


@given(st.binary(max_size=200) | VALUE.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_give_an_object_or_are_refused(data):
    if refusal(lambda: parse(data)) is None:
        assert None not in parse(data).values()


def test_much_too_long_prompt_is_not_tokenized_completely(demo_tokenizer):
    lengths = []

    class Counting:
        has_chat_template = True

        def encode(self, text: str, **options: bool) -> list[int]:
            lengths.append(len(text))
            return demo_tokenizer.encode(text, **options)

    def ask(text: str) -> list[int]:
        return prompt_ids(Counting(), CompletionRequest("text", text, [], None, None), {}, 2048)

    assert ask("a b " * 100) == demo_tokenizer.encode("a b " * 100)
    with pytest.raises(ValueError, match="2048"):
        ask("a b " * 1_000_000)
    assert max(lengths) < 40_000
    assert sum(lengths) < 200_000
