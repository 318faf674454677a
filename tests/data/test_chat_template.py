"""Calls and tools that a chat template leaves out or rewrites."""

from __future__ import annotations

from typing import Any

import pytest

from tests.data.test_encode import make_tokenizer
from your_ai.data import chat_template
from your_ai.data.encode import Encoder
from your_ai.data.rows import parse_row
from your_ai.errors import UserError

TEMPLATE = (
    "{% if tools %}{{ TOOLS }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}"
    "{% if m.tool_calls %}{{ CALLS }}{% endif %}<|im_end|>{% endfor %}"
)
CALLS = "{{ m.tool_calls | map(attribute='function') | list | tojson }}"
TOOLS = "{{ tools | tojson }}"
ARGUMENTS = {
    "city": 'Zürich\'s "old"\n<town>',
    "days": 3,
    "share": 0.25,
    "sure": True,
    "none": None,
    "": "  ",
    "deep": {"of it": ["tief", 44, [], {}]},
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "description": "of a place\nin Zürich"},
        "description": {"type": "object", "properties": {"inner": {"enum": ["a", "b"]}}},
    },
    "required": ["name"],
}


def encoder_of(calls: str, tools: str = TOOLS) -> Encoder:
    template = TEMPLATE.replace("{{ CALLS }}", calls).replace("{{ TOOLS }}", tools)
    return Encoder(make_tokenizer(template))


def row_with(*arguments: Any, tools: int = 1) -> Any:
    calls = [{"name": "aaa", "arguments": each} for each in arguments]
    given = [
        {"name": "ab"[number] * 3, "description": "it looks", "parameters": SCHEMA}
        for number in range(tools)
    ]
    asked, said = {"role": "user", "content": "Do aaa, bbb."}, {"role": "assistant", "content": ""}
    return parse_row({"messages": [asked, {**said, "tool_calls": calls}], "tools": given}, "f:1")


FIRST_CALL = "{{ m.tool_calls[0].function | tojson }}"
NO_NAMES = "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}"
IF_TEXT = (
    "{% for c in m.tool_calls %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{% if v is string %}{{ k }}={{ v }}{% endif %}{% endfor %}{% endfor %}"
)
NO_LISTS = IF_TEXT.replace("v is string", "v is not iterable or v is string")


@pytest.fixture(params=["tried", "refused"])
def tried(request, monkeypatch):
    """With marks, and as with a template that refuses them."""
    if request.param == "refused":
        monkeypatch.setattr(chat_template, "MOST_TRIED", 0)


@pytest.mark.parametrize(
    ("calls", "arguments"),
    [(FIRST_CALL, [{"city": "Oslo"}, {"city": "Bergen"}]), (IF_TEXT, [{"city": "Oslo", "n": 7}]),
     (NO_LISTS, [{"n": 7, "deep": ["lost"]}]), (IF_TEXT, [{"sure": True}])],
)  # fmt: skip
@pytest.mark.usefixtures("tried")
def test_a_call_of_which_a_part_is_left_out_refuses_the_row(calls, arguments):
    with pytest.raises(UserError, match=r"messages\[1\]: .* omits tool_calls or a part of them"):
        encoder_of(calls).encode(row_with(*arguments))


def test_a_call_whose_name_is_left_out_refuses_the_row_though_others_have_it():
    with pytest.raises(UserError, match=r"messages\[1\]: .* omits tool_calls"):
        encoder_of(NO_NAMES).encode(row_with({"n": 7}))


PROPERTIES = "{{ t.function.parameters.properties }}"
SOME = "the tools of a chat, or some of them"
NAMES = "{% for t in tools %}{{ t.function.name }}{% endfor %}"
DESCRIBED = NAMES.replace("}}{% e", "}} {{ t.function.description }}{% e")
NAMED = DESCRIBED.replace(
    "}}{% e", "}}{% for k in t.function.parameters.properties %}{{ k }}{% endfor %}{% e"
)


@pytest.mark.parametrize(
    ("shown", "left_out"),
    [("none", SOME), ("{{ tools[0] | tojson }}", SOME),
     (NAMES, "descriptions and parameters of tools"),
     (DESCRIBED, "descriptions and parameters of tools"),
     (NAMED, "descriptions and parameters of tools"),
     (NAMED.replace("{{ k }}", PROPERTIES), "")],
)  # fmt: skip
def test_tools_that_are_left_out_are_named_by_their_parts(shown, left_out):
    encoder = encoder_of(CALLS, shown)
    encoder.encode(row_with({"n": 7}, tools=2))
    note = f"the model's chat template omits {left_out}: 1 row, the first in f:1"
    assert encoder.notes.lines() == ([note] if left_out else [])


def test_a_template_is_tried_once_for_rows_of_one_form(monkeypatch):
    rendered, encoder = [], encoder_of(CALLS)
    render = chat_template.render
    monkeypatch.setattr(
        chat_template, "render", lambda *a, **k: rendered.append(render(*a, **k)) or rendered[-1]
    )
    for text in ("Oslo", "Bergen"):
        encoder.encode(row_with({"city": text, "days": len(text)}, tools=2))
    assert sum(chat_template.mark(0, "c") in text for text in rendered) == 1


EACH = "{% for c in m.tool_calls %}{{ c.function.name }} SHOWN{% endfor %}"
ITEMS = "{% for k, v in c.function.arguments.items() %}ITEM{% endfor %}"


@pytest.mark.parametrize(
    "shown",
    ["{{ c.function.arguments }}", "{{ c.function.arguments | tojson(indent=2) }}",
     "{{ c.function.arguments | tojson | tojson }}", "{{ c.function.arguments | tojson | e }}",
     "{{ c.function.arguments | tojson(ensure_ascii=True) }}",
     "{{ c.function.arguments | dictsort }}",
     ITEMS.replace("ITEM", "<p={{ k }}>{{ v if v is string else v | tojson }}</p>"),
     ITEMS.replace("ITEM", "{{ k }}={{ v | e }},"),
     "{{ '' ~ c.function.arguments | tojson }}"],
)  # fmt: skip
@pytest.mark.usefixtures("tried")
def test_calls_and_tools_in_other_forms_are_shown(shown):
    forms = shown.replace("c.function.arguments", "t")
    tools = "{% for t in tools %}" + forms + "{% endfor %}"
    encoder = encoder_of(EACH.replace("SHOWN", shown), tools)
    encoder.encode(row_with(ARGUMENTS, {}, tools=2))
    assert encoder.notes.lines() == []
