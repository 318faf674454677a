"""Replies of judges on disk, so that no answer is graded, and paid for, twice.

One SQLite file for all runs, which several processes may use at once (WAL). It may be deleted at
any time. A damaged file is moved aside, not repaired.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import shown

FILE = "judge.sqlite"
BUSY_S = 10.0  # how long to wait for another process that writes
RETRY_S = 0.01
SIDES = ("-wal", "-shm")  # the names of SQLite's own files end like this
CREATE = "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT, time REAL)"
READ = "SELECT reply FROM replies WHERE key = ?"
WRITE = "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)"


class ReplyCache:
    """Replies by key. Its functions may be called from several threads.

    After it is open, no failure of the file raises: the reply is then asked for, or not kept, and
    `notices` has a line about it.
    """

    def __init__(self, folder: Path) -> None:
        """Open the cache in `folder`, creating both. Raises UserError if that is not possible."""
        self.path = folder / FILE
        self.notices: list[str] = []
        self.lock = threading.Lock()
        self.connection: sqlite3.Connection | None = None
        self.inode: int | None = None  # of the open file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.open()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"{self.path}: the cache of judge replies cannot be opened ({shown(str(error))})"
            ) from error

    def open(self) -> None:
        """Open the file; move it aside first if it is damaged. Raises OSError, sqlite3.Error."""
        self.inode = inode(self.path)
        try:
            self.connect()
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self.replace(error)

    def connect(self) -> None:
        self.connection = connect(self.path)
        self.inode = inode(self.path)

    def replace(self, error: sqlite3.Error) -> None:
        """Move the damaged file aside and open a new one. Raises OSError, sqlite3.Error."""
        damaged = self.inode
        self.disconnect()
        with locked(self.path.with_name(f"{FILE}.lock")):
            if inode(self.path) != damaged:  # another process has already replaced it
                self.connect()
                return
            asides = (self.path.with_name(f"{FILE}.damaged-{n}") for n in itertools.count(1))
            aside = next(path for path in asides if not path.exists())
            os.rename(self.path, aside)
            for side in SIDES:
                with contextlib.suppress(FileNotFoundError):
                    os.rename(f"{self.path}{side}", f"{aside}{side}")
            self.connect()
        self.notices.append(
            f"{self.path}: the cache of judge replies is damaged ({shown(str(error))}); it was "
            f"moved to {aside.name}, and a new one was created"
        )

    def get(self, key: str) -> str | None:
        """The reply with this key, or None."""
        found = self.run(READ, (key,))
        return found[0][0] if found and isinstance(found[0][0], str) else None

    def put(self, key: str, reply: str) -> None:
        self.run(WRITE, (key, reply, time.time()))

    def run(self, statement: str, values: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        with self.lock:
            for is_last in (False, True):
                if self.connection is None:
                    return []
                try:
                    return self.connection.execute(statement, values).fetchall()
                except (sqlite3.Error, UnicodeError) as error:
                    failed: Exception = error
                if is_last or not isinstance(failed, sqlite3.Error) or not is_damage(failed):
                    break
                try:
                    self.replace(failed)
                except (OSError, sqlite3.Error) as error:
                    self.disconnect()
                    failed = error
                    break
            self.notices.append(
                f"{self.path}: the cache of judge replies cannot be used ({shown(str(failed))})"
            )
            return []

    def take_notices(self) -> list[str]:
        """The notices since the last call, each once."""
        with self.lock:
            found, self.notices = list(dict.fromkeys(self.notices)), []
        return found

    def close(self) -> None:
        with self.lock:
            self.disconnect()

    def disconnect(self) -> None:
        if self.connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self.connection.close()
        self.connection = None


def connect(path: Path) -> sqlite3.Connection:
    """Open a file, with its table. Raises OSError, and sqlite3.Error also if it is damaged.

    While another process changes a new file to WAL, SQLite does not wait for it, so this does.
    """
    deadline = time.monotonic() + BUSY_S
    while True:
        try:
            return connect_once(path)
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(RETRY_S)


def connect_once(path: Path) -> sqlite3.Connection:
    if path.exists() and not stat.S_ISREG(path.stat().st_mode):
        raise OSError("is not a regular file")
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(CREATE)
        connection.execute(READ, ("",)).fetchall()
    except BaseException:
        connection.close()
        raise
    return connection


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether an error is about the content of the file: not about locks, disks or access.

    A table of another form is an OperationalError, as are the latter.
    """
    other = ("no such column", "has no column", "columns but", "no such table")
    if isinstance(error, sqlite3.OperationalError):
        return any(text in str(error) for text in (*other, "malformed"))
    return isinstance(error, sqlite3.DatabaseError)


def inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file, which is created. Waits for other processes. Raises OSError."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
