"""What is said of a file that is not there, or cannot be read or written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from your_ai.errors import RunError
from your_ai.files import remedy_of
from your_ai.gates.text import closest, shortened

ENTRIES = 10_000  # of a folder, that are compared with a name
LIKE = 0.7  # least similarity of the name of a file, from 0 to 1


def missing_text(
    name: str | Path,
    what: str = "file or folder",
    known: Iterable[str] = (),
    beside: Path | None = None,
) -> str:
    """`no such file or folder: /whole/path; did you mean NAME?`, for an error that begins with the
    name.

    known: names that could be meant, too. Where a folder of the path is missing, a similar one is
    suggested. beside: another folder in which the name was looked for, after the current one.
    """
    path = Path(os.path.expanduser(name))
    there, wanted = path, ""
    while not os.path.isdir(there) and there != there.parent:
        there, wanted = there.parent, there.name
    try:
        with os.scandir(there) as entries:
            near_names = [entry.name for entry in islice(entries, ENTRIES)]
    except OSError:
        near_names = []
    choices = {**{name: str(there / name) for name in near_names}, **{name: name for name in known}}
    close = closest(wanted, choices, LIKE)
    near = f"; did you mean {shortened(choices[close])}?" if close else ""
    whole = "" if str(name) == os.path.abspath(name) else f": {shortened(os.path.abspath(path))}"
    if beside is not None:
        whole += f", nor {shortened(os.path.abspath(beside / path))}"
    return f"no such {what}{whole}{near}"


def unreadable_text(path: str | Path, error: OSError) -> str:
    """Say why a file that the user named cannot be read, for an error."""
    if isinstance(error, FileNotFoundError):
        return missing_text(path, "file")
    return f"cannot be read ({error.strerror or error})"


@contextlib.contextmanager
def naming_failures(path: Path, then: str) -> Iterator[None]:
    """Raise RunError, with what helps, if a file cannot be written in the `with` block.

    then: what the user does afterwards, such as RESUME of `errors`.
    """
    try:
        yield
    except OSError as error:
        raise RunError(
            f"{path}: cannot be written ({error.strerror}); {remedy_of(error)}, {then}"
        ) from error
