"""Where a model, an adapter or a file is written: nothing of the user's is replaced unasked."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from your_ai.errors import UserError

# What a folder of a model or an adapter has: one of these, weights, and files of these kinds.
MARKS = ("config.json", "adapter_config.json")
WEIGHTS = ".safetensors"
KINDS = (WEIGHTS, ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md", ".py", ".png",
         ".gitattributes")  # fmt: skip


def check_target(target: Path, force: bool, is_file: bool = False) -> None:
    """Raise UserError where a result cannot become `target`.

    force: a file may replace a file, and a folder one with nothing but a model or an adapter.
    Nothing else is ever replaced. is_file: the result is a file, and not a folder.
    """
    if not target.name or target.name in (".", ".."):
        raise UserError(f"{target}: give the name of a new file or folder")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: {target.absolute().parent} is no folder; make it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UserError(f"{target}: cannot be written (Permission denied); choose another place")
    if not os.path.lexists(target):
        return
    if not force:
        raise UserError(f"{target}: exists; choose another name, or replace it with --force")
    if target.is_symlink():
        raise UserError(f"{target}: is a link, which is never replaced; choose another name")
    if target.is_dir() == is_file:
        kind, other = ("folder", "file") if is_file else ("file", "folder")
        raise UserError(f"{target}: is a {kind}, and would be a {other}; choose another name")
    if target.is_dir() and not is_replaceable(target):
        raise UserError(f"{target}: holds other things than a model; choose another name")


def is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or holds a model or an adapter and nothing else."""
    found = list(folder.iterdir())
    marked = any((folder / name).is_file() for name in MARKS)
    weighty = any(path.suffix == WEIGHTS for path in found)
    known = all(path.is_file() and (path.suffix or path.name) in KINDS for path in found)
    return not found or (marked and weighty and known)


def unwritable(target: Path, error: OSError, goes_on: bool = False) -> UserError:
    """What to tell who wanted `target`. goes_on: the same command does, where it was."""
    full = error.errno == errno.ENOSPC or "No space" in str(error)
    again = "; the same command then goes on" if goes_on else ", then try again"
    then = f"free some disk{again}" if full else "choose another place"
    return UserError(f"{target}: cannot be written ({error.strerror or error}); {then}")
