"""Compute what depends on the sizes of a model once: a planner asks thousands of times."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
First = TypeVar("First")
Result = TypeVar("Result")


def memoized(
    function: Callable[Concatenate[First, P], Result],
) -> Callable[Concatenate[First, P], Result]:
    """Let a function remember its results in its first argument, as long as that exists.

    The first argument is a frozen dataclass, which is neither compared nor hashed. All others are
    hashable. Callers must not change a result.
    """
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def remembering(first: First, /, *args: P.args, **kwargs: P.kwargs) -> Result:
        found: dict[Any, Result] = first.__dict__.setdefault(name, {})
        key = (args, *kwargs.items()) if kwargs else args
        if key not in found:
            found[key] = function(first, *args, **kwargs)
        return found[key]

    return remembering
