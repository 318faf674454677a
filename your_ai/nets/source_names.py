"""Which names the code of a class of modules reads, from its bytecode."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@cache
def names_read(kind: type) -> frozenset[str]:
    """All names and string constants in the code of the modules that define a class and its bases.

    `__init__` is left out.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        for value in vars(sys.modules[base.__module__]).values():
            own = vars(value).items() if isinstance(value, type) else [("", value)]
            for name, member in own:
                for function in _functions_of(member) if name != "__init__" else ():
                    found |= _names_in(function.__code__)
    return frozenset(found)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield a function and the functions that it wraps."""
    while member is not None:
        if isinstance(member, FunctionType):
            yield member
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, staticmethod | classmethod):
            member = member.__func__
        else:
            member = getattr(member, "__dict__", {}).get("__wrapped__")


def _names_in(code: CodeType) -> set[str]:
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found


@cache
def weights_read(kind: type) -> frozenset[str]:
    """The attributes whose `weight` the code of a class reads itself, as in `self.gate.weight`.

    Such a layer must remain what it is: another layer in its place may have no such array.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            for function in _functions_of(member) if name != "__init__" else ():
                found |= _owners_of_weights(function.__code__)
    return frozenset(found)


def _owners_of_weights(code: CodeType) -> set[str]:
    found = {
        first.argval
        for first, second in pairwise(dis.get_instructions(code))
        if first.opname in ATTRIBUTES and second.opname in ATTRIBUTES and second.argval == "weight"
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _owners_of_weights(constant)
    return found
