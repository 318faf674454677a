"""Relative paths in a file of settings, which may be meant from the folder of that file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from your_ai.config.names import DEMO, DEMO_DATA, FOLDER, NONE

# Settings that are paths, ours and mlx-lm's.
PATHS = (
    *("model", "data", "valid", "prompt_template", "from_adapter", "hostfile", "judge_rubric"),
    "resume_adapter_file",
)
LISTS = ("data",)  # several paths, separated by commas, each with =SHARE
WORDS = (DEMO, *DEMO_DATA, FOLDER, NONE, "-", "")


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
