"""Values of settings: untrusted values -> the types of their fields, and types in words.

This module does not import mlx.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from your_ai.config.by_layer import ByLayer, LayerText
from your_ai.config.settings import TYPES
from your_ai.errors import UserError
from your_ai.gates.text import nearest, quoted, split_outside_brackets

UNITS = {  # bytes, the longest ends first
    "gib": 2**30,
    "mib": 2**20,
    "gb": 10**9,
    "mb": 10**6,
    "gi": 2**30,
    "mi": 2**20,
    "g": 10**9,
    "m": 10**6,
}
NUMBER_CHARACTERS = 100  # of a number that is given as text


def coerce(name: str, value: Any, label: str) -> Any:
    """Convert `value` to the type of field `name`.

    label: the beginning of the error message. Raises UserError if the value does not fit.
    """
    kind = TYPES[name]
    found: Any
    if value is None and type(None) in typing.get_args(kind):
        return None
    if name == "max_memory":
        found = gigabytes(value)
    elif kind == tuple[str, ...]:
        found = as_texts(name, value, label)
    elif LayerText in typing.get_args(kind) and has_patterns(value):
        found = as_layers(kind, value, label)
    else:
        found = as_kind(kind, value)
    if found is not None:
        return found
    if name == "max_memory":
        raise UserError(
            f"{label}: expected a number of GB, such as 8 or 500MB, found {quoted(value)}"
        )
    near = nearest(value, words_of(kind)) if isinstance(value, str) else ""
    raise UserError(f"{label}: expected {describe(kind)}, found {quoted(value)}{near}")


def as_texts(name: str, value: Any, label: str) -> tuple[str, ...] | None:
    """The texts of a list, or of a text that names several; None if it is neither."""
    parts = parts_of(name, value) if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(p, str) for p in parts):
        return None
    if name == "hosts" and not all(p.strip() for p in parts):
        raise UserError(
            f"{label}: an empty name is no host; name this machine and at least one "
            "other, or leave the option out to train on this machine alone"
        )
    return tuple(p.strip() for p in parts if p.strip())


def has_patterns(value: Any) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, str) and ("," in value or "=" in value))


def as_layers(kind: Any, value: Any, label: str) -> Any:
    """The value of a setting by layer, in one form. Raises UserError if it is not well formed."""
    try:
        found = ByLayer.of(value).setting
        return found if has_patterns(found) else as_kind(kind, found)
    except ValueError as error:
        raise UserError(f"{label} {quoted(value)}: {error}") from error


def as_kind(kind: Any, value: Any) -> Any:
    """Convert a value to a type of a single value; None if it does not fit."""
    options = typing.get_args(kind)
    if kind is bool:
        return value if isinstance(value, bool) else None
    if kind is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):  # Python refuses to convert very long ints
                return str(value)
        return None
    if float in (kind, *options):
        return as_number(value, float)
    # int, perhaps also None or literals
    nested = [typing.get_args(o) for o in options if typing.get_origin(o) is Literal]
    literals = options if typing.get_origin(kind) is Literal else [v for vs in nested for v in vs]
    if value in literals:
        return value
    number = as_number(value, int)
    return number if int in (kind, *options) or number in literals else None


def words_of(kind: Any) -> list[str]:
    """The words that a setting of this type may be."""
    literals = [o for o in (kind, *typing.get_args(kind)) if typing.get_origin(o) is Literal]
    return [str(word) for literal in literals for word in typing.get_args(literal)]


def parts_of(name: str, text: str) -> list[str]:
    """Split the text of a setting that is a list at its commas; a part with commas is in quotes."""
    if name == "reward":
        return split_outside_brackets(text)
    try:
        return next(csv.reader([text], skipinitialspace=True)) or [""]
    except csv.Error:  # it is very long, or has line breaks
        return text.split(",")


def joined_parts(parts: Iterable[object]) -> str:
    """The text that `parts_of` splits into these parts."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow([str(part) for part in parts])
    return line.getvalue()


def as_number(value: Any, kind: type) -> Any:
    """Return `value` as an int or a float if the conversion is exact, else None.

    The text `1e-4` is a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and len(value) > NUMBER_CHARACTERS:
        return None
    try:
        if kind is int and isinstance(value, (int, str)):  # a float has only 53 bits
            with contextlib.suppress(ValueError):
                return int(value)
        number = float(value)
    except ValueError:
        return None
    except OverflowError:
        number = math.inf
    if kind is float:
        return number
    return int(number) if math.isfinite(number) and number == int(number) else None


def gigabytes(value: Any) -> float | None:
    """A size in GB: 8, `8`, `8GB`, `8 GiB` or `500MB`; None for anything else."""
    if isinstance(value, str) and len(value) <= NUMBER_CHARACTERS:
        for unit, size_bytes in UNITS.items():
            number = value.strip().lower().removesuffix(unit)
            if number != value.strip().lower():
                found: float | None = as_number(number.strip(), float)
                return None if found is None else found * size_bytes / 1e9
    found = as_number(value, float)
    return found


def describe(kind: Any) -> str:
    """Describe a type in words: `a whole number or all`."""
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false",
             LayerText: "values by layer"}  # fmt: skip
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) is Literal:
        return " or ".join(str(v) for v in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list of names"
    parts = [describe(o) for o in typing.get_args(kind) if o is not type(None)]
    return " or ".join(parts)
