"""Cut models into shards, and put them in place."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.errors import UserError
from your_ai.modelfiles import shards
from your_ai.modelfiles.shards import cut, put_in_place
from your_ai.modelfiles.targets import Work

MB = 10**6


@given(st.lists(st.integers(1, 200 * MB), min_size=1, max_size=200))
def test_cut_keeps_order_and_bounds_shard_size(sizes):
    named = {str(index): size for index, size in enumerate(sizes)}
    found = cut(named)
    assert [name for names in found.values() for name in names] == list(named)
    most = max(shards.SHARD_LEAST_BYTES, sum(sizes) // shards.SHARDS)
    for names in found.values():
        assert len(names) == 1 or sum(named[name] for name in names) <= most
    assert sorted(found) == list(found)
    assert len(found) <= 2 * max(shards.SHARDS, sum(sizes) // most) + 1


def test_shards_have_at_most_a_gigabyte():
    found = cut({str(index): 400 * MB for index in range(200)})
    assert {len(names) for names in found.values()} == {2}


@pytest.fixture
def work(tmp_path: Path) -> Work:
    """Finished work, next to an existing model at its target."""
    work = Work(tmp_path / "out", "fusing", "fused.json")
    for folder, content in ((work.folder, "new"), (work.target, "old")):
        folder.mkdir()
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_text(content)
    return work


def content_of(folder: Path) -> str:
    return (folder / "config.json").read_text()


def test_put_in_place_replaces_the_old_model(tmp_path, work):
    put_in_place(work, replaces=True)
    assert content_of(work.target) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_existing_model_is_kept_without_replaces(tmp_path, work):
    with pytest.raises(OSError, match="not empty"):
        put_in_place(work, replaces=False)
    assert content_of(work.target) == "old"
    assert content_of(work.folder) == "new"


def test_folder_with_other_files_is_never_replaced(work):
    (work.target / "thesis.docx").write_text("years of work")
    with pytest.raises(UserError, match="contains files that do not belong to a model"):
        put_in_place(work, replaces=True)
    assert content_of(work.target) == "old"


def test_old_model_is_restored_if_the_rename_fails(work, monkeypatch):
    rename = os.rename

    def fail(source: Path, target: Path) -> None:
        if source == work.folder:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space"):
        put_in_place(work, replaces=True)
    assert content_of(work.target) == "old"
    assert not work.replaced.exists()


def test_replacing_continues_after_a_process_was_killed(tmp_path, work):
    os.rename(work.target, work.replaced)
    put_in_place(work, replaces=False)
    assert content_of(work.target) == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
