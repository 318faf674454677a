"""A metric written by the user: `module:function`, called with an answer and its row."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from your_ai.config import nearest
from your_ai.errors import UserError


@dataclass(frozen=True)
class Metric:
    """A user's function(answer, expected, row) -> number. `row` is the JSON object of the line.

    Its prints go to stderr, because stdout is for the results.
    """

    name: str
    function: Callable[[str, str, dict], Any]
    option: str = "--metric"
    """The option that named the function, for messages."""

    def score(self, answer: str, expected: str, row: dict, where: str) -> float:
        """Score an answer. Raises UserError, naming the row, if the function fails.

        It fails if it raises, or returns anything but a finite number.
        """
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = self.function(answer, expected, row)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise UserError(
                f"{where}: {self.option} {self.name} raised {described(error)}"
            ) from error
        if not isinstance(found, (Real, np.bool_)):
            text = f"{type(found).__name__} {found!r}" if found is not None else "None"
            raise UserError(
                f"{where}: {self.option} {self.name} returned {text[:80]}, not a number"
            )
        try:
            number = float(found)
        except (OverflowError, ValueError):  # an int or a fraction too large for a float
            number = math.inf
        if not math.isfinite(number):
            raise UserError(
                f"{where}: {self.option} {self.name} returned {number}, not a finite number"
            )
        return number


def load_metric(name: str, option: str = "--metric") -> Metric:
    """Import the function of `module:function`. Modules in the current folder come first.

    option: the option that names it, for messages.

    Raises UserError if the module cannot be imported or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserError(
            f"{option} {name}: give module:function, e.g. metrics:score for `def score(answer, "
            "expected, row)` in metrics.py"
        )
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        reason = described(error)
        raise UserError(f"{option} {name}: {module_name} cannot be imported ({reason})") from error
    finally:
        sys.path.remove(here)
        # The function may import modules from here later. At the end of the path, the folder
        # hides no installed module.
        sys.path.append(here)
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, known)
        raise UserError(f"{option} {name}: {module_name} has no function {function_name}{hint}")
    return Metric(name, function, option)


def described(error: BaseException) -> str:
    """`ValueError: first line of its message`."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
