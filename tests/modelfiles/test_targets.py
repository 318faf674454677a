from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.modelfiles import targets
from your_ai.modelfiles.targets import (
    check_disk,
    check_target,
    finished_shards,
    locked,
    read_record,
    write_error,
)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (folder / name).write_text("{}")
    return folder


OTHERS = {"empty": [], "notes": ["notes.txt"], "program": ["config.json", "main.py", "README.md"]}
NOT_EMPTY = "contains files that do not belong to a model"


@pytest.fixture
def place(tmp_path, model):
    """A folder with a model, and with other things that may be where a result shall go."""
    (tmp_path / "a.gguf").write_bytes(b"GGUF and more")
    for name in ("rows.csv", "notes.txt"):
        (tmp_path / name).write_text("years of work")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(model)
    for name, files in OTHERS.items():
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("years of work")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("new", {"force": False}),
        ("out", {"force": True}),
        ("empty", {"force": True}),
        ("a.gguf", {"force": True, "is_file": True}),
    ],
)
def test_new_name_and_with_force_a_model_or_an_empty_folder_are_accepted(place, name, options):
    check_target(place / name, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("out", {"force": False}, "exists; choose another name, or replace it with --force"),
        ("a.gguf", {"force": False, "is_file": True}, "exists"),
        ("rows.csv", {"force": True, "is_file": True}, "is no GGUF file, which alone is replaced"),
        ("pipe", {"force": True, "is_file": True}, "is no GGUF file, which alone is replaced"),
        ("notes.txt", {"force": False}, "is a file, the result is a folder"),
        ("notes.txt", {"force": True}, "is a file, the result is a folder"),
        ("out", {"force": True, "is_file": True}, "is a folder, the result is a file"),
        ("notes", {"force": True}, NOT_EMPTY),
        ("program", {"force": True}, NOT_EMPTY),
        ("link", {"force": True}, "is a link, which is never replaced"),
        ("missing/out", {"force": False}, "is not a folder; create it first"),
    ],
)
def test_anything_else_at_the_target_is_never_replaced(place, name, options, message):
    with pytest.raises(UserError, match=message):
        check_target(place / name, **options)


@pytest.mark.parametrize("name", ["thesis.docx", "notes", "data"])
def test_folder_with_other_files_is_never_replaced(model, name):
    if name == "data":
        (model / name).mkdir()
    else:
        (model / name).write_text("years of work")
    with pytest.raises(UserError, match=NOT_EMPTY):
        check_target(model, force=True)


def test_unwritable_parent_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UserError, match="Permission denied"):
        check_target(tmp_path / "out", force=False)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some disk space, then try again"),
        (OSError(errno.EIO, "No space left on device (os error 28)"), "free some disk space"),
        (PermissionError(errno.EACCES, "Permission denied"), "choose another place"),
    ],
)
def test_write_error_says_what_to_do(tmp_path, error, advice):
    assert advice in str(write_error(tmp_path, error))


def test_write_error_says_how_to_continue():
    full = write_error("out", OSError(errno.ENOSPC, "No space left on device"), goes_on=True)
    assert "free some disk space, then run the same command to continue" in str(full)


HOLD = """
import sys, time
from pathlib import Path
from your_ai.modelfiles.targets import locked
with locked(Path(sys.argv[1]), waits=False, creates=True):
    (Path(sys.argv[1]) / "mine").touch()
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_lock_lasts_until_the_process_ends(own_folder):
    folder = own_folder / "work"
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        with (
            pytest.raises(UserError, match="work: another process is working on it"),
            locked(folder, waits=False),
        ):
            pass
        process.kill()
    with locked(folder, waits=False):
        assert (folder / "mine").exists()


def test_empty_folder_is_removed_after_unlocking(own_folder):
    with pytest.raises(RuntimeError), locked(own_folder / "work", waits=False, creates=True):
        raise RuntimeError
    assert not (own_folder / "work").exists()


def test_missing_folder_is_not_created_by_default(own_folder):
    with pytest.raises(FileNotFoundError), locked(own_folder / "work", waits=True):
        pass


def test_waits_until_another_process_is_done(own_folder, monkeypatch):
    with contextlib.ExitStack() as other:
        other.enter_context(locked(own_folder / "work", waits=False, creates=True))
        waited = []

        def sleep(seconds: float) -> None:
            waited.append(seconds)
            other.close()

        monkeypatch.setattr(targets, "time", SimpleNamespace(sleep=sleep))
        with locked(own_folder / "work", waits=True, creates=True):
            assert waited == [targets.WAIT_S]


@pytest.mark.parametrize("becomes", ["renamed", "replaced"])
def test_the_folder_that_has_the_name_by_then_is_locked(own_folder, monkeypatch, becomes):
    """Another process completes and renames the folder just before it is locked."""
    monkeypatch.setattr(targets, "WAIT_S", 0)
    folder, flock = own_folder / "work", fcntl.flock
    folder.mkdir()
    (folder / "old").touch()

    def late(*args: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        folder.rename(own_folder / "done")
        if becomes == "replaced":
            folder.mkdir()
            (folder / "new").touch()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    with locked(folder, waits=True, creates=True):
        assert [path.name for path in folder.iterdir()] == ["new"] * (becomes == "replaced")
        with pytest.raises(UserError, match="another process"), locked(folder, waits=False):
            pass


def test_works_on_a_file_system_without_locks(own_folder, monkeypatch):
    def flock(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(own_folder / "work", waits=False, creates=True):
        pass


UNSAFE = ({"../kept": "a" * 64}, {"/etc/passwd": "a" * 64}, {"a": 7}, {"a": "x"}, {"a/b": ""})


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", '{"shards": []}', "\xff", "[" * 100_000),
        *(json.dumps({"key": "key", "shards": shards}) for shards in UNSAFE),
    ],
)
def test_damaged_record_or_one_with_unsafe_names_reads_as_empty(own_folder, text):
    (own_folder / "record.json").write_text(text, encoding="latin-1")
    assert read_record(own_folder / "record.json") == {"shards": {}}


def test_shards_without_a_record_are_deleted(own_folder):
    work = own_folder / "work"
    (work / "folder").mkdir(parents=True)
    (work / "model.safetensors").write_text("")
    assert finished_shards(work / "record.json", "key") == {}
    assert list(work.iterdir()) == []


def test_check_disk_checks_the_disk_of_a_future_folder(own_folder):
    check_disk(own_folder / "not" / "there" / "yet", 1000)
    with pytest.raises(UserError, match=r"yet: needs 1000000000\.0\d GB of disk space"):
        check_disk(own_folder / "not" / "there" / "yet", 10**18)


def test_links_are_deleted_but_not_their_targets(own_folder):
    work, kept = own_folder / "work", own_folder / "kept"
    work.mkdir()
    kept.mkdir()
    (kept / "file").write_text("kept")
    (work / "folder").symlink_to(kept)
    (work / "model.safetensors").symlink_to(kept / "file")
    shards = {"model.safetensors": sha256(kept / "file")}
    (work / "record.json").write_text(json.dumps({"key": "key", "shards": shards}))
    assert finished_shards(work / "record.json", "key") == {}
    assert list(work.iterdir()) == []
    assert (kept / "file").read_text() == "kept"
