from __future__ import annotations

import contextlib
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.rewards.rubric import parse_formula

NAMES = ("a", "b")
NUMBERS = st.floats(0, 10)
FORMULAS = st.recursive(
    st.sampled_from(NAMES) | st.integers(0, 99).map(str) | st.floats(0, 9).map("{:.6f}".format),
    lambda inner: st.one_of(
        st.builds("({} {} {})".format, inner, st.sampled_from(["+", "-", "*", "/", "**"]), inner),
        st.builds("(-{})".format, inner),
        st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), inner, inner),
    ),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a", 2), ("a + b * 3", 11), ("(a + b) / 10", 0.5), ("-a ** 2", -4), ("+b", 3),
        ("min(a, b, 1)", 1), ("max(a, b)", 3), ("min(a)", 2), ("2 ** 0.5", math.sqrt(2)),
        (" a\n", 2), ("1e-1 * a", 0.2), ("7 / 2", 3.5),
    ],
)  # fmt: skip
def test_arithmetic_is_that_of_float64(text, value):
    assert parse_formula(text, NAMES).value({"a": 2, "b": 3}) == value


@pytest.mark.parametrize(
    "text", ["a / 0", "0 ** -1", "10.0 ** 999", "9 ** 9 ** 9", "(-a) ** 0.5", "1e308 * 10",
             "max(1, (-a) ** 0.5)", "1e308 * 10 - 1e308 * 10"]
)  # fmt: skip
def test_a_formula_without_a_finite_value_has_none(text):
    assert parse_formula(text, NAMES).value({"a": 2, "b": 3}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a formula"), ("a +", "is not a formula"), ("a b", "is not a formula"),
        ("a\x00", "is not a formula"), ("(" * 1500, "is not a formula"),
        ("aa", "has the unknown name aa; did you mean a"), ("min", "has the unknown name min"),
        ("__import__('os')", "which is not allowed"), ("a.real", "a.real, which is not allowed"),
        ("a[0]", "not allowed"), ("a if b else 1", "not allowed"), ("a // b", "not allowed"),
        ("a % b", "not allowed"), ("a > b", "not allowed"), ("not a", "not allowed"),
        ("'a' * 9", "'a', which is not allowed"), ("True", "not allowed"), ("1j", "not allowed"),
        ("lambda: 1", "not allowed"), ("(a := 1)", "not allowed"), ("[a]", "not allowed"),
        ("min()", "has min without values"), ("max(a, key=b)", "has max without values"),
        ("min(*a)", "not allowed"), ("abs(a)", "not allowed"), ("1e999", "too large"),
        ("9" * 400, "too large"), ("+".join("a" * 400), "is too long"), ("a" * 3000, "is longer"),
    ],
)  # fmt: skip
def test_everything_else_is_refused(text, message):
    with pytest.raises(ValueError, match=f"^.*{message}"):
        parse_formula(text, NAMES)


@given(FORMULAS, NUMBERS, NUMBERS)
def test_a_formula_has_the_value_that_python_has(text, a, b):
    found = parse_formula(text, NAMES).value({"a": a, "b": b})
    # Floats throughout, so that Python computes no integers of a million digits.
    floats = {"min": min, "max": max, "__builtins__": {}, "a": a, "b": b}
    try:
        expected = eval(as_floats(text), floats)
    except (ArithmeticError, TypeError):  # complex numbers have no order
        expected = None
    if isinstance(expected, complex) or (expected is not None and not math.isfinite(expected)):
        expected = None
    assert found == expected


def as_floats(text: str) -> str:
    return re.sub(r"(?<![\w.])(\d+)(?![\w.])", r"\1.0", text)


@given(st.text())
def test_any_text_is_parsed_or_refused(text):
    with contextlib.suppress(ValueError):
        parse_formula(text, NAMES).value({"a": 1, "b": 2})
