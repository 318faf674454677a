"""Checkpoints: saved ones are loaded unchanged, damaged ones are named and skipped."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
from pathlib import Path

import mlx.core as mx
import pytest

from tests.conftest import flip, forbid_deleting
from your_ai.errors import UserError
from your_ai.files import TEMPORARY
from your_ai.run import checkpoint
from your_ai.run.checkpoint import SavedCheckpoint, TrainState

CONTENT = (checkpoint.ADAPTERS, checkpoint.OPTIMIZER, checkpoint.ADAPTER_CONFIG, checkpoint.STATE)


def make(step: int) -> SavedCheckpoint:
    mx.random.seed(step)
    return SavedCheckpoint(
        state=TrainState(step=step, skipped=2, skipped_in_a_row=1, loss_scale=0.1, good_steps=7),
        adapters={
            "a.lora_a": mx.random.normal((4, 8)),
            "a.lora_b": mx.random.normal((8, 4)).astype(mx.bfloat16),
        },
        optimizer={
            "step": mx.array(step, mx.uint64),
            "a.m": mx.random.normal((4, 8)).astype(mx.float16),
        },
        adapter_config={"fine_tune_type": "lora", "keys": ["ü"]},
        depends_on={"model": {"config.json": "abc"}, "data": {}},
    )


def save(folder: Path, *steps: int) -> list[Path]:
    return [checkpoint.save(folder, make(step)) for step in steps]


def assert_equal(first: SavedCheckpoint, second: SavedCheckpoint) -> None:
    for name in ("adapters", "optimizer"):
        ours, theirs = getattr(first, name), getattr(second, name)
        assert {n: (a.dtype, a.tolist()) for n, a in ours.items()} == {
            n: (a.dtype, a.tolist()) for n, a in theirs.items()
        }
    for name in ("state", "adapter_config", "depends_on"):
        assert getattr(first, name) == getattr(second, name)


def test_a_checkpoint_is_loaded_unchanged_and_then_needs_only_the_files_of_its_arrays(own_folder):
    """Arrays are read one after the other, when they are restored."""
    (path,) = save(own_folder, 3)
    loaded = checkpoint.load(path)
    for name in CONTENT:
        if name not in (checkpoint.OPTIMIZER, checkpoint.ADAPTERS):
            os.truncate(path / name, 0)
    assert_equal(loaded, make(3))


def test_a_checkpoint_replaces_one_of_the_same_step(own_folder):
    save(own_folder, 3)
    flip(own_folder / "step-000003" / checkpoint.ADAPTERS, -1)
    save(own_folder, 3)
    assert checkpoint.newest(own_folder) == (own_folder / "step-000003", [])
    assert [p.name for p in own_folder.iterdir()] == ["step-000003"]


def test_checkpoints_are_listed_newest_first(own_folder):
    save(own_folder, 3, 20, 999_999, 1_000_000)
    found = [path.name for path in checkpoint.list_checkpoints(own_folder)]
    assert found == ["step-1000000", "step-999999", "step-000020", "step-000003"]


def test_other_files_and_folders_are_not_listed(own_folder):
    for name in ("step-3", "step-000004.old", f"{TEMPORARY}step-000005-x", "latest"):
        (own_folder / name).mkdir()
    (own_folder / "step-000006").write_text("a file")
    assert checkpoint.list_checkpoints(own_folder) == []


@pytest.mark.parametrize("folder", ["empty", "nowhere"])
def test_a_run_without_checkpoints_has_no_newest(own_folder, folder):
    (own_folder / "empty").mkdir()
    assert checkpoint.newest(own_folder / folder) == (None, [])


@pytest.mark.parametrize("name", [*CONTENT, checkpoint.CHECKSUMS])
def test_a_checkpoint_with_a_missing_file_is_skipped(own_folder, name):
    older, newer = save(own_folder, 2, 4)
    (newer / name).unlink()
    assert checkpoint.newest(own_folder) == (older, [f"{newer / name}: is missing"])


def test_an_empty_checkpoint_folder_is_skipped(own_folder):
    (older,) = save(own_folder, 2)
    (own_folder / "step-000004").mkdir()
    path, faults = checkpoint.newest(own_folder)
    assert path == older
    assert len(faults) == 1


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("at", [0, None, -1])
def test_a_flipped_bit_is_detected(own_folder, name, at):
    older, newer = save(own_folder, 2, 4)
    flip(newer / name, at)
    assert checkpoint.newest(own_folder) == (older, [f"{newer / name}: its checksum is wrong"])


@pytest.mark.parametrize("name", CONTENT)
@pytest.mark.parametrize("keep", [0.0, 0.5, -1])
def test_a_truncated_file_is_detected(own_folder, name, keep):
    older, newer = save(own_folder, 2, 4)
    size = (newer / name).stat().st_size
    os.truncate(newer / name, size - 1 if keep == -1 else int(keep * size))
    assert checkpoint.newest(own_folder) == (older, [f"{newer / name}: its checksum is wrong"])


@pytest.mark.parametrize("text", ["", "{", "null", "[]", "3", "{}", "\0\0", '{"state.json": 3}'])
def test_unreadable_checksums_are_named(own_folder, text):
    older, newer = save(own_folder, 2, 4)
    (newer / checkpoint.CHECKSUMS).write_text(text)
    path, (fault,) = checkpoint.newest(own_folder)
    assert path == older
    assert fault.startswith(f"{newer / checkpoint.CHECKSUMS}: cannot be read")


@pytest.mark.parametrize("name", CONTENT)
def test_an_unreadable_file_is_named(own_folder, monkeypatch, name):
    older, newer = save(own_folder, 2, 4)
    sha256 = checkpoint.sha256

    def fail(path: Path) -> str:
        if path == newer / name:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return sha256(path)

    monkeypatch.setattr(checkpoint, "sha256", fail)
    path, (fault,) = checkpoint.newest(own_folder)
    assert path == older
    assert fault.startswith(f"{newer / name}:")


def test_all_skipped_checkpoints_are_named(own_folder):
    oldest, middle, newest = save(own_folder, 2, 4, 6)
    (middle / checkpoint.STATE).unlink()
    flip(newest / checkpoint.OPTIMIZER)
    assert checkpoint.newest(own_folder) == (
        oldest,
        [
            f"{newest / checkpoint.OPTIMIZER}: its checksum is wrong",
            f"{middle / checkpoint.STATE}: is missing",
        ],
    )


def test_if_no_checkpoint_is_intact_the_damaged_files_are_named(own_folder):
    older, newer = save(own_folder, 2, 4)
    (older / checkpoint.STATE).unlink()
    flip(newer / checkpoint.OPTIMIZER)
    with pytest.raises(UserError) as caught:
        checkpoint.newest(own_folder)
    assert str(older / checkpoint.STATE) in str(caught.value)
    assert str(newer / checkpoint.OPTIMIZER) in str(caught.value)


def test_the_checksums_cover_every_other_file(own_folder):
    (path,) = save(own_folder, 3)
    sums = json.loads((path / checkpoint.CHECKSUMS).read_text())
    assert {*sums, checkpoint.CHECKSUMS} == {p.name for p in path.iterdir()}


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"keep": 2}, [4, 3]),
        ({"step": 2}, [2]),  # those beyond the run's own step were damaged when it resumed
        ({"best": 1}, [4, 1]),
        ({"best": 4}, [4]),
        ({"best": 9}, [4]),
        ({"best": None}, [4]),
    ],
)
def test_prune_keeps_the_newest_and_the_best(own_folder, changes, kept):
    save(own_folder, 1, 2, 3, 4)
    checkpoint.prune(own_folder, **{"step": 4, "keep": 1, **changes})
    assert list(map(checkpoint.step_of, checkpoint.list_checkpoints(own_folder))) == kept


def test_best_step_is_that_of_the_newest_readable_state(own_folder):
    assert checkpoint.best_step(own_folder) is None
    for step, best in ((2, 2), (4, 2), (6, 6)):
        saved = make(step)
        state = dataclasses.replace(saved.state, best_loss=1.0, best_step=best)
        checkpoint.save(own_folder, dataclasses.replace(saved, state=state))
    assert checkpoint.best_step(own_folder) == 6
    (own_folder / "step-000006" / checkpoint.STATE).write_text("{")
    assert checkpoint.best_step(own_folder) == 2


def test_prune_continues_if_a_checkpoint_cannot_be_deleted(own_folder, monkeypatch):
    paths = save(own_folder, 1, 2, 3, 4)
    forbid_deleting(monkeypatch, checkpoint.STATE)
    checkpoint.prune(own_folder, step=4, keep=2)
    assert [checkpoint.fault(path) for path in paths[2:]] == [None, None]


def test_an_adapter_folder_replaces_the_previous_one(own_folder):
    target = own_folder / "adapter"
    checkpoint.save_adapter(target, make(1).adapters, {"rank": 1}, 4)
    checkpoint.save_adapter(target, make(2).adapters, {"rank": 2}, 8)
    written = json.loads((target / checkpoint.ADAPTER_CONFIG).read_text())
    assert written == {"rank": 2, "step": 8}
    assert checkpoint.adapter_step(target) == 8
    saved = mx.load(str(target / checkpoint.ADAPTERS))
    assert saved["a.lora_a"].tolist() == make(2).adapters["a.lora_a"].tolist()
    assert [p.name for p in own_folder.iterdir()] == ["adapter"]
