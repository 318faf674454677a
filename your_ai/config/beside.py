"""Relative paths in a file of settings, which may be meant from the folder of that file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from your_ai.config.names import DEMO, DEMO_DATA, FOLDER, NONE
from your_ai.errors import UserError
from your_ai.gates.paths import missing_text
from your_ai.gates.text import shortened

# Settings that are paths, ours and mlx-lm's.
PATHS = (
    *("model", "data", "valid", "prompt_template", "from_adapter", "hostfile", "judge_rubric"),
    "resume_adapter_file",
)
# Those that may also be an alias, an id on the hub, or a run.
NAMES = ("model", "from_adapter")
LISTS = ("data",)  # several paths, separated by commas, each with =SHARE
WORDS = (DEMO, *DEMO_DATA, FOLDER, NONE, "-", "")


def check_there(settings: Mapping[str, Any], file: Path) -> None:
    """Raise UserError for a relative path that is neither in the current folder nor beside `file`.

    settings: what `found_beside` made of those in the file, without those that flags replace. A
    value that may be a name counts as a path if it begins with a dot or has two slashes.
    """
    if os.path.abspath(file.parent) == os.getcwd():
        return  # one place; the error of what is not there names it
    for name in PATHS:
        value = settings.get(name)
        parts = value.split(",") if name in LISTS and isinstance(value, str) else [value]
        for part in parts:
            if not isinstance(part, str) or there(part := part.strip()):
                continue
            path = part.rpartition("=")[0] or part if name in LISTS else part
            is_name = name in NAMES and not path.startswith(".") and path.count("/") < 2
            if path in WORDS or path.startswith(("hf:", "~", "/")) or is_name or there(path):
                continue
            text = missing_text(path, beside=file.parent)
            raise UserError(f"{file}: {name} {shortened(path)}: {text}")


def found_beside(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with whole paths where a relative path is only found in `folder`.

    folder: of the file that has the settings. A path that is found in the current folder, or
    nowhere, stays as it is.
    """
    found = dict(settings)
    for name in PATHS:
        value = settings.get(name)
        if not isinstance(value, str):
            continue
        text = whole_path(value, folder)
        if text == value and name in LISTS and not there(value):
            text = ",".join(part_of_list(part, folder) for part in value.split(","))
        found[name] = text
    return found


def part_of_list(part: str, folder: Path) -> str:
    """`PATH` or `PATH=SHARE`, with the whole path if it is only found in `folder`."""
    name, separator, share = part.strip().rpartition("=")
    if not separator or there(part.strip()):
        return whole_path(part.strip(), folder)
    return f"{whole_path(name, folder)}={share}"


def whole_path(name: str, folder: Path) -> str:
    path = Path(os.path.expanduser(name))
    if name in WORDS or path.is_absolute() or there(name) or not there(str(folder / path)):
        return name
    return os.path.abspath(folder / path)


def there(name: str) -> bool:
    """Whether a path exists; `os.path` does not raise for what is no path."""
    return os.path.exists(os.path.expanduser(name))
