"""What a user asks of a run while it goes on: a file in its folder each, until it is heeded.

Whoever shows the run puts it there; the training process looks between two steps.
"""

from __future__ import annotations

from your_ai.errors import UserError
from your_ai.run.folder import RunFolder

SAVE = "save.request"
PAUSE = "pause.request"


def ask(folder: RunFolder, name: str) -> None:
    """Raises UserError where the folder cannot be written."""
    try:
        (folder.path / name).touch()
    except OSError as error:
        raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from error


def is_asked(folder: RunFolder, name: str) -> bool:
    return (folder.path / name).exists()


def withdraw(folder: RunFolder, name: str) -> bool:
    """Whether it was asked for until now."""
    try:
        (folder.path / name).unlink()
    except OSError:
        return False
    return True


def withdraw_all(folder: RunFolder) -> None:
    for name in (SAVE, PAUSE):
        withdraw(folder, name)
