"""Rows of prompts: every form, the expected answer, and the same rows read again by index."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import json_values, write_rows
from your_ai.data.columns import Layout
from your_ai.data.lines import Fields
from your_ai.data.prompts import EXPECTED, PromptRows, parse_prompts
from your_ai.data.rows import Chat, Question, read_rows
from your_ai.errors import UserError

ASKED = {"role": "user", "content": "Why?"}
SAID = {"role": "assistant", "content": "Because."}
BRIEF = {"role": "system", "content": "Be brief."}
TOOLS = [{"type": "function", "function": {"name": "look"}}]


def question(row: dict) -> Question:
    """What a row with these columns asks, as it is used by a run."""
    found = Layout(kind="prompts").row_of(row, "here")
    content = parse_prompts(found, "here").content
    assert isinstance(content, Question)
    return content


EARLIER = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "I."}]
WHY = {"from": "human", "value": "Why?"}
BECAUSE = {"from": "gpt", "value": "Because."}
TEXT, CHAT, SYSTEM = "Why?", Chat([ASKED]), Chat([BRIEF, ASKED])
FORMS = {
    "text": [
        (TEXT, {"prompt": "Why?"}, None),
        (TEXT, {"prompt": "Why?", "completion": "Because."}, "Because."),
        (TEXT, {"prompt": "Why?", "chosen": "Because.", "rejected": "No idea."}, None),
        (TEXT, {"prompt": "Why?", "text": "Why? Because.", "level": 3}, None),
        (TEXT, {"instruction": "Why?", "output": "Because."}, "Because."),
        (TEXT, {"question": "Why?"}, None),
        (TEXT, {"question": "Why?", "answer": "Because."}, "Because."),
        (TEXT, {"Question": "Why?", "Solution": "Because."}, "Because."),
        (TEXT, {"question": "Why?", "text": "of another kind", "answer": "Because."}, "Because."),
    ],
    "messages": [
        (CHAT, {"prompt": [ASKED]}, None),
        (CHAT, {"prompt": [ASKED], "answer": "Because."}, "Because."),
        (CHAT, {"prompt": [ASKED], "completion": "Because."}, "Because."),
        (CHAT, {"prompt": [ASKED], "completion": [SAID]}, "Because."),
        (CHAT, {"messages": [ASKED, SAID]}, "Because."),
        (CHAT, {"messages": [ASKED]}, None),
        (CHAT, {"messages": [ASKED], "answer": "Because."}, "Because."),
        (CHAT, {"messages": json.dumps([ASKED, SAID])}, "Because."),
        (CHAT, {"prompt": json.dumps([ASKED])}, None),
        (CHAT, {"conversations": [WHY]}, None),
        (CHAT, {"conversations": [WHY, BECAUSE]}, "Because."),
        (Chat([*EARLIER, ASKED]), {"messages": [*EARLIER, ASKED, SAID]}, "Because."),
    ],
    "a system prompt first": [
        (SYSTEM, {"prompt": "Why?", "system": "Be brief."}, None),
        (SYSTEM, {"prompt": [ASKED], "system": "Be brief."}, None),
        (SYSTEM, {"prompt": [BRIEF, ASKED]}, None),
        (SYSTEM, {"prompt": [BRIEF, ASKED], "system": "Another."}, None),
        (SYSTEM, {"messages": [ASKED], "system": "Be brief."}, None),
        (SYSTEM, {"question": "Why?", "system": "Be brief."}, None),
        (SYSTEM, {"Question": "Why?", "System": "Be brief."}, None),
        (SYSTEM, {"question": "Why?", "answer": "Because.", "system": "Be brief."}, "Because."),
        (SYSTEM, {"instruction": "Why?", "output": "Because.", "system": "Be brief."}, "Because."),
        (SYSTEM, {"messages": [ASKED, SAID], "system": "Be brief."}, "Because."),
    ],
    "tools": [
        (Chat([ASKED], TOOLS), {"prompt": prompt, "tools": tools}, None)
        for prompt in ("Why?", [ASKED])
        for tools in (TOOLS, json.dumps(TOOLS))
    ],
    "earlier turns": [
        (Chat([*EARLIER, ASKED]), {"prompt": prompt, "history": [["Who?", "I."]]}, None)
        for prompt in ("Why?", [ASKED])
    ],
}


@pytest.mark.parametrize(
    ("asked", "row", "expected"),
    [pytest.param(*case, id=form) for form, cases in FORMS.items() for case in cases],
)
def test_a_row_in_any_form_asks_and_expects_the_same(asked, row, expected):
    assert question(row) == Question(asked, expected)


# -- the expected answer


CALL = {"type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}


@pytest.mark.parametrize(
    "answer", [{**SAID, "tool_calls": [CALL]}, {**SAID, "reasoning_content": "It is so."}]
)
@pytest.mark.parametrize("form", ["messages", "completion", "text + completion"])
def test_an_expected_answer_with_calls_or_reasoning_is_a_chat(answer, form):
    row = {
        "messages": {"messages": [ASKED, answer]},
        "completion": {"prompt": [ASKED], "completion": [answer]},
        "text + completion": {"prompt": "Why?", "completion": [answer]},
    }[form]
    found = question(row)
    assert found.prompt == Chat([ASKED])
    assert isinstance(found.expected, Chat)
    assert found.expected.messages == [ASKED, answer]


@pytest.mark.parametrize(
    ("asked", "name"), [*(("prompt", name) for name in EXPECTED), ("question", "answer")]
)
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *(("4", "4"), (4, "4"), (4.5, "4.5"), ("", ""), (None, None), (True, None)),
        *(([1, 2], None), ({"a": 1}, None)),
    ],
)
def test_the_expected_answer_is_in_a_column_beside_the_prompt(asked, name, value, expected):
    assert question({asked: "2 + 2", name: value}) == Question("2 + 2", expected)


def test_the_most_telling_column_is_used():
    row = {"prompt": "2 + 2", "reference": "no", "completion": None, "answer": "4"}
    assert question(row).expected == "4"


def test_all_columns_are_kept_for_rewards():
    row = {"question": "Why?", "answer": "Because.", "level": 3, "tags": ["a"]}
    assert row.items() <= Layout(kind="prompts").row_of(row, "here").items()


def test_named_columns_are_used():
    layout = Layout({"prompt": "ask", "completion": "key"}, kind="prompts")
    row = layout.row_of({"ask": "Why?", "key": "Because.", "answer": "no"}, "here")
    assert parse_prompts(row, "here").content == Question("Why?", "Because.")


@given(st.text(st.characters(codec="utf-8"), min_size=1).filter(str.strip))
def test_any_text_may_be_a_prompt(text):
    assert question({"prompt": text, "answer": text}) == Question(text, text)


# -- what is no prompt


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "has no prompt; keys found: none"),
        ({"text": "Why?"}, "has no prompt; keys found: text"),
        ({"answer": "Because."}, "has no prompt; keys found: answer"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt": " \n\u2003"}, "prompt: is empty"),
        ({"prompt": [{"role": "user", "content": " "}]}, "prompt: is empty"),
        ({"messages": [{"role": "user", "content": ""}, SAID]}, "prompt: is empty"),
        ({"instruction": "", "output": "x"}, "prompt: is empty"),
        ({"prompt": []}, "prompt: expected a list of messages"),
        ({"prompt": None}, "prompt: expected text, found nothing"),
        ({"prompt": 0.3}, "prompt: expected text, found float"),
        ({"prompt": {"role": "user"}}, "prompt: expected text, found dict"),
        ({"prompt": ["Why?"]}, 'prompt[0]: expected an object with "role" and "content"'),
        ({"prompt": [{"role": "user"}]}, "content: expected text, found nothing"),
        ({"prompt": [SAID]}, "prompt: has only messages of the assistant"),
        ({"messages": [SAID, SAID]}, "prompt: has only messages of the assistant"),
        ({"prompt": [], "completion": [SAID]}, "prompt: expected a list of messages"),
        ({"prompt": "Why?", "tools": 3}, "tools: expected a list, found int"),
        (
            {"prompt": "Why?", "system": [3]},
            "system: content: has parts that are no text and cannot be trained: int",
        ),
        ({"prompt": "Why?", "weight": -1}, "weight -1: must be finite and at least 0"),
        ({"prompt": "Why?", "weight": "a lot"}, "weight: expected a number, found"),
    ],
    ids=str,
)
def test_a_row_without_a_prompt_is_one_line_with_its_place(row, message):
    with pytest.raises(UserError, match=r"^data.jsonl:7: [^\n]*$") as raised:
        parse_prompts(row, "data.jsonl:7")
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "row",
    [{"a": 1}, {"question": None}, {"question": 1.5}, {"messages": "no JSON"}, {"messages": 1}],
    ids=str,
)
def test_columns_without_a_prompt_are_one_line_with_their_place(row):
    with pytest.raises(UserError, match=r"^here: [^\n]*$"):
        question(row)


JSON = json_values(st.sampled_from(["role", "content", "from", "value"]), leaves=6)
KEYS = ("prompt", "completion", "messages", "conversations", "instruction", "output", "question",
        "answer", "system", "tools", "weight", "text")  # fmt: skip


@given(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4))
def test_any_row_is_a_question_or_one_error(row):
    try:
        found = question(row)
    except UserError as error:
        message = str(error)
    else:
        assert found.expected is None or isinstance(found.expected, str | Chat)
        message = "here: a question"
    assert re.fullmatch(r"here: [^\n]*", message)


# -- rows of a file, by index


def written(path: Path, data: bytes) -> PromptRows:
    path.write_bytes(data)
    return PromptRows(path)


def texts_of(rows: PromptRows) -> list[Any]:
    return [rows.read(index)[1].content.prompt for index in range(len(rows.offsets))]


def test_rows_are_read_at_their_lines(tmp_path):
    """After a byte order mark, between blank lines, and with any ends of lines."""
    lines = [b"", b'{"prompt": "a"}', b" \t", b"", '{"prompt": "\u00fc\u2028\U0001f600"}'.encode()]
    lines.append(b'{"prompt": "last"}')
    for end in (b"\n", b"\r\n"):
        for mark in (b"", b"\xef\xbb\xbf"):
            rows = written(tmp_path / "train.jsonl", mark + end.join(lines))
            assert texts_of(rows) == ["a", "\u00fc\u2028\U0001f600", "last"]
            places = [rows.read(index)[1].where for index in range(3)]
            assert places == [f"{rows.path}:{line}" for line in (2, 5, 6)]


def test_a_row_comes_with_all_its_columns(tmp_path):
    row = {"prompt": "a", "answer": 4, "level": {"of": [1, 2]}}
    rows = PromptRows(write_rows(tmp_path / "train.jsonl", [row]))
    assert rows.read(0)[0] == row


def test_a_converted_row_names_the_place_it_came_from(tmp_path):
    row = {"prompt": "a", "your_ai: from": "table.csv:9"}
    content, parsed = PromptRows(write_rows(tmp_path / "train.jsonl", [row])).read(0)
    assert (content, parsed.where) == ({"prompt": "a"}, "table.csv:9")


BLANK = st.sampled_from([b"", b" ", b"\t", b"\r", b"\x0c"])
ROW = st.text(st.characters(codec="utf-8"), max_size=5).map(lambda text: f"x{text}")
LINES = st.lists(BLANK | ROW.map(lambda text: json.dumps({"prompt": text}).encode()), max_size=9)
UNICODE = ROW.map(lambda text: json.dumps({"prompt": text}, ensure_ascii=False).encode())


@given(st.lists(BLANK | UNICODE, max_size=9), LINES, st.booleans(), st.booleans())
def test_indices_are_those_of_the_rows_that_are_encoded(
    tmp_path_factory, lines, more, marked, ended
):
    path = tmp_path_factory.getbasetemp() / "rows.jsonl"
    data = b"\n".join([*lines, *more, b'{"prompt": "end"}']) + b"\n" * ended
    rows = written(path, b"\xef\xbb\xbf" * marked + data)
    expected = list(read_rows(path, parse=parse_prompts))
    assert texts_of(rows) == [row.content.prompt for row in expected]
    assert [rows.where(index) for index in range(len(expected))] == [row.where for row in expected]


def test_a_file_that_changed_is_one_error(tmp_path):
    rows = PromptRows(write_rows(tmp_path / "train.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))
    assert texts_of(rows) == ["a", "b"]
    data = rows.path.read_bytes()
    (tmp_path / "other").write_bytes(data)
    (tmp_path / "other").replace(rows.path)  # the same bytes
    assert texts_of(rows) == ["a", "b"]
    for changed in (data.replace(b"a", b"c"), data + b'{"prompt": "c"}\n', b""):
        rows.path.write_bytes(changed)
        with pytest.raises(UserError, match=r"^[^\n]*train.jsonl: was changed [^\n]*$"):
            rows.read(1)
    rows.path.unlink()
    with pytest.raises(UserError, match=r"^[^\n]*train.jsonl[^\n]*$"):
        rows.read(0)


def test_messages_beside_a_prompt_are_named():
    row = Fields({"prompt": "q", "messages": [{"role": "user", "content": "r"}], "x": 1})
    assert parse_prompts(row, "here").content == Question("q", None)
    assert row.unused() == ("messages",)
