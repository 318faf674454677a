from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import UserError
from your_ai.rewards.names import FUNCTION, WeightedName, needs_expected, parse_rewards

WITHOUT_MARKS = st.text(st.characters(blacklist_characters="\\()[]{}")).map(str.strip)


@pytest.mark.parametrize(
    ("text", "name", "kind", "argument", "weight"),
    [
        ("exact_match", "exact_match", "exact_match", "", 1),
        ("exact_match=2", "exact_match", "exact_match", "", 2),
        ("judge = -0.5", "judge", "judge", "", -0.5),
        ("length:200=1e-1", "length:200", "length", "200", 0.1),
        ("regex:a=b", "regex:a=b", "regex", "a=b", 1),
        ("regex:a=b=.5", "regex:a=b", "regex", "a=b", 0.5),
        ("regex:x=1=1", "regex:x=1", "regex", "x=1", 1),
        ("contains:m:f", "contains:m:f", "contains", "m:f", 1),
        ("contains: a ", "contains: a ", "contains", " a ", 1),
        ("my.rewards:brevity=+3", "my.rewards:brevity", FUNCTION, "my.rewards:brevity", 3),
    ],
)
def test_name_argument_and_weight_are_read(text, name, kind, argument, weight):
    assert parse_rewards([text]) == (WeightedName(name, kind, argument, weight),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("exact_mach", "no such reward; did you mean exact_match"),
        ("lenght:200", "no such reward; did you mean length"),
        ("zzz", "no such reward; expected one of: exact_match, json_valid"),
        ("", "has no name; expected one of"),
        ("=2", "has no name"),
        (":f", "has no name"),
        ("exact_match=0", "every weight is 0"),
        ("exact_match=nan", "the weight must be a finite number"),
        ("exact_match=-inf", "the weight must be"),
        ("exact_match=1e999", "the weight must be"),
        ("exact_match=x", "no such reward; did you mean exact_match"),
        ("exact_match:a", "exact_match takes no argument"),
        ("length", "needs an argument, e.g. length:200"),
        ("length:", "needs something after the colon"),
        ("length:many", "needs a number of tokens, e.g. length:200"),
        ("length:-1", "needs a number of tokens"),
        ("length:0", "needs a number of tokens from 1 to"),
        ("length:²", "needs a number of tokens"),
        ("regex:(", "is not a valid pattern"),
        ("regex:a{99999999999}", "is not a valid pattern"),
        ("run:", "needs something after the colon"),
        ("my-rewards:f", "no such reward"),
    ],
)
def test_a_wrong_reward_is_an_error_of_one_line(text, message):
    with pytest.raises(UserError, match=r"^--reward ") as error:
        parse_rewards([text])
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_reward_may_be_given_once_and_one_is_needed():
    with pytest.raises(UserError, match=r"exact_match: is given twice"):
        parse_rewards(["exact_match", "exact_match=2"])
    with pytest.raises(UserError, match="names no reward"):
        parse_rewards([])


@given(st.lists(st.text(), min_size=1))
def test_any_text_is_parsed_or_an_error_of_the_user(texts):
    try:
        found = parse_rewards(texts)
    except UserError:
        return
    assert len(found) == len(texts)


@given(WITHOUT_MARKS.filter(bool), st.floats(allow_nan=False, allow_infinity=False).filter(bool))
def test_a_name_with_its_weight_is_read_back(text, weight):
    [found] = parse_rewards([f"contains:{text}={weight!r}"])
    assert (found.argument, found.weight) == (text, weight)


def test_rewards_that_need_the_expected_answer_are_named():
    names = parse_rewards(["judge", "json_fields=2", "exact_match", "a:b"])
    assert needs_expected(names) == ["json_fields", "exact_match"]
