"""A full disk: saved files stay intact, no partial files remain, and the error is one line."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import mlx.core as mx
import pytest

from tests.conftest import resume, train, train_once
from tests.fault.processes import call, final_files, leftovers
from your_ai.config import TrainConfig
from your_ai.engine import spill
from your_ai.errors import RunError, UserError
from your_ai.files import TEMPORARY
from your_ai.run import checkpoint, child
from your_ai.run.checkpoint import SavedCheckpoint, TrainState
from your_ai.run.folder import RunFolder, locked

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
DISK_BYTES = 2 << 20
ROOM_BYTES = 48 << 10  # enough for events, but not for a checkpoint at this rank
LARGE_RANK = 32
Room = Callable[[int], AbstractContextManager[None]]  # argument: bytes that can still be written


def make(step: int) -> SavedCheckpoint:
    return SavedCheckpoint(
        state=TrainState(step=step),
        adapters={"a": mx.full((64, 64), float(step))},
        optimizer={"m": mx.full((128, 64), float(step))},
        adapter_config={},
        depends_on={},
    )


def values(path: Path) -> set[float]:
    """All numbers in the arrays of a checkpoint."""
    loaded = checkpoint.load(path)
    arrays = [*loaded.adapters.values(), *loaded.optimizer.values()]
    return {value for array in arrays for value in array.flatten().tolist()}


def bytes_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def command_of(config: TrainConfig) -> list[str]:
    """A command that begins a new run, `new`."""
    flags = ["--plan", config.plan, "--spill" if config.spill else "--no-spill", "--no-supervise"]
    return ["train", "--model", config.model, "--data", config.data, "--run", "new", *flags]


@contextlib.contextmanager
def full_at(call: int) -> Iterator[list[str]]:
    """Let the `call`-th call that writes fail; yields the names of the calls so far."""
    called: list[str] = []

    def limited(module: object, name: str, error: Exception) -> None:
        whole = getattr(module, name)

        def write(*arguments, **options):
            called.append(name)
            if len(called) == call:
                raise error
            return whole(*arguments, **options)

        patch.setattr(module, name, write)

    with pytest.MonkeyPatch.context() as patch:
        limited(os, "fsync", FULL)
        limited(os, "rename", FULL)
        limited(tempfile, "mkdtemp", FULL)
        limited(Path, "write_text", FULL)
        limited(mx, "save_safetensors", RuntimeError("[write] Unable to write 8 bytes to file."))
        yield called


@pytest.mark.parametrize("there", ["nothing", "one of that step"])
def test_full_disk_at_any_stage_of_saving_leaves_intact_checkpoints(own_folder, there):
    checkpoint.save(own_folder, make(2))
    if there == "one of that step":
        checkpoint.save(own_folder, make(4))
    failed = 0
    while True:
        with full_at(failed + 1) as called, contextlib.suppress(RunError):
            checkpoint.save(own_folder, make(4))
        path, faults = checkpoint.newest(own_folder)
        assert path is not None
        assert faults == []
        assert len(values(path)) == 1
        assert there == "nothing" or path.name == "step-000004"
        assert not list(own_folder.glob(f"{TEMPORARY}*"))
        if len(called) <= failed:
            break
        failed += 1
    assert failed >= 12  # 5 files and 2 folders synced, 5 written, made and renamed
    assert values(own_folder / "step-000004") == {4.0}


@contextlib.contextmanager
def file_limit(size_bytes: int) -> Iterator[None]:
    """Limit the size of files: for the writer, this is the same as a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def filled(disk: Path, room_bytes: int) -> Iterator[None]:
    """Fill a disk with a file so that only `room_bytes` are free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        os.posix_fallocate(file.fileno(), 0, shutil.disk_usage(disk).free - room_bytes)
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture(params=["a small disk", "a limit on files"])
def room(request, own_folder, monkeypatch) -> Iterator[Room]:
    """Limits the free space in the working folder, which is on a small disk.

    Only root can mount such a disk; other users get a limit on the size of files.
    """
    disk = own_folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(disk)]
    wanted = request.param == "a small disk" and shutil.which("mount")
    if not wanted or subprocess.run(mount, capture_output=True).returncode != 0:
        yield file_limit
        return
    monkeypatch.chdir(disk)
    try:
        yield lambda room_bytes: filled(disk, room_bytes)
    finally:
        monkeypatch.chdir(own_folder)
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_checkpoint_is_complete_or_absent_for_any_free_space(room):
    place = Path("checkpoints")
    checkpoint.save(place, make(2))
    before = bytes_of(place)
    refused = saved = 0
    for room_bytes in range(0, 96 << 10, 6 << 10):
        try:
            with room(room_bytes):
                checkpoint.save(place, make(4))
        except RunError:
            refused += 1
            assert bytes_of(place) == before
        else:
            saved += 1
            assert checkpoint.newest(place) == (place / "step-000004", [])
            assert values(place / "step-000004") == {4.0}
            shutil.rmtree(place / "step-000004")
    assert refused > 0
    assert saved > 0


def test_run_stopped_by_a_full_disk_resumes_once_there_is_space(configure, room, capsys):
    large = {"lora_rank": LARGE_RANK, "lora_targets": "q_proj,v_proj"}
    settings = {"lora_dropout": 0.2, "save_every": 1, "keep": 9, **large}
    run = train(configure(run="r", max_steps=2, **settings))
    before = bytes_of(run.checkpoints)
    with room(ROOM_BYTES):
        status, _, error = call(capsys, "train", "--resume", "r", "--max-steps", "4")
    assert status == 1
    assert error.startswith("error: runs/r/checkpoints/step-000003: cannot be written")
    assert error.endswith("free some disk space, then resume the run\n")
    assert len(error.splitlines()) == 1
    assert bytes_of(run.checkpoints) == before
    assert leftovers(run) == []

    assert resume(run, max_steps=4) == 0
    whole = train(configure(run="whole", max_steps=4, **settings))
    assert final_files(run) == final_files(whole)


def test_new_run_on_a_full_disk_is_refused_and_leaves_nothing(room, configure, capsys):
    command = command_of(configure())
    with room(0):
        status, _, error = call(capsys, *command)
    assert status == 2
    assert error.startswith("error: runs/new: cannot be written")
    assert len(error.splitlines()) == 1
    assert "bug in your_ai" not in error
    assert not Path("runs/new").exists()


def test_run_that_is_removed_does_not_ask_to_be_resumed(configure, capsys):
    with no_room_for(spill, "write_at"):
        status, _, error = call(capsys, *command_of(configure(plan="staged", spill=True)))
    assert status == 1, error
    assert "optimizer states cannot be written" in error
    assert error.endswith("free some disk space, then run the same command again\n")
    assert len(error.splitlines()) == 1
    assert not Path("runs/new").exists()


@contextlib.contextmanager
def no_room_for(module: object, name: str, after: int = 0) -> Iterator[None]:
    """Let a function that writes fail, after the first `after` calls."""
    whole, calls = getattr(module, name), itertools.count(1)

    def write(*arguments, **options):
        if next(calls) > after:
            raise FULL
        return whole(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, write)
        yield


def assert_one_line_of_error(status: int, _: str, error: str) -> None:
    assert status in (1, 2)
    assert len(error.splitlines()) == 1
    assert os.strerror(errno.ENOSPC) in error
    assert "bug in your_ai" not in error


@pytest.fixture
def stopped(configure: Callable[..., TrainConfig]) -> RunFolder:
    """A run of two steps."""
    return train_once(configure(run="r", max_steps=2, save_every=1))


def test_unwritable_event_gives_one_line_of_error(stopped, capsys):
    with no_room_for(os, "write", after=4):
        assert_one_line_of_error(*call(capsys, "train", "--resume", "r", "--max-steps", "9"))
    assert resume(stopped, max_steps=4) == 0


def test_resuming_on_a_full_disk_gives_one_line_of_error(stopped, capsys):
    config = stopped.config.read_bytes()
    with no_room_for(Path, "write_text"):
        assert_one_line_of_error(*call(capsys, "train", "--resume", "r", "--max-steps", "9"))
    assert stopped.config.read_bytes() == config


def test_failed_write_of_the_adapter_leaves_the_old_one(stopped):
    before = bytes_of(stopped.adapter)
    checkpoints = 2  # calls for a checkpoint: its adapter and its optimizer
    with no_room_for(mx, "save_safetensors", after=checkpoints), pytest.raises(RunError) as caught:
        resume(stopped, max_steps=3)
    assert str(stopped.adapter) in str(caught.value)
    assert bytes_of(stopped.adapter) == before
    assert leftovers(stopped) == []
    assert resume(stopped) == 0
    assert bytes_of(stopped.adapter) != before


def test_failed_lock_on_a_full_disk_does_not_block_later_locks(stopped):
    (stopped.path / "lock").unlink()
    with file_limit(0), contextlib.suppress(UserError, RunError), locked(stopped):
        pass
    with locked(stopped):
        assert (stopped.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_process_whose_error_found_no_room_is_said_to_have_met_a_full_disk(stopped, monkeypatch):
    lost = child.reported_error(stopped, 1, "")
    assert "process.log" in str(lost)
    full = shutil.disk_usage(stopped.path)._replace(free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert_one_line_of_error(1, "", str(child.reported_error(stopped, 1, "")))
