from __future__ import annotations

import errno
import os

import pytest

from your_ai.errors import UserError
from your_ai.modelfiles.targets import check_target, unwritable


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
        (folder / name).write_text("{}")
    return folder


def test_a_new_name_is_taken(tmp_path):
    check_target(tmp_path / "new", force=False)


def test_what_is_there_is_replaced_only_when_asked(model):
    with pytest.raises(UserError, match="exists; choose another name, or replace it with --force"):
        check_target(model, force=False)
    check_target(model, force=True)


def test_a_file_is_replaced_when_asked(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    with pytest.raises(UserError, match="exists"):
        check_target(tmp_path / "a.gguf", force=False, is_file=True)
    check_target(tmp_path / "a.gguf", force=True, is_file=True)


def test_a_folder_does_not_replace_a_file_nor_a_file_a_folder(model, tmp_path):
    (tmp_path / "notes.txt").write_text("years of work")
    with pytest.raises(UserError, match="is a file, and would be a folder"):
        check_target(tmp_path / "notes.txt", force=True)
    with pytest.raises(UserError, match="is a folder, and would be a file"):
        check_target(model, force=True, is_file=True)


@pytest.mark.parametrize("name", ["thesis.docx", "notes", "data"])
def test_a_folder_with_other_things_is_never_replaced(model, name):
    if name == "data":
        (model / name).mkdir()
    else:
        (model / name).write_text("years of work")
    with pytest.raises(UserError, match="holds other things than a model"):
        check_target(model, force=True)


@pytest.mark.parametrize("names", [["notes.txt"], ["config.json", "main.py", "README.md"]])
def test_a_folder_without_a_model_is_never_replaced(tmp_path, names):
    (tmp_path / "out").mkdir()
    for name in names:
        (tmp_path / "out" / name).write_text("years of work")
    with pytest.raises(UserError, match="holds other things"):
        check_target(tmp_path / "out", force=True)


def test_an_empty_folder_is_replaced_when_asked(tmp_path):
    (tmp_path / "out").mkdir()
    check_target(tmp_path / "out", force=True)


def test_a_link_is_never_replaced(model, tmp_path):
    (tmp_path / "link").symlink_to(model)
    with pytest.raises(UserError, match="is a link, which is never replaced"):
        check_target(tmp_path / "link", force=True)


def test_a_place_that_is_not_there_is_told(tmp_path):
    with pytest.raises(UserError, match="is no folder; make it first"):
        check_target(tmp_path / "missing" / "out", force=False)


def test_a_place_that_cannot_be_written_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(UserError, match="Permission denied"):
        check_target(tmp_path / "out", force=False)


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "free some disk, then try again"),
        (OSError(errno.EIO, "No space left on device (os error 28)"), "free some disk"),
        (PermissionError(errno.EACCES, "Permission denied"), "choose another place"),
    ],
)
def test_what_cannot_be_written_is_told_with_what_to_do(tmp_path, error, advice):
    assert advice in str(unwritable(tmp_path, error))


def test_work_that_goes_on_is_told_so():
    full = unwritable("out", OSError(errno.ENOSPC, "No space left on device"), goes_on=True)
    assert "free some disk; the same command then goes on" in str(full)
