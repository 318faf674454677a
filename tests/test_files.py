"""Files that are complete or absent."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

import pytest

from your_ai import files
from your_ai.files import TEMPORARY, atomic_folder, clean, remedy_of, sha256


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_atomically(
    target: Path, text: str = "new", error: type[BaseException] | None = None
) -> None:
    with atomic_folder(target) as folder:
        (folder / "file").write_text(text)
        if error is not None:
            raise error


def test_sha256_hashes_the_whole_file(own_folder):
    content = os.urandom((2 << 20) + 17)
    (own_folder / "file").write_bytes(content)
    assert sha256(own_folder / "file") == hashlib.sha256(content).hexdigest()


def test_sha256_of_a_missing_file_raises(own_folder):
    with pytest.raises(FileNotFoundError):
        sha256(own_folder / "file")


def test_folder_appears_when_it_is_complete(own_folder):
    target = own_folder / "target"
    with atomic_folder(target) as folder:
        (folder / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert names(own_folder) == ["target"]


def test_missing_parent_folder_is_not_created(own_folder):
    """It may be a run folder that was deleted meanwhile."""
    with pytest.raises(FileNotFoundError):
        write_atomically(own_folder / "gone" / "target")
    assert names(own_folder) == []


def test_folder_can_be_read_by_others(own_folder):
    write_atomically(own_folder / "target")
    assert stat.S_IMODE((own_folder / "target").stat().st_mode) == 0o755


def test_existing_folder_is_replaced_completely(own_folder):
    target = own_folder / "target"
    with atomic_folder(target) as folder:
        (folder / "of the old").write_text("old")
    write_atomically(target)
    assert names(target) == ["file"]
    assert names(own_folder) == ["target"]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_error_while_writing_leaves_nothing(own_folder, error):
    with pytest.raises(error):
        write_atomically(own_folder / "target", error=error)
    assert names(own_folder) == []


def test_error_while_writing_keeps_the_old_folder(own_folder):
    write_atomically(own_folder / "target", "old")
    with pytest.raises(ZeroDivisionError):
        write_atomically(own_folder / "target", error=ZeroDivisionError)
    assert (own_folder / "target" / "file").read_text() == "old"
    assert names(own_folder) == ["target"]


def test_failed_replacement_keeps_the_old_folder(own_folder, monkeypatch):
    target = own_folder / "target"
    write_atomically(target, "old")
    rename = os.rename

    def fail_to_move_in(source, to):
        if Path(to) == target and not str(source).endswith(".old"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, to)

    monkeypatch.setattr(os, "rename", fail_to_move_in)
    with pytest.raises(OSError, match="Input/output"):
        write_atomically(target)
    assert (target / "file").read_text() == "old"
    assert names(own_folder) == ["target"]


def test_files_are_synced_before_the_folder_is_renamed(own_folder, monkeypatch):
    done = []
    sync, rename = files.sync, os.rename
    monkeypatch.setattr(files, "sync", lambda path: (done.append(path.name), sync(path)))
    monkeypatch.setattr(os, "rename", lambda a, b: (done.append("rename"), rename(a, b)))
    with atomic_folder(own_folder / "target") as folder:
        (folder / "a").write_text("a")
        (folder / "b").write_text("b")
    renamed = done.index("rename")
    assert {"a", "b", folder.name} == set(done[:renamed])
    assert done[renamed + 1 :] == [own_folder.name]


def test_clean_deletes_only_temporary_folders(own_folder):
    for name in (f"{TEMPORARY}a-1", f"{TEMPORARY}a-1.old", "a", "b.tmp"):
        (own_folder / name / "inside").mkdir(parents=True)
    clean(own_folder)
    assert names(own_folder) == ["a", "b.tmp"]


def test_clean_of_a_missing_folder_does_nothing(own_folder):
    clean(own_folder / "nowhere")


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some disk space"),
        (errno.EDQUOT, "free some disk space"),
        (errno.EROFS, "correct its permissions"),
        (errno.EIO, "check the disk"),
        (None, "check the disk"),
    ],
)
def test_remedies_fit_the_error(number, remedy):
    assert remedy_of(OSError(number, "why")) == remedy
