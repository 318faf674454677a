"""Requests of the user to a running run. Each is a file in its folder until it is handled.

The process that shows the run creates the file. The training process checks for it between two
steps.
"""

from __future__ import annotations

from your_ai.errors import named_errors
from your_ai.run.folder import RunFolder

SAVE = "save.request"
PAUSE = "pause.request"
STOP = "stop.request"  # made before the signal that stops a run, which is that of Ctrl-C


def ask(folder: RunFolder, name: str) -> None:
    """Make a request. Raises UserError if the folder cannot be written."""
    with named_errors(folder.path, "written"):
        (folder.path / name).touch()


def is_asked(folder: RunFolder, name: str) -> bool:
    return (folder.path / name).exists()


def withdraw(folder: RunFolder, name: str) -> bool:
    """Remove a request, and return whether it existed."""
    try:
        (folder.path / name).unlink()
    except OSError:
        return False
    return True


def withdraw_all(folder: RunFolder) -> None:
    for name in (SAVE, PAUSE, STOP):
        withdraw(folder, name)
