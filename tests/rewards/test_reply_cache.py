from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from your_ai.errors import UserError
from your_ai.rewards.reply_cache import FILE, ReplyCache

WRITE_MANY = """
import sys
from pathlib import Path
from your_ai.rewards.reply_cache import ReplyCache
cache = ReplyCache(Path("cache"))
for i in range(50):
    cache.put(f"{sys.argv[1]}-{i}", "reply")
print(*cache.take_notices())
"""


@pytest.fixture
def folder(own_folder) -> Path:
    return own_folder / "some" / "cache"


def test_replies_are_kept_for_the_next_run(folder):
    first = ReplyCache(folder)
    assert first.get("a") is None
    first.put("a", "one")
    first.put("a", "two")
    first.close()
    again = ReplyCache(folder)
    assert (again.get("a"), again.get("b")) == ("two", None)
    assert again.take_notices() == []
    again.close()


@pytest.mark.parametrize("content", [b"not a database" * 1000, b"SQLite format 3\0" + b"x" * 9000])
def test_a_damaged_file_is_moved_aside_with_a_notice(folder, content):
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(content)
    cache = ReplyCache(folder)
    cache.put("a", "one")
    assert cache.get("a") == "one"
    [notice] = cache.take_notices()
    assert "is damaged" in notice
    assert f"moved to {FILE}.damaged-1" in notice
    assert cache.take_notices() == []
    assert (folder / f"{FILE}.damaged-1").read_bytes() == content
    cache.close()


def test_a_file_that_is_damaged_while_it_is_open_is_moved_aside(folder):
    cache = ReplyCache(folder)
    for i in range(200):
        cache.put(f"{i}", "x" * 1000)
    cache.close()
    data = bytearray((folder / FILE).read_bytes())
    data[8192:] = b"\xff" * (len(data) - 8192)
    (folder / FILE).write_bytes(data)
    cache = ReplyCache(folder)
    found = {cache.get(f"{i}") for i in range(200)}
    cache.put("a", "one")
    assert cache.get("a") == "one"
    assert found <= {None, "x" * 1000}
    assert any("is damaged" in notice for notice in cache.take_notices())
    cache.close()


def test_a_file_that_another_run_has_replaced_is_not_moved_again(folder):
    folder.mkdir(parents=True)
    (folder / FILE).write_bytes(b"not a database" * 1000)
    slow = ReplyCache.__new__(ReplyCache)
    slow.path, slow.notices, slow.connection = folder / FILE, [], None
    slow.inode = os.stat(folder / FILE).st_ino
    quick = ReplyCache(folder)
    quick.put("a", "one")
    slow.replace(sqlite3.DatabaseError("file is not a database"))
    slow.lock = threading.Lock()
    assert slow.get("a") == "one"
    assert slow.take_notices() == []
    assert not (folder / f"{FILE}.damaged-2").exists()
    slow.close()
    quick.close()


def test_a_table_of_another_form_counts_as_damage(folder):
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("CREATE TABLE replies (other TEXT)")
    connection.close()
    cache = ReplyCache(folder)
    cache.put("a", "one")
    assert cache.get("a") == "one"
    cache.close()


def test_several_processes_write_at_once(own_folder):
    command = [sys.executable, "-c", WRITE_MANY]
    both = [subprocess.Popen([*command, name], stdout=subprocess.PIPE) for name in ("a", "b")]
    assert [process.communicate()[0].strip() for process in both] == [b"", b""]
    cache = ReplyCache(own_folder / "cache")
    assert all(cache.get(f"{name}-{i}") == "reply" for name in "ab" for i in range(50))
    cache.close()


def test_runs_that_start_together_make_one_cache(own_folder):
    failed = []

    def use(folder: Path, gate: threading.Barrier) -> None:
        gate.wait()
        try:
            ReplyCache(folder).close()
        except UserError as error:
            failed.append(error)

    for i in range(20):
        gate = threading.Barrier(4)
        arguments = own_folder / str(i), gate
        threads = [threading.Thread(target=use, args=arguments) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []


def test_threads_share_a_cache(folder):
    cache = ReplyCache(folder)
    threads = [threading.Thread(target=cache.put, args=(f"{i}", "x")) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [cache.get(f"{i}") for i in range(8)] == ["x"] * 8
    cache.close()


def test_a_value_that_is_not_text_is_not_a_reply(folder):
    cache = ReplyCache(folder)
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("INSERT INTO replies VALUES ('a', 5.5, 0), ('b', x'ff', 0)")
    connection.close()
    assert (cache.get("b"), cache.get("c")) == (None, None)
    cache.close()


def test_a_full_disk_costs_a_reply_but_not_the_run(folder):
    cache = ReplyCache(folder)
    cache.connection.execute("PRAGMA max_page_count = 1")
    for i in range(3):
        cache.put(f"{i}", "x" * 20_000)
    [notice] = cache.take_notices()
    assert "cannot be used" in notice
    assert cache.get("0") is None
    cache.close()
    assert cache.get("0") is None


def test_a_cache_that_cannot_be_opened_is_an_error(own_folder):
    (own_folder / "file").write_text("")
    with pytest.raises(UserError, match="cannot be opened"):
        ReplyCache(own_folder / "file")
    os.makedirs(own_folder / "a" / FILE)
    os.makedirs(own_folder / "b")
    os.mkfifo(own_folder / "b" / FILE)
    for name in "ab":
        with pytest.raises(UserError, match=f"{FILE}: .* cannot be opened .*regular file"):
            ReplyCache(own_folder / name)
