"""A reward written by the user: `module:function`, called as TRL calls reward functions."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from your_ai.data.turns import ASSISTANT
from your_ai.errors import UserError
from your_ai.gates.functions import UsersCodeFailed, as_float, load_function, running_users_code
from your_ai.gates.text import counted, nearest, quoted
from your_ai.rewards.names import PLAIN, WITH_ARGUMENT
from your_ai.rewards.rollout import Rollout

# Arguments that every function can take. A row's column of the same name is not passed.
OWN_ARGUMENTS = ("prompts", "completions", "messages", "expected")
# The text of prompt and completion in a row, which the arguments above replace.
NOT_COLUMNS = ("prompt", "completion")


class FunctionFailed(Exception):
    """A user's function raised an error. Its text names the error."""


@dataclass(frozen=True)
class RewardFunction:
    """A user's function of a batch of completions."""

    name: str
    """`module:function`."""
    function: Callable[..., Any]
    parameters: dict[str, bool] | None
    """By name of a parameter, whether it has a default; None if it takes all by **kwargs."""

    def rewards(self, rollouts: Sequence[Rollout], step: int) -> list[float | None]:
        """Call the function once, with all rollouts; n numbers, or None where it gives none.

        Its prints go to stderr. Raises FunctionFailed if it raises, and UserError for a result
        that is not a list of n finite numbers or None.
        """
        arguments = self.arguments(rollouts)
        try:
            with running_users_code():
                found = self.function(**arguments)
                if inspect.isawaitable(found):
                    found = run_awaitable(found)
        except UsersCodeFailed as error:
            raise FunctionFailed(str(error)) from error.__cause__
        where = f"--reward {self.name}: step {step}"
        if not isinstance(found, list | tuple) and hasattr(found, "tolist"):
            found = found.tolist()  # an array
        if not isinstance(found, list | tuple):
            what = f"{type(found).__name__} {quoted(found, 80)}"
            raise UserError(f"{where}: returned {what}, not a list of numbers")
        if len(found) != len(rollouts):
            raise UserError(
                f"{where}: returned {counted(len(found), 'number')} for "
                f"{counted(len(rollouts), 'completion')}"
            )
        return [
            number_of(value, f"{where}: {rollout.where}")
            for value, rollout in zip(found, rollouts, strict=True)
        ]

    def arguments(self, rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
        """The lists to pass, each with an entry per rollout; None where a row lacks a column.

        They are copies: the function may change what it gets.
        """
        columns = dict.fromkeys(
            name
            for rollout in rollouts
            for name in rollout.row
            if name not in OWN_ARGUMENTS and name not in NOT_COLUMNS
        )
        given: dict[str, list[Any]] = {
            "prompts": [
                deepcopy(rollout.messages) if in_messages(rollout) else rollout.prompt
                for rollout in rollouts
            ],
            "completions": [completion_of(rollout) for rollout in rollouts],
            "messages": [deepcopy(rollout.messages) for rollout in rollouts],
            "expected": [rollout.expected for rollout in rollouts],
            **{name: [deepcopy(r.row.get(name)) for r in rollouts] for name in columns},
        }
        if self.parameters is None:
            return given
        nothing = [None] * len(rollouts)
        return {
            name: given.get(name, nothing)
            for name, has_default in self.parameters.items()
            if name in given or not has_default
        }


def completion_of(rollout: Rollout) -> str | list[dict[str, Any]]:
    """A completion as TRL gives it to its functions: a conversation has all its messages."""
    if rollout.said is not None:
        return deepcopy(rollout.said) or [{"role": ASSISTANT, "content": ""}]
    if in_messages(rollout):
        return [{"role": ASSISTANT, "content": rollout.completion}]
    return rollout.completion


def in_messages(rollout: Rollout) -> bool:
    """Return whether its row's prompt is messages: then TRL gives its functions messages, too."""
    return isinstance(rollout.row.get("prompt"), list)


def load_reward_function(name: str) -> RewardFunction:
    """Import a reward function. Raises UserError if it is missing or cannot be called by name."""
    option = f"--reward {name}"
    example = "rewards:brevity for `def brevity(completions, **kwargs)` in rewards.py"
    try:
        function = load_function(name, option, example)
    except UserError as error:
        module = name.partition(":")[0]
        missing = isinstance(error.__cause__, ModuleNotFoundError)
        hint = nearest(module, (*PLAIN, *WITH_ARGUMENT)) if missing else ""
        raise UserError(f"{error}{hint}") from error
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C have no signature
        return RewardFunction(name, function, None)
    required = [p for p in parameters if p.default is p.empty]
    if any(p.kind == p.POSITIONAL_ONLY for p in required):
        raise UserError(f"{option}: has positional-only parameters; it is called by keywords")
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return RewardFunction(name, function, None)
    named = {
        p.name: p.default is not p.empty
        for p in parameters
        if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
    }
    if "completions" not in named:
        raise UserError(f"{option}: has no parameter completions; give it one, e.g. {example}")
    return RewardFunction(name, function, named)


def run_awaitable(awaitable: Awaitable[Any]) -> Any:
    """Wait for the result of an async function, also where an event loop runs already."""

    async def wait() -> Any:
        return await awaitable

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(wait())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, wait()).result()


def number_of(value: Any, where: str) -> float | None:
    """A value that a function returned. Raises UserError, beginning with `where`."""
    if value is None:
        return None
    if not isinstance(value, Real | np.bool_):
        what = f"{type(value).__name__} {quoted(value, 80)}"
        raise UserError(f"{where}: returned {what}, not a number or None")
    number = as_float(value)
    if not math.isfinite(number):
        raise UserError(
            f"{where}: returned {number}, not a finite number; return None where there is no reward"
        )
    return number
