"""kill -9 at any moment: a run resumes from its last intact checkpoint, with the same result."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys

import mlx.core as mx
import pytest

from tests.conftest import losses_of, resume, train_once, write_rows
from tests.fault.processes import (
    ENDLESS,
    PATIENCE_S,
    call,
    final_files,
    leftovers,
    started,
    steps_done,
    wait_for,
    wait_until,
)
from your_ai.config import TrainConfig
from your_ai.files import TEMPORARY, clean
from your_ai.hub.find import store
from your_ai.run import checkpoint, events, folder
from your_ai.run.checkpoint import SavedCheckpoint, TrainState
from your_ai.run.folder import RUNS, RunFolder

# Saves a checkpoint in forks, of which the n-th kills itself at the n-th call that changes what is
# on the disk, until one comes to its end. Half of what a write would have written is then there.
SAVE_AND_DIE = """
import itertools, os, signal, sys, tempfile
from pathlib import Path

import mlx.core as mx

from your_ai.run import checkpoint

calls = 0


def deadly(module, name, last, file_of=None):
    whole = getattr(module, name)

    def call(*args, **options):
        global calls
        calls += 1
        if calls == last:
            if file_of is not None:
                whole(*args, **options)
                os.truncate(file_of(args), os.path.getsize(file_of(args)) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args, **options)

    setattr(module, name, call)


def save(place, last):
    deadly(os, "fsync", last)
    deadly(os, "rename", last)
    deadly(tempfile, "mkdtemp", last)
    deadly(mx, "save_safetensors", last, lambda args: args[0])
    deadly(Path, "write_text", last, lambda args: args[0])
    checkpoint.save(
        place,
        checkpoint.SavedCheckpoint(
            state=checkpoint.TrainState(step=4),
            adapters={"a": mx.full((64, 64), 4.0)},
            optimizer={"m": mx.full((64, 64), 4.0)},
            adapter_config={},
            depends_on={},
        ),
    )


for number in itertools.count(1):
    place = Path(f"kill-{number}")
    os.system(f"cp -r first {place}")
    pid = os.fork()
    if pid == 0:
        try:
            save(place, number)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(place, status, flush=True)
    if status != -signal.SIGKILL:
        break
"""


@pytest.fixture
def settings() -> dict[str, object]:
    """Dropout, accumulation, validations, and a kill within an epoch."""
    often = {"save_every": 2, "eval_every": 3}
    return {"lora_dropout": 0.2, "grad_accumulation": 2, "lora_layers": 1, **often}


@pytest.mark.parametrize("there", ["nothing", "a whole one", "a damaged one"])
def test_kill_at_any_stage_of_saving_leaves_an_intact_checkpoint(own_folder, there):
    """there: the checkpoint that already exists at the new one's path."""
    first = own_folder / "first"
    old = SavedCheckpoint(TrainState(step=2), {"a": mx.full((64, 64), 2.0)}, {}, {}, {})
    checkpoint.save(first, old)
    if there != "nothing":
        checkpoint.save(first, dataclasses.replace(old, state=TrainState(step=4)))
    if there == "a damaged one":
        (first / "step-000004" / checkpoint.STATE).write_text("")

    told = subprocess.check_output([sys.executable, "-c", SAVE_AND_DIE], text=True)
    *killed, saved = [line.split() for line in told.splitlines()]
    assert saved[1] == "0"
    for name, status in (*killed, saved):
        assert status == str(int(-signal.SIGKILL)) or name == saved[0]
        place = own_folder / name
        path, faults = checkpoint.newest(place)
        assert path is not None
        assert faults == [] or there == "a damaged one"
        loaded = checkpoint.load(path)
        assert (loaded.state.step, loaded.adapters["a"].max()) in [(2, 2), (4, 2), (4, 4)]
        clean(place)
        assert {p.name for p in place.iterdir()} <= {"step-000002", "step-000004"}
    assert len(killed) >= 12  # 5 files and 2 folders synced, 5 written, made and renamed
    assert (loaded.state.step, loaded.adapters["a"].max()) == (4, 4)


BY_LAYER = {
    "lora_rank": "4,mlp=3,block.1=2", "lora_alpha": "10,mlp=7", "lora_targets": ["all-linear"],
    "lora_layers": "all", "use_dora": True,
}  # fmt: skip


@pytest.mark.parametrize("more", [{}, BY_LAYER], ids=["one rank", "ranks by layer"])
def test_killed_process_resumes_exactly(configure, settings, capsys, more):
    """The run is killed, half of an event line is appended, and the command line resumes it."""
    settings |= more
    run = RunFolder(RUNS / "killed")
    with started(configure(max_steps=ENDLESS, **settings), "killed") as process:
        wait_for(process, run, events.Step, 5)
    assert process.returncode == -signal.SIGKILL
    records, _ = events.tail(run.events)
    line = events.to_line(records[-1])
    with run.events.open("a") as file:
        file.write(line[: len(line) // 2])
    (run.checkpoints / f"{TEMPORARY}step-000099-x").mkdir()

    steps = steps_done(run) + 3
    status, _, error = call(capsys, "train", "--resume", "killed", "--max-steps", str(steps))
    assert status == 0, error
    whole = train_once(configure(run="whole", max_steps=steps, **settings))
    assert final_files(run) == final_files(whole)
    assert losses_of(run) == losses_of(whole)
    assert leftovers(run) == []
    lines = run.events.read_bytes().splitlines()
    assert sum(events.from_line(line) is None for line in lines) == 1  # the half line


# A function does something, and kills its process.
DIE = """
import os, signal
from your_ai.{module} import {name} as owner

whole = owner.{function}

def die(*arguments):
    {first}
    os.kill(os.getpid(), signal.SIGKILL)

owner.{function} = die
"""


def killed_by(config: TrainConfig, place: str, first: str = "pass") -> RunFolder:
    """A new run whose process is killed at a function: `module.name.function`."""
    module, name, function = place.rsplit(".", 2)
    before = DIE.format(module=module, name=name, function=function, first=first)
    with started(config, "killed", before=before) as process:
        process.wait()
    assert process.returncode == -signal.SIGKILL
    return folder.find("killed")


@pytest.mark.parametrize(
    "place", ["run.folder.locked", "run.checkpoint.save"], ids=["start", "first checkpoint"]
)
def test_run_killed_before_its_first_checkpoint_starts_again(configure, settings, place):
    settings["max_steps"] = 3
    run = killed_by(configure(**settings), place)
    assert checkpoint.newest(run.checkpoints) == (None, [])
    assert resume(run) == 0
    assert final_files(run) == final_files(train_once(configure(run="whole", **settings)))


@pytest.mark.parametrize(
    ("function", "first"),
    [
        ("computed", "whole(*arguments)"),
        ("sha256", "os.truncate(arguments[0], os.path.getsize(arguments[0]) // 2)"),
    ],
    ids=["computed", "half written"],
)
def test_run_killed_while_its_reference_is_computed_starts_again(
    configure, own_folder, function, first
):
    rows = [{"prompt": f"Question {i}", "chosen": "Yes", "rejected": "No"} for i in range(4)]
    data = write_rows(own_folder / "pairs.jsonl", rows)
    settings = {"objective": "dpo", "data": str(data), "max_steps": 2, "valid": "none"}
    run = killed_by(configure(**settings), f"training.reference.{function}", first)
    assert resume(run) == 0
    assert final_files(run) == final_files(train_once(configure(run="whole", **settings)))
    kept = (store() / "cache" / "reference").iterdir()
    assert len([path for path in kept if not path.name.startswith(TEMPORARY)]) == 1


def test_temporary_files_of_a_killed_process_are_deleted(configure):
    run = folder.create(configure(max_steps=1))
    for parent in (run.path, run.checkpoints):
        for name in ("step-000004-x", "adapter-y.old"):
            (parent / f"{TEMPORARY}{name}" / "inside").mkdir(parents=True)
    resume(run)
    assert leftovers(run) == []


def test_run_in_use_by_another_process_is_refused(configure, capsys, monkeypatch):
    monkeypatch.setattr(folder, "LOCK_WAIT_S", 0.1)
    run = RunFolder(RUNS / "r")
    with started(configure(max_steps=ENDLESS), "r") as process:
        wait_for(process, run, events.Step)
        status, _, error = call(capsys, "train", "--resume", "r", "--max-steps", "9")
        before = steps_done(run)
        wait_until(process, lambda: steps_done(run) > before)  # the first process continues
    assert status == 2
    assert f"process {process.pid} is working on this run" in error
    assert len(error.splitlines()) == 1
    assert run.read_config().max_steps == ENDLESS


def test_deleted_run_folder_gives_one_line_of_error(configure):
    run = RunFolder(RUNS / "r")
    with started(configure(max_steps=100, save_every=40), "r") as process:
        wait_for(process, run, events.Step, 3)
        run.path.rename("elsewhere")  # like a deletion, but instant
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert error.startswith("error: runs/r")
    assert len(error.splitlines()) == 1
    assert "bug in your_ai" not in error
    assert not run.path.exists()
