from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards.rollouts import rollout
from your_ai.errors import UserError
from your_ai.rewards.builtin import builtin, check_expected, is_same, parse_strict, without_fence
from your_ai.rewards.names import parse_rewards
from your_ai.rewards.rollout import Rollout

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=10,
)  # fmt: skip


def reward(name: str, given: Rollout) -> float:
    [parsed] = parse_rewards([name])
    return builtin(parsed)(given)


@pytest.mark.parametrize(
    ("completion", "value"), [("yes", 1), (" yes\n", 1), ("Yes", 0), ("", 0), ("yes.", 0)]
)
def test_exact_match_ignores_surrounding_space(completion, value):
    assert reward("exact_match", rollout(completion, expected=" yes")) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"a": 1}', 1), (" [1]\n", 1), ("3", 1), ('"x"', 1), ("null", 1),
        ("", 0), ("{'a': 1}", 0), ('{"a": 1} ok', 0), ("NaN", 0), ("[Infinity]", 0),
        ('{"a": 1, "a": 2}', 0), ("```json\n{}\n```", 0), ("[" * 100_000, 0), ("9" * 5000, 0),
        ("[" * 65 + "]" * 65, 0), ("\ud800", 0),
    ],
)  # fmt: skip
def test_json_valid_needs_the_whole_text_to_be_json(completion, value):
    assert reward("json_valid", rollout(completion)) == value


@pytest.mark.parametrize(
    ("completion", "value"),
    [
        ('{"a": 1, "b": [2, {"c": null}]}', 1),
        ('{"b": [2, {"c": null}], "a": 1.0, "more": 3}', 1),
        ('```json\n{"a": 1, "b": 0}\n```', 0.5),
        ('```\n{"a": 1}```', 0.5),
        ('{"a": true, "b": 1}', 0), ('{"a": "1"}', 0), ("[1]", 0), ("", 0), ("{}", 0),
        ('{"a": 1} and more', 0),
    ],
)  # fmt: skip
def test_json_fields_is_the_share_of_equal_fields(completion, value):
    expected = '{"a": 1, "b": [2, {"c": null}]}'
    assert reward("json_fields", rollout(completion, expected=expected)) == value


@given(VALUES)
def test_a_json_value_equals_itself_and_its_text(value):
    assert is_same(parse_strict(json.dumps(value)), value)


@given(st.text())
def test_no_completion_raises(text):
    given = rollout(text, expected='{"a": 1}')
    for name in ("exact_match", "json_valid", "json_fields", "regex:^a", "contains:b"):
        assert 0 <= reward(name, given) <= 1


def test_only_one_surrounding_fence_is_removed():
    assert without_fence(" ```json\n{}\n``` ") == "{}\n"
    assert without_fence("so: ```json\n{}\n```") == "so: ```json\n{}\n```"


@pytest.mark.parametrize(
    ("pattern", "value"), [("o+", 1), ("^o", 0), (r"\d,\s", 0), ("o$", 1), ("(?i)HELL", 1)]
)
def test_regex_searches_the_completion(pattern, value):
    assert reward(f"regex:{pattern}", rollout("hello")) == value


@pytest.mark.parametrize(
    ("tokens", "value"), [(0, 1), (100, 1), (150, 0.5), (175, 0.25), (200, 0), (1000, 0)]
)
def test_length_falls_linearly_to_twice_the_length(tokens, value):
    assert reward("length:100", rollout(tokens=tokens)) == value


def test_contains_is_literal_and_case_sensitive():
    assert reward("contains:a.c", rollout("xa.cx")) == 1
    assert reward("contains:a.c", rollout("abc A.C")) == 0


def test_functions_and_the_judge_are_not_built_in():
    assert [builtin(name) for name in parse_rewards(["a:b", "judge"])] == [None, None]


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (None, "has no expected answer, which --reward json_fields needs"),
        ("[1]", "is a JSON object with fields .it is a JSON list"),
        ("{}", "it is empty"),
        ("yes", "Expecting value"),
        ('{"a": 1, "a": 2}', "it has a twice"),
    ],
)
def test_an_expected_answer_that_cannot_be_used_is_an_error_with_the_row(expected, message):
    with pytest.raises(UserError, match=f"^t.jsonl:7: .*{message}"):
        check_expected(parse_rewards(["json_fields"]), expected, "t.jsonl:7")


def test_rows_without_an_expected_answer_are_fine_where_no_reward_needs_one():
    check_expected(parse_rewards(["length:3", "a:b", "judge"]), None, "t.jsonl:7")
    with pytest.raises(UserError, match=r"^t.jsonl:7: .* exact_match"):
        check_expected(parse_rewards(["length:3", "exact_match"]), None, "t.jsonl:7")
