"""The hint for unknown columns names those of the file, and the roles of the objective."""

from __future__ import annotations

import shlex

import pytest

from your_ai.config import ABOUT, TrainConfig
from your_ai.data.column_hints import UnknownColumns, columns_option
from your_ai.data.columns import ROLES, Layout, parse_columns

TICKET = {"id": "7", "team": "a", "they_wrote": "Where is it?", "we_said": "On its way, sir."}
JUDGED = {"Kundenfrage": "Where is it?", "gut (good)": "On its way.", "schlecht (bad)": "No."}


@pytest.mark.parametrize(
    ("objective", "record", "option"),
    [
        ("sft", TICKET, "prompt=they_wrote,completion=we_said"),
        ("sft", {"they_wrote": "2 + 2?", "number": "4"}, "prompt=they_wrote,completion=number"),
        ("sft", {"we_said": "It is on its way", "ask": "?"}, "prompt=ask,completion=we_said"),
        ("dpo", JUDGED, "prompt=Kundenfrage,chosen=gut (good),rejected=schlecht (bad)"),
        ("dpo", {"q": "?", "non_preferred": "a", "preferred": "b"},
         "prompt=q,chosen=preferred,rejected=non_preferred"),
        ("kto", {**TICKET, "fine": "yes"}, "prompt=they_wrote,completion=we_said,label=fine"),
        ("kto", JUDGED, "prompt=Kundenfrage,chosen=gut (good),rejected=schlecht (bad)"),
        ("kto", TICKET, "prompt=they_wrote,completion=we_said,label=COLUMN"),
        ("reward", {"q": "a?", "we": "b", "stars": 4.5}, "prompt=q,completion=we,score=stars"),
        ("reward", JUDGED, "prompt=Kundenfrage,chosen=gut (good),rejected=schlecht (bad)"),
        ("sft", {"thread": [{"from": "human"}], "id": 3}, "messages=thread"),
        ("sft", {"data": {"turns": [{"role": "user"}]}}, "messages=data.turns"),
        ("sft", {"translation": {"en": "Good day", "fr": "Bonjour"}},
         "prompt=translation.en,completion=translation.fr"),
        ("sft", {"context": "Rome is in Italy.", "question": "Where?",
                 "answers": {"text": ["Italy", "Europe"], "answer_start": [11, 0]}},
         "prompt=question,completion=answers.text.0"),
        ("sft", {"bad answer": "No.", "ask": "Is it?", "good answer": "Yes."},
         "prompt=ask,completion=good answer"),
        ("sft", {"id": "0", "data": ["Is it so?", "Yes."]}, "messages=data"),
        ("sft", {"question": "q", "answers": ["an answer", "another"]},
         "prompt=question,completion=answers.0"),
        ("sft", {"task_id": "HE/1", "prompt": "def f():", "canonical_solution": "pass"},
         "prompt=prompt,completion=canonical_solution"),
        ("sft", {"query": "Rain?", "answers": [{"name": "f"}], "tools": [{"name": "f"}]},
         "prompt=query,completion=answers"),
        ("dpo", {"prompt": "?", "answers": [{"answer": "a"}], "turns": 1},
         "prompt=prompt,chosen=COLUMN,rejected=COLUMN"),
        ("reward", {"prompt": "?", "response": "b", "helpfulness": 3},
         "prompt=prompt,completion=response,score=helpfulness"),
        ("grpo", {"id": 3, "they_wrote": "Where?"}, "prompt=they_wrote"),
    ],
)  # fmt: skip
def test_option_has_the_columns_of_the_file_and_the_roles_of_the_objective(
    objective, record, option
):
    kind = TrainConfig(objective=objective).row_kind
    words = shlex.split(columns_option(kind, record))
    assert words == ["--columns", option]
    assert parse_columns(words[1].split(","), kind)
    with pytest.raises(UnknownColumns, match=r"here: .*; say what they are with --columns"):
        Layout(kind=kind).row_of(record, "here")


def test_help_names_every_role():
    for role in ROLES:
        assert role in ABOUT["columns"].help
