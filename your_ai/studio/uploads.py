"""Files that users give to the studio: they arrive in pieces, and are kept in studio/data/."""

from __future__ import annotations

import os
import re
from pathlib import Path

from starlette.responses import JSONResponse, Response

from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened
from your_ai.studio.pages import STUDIO, PageRequest, do

GIVEN = STUDIO / "data"
PARTS = re.compile(r"[^/\\\x00-\x1f\x7f]{1,120}(/[^/\\\x00-\x1f\x7f]{1,120}){0,8}")
UNFINISHED = ".part"
MOST_FILES = 10_000


def given_files() -> list[Path]:
    """The files and folders that were given, the newest first."""
    try:
        found = [path for path in GIVEN.iterdir() if not path.name.startswith(".")]
    except OSError:
        return []
    found = [path for path in found if path.suffix != UNFINISHED]
    return sorted(found, key=lambda path: path.stat().st_mtime, reverse=True)


def place_of(name: str) -> Path:
    """The path for a file with this name, in GIVEN and nowhere else. Raises UserError."""
    parts = name.split("/")
    if not PARTS.fullmatch(name) or any(part.startswith(".") or not part.strip() for part in parts):
        raise UserError(f"{shortened(name, 60)}: is no name for a file; rename it")
    return GIVEN.joinpath(*parts)


def receive(asked: PageRequest) -> Response:
    """Append a piece of a file at its place; the last piece makes the file whole.

    Of the query: `name`, `at` (bytes before this piece) and `size` (bytes of the whole file).
    """
    name = asked.query.get("name", "")
    path = place_of(name)
    try:
        at, size = int(asked.query["at"]), int(asked.query["size"])
    except (KeyError, ValueError) as error:
        raise UserError(f"{name}: a piece of a file needs `at` and `size`") from error
    part = path.with_name(path.name + UNFINISHED)
    with named_errors(path, "written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        for each in (part, path, *path.parents):
            if each.is_symlink():
                raise UserError(f"{each}: is a symbolic link; remove it by hand")
        with part.open("wb" if at == 0 else "r+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() != at or not 0 <= at + len(asked.body) <= size:
                raise UserError(f"{name}: a piece is missing; give the file again")
            file.write(asked.body)
        if at + len(asked.body) == size:
            os.replace(part, path)
    return JSONResponse({"path": str(path), "received": at + len(asked.body)})


PAGES = [do("/upload", receive)]
