from __future__ import annotations

from pathlib import Path

import pytest

from your_ai.errors import UserError
from your_ai.rewards.rubric import DEFAULT_RUBRIC, Criterion, Prices, Rubric, read_rubric

FULL = """
instructions: Be strict.
criteria:
  - name: truth
    description: It is true.
    scale: [0, 10]
  - {name: style, scale: [1, 5]}
formula: (truth / 10 + style / 5) / 2
range: [0, 1]
prices: {input: 0.5, output: 2}
"""


def read(text: str) -> Rubric:
    path = Path("rubric.yaml")
    path.write_text(text)
    return read_rubric(path)


def test_a_full_rubric_is_read(own_folder):
    rubric = read(FULL)
    assert rubric.criteria == (
        Criterion("truth", "It is true.", 0, 10),
        Criterion("style", "", 1, 5),
    )
    assert (rubric.instructions, rubric.limits) == ("Be strict.", (0, 1))
    assert rubric.prices == Prices(0.5, 2)
    assert rubric.total({"truth": 5, "style": 5}) == 0.75


def test_without_a_formula_the_total_is_the_mean_of_the_scaled_grades(own_folder):
    rubric = read("criteria: [{name: a}, {name: b, scale: [1, 3]}]")
    assert rubric.total({"a": 5, "b": 3}) == 0.75
    assert rubric.prices is None


def test_the_total_is_clipped_to_the_range(own_folder):
    rubric = read("criteria: [{name: a}]\nformula: a - 5\nrange: [-1, 1]")
    assert [rubric.total({"a": grade}) for grade in (0, 4.5, 5.5, 10)] == [-1, -0.5, 0.5, 1]


def test_a_division_by_zero_gives_no_total(own_folder):
    rubric = read("criteria: [{name: a}]\nformula: 1 / a\nrange: [0, 1]")
    assert rubric.total({"a": 0}) is None


def test_the_default_rubric_gives_rewards_between_0_and_1():
    rubric = read_rubric(DEFAULT_RUBRIC)
    best = {criterion.name: criterion.high for criterion in rubric.criteria}
    assert rubric.total(best) == pytest.approx(1)
    assert rubric.total(dict.fromkeys(best, 0)) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "criteria must be a list of 1 to 50"),
        ("criteria: []", "criteria must be a list"),
        ("criteria: {a: 1}", "criteria must be a list"),
        ("criteria: [a]", "criteria 1: expected name, description and scale, found a"),
        ("criteria: [{name: a}, {}]", "criteria 2: name must be a word"),
        ("criteria: [{name: a b}]", "criteria 1: name must be a word"),
        ("criteria: [{name: 3}]", "criteria 1: name must be a word"),
        ("criteria: [{name: min}]", "the name min has a meaning"),
        ("criteria: [{name: lambda}]", "the name lambda has a meaning"),
        ("criteria: [{name: a}, {name: a}]", "two criteria have the name a"),
        ("criteria: [{name: a, scal: [0, 1]}]", "unknown key scal; did you mean scale"),
        ("criteria: [{name: a, scale: [1, 1]}]", "scale: expected two numbers"),
        ("criteria: [{name: a, scale: [0, .inf]}]", "scale: expected two numbers"),
        ("criteria: [{name: a, scale: [false, true]}]", "scale: expected two numbers"),
        ("criteria: [{name: a, scale: 5}]", "scale: expected two numbers"),
        ("criteria: [{name: a, description: 5}]", "description: must be a text"),
        ("criteria: [{name: a}]\nformula: a +", "formula is not a formula"),
        ("criteria: [{name: a}]\nformula: b", "formula has the unknown name b"),
        ("criteria: [{name: a}]\nformula: [a]", "formula must be a text"),
        ("criteria: [{name: a}]\nformula: a / 0", "formula has no finite value"),
        ("criteria: [{name: a}]\nrange: [1, 0]", "range: expected two numbers"),
        ("criteria: [{name: a}]\nprices: 3", "prices: expected input and output"),
        ("criteria: [{name: a}]\nprices: {input: -1}", "prices: expected US dollars"),
        ("criteria: [{name: a}]\nprices: {in: 1}", "prices: unknown key in"),
        ("criteria: [{name: a}]\nformulas: a", "unknown key formulas; did you mean formula"),
        ("- a", "expected `key: value` lines"),
        ("a: [", "rubric.yaml"),
    ],
)
def test_a_wrong_rubric_is_an_error_naming_file_and_key(own_folder, text, message):
    with pytest.raises(UserError, match=r"^rubric.yaml") as error:
        read(text)
    assert message in str(error.value)


def test_a_missing_rubric_is_an_error(own_folder):
    with pytest.raises(UserError, match=r"^absent.yaml: no such file"):
        read_rubric(Path("absent.yaml"))
