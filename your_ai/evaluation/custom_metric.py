"""A metric written by the user: `module:function`, called with an answer and its row."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from your_ai.errors import UserError
from your_ai.gates.functions import UsersCodeFailed, as_float, load_function, running_users_code
from your_ai.gates.text import quoted


@dataclass(frozen=True)
class Metric:
    """A user's function(answer, expected, row) -> number. `row` is the JSON object of the line.

    Its prints go to stderr, because stdout is for the results.
    """

    name: str
    function: Callable[[str, str, dict[str, Any]], Any]
    option: str = "--metric"
    """The option that named the function, for messages."""

    def score(self, answer: str, expected: str, row: dict[str, Any], where: str) -> float:
        """Score an answer. Raises UserError, naming the row, if the function fails.

        It fails if it raises, or returns anything but a finite number.
        """
        label = f"{where}: {self.option} {self.name}"
        try:
            with running_users_code():
                found = self.function(answer, expected, row)
        except UsersCodeFailed as error:
            raise UserError(f"{label} raised {error}") from error.__cause__
        if not isinstance(found, (Real, np.bool_)):
            text = f"{type(found).__name__} {quoted(found, 80)}" if found is not None else "None"
            raise UserError(f"{label} returned {text}, not a number")
        number = as_float(found)
        if not math.isfinite(number):
            raise UserError(f"{label} returned {number}, not a finite number")
        return number


def load_metric(name: str, option: str = "--metric") -> Metric:
    """Import the function of `module:function`. Modules in the current folder come first.

    option: the option that names it, for messages.

    Raises UserError if the module cannot be imported or has no such function.
    """
    example = "metrics:score for `def score(answer, expected, row)` in metrics.py"
    return Metric(name, load_function(name, f"{option} {name}", example), option)
