"""A file that is not there is named with its whole path, and with what is near it."""

from __future__ import annotations

from pathlib import Path

import pytest

from your_ai.gates.paths import missing_text, unreadable_text


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("tikets.csv", "tickets.csv"),
        ("folder/notse.md", "folder/notes.md"),
        ("./foldr/notes.md", "folder"),
        ("demo-pair", "demo-pairs"),
        ("entirely", ""),
        ("/nothing-like-this-one", ""),
        ("~/nothing-like-this-one", ""),
    ],
)
def test_missing_file_has_its_whole_path_and_the_nearest_name(own_folder, name, near):
    Path("tickets.csv").touch()
    Path("folder").mkdir()
    Path("folder/notes.md").touch()
    whole = "" if name[0] == "/" else f": {Path(name).expanduser().absolute()}"
    hint = f"; did you mean {near}?" if near else ""
    assert missing_text(name, known=["demo-pairs"]) == f"no such file or folder{whole}{hint}"


def test_other_errors_keep_their_reason():
    assert unreadable_text("a", PermissionError(13, "Permission denied")) == (
        "cannot be read (Permission denied)"
    )
