"""Damaged checkpoints are named and skipped; a changed model or changed data is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import (
    TINY,
    chat,
    events_of,
    flip,
    forbid_deleting,
    make_model,
    refused,
    resume,
    train,
    working_in,
    write_rows,
)
from tests.fault.processes import call, final_files
from your_ai.config import build
from your_ai.errors import UserError
from your_ai.run import checkpoint, events
from your_ai.run.folder import RUNS, RunFolder

STEPS = 6
NEWEST = "step-000004"
MODEL_FILES = ("model.safetensors", "config.json", "chat_template.jinja")


@dataclass(frozen=True)
class Undisturbed:
    """An undisturbed run, with its model and data."""

    run: RunFolder
    model: Path
    data: Path


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    place = tmp_path_factory.mktemp("undisturbed")
    rows = [chat(f"Question {i}" + " please" * i, f"Answer {i}") for i in range(10)]
    with working_in(place):
        settings = {
            "model": str(make_model(place / "model", **TINY)),
            "data": str(write_rows(place / "data" / "train.jsonl", rows).parent),
            "run": "r", "max_steps": STEPS, "batch_size": 2, "lora_layers": 1, "lora_dropout": 0.2,
            "learning_rate": 1e-2, "save_every": 2, "keep": 9, "supervise": False,
        }  # fmt: skip
        write_rows(place / "data" / "valid.jsonl", rows[:3])
        run = train(build(settings, "test"))
    return Undisturbed(RunFolder(place / run.path), place / "model", place / "data")


@pytest.fixture
def cut(undisturbed: Undisturbed) -> RunFolder:
    """The run after step 4, with checkpoints of steps 0, 2 and 4."""
    run = RunFolder(RUNS / "r")
    shutil.copytree(undisturbed.run.path, run.path)
    shutil.rmtree(run.adapter)
    shutil.rmtree(run.checkpoints / f"step-{STEPS:06d}")
    run.events.unlink()
    assert checkpoint.newest(run.checkpoints) == (run.checkpoints / NEWEST, [])
    return run


def cut_short(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(  # tests/run/test_checkpoint.py damages every file in every way
    ("damage", "name"),
    [
        (flip, checkpoint.ADAPTERS), (cut_short, checkpoint.OPTIMIZER),
        (Path.unlink, checkpoint.ADAPTER_CONFIG), (cut_short, checkpoint.STATE),
        (flip, checkpoint.CHECKSUMS), (Path.unlink, checkpoint.CHECKSUMS),
    ],
)  # fmt: skip
def test_run_resumes_from_the_checkpoint_before_a_damaged_one(cut, undisturbed, damage, name):
    damage(cut.checkpoints / NEWEST / name)
    assert resume(cut) == 0
    (started,) = events_of(cut, events.Started)
    assert started.step == 2
    (notice,) = events_of(cut, events.Notice)
    # A flipped bit in the checksums makes another file look damaged, and that one is named.
    named = str(cut.checkpoints / NEWEST)
    if (damage, name) != (flip, checkpoint.CHECKSUMS):
        named = str(cut.checkpoints / NEWEST / name)
    assert notice.text.startswith(named)
    assert final_files(cut) == final_files(undisturbed.run)


def test_damaged_checkpoint_is_replaced_by_an_intact_one(cut):
    flip(cut.checkpoints / NEWEST / checkpoint.ADAPTERS)
    resume(cut)
    assert [checkpoint.fault(p) for p in checkpoint.list_checkpoints(cut.checkpoints)] == [None] * 4


def test_damaged_checkpoint_does_not_count_for_keep(cut):
    """The run stops again before it reaches the step of the damaged one."""
    flip(cut.checkpoints / NEWEST / checkpoint.ADAPTERS)
    resume(cut, max_steps=3, keep=1)
    path, _ = checkpoint.newest(cut.checkpoints)
    assert path == cut.checkpoints / "step-000003"


def test_run_is_refused_if_every_checkpoint_is_damaged(cut, capsys):
    paths = checkpoint.list_checkpoints(cut.checkpoints)
    for path in paths:
        flip(path / checkpoint.ADAPTERS)
    error = refused(capsys, "train", "--resume", "r", "--supervise")
    for path in paths:
        assert str(path / checkpoint.ADAPTERS) in error
    assert checkpoint.list_checkpoints(cut.checkpoints) == paths


def test_undeletable_checkpoint_does_not_stop_the_run(cut, undisturbed, monkeypatch):
    forbid_deleting(monkeypatch, checkpoint.OPTIMIZER)
    assert resume(cut, keep=2, save_every=1) == 0
    newest = checkpoint.list_checkpoints(cut.checkpoints)[:2]
    assert [path.name for path in newest] == ["step-000006", "step-000005"]
    assert [checkpoint.fault(path) for path in newest] == [None, None]
    assert final_files(cut) == final_files(undisturbed.run)


def test_moved_model_counts_as_the_same(cut, undisturbed, own_folder):
    moved = shutil.copytree(undisturbed.model, own_folder / "moved")
    assert resume(cut, model=str(moved)) == 0
    assert final_files(cut) == final_files(undisturbed.run)


def change(path: Path) -> None:
    """Change the content of a file so that it is still valid."""
    content = path.read_bytes()
    if path.suffix == ".safetensors":
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif path.suffix == ".jsonl":
        path.write_bytes(content.replace(b"Answer", b"answer", 1))
    else:
        path.write_bytes(content + b"\n")


def refusal(run: RunFolder, **changes: str) -> str:
    with pytest.raises(UserError) as caught:
        resume(run, **changes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "harm", "name", "changed"),
    [
        *(("model", change, name, name) for name in MODEL_FILES),
        ("data", change, "train.jsonl", "train.jsonl"),
        ("data", change, "valid.jsonl", "valid.jsonl"),
        ("data", Path.unlink, "valid.jsonl", "train.jsonl, valid.jsonl"),  # others are held out
    ],
)
def test_changed_model_or_data_is_refused(cut, undisturbed, own_folder, what, harm, name, changed):
    other = shutil.copytree(getattr(undisturbed, what), own_folder / "other")
    harm(other / name)
    text = refusal(cut, **{what: str(other)})
    assert f"--resume r: the {what} changed since the run began ({changed})" in text


def test_refused_run_resumes_with_the_original_data(cut, undisturbed, own_folder):
    other = shutil.copytree(undisturbed.data, own_folder / "other")
    change(other / "train.jsonl")
    refusal(cut, data=str(other))
    assert resume(cut, data=str(undisturbed.data)) == 0
    assert final_files(cut) == final_files(undisturbed.run)


@pytest.mark.parametrize(
    "flags",
    [
        ("--learning-rate", "0.5"), ("--seed", "1"), ("--batch-size", "1"), ("--lora-rank", "2"),
        ("--config", "demo"), ("--run", "other"),
    ],
    ids=lambda flags: flags[0],
)  # fmt: skip
def test_changing_a_fixed_option_is_refused(cut, capsys, flags):
    before = cut.config.read_bytes()
    assert flags[0] in refused(capsys, "train", "--resume", "r", *flags)
    assert cut.config.read_bytes() == before


def test_repeating_an_option_with_the_same_value_is_accepted(cut, undisturbed, capsys):
    status, _, error = call(capsys, "train", "--resume", "r", "--learning-rate", "0.01")
    assert (status, error) == (0, "")
    assert final_files(cut) == final_files(undisturbed.run)


@pytest.mark.parametrize("name", ["events.jsonl", "lock"])
def test_garbage_in_a_file_of_the_run_folder_does_no_harm(cut, undisturbed, capsys, name):
    (cut.path / name).write_bytes(b"\0\xff[{" * 1000)
    status, _, error = call(capsys, "train", "--resume", "r")
    assert (status, error) == (0, "")
    assert final_files(cut) == final_files(undisturbed.run)
