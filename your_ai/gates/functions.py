"""Functions that the user names as `module:function`."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from your_ai.errors import Interrupted, UserError
from your_ai.gates.text import nearest, shown


class UsersCodeFailed(Exception):
    """The user's code raised an error, which is the cause. Its text describes that in one line."""


def load_function(name: str, where: str, example: str) -> Callable[..., Any]:
    """Import the function of `module:function`. Modules in the current folder come first.

    What the module prints goes to stderr, because stdout is for results.

    where: what names the function, for messages, such as `--metric m:f`.
    example: a name and its function, for the message about a malformed name.

    Raises UserError if the module cannot be imported or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name.isidentifier():
        raise UserError(f"{where}: give module:function, e.g. {example}")
    module = load_module(module_name, where)
    function: Callable[..., Any] | None = getattr(module, function_name, None)
    if not callable(function):
        known = [n for n, value in vars(module).items() if callable(value)]
        hint = nearest(function_name, known)
        raise UserError(f"{where}: {module_name} has no function {function_name}{hint}")
    return function


def load_module(name: str, where: str) -> ModuleType:
    """Import a module of the user, as `load_function` does. Raises UserError if that fails."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        with running_users_code():
            return importlib.import_module(name)
    except UsersCodeFailed as error:
        raise UserError(f"{where}: {name} cannot be imported ({error})") from error.__cause__
    finally:
        sys.path.remove(here)
        # The function may import modules from here later. At the end of the path, the folder
        # hides no installed module.
        sys.path.append(here)


@contextlib.contextmanager
def running_users_code() -> Iterator[None]:
    """Guard a block that runs the user's code: its prints go to stderr, and the folder stays.

    Raises UsersCodeFailed for whatever it raises, except a request to stop.
    """
    folder = os.open(".", os.O_RDONLY)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (KeyboardInterrupt, Interrupted):
        raise
    except BaseException as error:  # also SystemExit and the cancellation of async functions
        raise UsersCodeFailed(shown(described(error))) from error
    finally:
        os.fchdir(folder)
        os.close(folder)


def described(error: BaseException) -> str:
    """`ValueError: first line of its message`."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:  # the user's class may do anything
        lines = []
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def as_float(value: Any) -> float:
    """A number that a user's function returned; infinite if it is too large for a float."""
    try:
        return float(value)
    except (OverflowError, ValueError):  # an int or a fraction too large for a float
        return math.inf
