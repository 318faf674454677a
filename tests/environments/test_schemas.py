from __future__ import annotations

import json
import keyword
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.environments.schemas import fault_of_arguments, tool_schema
from your_ai.errors import UserError


def look_up(
    name: str,
    count: int = 1,
    unit: Literal["kg", "g"] | None = None,
    tags: list[str] | None = None,
    more: dict[str, float] = {},  # noqa: B006
) -> str:
    """Look up the price
    of a thing.

    A second paragraph.

    Args:
        name: The thing, as
            it is called.
        count (int, optional): How many: all.

    Returns:
        str: A price.
    """
    return name


def test_a_schema_has_types_defaults_and_texts():
    text = {"type": "string"}
    unit = [{"anyOf": [{"type": "string", "enum": ["kg", "g"]}, {"type": "null"}]}]
    assert tool_schema(look_up, "look_up", "w") == {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up the price of a thing.",
            "parameters": {
                "type": "object",
                "properties": {
                    "name": {**text, "description": "The thing, as it is called."},
                    "count": {"type": "integer", "description": "How many: all.", "default": 1},
                    "unit": {**unit[0], "default": None},
                    "tags": {
                        "anyOf": [{"type": "array", "items": text}, {"type": "null"}],
                        "default": None,
                    },
                    "more": {
                        "type": "object",
                        "additionalProperties": {"type": "number"},
                        "default": {},
                    },
                },
                "required": ["name"],
            },
        },
    }


def no_docstring(a: int):
    pass


def no_type(a):
    """D."""


def bytes_type(a: bytes):
    """D."""


def positional(a: int, /):
    """D."""


def many(*a: int):
    """D."""


def unknown_name(a: Missing):  # noqa: F821
    """D."""


def wrong_default(a: int = "x"):
    """D."""


def other_argument(name: str):
    """D.

    Args:
        nam: N.
    """


EXPECTED = "str, int, float, bool, list[...], dict, Literal or Optional of these"


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (no_docstring, "has no docstring, from which the model learns what it does"),
        (no_type, f"parameter a has no type; expected {EXPECTED}"),
        (bytes_type, f"parameter a: type <class 'bytes'> has no JSON schema; expected {EXPECTED}"),
        (positional, "parameter a cannot be given by its name"),
        (many, "parameter a cannot be given by its name"),
        (unknown_name, "its types cannot be read (NameError: name 'Missing' is not defined)"),
        (wrong_default, "parameter a: its default: expected integer, found 'x'"),
        (other_argument, "its docstring describes nam, which is no parameter; did you mean name?"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused(function, text):
    with pytest.raises(UserError) as error:
        tool_schema(function, "f", "--tools m: f")
    assert str(error.value) == f"--tools m: f: {text}"


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ({"name": "x", "unit": "kg", "tags": ["a"], "more": {"b": 1}}, None),
        ({"name": "x", "tags": None, "unit": None}, None),
        ("x", "arguments: expected an object"),
        ({}, "argument name is missing"),
        ({"name": "x", "cont": 2}, "there is no argument cont; did you mean count?"),
        ({"name": 3}, "argument name: expected string, found 3"),
        ({"name": "x", "count": True}, "argument count: expected integer, found True"),
        ({"name": "x", "count": 1.0}, "argument count: expected integer, found 1.0"),
        ({"name": "x", "unit": "mg"}, "argument unit: 'mg' fits none of its types"),
        ({"name": "x", "tags": [1]}, "argument tags: [1] fits none of its types"),
        ({"name": "x", "more": {"b": "c"}}, "argument more[b]: expected number, found 'c'"),
    ],
)
def test_arguments_are_checked(arguments, fault):
    assert fault_of_arguments(arguments, tool_schema(look_up, "look_up", "w")) == fault


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a type, made without this package's schemas."""
    plain = {
        str: st.text(max_size=4),
        int: st.integers(),
        float: st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        type(None): st.none(),
    }
    if isinstance(kind, type):
        return plain[kind]
    name, inner = kind
    if name == "list":
        return st.lists(values_of(inner), max_size=3)
    if name == "dict":
        return st.dictionaries(st.text(max_size=3), values_of(inner), max_size=3)
    if name == "optional":
        return st.none() | values_of(inner)
    return st.sampled_from(inner)  # literal


def annotation_of(kind: Any) -> Any:
    if isinstance(kind, type):
        return kind
    name, inner = kind
    if name == "list":
        return list[annotation_of(inner)]
    if name == "dict":
        return dict[str, annotation_of(inner)]
    if name == "optional":
        return annotation_of(inner) | None
    return Literal[tuple(inner)]


leaves = st.sampled_from([str, int, float, bool]) | st.tuples(
    st.just("literal"), st.lists(st.text(max_size=3), min_size=1, max_size=3)
)
kinds = st.recursive(
    leaves,
    lambda inner: st.tuples(st.sampled_from(["list", "dict", "optional"]), inner),
    max_leaves=4,
)
names = st.from_regex("[a-z]{1,5}", fullmatch=True).filter(lambda n: not keyword.iskeyword(n))
signatures = st.dictionaries(names, kinds, min_size=1, max_size=4)


def function_of(signature: dict[str, Any]) -> Any:
    namespace: dict[str, Any] = {}
    exec(f"def f({', '.join(signature)}):\n '''Do.'''", namespace)
    namespace["f"].__annotations__ = {name: annotation_of(k) for name, k in signature.items()}
    return namespace["f"]


@given(st.data(), signatures)
def test_values_of_the_types_fit_the_schema(data, signature):
    """After a round through JSON, as the model's arguments have."""
    schema = tool_schema(function_of(signature), "f", "w")
    values = {name: data.draw(values_of(kind)) for name, kind in signature.items()}
    assert fault_of_arguments(json.loads(json.dumps(values)), schema) is None


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=6,
)


def fits(value: Any, kind: Any) -> bool:
    """A plain reading of a type."""
    if kind is float:
        return type(value) in (int, float) and abs(value) < float("inf")
    if isinstance(kind, type):
        return type(value) is kind
    name, inner = kind
    if name == "list":
        return type(value) is list and all(fits(each, inner) for each in value)
    if name == "dict":
        return type(value) is dict and all(fits(each, inner) for each in value.values())
    if name == "optional":
        return value is None or fits(value, inner)
    return value in inner


@given(kinds, json_values)
def test_any_value_fits_exactly_if_it_has_the_type(kind, value):
    schema = tool_schema(function_of({"a": kind}), "f", "w")
    assert (fault_of_arguments({"a": value}, schema) is None) == fits(value, kind)
