"""Check the target of an output, so that no file of the user is replaced without permission."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from your_ai.errors import UserError
from your_ai.hub.check import TEMPLATES

# The folder of a model or an adapter has one of these, weights, and only files of these kinds.
MARKS = ("config.json", "adapter_config.json")
WEIGHTS = ".safetensors"
MODELFILE = "Modelfile"  # Ollama's settings of a model
GGUF = ".gguf"  # a folder with one such file is a model too
KINDS = (WEIGHTS, GGUF, MODELFILE, ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md",
         ".py", ".png", ".gitattributes")  # fmt: skip


def check_target(target: Path, force: bool, is_file: bool = False) -> None:
    """Raise UserError if a result cannot be written to `target`.

    force: a file may replace a file, and a folder may replace a folder that contains only a
        model or an adapter. Nothing else is ever replaced.
    is_file: the result is a file, not a folder.
    """
    if not target.name or target.name in (".", ".."):
        raise UserError(f"{target}: give the name of a new file or folder")
    if not target.absolute().parent.is_dir():
        raise UserError(f"{target}: {target.absolute().parent} is not a folder; create it first")
    if not os.access(target.absolute().parent, os.W_OK):
        raise UserError(f"{target}: cannot be written (Permission denied); choose another place")
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        raise UserError(f"{target}: is a link, which is never replaced; choose another name")
    if target.is_dir() == is_file:
        kind, other = ("folder", "file") if is_file else ("file", "folder")
        raise UserError(f"{target}: is a {kind}, the result is a {other}; choose another name")
    if target.is_dir() and not is_replaceable(target):
        raise UserError(
            f"{target}: contains files that do not belong to a model; choose another name"
        )
    if not force:  # last, because --force would not help against the others
        raise UserError(f"{target}: exists; choose another name, or replace it with --force")


def is_replaceable(folder: Path) -> bool:
    """Whether a folder is empty, or contains a model or an adapter and nothing else."""
    found = list(folder.iterdir())
    marked = any((folder / name).is_file() for name in MARKS)
    weighty = any(path.suffix == WEIGHTS for path in found)
    inside = [path for path in found if path.name != TEMPLATES]
    inside += (folder / TEMPLATES).glob("*")
    known = all(path.is_file() and (path.suffix or path.name) in KINDS for path in inside)
    files = sum(path.suffix == GGUF for path in found)
    is_model = (marked and weighty and not files) or (files == 1 and not weighty)
    return not found or (is_model and known)


def write_error(target: Path, error: OSError, goes_on: bool = False) -> UserError:
    """The error for a target that cannot be written; goes_on: the same command can continue."""
    full = error.errno == errno.ENOSPC or "No space" in str(error)
    again = ", then run the same command to continue" if goes_on else ", then try again"
    then = f"free some disk space{again}" if full else "choose another place"
    return UserError(f"{target}: cannot be written ({error.strerror or error}); {then}")
