from __future__ import annotations

import errno
import os

import pytest

from your_ai.errors import UserError
from your_ai.modelfiles.targets import check_target, write_error


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (folder / name).write_text("{}")
    return folder


def test_new_name_is_accepted(tmp_path):
    check_target(tmp_path / "new", force=False)


def test_existing_model_is_replaced_only_with_force(model):
    with pytest.raises(UserError, match="exists; choose another name, or replace it with --force"):
        check_target(model, force=False)
    check_target(model, force=True)


def test_file_is_replaced_only_with_force(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="exists"):
        check_target(tmp_path / "a.gguf", force=False, is_file=True)
    check_target(tmp_path / "a.gguf", force=True, is_file=True)


def test_folder_and_file_never_replace_each_other(model, tmp_path):
    (tmp_path / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match="is a file, the result is a folder"):
        check_target(tmp_path / "notes.txt", force=False)  # --force would not help
    with pytest.raises(UserError, match="is a file, the result is a folder"):
        check_target(tmp_path / "notes.txt", force=True)
    with pytest.raises(UserError, match="is a folder, the result is a file"):
        check_target(model, force=True, is_file=True)


@pytest.mark.parametrize("name", ["thesis.docx", "notes", "data"])
def test_folder_with_other_files_is_never_replaced(model, name):
    if name == "data":
        (model / name).mkdir()
    else:
        (model / name).write_text("years of work")
    with pytest.raises(UserError, match="contains files that do not belong to a model"):
        check_target(model, force=True)


@pytest.mark.parametrize("names", [["notes.txt"], ["config.json", "main.py", "README.md"]])
def test_folder_without_a_model_is_never_replaced(tmp_path, names):
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_text("years of work")
    with pytest.raises(UserError, match="contains files that do not belong to a model"):
        check_target(tmp_path / "out", force=True)


def test_empty_folder_is_replaced_with_force(tmp_path):
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out", force=True)


def test_link_is_never_replaced(model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(UserError, match="is a link, which is never replaced"):
        check_target(tmp_path / "link", force=True)


def test_missing_parent_folder_is_refused(tmp_path):
    with pytest.raises(UserError, match="is not a folder; create it first"):
        check_target(tmp_path / "missing" / "out", force=False)


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
