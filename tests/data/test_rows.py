"""JSONL lines -> rows: each format, files as they occur in practice, and errors for bad rows."""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import chat, json_values, write_rows
from your_ai.data import lines, rows
from your_ai.data.lines import ROW_LIMIT, Fields, RowLimit, checked_sha256
from your_ai.data.rows import Chat, Pair, Row, Text, parse_line, parse_row, read_rows, with_progress
from your_ai.errors import UserError
from your_ai.gates import text

USER = {"role": "user", "content": "q"}
ASSISTANT = {"role": "assistant", "content": "a"}


def rows_of(*lines: Any) -> list[Row]:
    return list(read_rows(write_rows(Path("train.jsonl"), list(lines))))


def content_of(row: dict[str, Any]) -> Chat | Pair | Text:
    (parsed,) = rows_of(row)
    return parsed.content


def read_bytes(data: bytes) -> list[Row]:
    Path("train.jsonl").write_bytes(data)
    return list(read_rows(Path("train.jsonl")))


# Each format


ALPACA = {"instruction": "q", "output": "a"}
CONTENTS = {
    "messages": ({"messages": [USER, ASSISTANT]}, Chat([USER, ASSISTANT])),
    "conversations of messages": ({"conversations": [USER, ASSISTANT]}, Chat([USER, ASSISTANT])),
    "texts alone, the first of a person": (
        {"conversations": ["q", "a", "q"]},
        Chat([USER, ASSISTANT, USER]),
    ),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, Pair("q", "a")),
    "one answer in a list": ({"prompt": "q", "completion": ["a"]}, Pair("q", "a")),
    "an empty system prompt": ({"prompt": "q", "completion": "a", "system": ""}, Pair("q", "a")),
    "no system prompt": ({"prompt": "q", "completion": "a", "system": None}, Pair("q", "a")),
    "messages of which only the completion is trained": (
        {"prompt": [USER, ASSISTANT, USER], "completion": [ASSISTANT]},
        Chat([USER, ASSISTANT, USER, ASSISTANT], first_trained=3),
    ),
    "alpaca without an input": (ALPACA, Pair("q", "a")),
    "alpaca with an empty input": ({**ALPACA, "input": ""}, Pair("q", "a")),
    "alpaca whose input is null": ({**ALPACA, "input": None}, Pair("q", "a")),
    "alpaca beside a text": ({**ALPACA, "text": "q and a"}, Pair("q", "a")),
    **{
        f"alpaca with an {name}": ({**ALPACA, name: "1 and 2"}, Pair("q\n\n1 and 2", "a"))
        for name in ("Input", "INPUT", "input")
    },
}


@pytest.mark.parametrize(("row", "content"), CONTENTS.values(), ids=CONTENTS)
def test_each_format_becomes_a_chat_or_a_pair(row, content):
    assert content_of(row) == content


def test_messages_keep_keys_that_templates_may_read():
    thinking = {**ASSISTANT, "reasoning_content": "because", "name": "bot"}
    assert content_of({"messages": [USER, thinking]}).messages[1] == thinking


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "json-text"])
@pytest.mark.parametrize(
    "row", [{"messages": [USER, ASSISTANT]}, {"prompt": [USER], "completion": [ASSISTANT]}]
)
def test_tools_of_messages_are_read(row, as_text):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert content_of({**row, "tools": json.dumps(tools) if as_text else tools}).tools == tools


CALLS = [{"name": "add", "arguments": {"a": 1}}]


@pytest.mark.parametrize("answer", [CALLS, json.dumps(CALLS), json.dumps(CALLS[0])])
@pytest.mark.parametrize("keys", [("prompt", "completion"), ("instruction", "output")])
def test_an_answer_that_calls_the_tools_of_its_row_is_calls(answer, keys):
    if keys[1] == "output" and not isinstance(answer, str):
        return
    row = {**dict(zip(keys, ("q", answer), strict=True)), "tools": [{"name": "add"}]}
    found = content_of(row)
    call = {"type": "function", "function": CALLS[0]}
    said = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (found.messages, found.first_trained) == ([USER, said], 1)


@pytest.mark.parametrize("answer", ['[{"name": "other"}]', "[1]", "[", "[]", '{"a": 1}', "a"])
def test_any_other_answer_beside_tools_is_text(answer):
    found = content_of({"prompt": "q", "completion": answer, "tools": [{"name": "add"}]})
    assert found.messages == [USER, {"role": "assistant", "content": answer}]


@pytest.mark.parametrize(("own", "unused"), [("Be brief.", ()), ("Be kind.", ("system",))])
def test_a_system_prompt_beside_another_is_named(own, unused):
    first = {"role": "system", "content": own}
    row = Fields({"system": "Be brief.", "messages": [first, USER, ASSISTANT]})
    assert parse_row(row, "here").content == Chat([first, USER, ASSISTANT])
    assert row.unused() == unused


def call(arguments: Any) -> dict[str, Any]:
    function = {"name": "add", "arguments": arguments}
    return {"id": "c1", "type": "function", "function": function}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}], ids=["json-text", "object"])
def test_tool_call_arguments_are_objects(arguments):
    turn = {"role": "assistant", "content": "", "tool_calls": [call(arguments)]}
    parsed = content_of({"messages": [USER, turn]}).messages[1]
    assert parsed["tool_calls"] == [call({"a": 1})]


@pytest.mark.parametrize("content", [{}, {"content": None}], ids=["missing", "null"])
def test_a_tool_call_needs_no_content(content):
    turn = {"role": "assistant", **content, "tool_calls": [call({"a": 1})]}
    assert content_of({"messages": [USER, turn]}).messages[1]["content"] == ""


# Weights


@pytest.mark.parametrize(
    ("given", "weight"), [({}, 1), ({"weight": 0}, 0), ({"weight": 0.25}, 0.25), ({"weight": 3}, 3)]
)
def test_a_weight_is_read_and_one_by_default(given, weight):
    assert rows_of({"text": "t", **given})[0].weight == weight


# Files as they occur in practice


def test_rows_have_their_line_number():
    rows = rows_of({"text": "t"}, "", "   ", {"text": "u"})
    assert [row.where for row in rows] == ["train.jsonl:1", "train.jsonl:4"]


@pytest.mark.parametrize(
    ("data", "texts"),
    [
        (b'\xef\xbb\xbf{"text": "t"}\n', ["t"]),
        (b'{"text": "t"}\r\n\r\n{"text": "u"}\r\n', ["t", "u"]),
        (b'{"text": "t"}\n{"text": "u"}', ["t", "u"]),
        ('{"text": "one\u2028two\u0085three"}'.encode(), ["one\u2028two\u0085three"]),
    ],
    ids=[
        "byte order mark",
        "Windows line ends",
        "no newline at the end",
        "only newlines end lines",
    ],
)
def test_files_of_other_programs_are_read(data, texts):
    assert [row.content.text for row in read_bytes(data)] == texts


def test_rows_before_a_bad_row_are_yielded():
    path = write_rows(Path("train.jsonl"), [{"text": "t"}, "no JSON"])
    assert next(read_rows(path)).content == Text("t")


# Bad rows

BAD = {
    "no JSON": ("hello", "not valid JSON"),
    "cut short": ('{"text": "x"', "not valid JSON"),
    "two objects": ('{"text": "x"}{"text": "y"}', "not valid JSON"),
    "nested too deeply": ("[" * 200_000, "nested too deeply"),
    "a list": ('["a"]', "found list"),
    "a text": ('"a"', "found str"),
    "null": ("null", "found NoneType"),
    "unknown keys": ({"question": "x", "answer": "y"}, "keys found: question, answer;"),
    "known formats": ({"question": "x"}, "prompt + completion"),
    "no keys": ({}, "keys found: none"),
    "half a pair": ({"prompt": "x"}, "keys found: prompt;"),
    "text": ({"text": 0.5}, "text: expected text, found float"),
    "prompt": ({"prompt": None, "completion": "y"}, "unknown row format; keys found: completion"),
    "completion": ({"prompt": "x", "completion": ["y", "z"]}, "completion[0]: expected an object"),
    "list and text": ({"prompt": [USER], "completion": 0.5}, "completion: expected text, found"),
    "empty prompt list": ({"prompt": [], "completion": [ASSISTANT]}, "prompt: expected a list"),
    "pair tools": ({"prompt": [USER], "completion": [ASSISTANT], "tools": 5}, "tools: expected"),
    "instruction": ({"instruction": True, "output": "y"}, "instruction: expected text, found bool"),
    "output": ({"instruction": "x", "output": None}, "unknown row format; keys found: instruction"),
    "input": (
        {"instruction": "x", "input": [5], "output": "y"},
        "input: expected text, found list",
    ),
    "messages": ({"messages": "x"}, "messages: expected a list"),
    "no messages": ({"messages": []}, "messages: expected a list"),
    "message": ({"messages": [USER, "x"]}, 'messages[1]: expected an object with "role"'),
    "no role": ({"messages": [{"content": "x"}]}, 'messages[0]: expected an object with "role"'),
    "role": ({"messages": [{"role": 1, "content": "x"}]}, 'expected an object with "role"'),
    "no content": ({"messages": [{"role": "user"}]}, "content: expected text, found nothing"),
    "content": ({"messages": [{"role": "user", "content": 0.5}]}, "content: expected text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
        "has parts that are no text and cannot be trained: image_url; remove them",
    ),
    "a bare part": ({"messages": [{"role": "user", "content": ["x"]}]}, "cannot be trained: str"),
    "part without text": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": None}]}]},
        "content:",
    ),
    "tool calls": ({"messages": [{**ASSISTANT, "tool_calls": {}}]}, "tool_calls: expected a list"),
    "tool arguments": (
        {"messages": [{**ASSISTANT, "tool_calls": [call("{a: 1}")]}]},
        "tool_calls: arguments: is not valid JSON",
    ),
    "tools": ({"messages": [USER], "tools": {"name": "add"}}, "tools: expected a list, found dict"),
    "tools as text": ({"messages": [USER], "tools": "add"}, "tools: is not valid JSON"),
    "conversations": ({"conversations": "x"}, "conversations: expected a list"),
    "no conversations": ({"conversations": []}, "conversations: expected a list"),
    "turn": ({"conversations": [7]}, "conversations[0]: expected an object"),
    "from": (
        {"conversations": [{"from": 1, "value": "x"}]},
        "conversations[0]: expected an object",
    ),
    "no value": ({"conversations": [{"from": "human"}]}, "conversations[0]: content: expected"),
    "turn under a system key": (
        {"system": "s", "conversations": [{"from": "human"}]},
        "conversations[0]: content: expected",
    ),
    "weight as text": ({"text": "x", "weight": "much"}, "weight: expected a number, found much"),
    "weight true": ({"text": "x", "weight": True}, "weight: expected a number, found True"),
    "weight negative": ({"text": "x", "weight": -1}, "weight -1: must be finite and at least 0"),
    "weight NaN": ('{"text": "x", "weight": NaN}', "weight nan: must be finite"),
    "weight infinite": ('{"text": "x", "weight": 1e999}', "weight inf: must be finite"),
    "weight beyond floats": ({"text": "x", "weight": 10**400}, "must be finite"),
    "weight of too many digits": ('{"text": "x", "weight": ' + "9" * 5000 + "}", ""),
    "a message of weight 2": (
        {"messages": [USER, {"role": "assistant", "content": "a", "weight": 2}]},
        "messages[1]: weight 2: must be 0 or 1 in a message",
    ),
    "weight of a bad row": ({"messages": [USER], "weight": "x"}, "weight: expected a number"),
    "a key twice": ('{"text": "a", "text": "b"}', "has the key text twice"),
    "a key twice within": ('{"text": "a", "x": {"y": 1, "y": 1}}', "has the key y twice"),
    "system": (
        {"prompt": "q", "completion": "a", "system": [7]},
        "system: content: has parts that are no text",
    ),
}


@pytest.mark.parametrize(
    ("line", "reason"), BAD.values(), ids=[key.replace(" ", "-") for key in BAD]
)
def test_the_error_names_a_bad_row(line, reason):
    with pytest.raises(UserError) as caught:
        rows_of({"text": "good"}, "", line)
    where, text = str(caught.value).split(": ", 1)
    assert where == "train.jsonl:3"
    assert reason in text


def test_columns_without_a_value_are_as_good_as_none():
    joined = {"messages": None, "prompt": None, "text": "hello", "weight": None}
    (row,) = rows_of(joined)
    assert (row.content, row.weight, row.unused) == (Text("hello"), 1.0, ())


def test_the_error_names_a_row_that_is_not_utf8():
    with pytest.raises(UserError, match=r"^train\.jsonl:2: is not UTF-8"):
        read_bytes(b'{"text": "t"}\n{"text": "caf\xe9"}\n')


# Bad files


@pytest.mark.parametrize("data", [b"", b"\n \r\n\n", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_an_empty_file_is_refused(data):
    with pytest.raises(UserError, match=r"^train\.jsonl: the file is empty"):
        read_bytes(data)


@pytest.mark.parametrize("name", ["missing", "folder"])
def test_a_missing_file_and_a_folder_are_refused(name):
    Path("folder").mkdir()
    with pytest.raises(UserError, match=f"^{name}: cannot be read"):
        list(read_rows(Path(name)))


# Untrusted rows


def nested(depth: int, opening: str = "[", closing: str = "]") -> str:
    return opening * depth + "1" + closing * depth


def test_deep_nesting_is_refused_everywhere():
    """Deeper values would exceed Python's recursion limit in templates and in JSON encoders."""
    for depth in (65, 900, 20_000, 100_000):
        call = {"function": {"name": "f", "arguments": nested(depth, '{"a":', "}")}}
        for line in (
            nested(depth),
            f'{{"text": "a", "more": {nested(depth)}}}',
            json.dumps({"messages": [USER, ASSISTANT], "tools": nested(depth)}),
            json.dumps({"messages": [USER, {**ASSISTANT, "tool_calls": [call]}]}),
        ):
            with pytest.raises(UserError, match=r"train\.jsonl:1: .*nested too deeply"):
                rows_of(line)
    assert rows_of(f'{{"text": "a", "more": {nested(60)}}}')
    assert rows_of(f'{{"text": "{"[" * 200}"}}')  # brackets in a string are not nesting


def test_errors_show_long_values_shortened():
    long = "k" * 3_000_000
    for row in (
        {long: 1},
        {"text": "a", "weight": long},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
        {"messages": [{**USER, "weight": long}]},
    ):
        with pytest.raises(UserError) as caught:
            rows_of(row)
        assert len(str(caught.value)) < 500


LIMIT = RowLimit(row_bytes=100)


@pytest.mark.parametrize("end", ["", "\n", "\r\n", "\n\n"])
def test_a_line_that_is_too_long_is_refused_before_it_is_read(end):
    good = json.dumps({"text": "a"})
    Path("train.jsonl").write_text(f"{good}\n\n" + "x" * 101 + end)
    for read in (lambda: list(read_rows(Path("train.jsonl"), LIMIT)),
                 lambda: checked_sha256(Path("train.jsonl"), LIMIT)):  # fmt: skip
        with pytest.raises(UserError, match=r"^train\.jsonl:3: the row has more than 100 bytes"):
            read()


def test_a_line_of_the_maximum_length_is_read(monkeypatch):
    monkeypatch.setattr(lines, "BLOCK_BYTES", 7)
    line = json.dumps({"text": "a" * 88})
    assert len(line) == 100
    path = Path("train.jsonl")
    for data in (line, f"{line}\n", f"\n{line}\n{line}\n"):
        path.write_text(data)
        assert list(read_rows(path, LIMIT))
        assert checked_sha256(path, LIMIT) == hashlib.sha256(data.encode()).hexdigest()


def test_a_huge_file_without_newlines_is_refused_immediately(own_folder):
    with (own_folder / "sparse.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    began = time.monotonic()
    with pytest.raises(UserError, match=r"sparse\.jsonl:1: the row has more than"):
        checked_sha256(own_folder / "sparse.jsonl", ROW_LIMIT)
    with pytest.raises(UserError, match=r"sparse\.jsonl:1: the row has more than"):
        list(read_rows(own_folder / "sparse.jsonl"))
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "line",
    [
        json.dumps({"text": "a" * 200_000}),
        json.dumps({"text": "a", "more": [{}] * 60_000}),
        json.dumps(chat("a" * 100_000, "b")),
    ],
)
def test_a_row_that_needs_too_much_memory_is_refused(line):
    path = write_rows(Path("train.jsonl"), [line])
    with pytest.raises(UserError, match=r"^train\.jsonl:1: reading a row of .* MB, but 2 MB are"):
        list(read_rows(path, RowLimit(room_bytes=2_000_000)))
    assert list(read_rows(path, RowLimit(room_bytes=40_000_000)))


SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "completion": "a"},
        {"instruction": "q", "output": "a"},
        {"prompt": [USER], "completion": [ASSISTANT]},
        {"messages": [USER, ASSISTANT]},
        {"messages": [SYSTEM, USER, ASSISTANT]},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "q"},
                           {"from": "gpt", "value": "a"}]},
    ],
)  # fmt: skip
@pytest.mark.parametrize("system", ["s", {"parts": [{"text": "s"}]}], ids=["text", "parts"])
def test_a_system_prompt_comes_before_the_question_in_every_form(row, system):
    assert content_of({**row, "system": system}).messages == [SYSTEM, USER, ASSISTANT]


JUNK = json_values(
    st.sampled_from(["role", "content", "text", "type", "value", "from", "x"]), leaves=12
)
KEYS = ("messages", "conversations", "prompt", "completion", "instruction", "output", "text",
        "tools", "weight", "system", "input")  # fmt: skip


@given(row=st.dictionaries(st.sampled_from(KEYS), JUNK, max_size=4))
def test_any_object_is_parsed_or_refused_in_one_line(row):
    line = json.dumps(row).encode()
    try:
        found = parse_line(line, "rows:1")
    except UserError as error:
        message = str(error)
        assert message.startswith("rows:1: ") and len(message) < 1000  # noqa: PT018
    else:
        assert 0 <= found.weight <= rows.FLOAT32_MAX


@given(line=st.binary(max_size=60) | st.text(st.sampled_from('{}[]":,\\u0d8 1e-"text'), max_size=60)
       .map(str.encode))  # fmt: skip
def test_any_line_is_parsed_or_raises_UserError(line):
    with contextlib.suppress(UserError):
        parse_line(line, "rows:1")


def test_a_bar_says_every_few_seconds_how_many_rows_are_read(tmp_path, monkeypatch):
    now, written = [0.0], []
    monkeypatch.setattr(text, "time", SimpleNamespace(monotonic=lambda: now[0]))
    path = tmp_path / "many.jsonl"
    path.write_text('{"text": "a"}\n' * 8)
    for row in with_progress(read_rows(path), path, ROW_LIMIT, written.append):
        now[0] = 2.0 * row.line
    assert written == [
        "reading many.jsonl: [##########..........] 50% of 8 rows",
        "reading many.jsonl: [#################...] 87% of 8 rows",
    ]


def test_messages_that_end_with_a_question_are_answered_by_the_completion():
    content = content_of({"messages": [USER], "completion": "a", "system": "s"})
    assert [turn["role"] for turn in content.messages] == ["system", "user", "assistant"]
    assert content.first_trained == 2


PARTS = st.lists(
    st.dictionaries(
        st.sampled_from(["type", "name", "content", "input", "text", "tool_use", "tool_result",
                         "functionCall", "functionResponse", "response", "thinking"]),
        st.sampled_from(["tool_use", "tool_result", "text", "a", 1, None, [], ["f"], {}, {"b": 2}]),
        max_size=4,
    ),
    min_size=1, max_size=3,
)  # fmt: skip


@given(parts=PARTS, tools=st.sampled_from([None, [{"name": "a"}]]))
def test_parts_of_any_kind_are_read_or_refused(parts, tools):
    turns = [USER, {"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
    for row in ({"messages": turns}, {"prompt": "q", "completion": parts}):
        with contextlib.suppress(UserError):
            assert isinstance(content_of({**row, "tools": tools}), Chat)
