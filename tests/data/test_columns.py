"""Columns become rows: as --columns says, or as their names tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from your_ai.data.columns import Layout, guess, layout_of, parse_columns, template_of
from your_ai.data.rows import Pair, parse_row
from your_ai.errors import UserError

PAIR = {"prompt": "p", "completion": "c"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("names", "roles"),
    [
        (("question", "answer"), {"prompt": "question", "completion": "answer"}),
        (("id", "Question ", "ANSWER"), {"prompt": "Question ", "completion": "ANSWER"}),
        (("instruction", "response"), {"prompt": "instruction", "completion": "response"}),
        (("input", "output"), {"prompt": "input", "completion": "output"}),
        (("query", "target", "text"), {"prompt": "query", "completion": "target"}),
        (("content",), {"text": "content"}),
        (("dialog", "id"), {"messages": "dialog"}),
        (
            ("system", "question", "answer"),
            {"prompt": "question", "completion": "answer", "system": "system"},
        ),
    ],
)
def test_roles_are_guessed_from_the_names(names, roles):
    words = {name: [{"role": "user"}] if name == "dialog" else "words" for name in names}
    assert guess(words, "here") == roles


@pytest.mark.parametrize(
    ("names", "option"),
    [
        (("a", "b"), "prompt=a,completion=b"),
        (("question",), "prompt=question,completion=COLUMN"),
        (("answer",), "prompt=COLUMN,completion=answer"),
        ((), "prompt=COLUMN,completion=COLUMN"),
    ],
)
def test_names_that_do_not_tell_are_refused_with_the_option_that_does(names, option):
    with pytest.raises(UserError, match=rf"^here: unknown row format.*--columns {option}$"):
        guess(dict.fromkeys(names, "words"), "here")


def test_a_column_of_texts_is_one_answer_or_refused_and_its_first_can_be_named():
    layout = layout_of(("prompt=q", "completion=a.text.0"), "")
    for texts, unused in (["x"], set()), (["x", "y"], {"a.text"}):
        row = layout.row_of({"q": "p", "a": {"text": texts}}, "here")
        assert row["completion"] == "x"
        assert row.keys() - {"prompt", "completion"} == unused
    layout = layout_of(("prompt=q", "completion=b.0"), "")  # a column of this name
    assert layout.row_of({"q": "p", "b.0": "x", "b": 7}, "here")["b"] == 7
    assert layout.row_of({"q": "p", "b.0": "x", "b": "y"}, "here")["b"] == "y"
    whole = layout_of(("prompt=q", "completion=a.text"), "")
    row = whole.row_of({"q": "p", "a": {"text": ["x", "y"]}}, "here")
    with pytest.raises(UserError, match=r"completion\[0\]: expected an object"):
        parse_row(row, "here")


def test_a_prompt_template_writes_cells_as_tables_have_them(tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ a }}|{{ b }}|{{ c }}|{{ d }}|{{ a or 'x' }}")
    render, _ = template_of(str(path))
    assert render({"a": None, "b": {"k": "é"}, "c": True, "d": 1.5}, "here") == (
        '|{"k": "é"}|true|1.5|x'
    )


def test_rows_in_a_known_format_are_kept():
    for row in (PAIR, {"messages": TURNS, "id": 1}, {"text": "t", "question": "?", "answer": "!"}):
        assert Layout().row_of(row, "here") == row


def test_each_kind_of_record_is_guessed_once_and_reported():
    layout = Layout()
    for _ in range(2):
        assert layout.row_of({"question": "p", "answer": "c", "id": 7}, "x") == {**PAIR, "id": 7}
        assert layout.row_of({"body": "t"}, "y") == {"text": "t"}
    assert layout.notes() == [
        "guessed from the names of the columns: prompt = question, completion = answer",
        "guessed from the names of the columns: text = body",
    ]


def test_named_columns_win_over_those_that_look_like_a_format():
    layout = layout_of(("prompt=q", "completion=a"), "")
    record = {"q": "p", "a": "c", "messages": TURNS, "text": "t", "prompt": "other", "id": "i"}
    assert layout.row_of(record, "here") == {**PAIR, "id": "i"}
    (note,) = layout.notes()
    assert note.startswith("columns that are not used: messages, prompt, text;")


def test_columns_may_be_parts_of_objects():
    layout = layout_of(("prompt=t.en", "completion=t.more.fr"), "")
    record = {"t": {"en": "p", "more": {"fr": "c", "de": "d"}}, "id": "i"}
    assert layout.row_of(record, "here") == {**PAIR, "t.more.de": "d", "id": "i"}
    known = {"prompt": "q", "completion": "no", "meta": {"answer": "c"}}
    layout = layout_of(("prompt=prompt", "completion=meta.answer"), "")
    assert layout.row_of(known, "here")["completion"] == "c"
    with pytest.raises(UserError, match=r"here: has no column t\.fr, .*; columns: t; say"):
        layout_of(("prompt=t.en", "completion=t.fr"), "").row_of({"t": {"en": "p"}}, "here")


def test_rewards_get_whole_columns_if_the_prompt_is_a_part_of_one():
    layout = layout_of(("prompt=task.text", "completion=task.key"), "", "prompts")
    record = {"task": {"text": "q", "key": "a", "level": 3}}
    assert layout.row_of(record, "here") == {**record, "prompt": "q", "completion": "a"}


def test_a_column_called_weight_counts_only_in_a_known_format_or_by_name():
    assert "weight" not in Layout().row_of({"question": "q", "answer": "a", "weight": "3"}, "x")
    assert Layout().row_of({**PAIR, "weight": "3"}, "x")["weight"] == 3.0
    layout = layout_of(("text=t", "weight=w"), "")
    assert layout.row_of({"t": "x", "w": "0.5"}, "x") == {"text": "x", "weight": 0.5}
    with pytest.raises(UserError, match="weight: expected a number, found heavy"):
        layout.row_of({"t": "x", "w": "heavy"}, "x")


def test_a_system_prompt_becomes_a_message():
    layout = layout_of(("prompt=q", "completion=a", "system=s"), "")
    row = layout.row_of({"q": "q", "a": "a", "s": "Be brief", "history": [["e", "f"]]}, "here")
    turns = parse_row(row, "here").content.messages
    assert [turn["content"] for turn in turns] == ["Be brief", "e", "f", "q", "a"]
    for nothing in ("", None):
        row = layout.row_of({"q": "q", "a": "a", "s": nothing}, "here")
        assert parse_row(row, "here").content == Pair("q", "a")
    with_turns = layout_of(("messages=m", "system=s"), "")
    row = with_turns.row_of({"m": TURNS, "s": "Be brief"}, "here")
    assert parse_row(row, "here").content.messages[0]["content"] == "Be brief"


def test_values_that_tables_only_have_as_text_are_parsed():
    record = {"messages": '[{"role": "user", "content": "q"}]', "weight": "0.5"}
    assert Layout().row_of(record, "x")["messages"] == [{"role": "user", "content": "q"}]
    assert parse_row(Layout().row_of({"prompt": "p", "completion": "c", "weight": "2"}, "x"), "x")
    layout = layout_of(("prompt=q", "completion=a", "weight=w"), "")
    assert layout.row_of({"q": 1, "a": 42, "w": "2"}, "x") == {
        "prompt": "1", "completion": "42", "weight": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"q": "p"}, "has no column a, which is to be the completion; columns: q"),
        ({"q": "p", "a": None}, "column a: expected text, found nothing"),
        (
            {"q": "p", "a": 1.5},
            "column a: expected text, found float; write it as text, in quo.*s$",
        ),
        ({"q": "p", "a": True}, "column a: expected text, found bool"),
    ],
)
def test_cells_that_are_no_text_are_refused(record, reason):
    with pytest.raises(UserError, match=f"^here: {reason}"):
        layout_of(("prompt=q", "completion=a"), "").row_of(record, "here")


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        (("question",), "expected ROLE=COLUMN, like prompt=question"),
        (("prompt=",), "expected ROLE=COLUMN"),
        (("promt=q", "completion=a"), "unknown role promt; did you mean prompt"),
        (("zzz=q",), "expected one of: messages, prompt"),
        (("prompt=q", "prompt=r"), "names the prompt twice"),
        (("prompt=q",), "names prompt; name prompt and completion, or text, or messages"),
        (("text=q", "completion=a"), "names text and completion; name"),
        (("completion=a",), "names no prompt; add prompt=COLUMN"),
    ],
)
def test_columns_that_cannot_be_meant_are_refused(columns, reason):
    with pytest.raises(UserError, match=rf"^--columns.*{reason}"):
        layout_of(columns, "")


def test_spaces_around_columns_are_ignored():
    assert parse_columns((" prompt = my question ", "completion=a")) == {
        "prompt": "my question",
        "completion": "a",
    }


# Templates


def template(text: str) -> str:
    Path("t.jinja").write_text(text)
    return "t.jinja"


def test_a_template_makes_the_prompt_of_all_columns():
    name = template("{% if context %}{{ context }}\n{% endif %}Q: {{ question | upper }}")
    layout = layout_of((), name)
    record = {"context": "C", "question": "why", "answer": "so", "more": "m"}
    assert layout.row_of(record, "x") == {
        "more": "m", "prompt": "C\nQ: WHY", "completion": "so",  # what it used is not left over
    }  # fmt: skip
    layout = layout_of(("completion=context",), name)
    assert layout.row_of(record, "x")["completion"] == "C"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ nothing }}", "'nothing' is undefined; columns: question, answer"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "[Rr]ange"),
        (
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "takes more than",
        ),
        ("  ", "renders an empty prompt"),
        ("{{ 1 / 0 }}", "division by zero"),
    ],
)
def test_a_template_that_fails_names_the_row(monkeypatch, text, reason):
    monkeypatch.setattr("your_ai.data.columns.TEMPLATE_SECONDS", 0.3)
    layout = layout_of((), template(text))
    with pytest.raises(UserError, match=rf"^here: --prompt-template t\.jinja: .*{reason}"):
        layout.row_of({"question": "q", "answer": "a"}, "here")


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"{{ a ", "line 1: "), (b"\xff", "is not UTF-8 text"), (None, "no such file: /")],
)
def test_a_template_that_is_not_one_is_refused(content, reason):
    if content is not None:
        Path("t.jinja").write_bytes(content)
    with pytest.raises(UserError, match=rf"^--prompt-template t\.jinja: {reason}"):
        layout_of((), "t.jinja")


@pytest.mark.parametrize(
    "text", ["{{ 'x' * 3000000000 }}", "{{ 9 ** 3000000000 }}", "{{ 'x' | center(3000000000) }}"]
)
def test_constants_of_a_template_do_not_take_all_memory(text):
    with pytest.raises(UserError, match=r"--prompt-template t\.jinja: "):
        layout_of((), template(text)).row_of({"answer": "a"}, "here")


def test_a_template_and_a_prompt_column_exclude_each_other():
    with pytest.raises(UserError, match=r"^--columns prompt=...: cannot be combined"):
        layout_of(("prompt=q", "completion=a"), template("x"))


PREFERRED = {"chosen": "Yes, two", "rejected": "Yes, three"}


def test_the_prompt_of_a_pair_is_guessed_from_its_name():
    layout = Layout()
    row = layout.row_of({"Question": "How many?", **PREFERRED}, "d:1")
    assert row == {"prompt": "How many?", **PREFERRED}
    assert layout.notes() == [
        "guessed from the names of the columns: chosen = chosen, rejected = rejected, "
        "prompt = Question"
    ]


@pytest.mark.parametrize(
    "record", [PREFERRED, {"prompt": "p", **PREFERRED}, {"source": "web", **PREFERRED}]
)
def test_a_pair_without_another_prompt_is_left_as_it_is(record):
    layout = Layout()
    assert layout.row_of(record, "d:1") == record
    assert layout.notes() == []


@pytest.mark.parametrize(
    ("columns", "record", "row"),
    [
        (("prompt=q", "chosen=good", "rejected=bad"), {"q": "p", "good": "a", "bad": "b"},
         {"prompt": "p", "chosen": "a", "rejected": "b"}),
        (("prompt=q", "completion=a", "label=up"), {"q": "p", "a": "c", "up": True},
         {"prompt": "p", "completion": "c", "label": True}),
        (("prompt=prompt", "completion=completion"),
         {"prompt": "p", "completion": "c", "label": True}, PAIR),
        (("system=rules",), {"conversations": TURNS, "rules": "be kind"},
         {"messages": TURNS, "system": "be kind"}),
        (("prompt=q", "completion=a"), {"q": "p", "a": "c", "text": "t"}, PAIR),
        (("prompt=q", "completion=a"), {"text": "t"}, {"text": "t"}),  # in a known format
    ],
)  # fmt: skip
def test_columns_name_texts_system_prompts_preferences_and_labels(columns, record, row):
    assert layout_of(columns, "").row_of(record, "d:1") == row


@pytest.mark.parametrize("there", ["chosen", "Rejected"])
def test_a_pair_with_one_answer_names_the_other(there):
    missing = {"chosen": "rejected", "Rejected": "chosen"}[there]
    with pytest.raises(UserError, match=f"^d:1: {missing} is missing; columns: prompt, {there}"):
        Layout().row_of({"prompt": "p", there: "a"}, "d:1")
