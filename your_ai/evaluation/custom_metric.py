"""A metric written by the user: `module:function`, called with an answer and its row."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from your_ai.errors import UserError
from your_ai.gates.functions import as_float, described, load_function


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
        number = as_float(found)
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
    example = "metrics:score for `def score(answer, expected, row)` in metrics.py"
    return Metric(name, load_function(name, f"{option} {name}", example), option)
