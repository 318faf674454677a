"""A measure of the user's own: `module:function`, called with an answer and its row."""

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
    """function(answer, expected, row) -> a number: row as its line of the file has it.

    What it prints goes to stderr: stdout is for what was measured.
    """

    name: str
    function: Callable[[str, str, dict], Any]

    def score(self, answer: str, expected: str, row: dict, where: str) -> float:
        """Raises UserError, naming the row, where the function raises or gives no number."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                found = self.function(answer, expected, row)
        except (Exception, SystemExit) as error:  # the user's code raises what it likes
            raise UserError(f"{where}: --metric {self.name} raised {described(error)}") from error
        if not isinstance(found, (Real, np.bool_)):
            text = f"{type(found).__name__} {found!r}" if found is not None else "None"
            raise UserError(f"{where}: --metric {self.name} gave {text[:80]}, not a number")
        try:
            number = float(found)
        except (OverflowError, ValueError):  # an int, or a fraction, beyond floats
            number = math.inf
        if not math.isfinite(number):
            raise UserError(f"{where}: --metric {self.name} gave {number}, not a finite number")
        return number


def load_metric(name: str) -> Metric:
    """The function of `module:function`; modules of the current folder come first.

    Raises UserError where the module cannot be imported, or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserError(
            f"--metric {name}: give module:function, e.g. metrics:score for `def score(answer, "
            "expected, row)` in metrics.py"
        )
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # the user's code raises what it likes
        reason = described(error)
        raise UserError(f"--metric {name}: {module_name} cannot be imported ({reason})") from error
    finally:
        sys.path.remove(here)
        sys.path.append(here)  # for what the function imports itself; it hides nothing there
    function = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, known)
        raise UserError(f"--metric {name}: {module_name} has no function {function_name}{hint}")
    return Metric(name, function)


def described(error: BaseException) -> str:
    """`ValueError: its message`, of which the first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
