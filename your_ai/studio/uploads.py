"""Files that users give to the studio: they arrive in pieces, and are kept in studio/data/.

What is given together arrives in a hidden folder, and is moved to its place when it is whole.
"""

from __future__ import annotations

import filecmp
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from starlette.responses import JSONResponse, Response

from your_ai.config import DEMO_DATA
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import shortened
from your_ai.studio.pages import STUDIO, PageRequest, do

GIVEN = STUDIO / "data"
PARTS = re.compile(r"[^/\\\x00-\x1f\x7f]{1,120}(/[^/\\\x00-\x1f\x7f]{1,120}){0,8}")
GIFT, GIFT_ID = ".gift-", re.compile(r"[0-9a-f-]{8,40}")
KEEP_GIFT_S = 86_400.0  # of which nothing more arrived
SPLIT = re.compile(r"(train|training)\b", re.IGNORECASE)  # the name of a file of training rows
PARTIAL = ".partial"  # at the end of the name of a file that is still arriving
UNFINISHED = ".unfinished"  # progress of `data make`
MOVING = threading.Lock()


def given_files() -> list[Path]:
    """The files and folders that were given or made, the newest first. Links are not followed."""
    found = []
    for path in GIVEN.iterdir() if GIVEN.is_dir() else ():
        is_plain = not path.is_symlink() and (path.is_file() or path.is_dir())
        if is_plain and not path.name.startswith(".") and path.suffix != UNFINISHED:
            found.append(path)
    return sorted(found, key=changed_at, reverse=True)


def changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # it was removed in the meantime
        return 0.0


def place_of(name: str, folder: Path = GIVEN) -> Path:
    """The path for a file with this name, in the folder and nowhere else. Raises UserError."""
    parts = name.split("/")
    if not PARTS.fullmatch(name) or any(part.startswith(".") or not part.strip() for part in parts):
        raise UserError(f"{shortened(name, 60)}: is no name for a file; rename it")
    place = folder.joinpath(*parts)
    for path in (place, *place.parents):
        if path.is_symlink():
            raise UserError(f"{path}: is a symbolic link; remove it by hand")
    return place


def gift_of(asked: PageRequest) -> Path:
    """The folder in which what is given together arrives. Raises UserError."""
    name = asked.query.get("gift", "")
    if not GIFT_ID.fullmatch(name):
        raise UserError("a piece of a file needs `gift`")
    return GIVEN / f"{GIFT}{name}"


def receive(asked: PageRequest) -> Response:
    """Append a piece of a file.

    Of the query: `gift`, `name`, `at` (bytes before this piece), `size` (bytes of the whole file).
    """
    name, gift = asked.query.get("name", ""), gift_of(asked)
    path = place_of(name, gift)
    try:
        at, size = int(asked.query["at"]), int(asked.query["size"])
    except (KeyError, ValueError) as error:
        raise UserError(f"{name}: a piece of a file needs `at` and `size`") from error
    with named_errors(path, "written"):
        if at == 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned()
        partial = path.with_name(f"{path.name}{PARTIAL}")
        with partial.open("wb" if at == 0 else "r+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() != at or not 0 <= at + len(asked.body) <= size:
                raise UserError(f"{name}: a piece is missing; give the file again")
            try:
                file.write(asked.body)
                file.flush()
            except OSError:  # the disk is full: what arrived of it is of no use
                shutil.rmtree(gift, ignore_errors=True)
                raise
        if at + len(asked.body) == size:
            os.replace(partial, path)
    return JSONResponse({"received": at + len(asked.body)})


def remove_abandoned() -> None:
    """Remove what began to arrive and did not go on."""
    for path in GIVEN.glob(f"{GIFT}*"):
        if time.time() - changed_at(path) > KEEP_GIFT_S:
            shutil.rmtree(path, ignore_errors=True)


def finish(asked: PageRequest) -> Response:
    """Keep what has arrived, and say by which names the page of data shows it.

    Files of splits that are given together are one folder.
    """
    gift = gift_of(asked)
    with named_errors(gift, "read"), MOVING:
        if partial := next(gift.rglob(f"*{PARTIAL}"), None):
            raise UserError(f"{partial.stem}: a piece is missing; give the file again")
        found = sorted(gift.iterdir())
        if len(found) > 1 and any(SPLIT.match(path.name) for path in found):
            kept = [keep(gift, "data")]
        else:
            kept = [keep(path, path.name) for path in found]
            shutil.rmtree(gift, ignore_errors=True)
    return JSONResponse({"data": ",".join(path.name for path in kept)})


def keep(path: Path, name: str) -> Path:
    """Move what was given to its place; with a number if there is something else of this name."""
    for place in places(name):
        if not os.path.lexists(place):
            os.replace(path, place)
            os.utime(place)
            return place
        if not place.is_symlink() and same(path, place):
            return place
    raise AssertionError


def places(name: str) -> Iterator[Path]:
    """Yield the places for something of this name: NAME.csv, NAME-2.csv ..., and no place with the
    name of data that is installed."""
    path = GIVEN / name
    if name not in DEMO_DATA:
        yield path
    for number in count(2):
        yield path.with_name(f"{path.stem}-{number}{path.suffix}")


def free_place(name: str) -> Path:
    """The first of the places at which nothing is."""
    return next(place for place in places(name) if not os.path.lexists(place))


def same(one: Path, other: Path) -> bool:
    """Return whether two files, or the files in two folders, have the same names and content."""
    names = names_in(one)
    return names == names_in(other) and all(
        filecmp.cmp(one / name, other / name, shallow=False) for name in names
    )


def names_in(path: Path) -> set[Path]:
    """The paths of the files in a folder, relative to it; of a file, that of itself."""
    return {each.relative_to(path) for each in (path, *path.rglob("*")) if each.is_file()}


PAGES = [do("/upload", receive), do("/upload/done", finish)]
