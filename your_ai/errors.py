"""The two ways a command ends badly. Both are shown as one line, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user can mend: what is wrong, where, and what to do. Exit status 2."""


class RunError(Exception):
    """A run that cannot go on although its input was fine. Exit status 1."""
