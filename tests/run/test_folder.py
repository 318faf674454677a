"""The run folder: created once, found by name or path, and locked by one process at a time."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.conftest import killed_in
from tests.run.holding import held
from your_ai.config import ADDED, TrainConfig
from your_ai.errors import UserError
from your_ai.run import folder as folders
from your_ai.run.folder import RUNS, RunFolder, create, default_name, discard, find, locked

CONFIG = TrainConfig(model="models/m", data="data", run="r", seed=7)


def named(run: str) -> TrainConfig:
    return dataclasses.replace(CONFIG, run=run)


@pytest.fixture
def holder():
    """Another process that locks the run r until its stdin is closed."""
    with held(create(CONFIG)) as process:
        yield process


def test_a_written_config_is_read_back():
    run = create(CONFIG)
    changed = dataclasses.replace(CONFIG, max_steps=9, lora_targets=("q_proj", "v_proj"))
    run.write_config(changed)
    assert run.read_config() == changed
    assert [path.name for path in run.path.iterdir()] == ["config.yaml"]


def test_settings_that_an_old_run_does_not_have_are_those_it_trained_with():
    run = create(TrainConfig(model="m", data="d", run="r"))
    lines = run.config.read_text().splitlines(keepends=True)
    names = tuple(f"{name}:" for name in ADDED)
    run.config.write_text("".join(line for line in lines if not line.startswith(names)))
    config = run.read_config()
    assert {name: getattr(config, name) for name in ADDED} == ADDED
    assert not ADDED.keys() & config.fixed_on_resume().keys()


def test_paths_of_data_are_absolute(own_folder):
    Path("demo-pairs").mkdir()
    for name in ("a.csv", "b.csv", "t.jinja", "c,d.csv"):
        Path(name).write_text("x")
    here = str(own_folder)
    for given, expected in (
        ("a.csv", f"{here}/a.csv"),
        ("a.csv=2, b.csv,hf:o/n", f"{here}/a.csv=2,{here}/b.csv,hf:o/n"),
        ("c,d.csv", f"{here}/c,d.csv"),
        ("gone.csv,hf:o/n=2", "gone.csv,hf:o/n=2"),
        ("demo", "demo"),
        ("demo-pairs", "demo-pairs"),
    ):
        config = TrainConfig(model="m", data=given, valid="b.csv", prompt_template="t.jinja")
        found = folders.with_absolute_paths(config)
        assert found.data == expected
        assert (found.valid, found.prompt_template) == (f"{here}/b.csv", f"{here}/t.jinja")


@pytest.mark.parametrize("word", ["none", "folder"])
def test_words_of_valid_are_no_paths(word):
    Path(word).mkdir()
    config = TrainConfig(model="m", data="d", valid=word)
    assert folders.with_absolute_paths(config).valid == word


def test_a_failed_config_write_keeps_the_old_config(monkeypatch):
    run = create(CONFIG)
    write_text = Path.write_text

    def fail(path, text, **options):
        write_text(path, text[:20], **options)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fail)
    with pytest.raises(OSError, match="No space"):
        run.write_config(named("other"))
    assert run.read_config() == CONFIG


@pytest.mark.parametrize("name", ["../r", "a/b", ".hidden", "-r", "a b", "ü", "a\n", "."])
def test_names_with_special_characters_are_refused(name):
    with pytest.raises(UserError, match="--run"):
        create(named(name))
    assert not RUNS.exists()


def test_a_taken_name_is_refused_and_does_not_change_the_existing_run():
    run = create(CONFIG)
    with pytest.raises(UserError, match=r"exists; .*--resume r"):
        create(dataclasses.replace(CONFIG, seed=8))
    assert run.read_config() == CONFIG


def test_second_run_created_at_the_same_time_does_not_touch_the_first(monkeypatch):
    run = create(CONFIG)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "exists", lambda path: False)  # it did not exist a moment ago
        with pytest.raises(UserError):
            create(dataclasses.replace(CONFIG, seed=8))
    assert run.config.is_file()


@pytest.mark.parametrize("call", ["mkdir", "write_text", "replace"])
def test_a_run_killed_during_creation_does_not_block_its_name(call):
    with killed_in(os if call == "replace" else Path, call, at=1):
        create(CONFIG)
    assert create(CONFIG).read_config() == CONFIG


def test_a_file_named_runs_is_an_error():
    RUNS.write_text("a file")
    with pytest.raises(UserError, match="cannot be written"):
        create(CONFIG)


def test_a_full_disk_during_creation_leaves_no_run(monkeypatch):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(Path, "write_text", Mock(side_effect=full))
    with pytest.raises(UserError, match="No space left"):
        create(CONFIG)
    assert not RUNS.exists()


@pytest.mark.parametrize(
    ("model", "data", "start"),
    [
        ("mlx-community/Llama-3.2-1B", "my data/", "Llama-3.2-1B-my-data-"),
        ("/models/m", "rows/train.jsonl", "m-train-"),
        ("demo", "demo", "demo-2"),
        ("demo", "demo-pairs", "demo-pairs-2"),
        ("m", "demo-pairs", "m-demo-pairs-2"),
        ("~/.models/.m_1", "données", "m-1-donn-es-"),
        ("..", "数据", ""),
    ],
)
def test_a_run_without_a_name_is_named_after_model_and_data(model, data, start):
    name = default_name(TrainConfig(model=model, data=data))
    assert name.startswith(start)
    assert folders.NAME.fullmatch(name)


def test_runs_without_a_name_that_start_in_the_same_second_have_different_names(monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda _: "20260101-000000")
    config = TrainConfig(model="models/m", data="data")
    names = [create(config).name for _ in range(3)]
    assert names == [f"m-data-20260101-000000{end}" for end in ("", "-2", "-3")]


@pytest.mark.parametrize("given", ["r", "runs/r", "runs/r/"])
def test_a_run_is_found_by_its_name_or_path(given):
    run = create(CONFIG)
    assert find(given).path.resolve() == run.path.resolve()


def test_a_run_is_found_by_a_path_from_anywhere(own_folder, monkeypatch):
    create(CONFIG)
    (own_folder / "elsewhere").mkdir()
    monkeypatch.chdir(own_folder / "elsewhere")
    assert find(str(own_folder / "runs" / "r")).read_config() == CONFIG


def test_a_run_found_as_the_current_folder_has_its_name(monkeypatch):
    monkeypatch.chdir(create(CONFIG).path)
    assert find(".").name == CONFIG.run


def test_an_unknown_run_is_refused_with_the_nearest_name():
    create(named("first-run"))
    with pytest.raises(UserError, match=r"no run named frist-run .*did you mean first-run"):
        find("frist-run")


def test_find_fails_if_there_are_no_runs():
    with pytest.raises(UserError, match="no run named r"):
        find("r")


def test_discarding_the_only_run_removes_the_runs_folder():
    discard(create(CONFIG).path)
    assert not RUNS.exists()


def test_discarding_a_run_keeps_the_other_runs():
    other = create(named("other"))
    discard(create(CONFIG).path)
    assert [path.name for path in RUNS.iterdir()] == [other.name]


def test_locking_a_locked_run_names_the_process(holder, monkeypatch):
    monkeypatch.setattr(folders, "LOCK_WAIT_S", 0.2)
    with (
        pytest.raises(UserError, match=f"process {holder.pid} is working on this run"),
        locked(RunFolder(RUNS / "r")),
    ):
        pass


def test_the_lock_of_a_killed_process_is_released(holder):
    holder.kill()
    with locked(RunFolder(RUNS / "r")):
        assert (RUNS / "r" / "lock").read_text() == f"{os.getpid()}\n"


def test_locking_waits_for_a_process_that_is_ending(holder):
    """A process that was asked to stop takes a moment."""
    threading.Timer(0.3, holder.stdin.close).start()
    with locked(RunFolder(RUNS / "r")):
        assert holder.stdin.closed


def test_a_deleted_folder_cannot_be_locked():
    run = create(CONFIG)
    discard(run.path)
    with pytest.raises(UserError, match="runs/r: cannot be written"), locked(run):
        pass


@pytest.mark.parametrize("kept_lines", [0, 5], ids=["empty", "cut at a line"])
def test_a_damaged_config_is_refused(kept_lines):
    """Defaults in place of the missing settings would describe a different run."""
    run = create(CONFIG)
    lines = run.config.read_text().splitlines(keepends=True)
    run.config.write_text("".join(lines[:kept_lines]))
    with pytest.raises(UserError, match=r"config\.yaml"):
        run.read_config()


def test_old_leftovers_of_killed_creations_are_deleted():
    for name, age_s in (("old", 7200), ("young", 0)):
        (RUNS / f".tmp-{name}").mkdir(parents=True)
        then = time.time() - age_s
        os.utime(RUNS / f".tmp-{name}", (then, then))
    create(CONFIG)
    assert sorted(path.name for path in RUNS.iterdir()) == [".tmp-young", "r"]


@pytest.mark.parametrize("name", [folders.LOCK, folders.SUPERVISOR_LOCK])
def test_a_run_has_an_owner_while_it_is_locked(own_folder, name):
    run = create(CONFIG)
    assert (folders.owner(run), folders.is_running(run)) == (None, False)
    with locked(run, name):
        assert (folders.owner(run), folders.is_running(run)) == (os.getpid(), True)
    assert (folders.owner(run), folders.is_running(run)) == (None, False)
