"""Ctrl-C and other stop signals: the step is finished and saved; nothing is lost."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from tests.conftest import chat, events_of, losses_of, resume, train, train_once, write_rows
from tests.fault.processes import (
    ENDLESS,
    PATIENCE_S,
    call,
    final_files,
    leftovers,
    started,
    steps_done,
    wait_for,
)
from your_ai import files
from your_ai.config import TrainConfig
from your_ai.evaluation import dataset_scores
from your_ai.run import checkpoint, events, folder, stopping
from your_ai.run.folder import RUNS, RunFolder
from your_ai.training import process
from your_ai.training import train as recipe


@pytest.fixture
def settings() -> dict[str, object]:
    return {"lora_dropout": 0.2, "grad_accumulation": 2, "save_every": 2, "lora_layers": 1}


def stopped(process: subprocess.Popen, number: int) -> tuple[str, str]:
    """Send a signal and wait for the end; return stdout and stderr."""
    process.send_signal(number)
    return process.communicate(timeout=PATIENCE_S)


def assert_resumes_exactly(
    run: RunFolder, configure: Callable[..., TrainConfig], settings: dict[str, object]
) -> None:
    steps = checkpoint.load(checkpoint.list_checkpoints(run.checkpoints)[0]).state.step + 2
    assert resume(run, max_steps=steps) == 0
    whole = train_once(configure(**{**settings, "run": "whole", "max_steps": steps}))
    assert losses_of(run) == losses_of(whole)
    assert final_files(run) == final_files(whole)


def test_sigterm_in_training_finishes_the_step_and_saves(configure, settings):
    run = RunFolder(RUNS / "r")
    with started(configure(max_steps=ENDLESS, **settings), "r") as process:
        wait_for(process, run, events.Step, 3)
        output, error = stopped(process, signal.SIGTERM)
    assert (process.returncode, error) == (128 + signal.SIGTERM, "")
    step = steps_done(run)
    assert output.splitlines()[-2:] == [
        f"stopped by SIGTERM after step {step}; everything is saved. Continue with:",
        "  your_ai train --resume r",
    ]
    assert checkpoint.newest(run.checkpoints) == (run.checkpoints / f"step-{step:06d}", [])
    assert_resumes_exactly(run, configure, settings)


def test_ctrl_c_in_validation_ends_it_and_saves(configure, settings, monkeypatch, capsys):
    """After its first batch; the next waits until that is noted."""
    run = folder.create(configure(run="r", max_steps=ENDLESS, eval_every=3, **settings))
    batches = dataset_scores.in_order_of_length

    def interrupted_batches(*arguments):
        first, *others = batches(*arguments)
        yield first
        os.kill(os.getpid(), signal.SIGINT)
        while not events_of(run, events.Stopping):
            time.sleep(0.001)
        yield from others

    with monkeypatch.context() as patch:
        patch.setattr(dataset_scores, "in_order_of_length", interrupted_batches)
        status, output, error = call(capsys, "train", "--resume", "r")
    assert (status, error) == (128 + signal.SIGINT, "")
    assert output.splitlines()[-2:] == [
        "stopped by Ctrl-C after step 3; everything is saved. Continue with:",
        "  your_ai train --resume r",
    ]
    assert events_of(run, events.Validation) == []
    assert checkpoint.newest(run.checkpoints) == (run.checkpoints / "step-000003", [])
    assert_resumes_exactly(run, configure, settings)


def test_ctrl_c_while_saving_leaves_intact_checkpoints(configure, settings, monkeypatch, capsys):
    """While it waits for the disk, the second time that it saves."""
    run = folder.create(configure(run="r", max_steps=ENDLESS, **settings))
    sync, saved = files.sync, itertools.count(1)

    def interrupted_sync(path):
        if path.name == checkpoint.ADAPTERS and next(saved) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(files, "sync", interrupted_sync)
        status, output, error = call(capsys, "train", "--resume", "r")
    assert (status, error) == (128 + signal.SIGINT, "")
    assert output.splitlines()[-1] == "  your_ai train --resume r"
    for path in checkpoint.list_checkpoints(run.checkpoints):
        assert checkpoint.fault(path) is None
    assert leftovers(run) == []
    assert next(saved) > 2
    assert_resumes_exactly(run, configure, settings)


def test_second_ctrl_c_stops_immediately(configure, data_folder):
    rows = [chat(f"Question {i}", "Answer " * 10) for i in range(80)]
    write_rows(data_folder / "train.jsonl", rows)
    # A step takes a second or more, and the first Ctrl-C waits for it.
    config = configure(max_steps=ENDLESS, grad_accumulation=40, save_every=1, lora_layers=1)
    run = RunFolder(RUNS / "r")
    with started(config, "r") as process:
        wait_for(process, run, events.Checkpoint, 2)
        process.send_signal(signal.SIGINT)
        wait_for(process, run, events.Stopping)
        _, error = stopped(process, signal.SIGINT)
    assert (process.returncode, error) == (128 + signal.SIGINT, "")
    assert steps_done(run) == 1  # the second step was not finished
    assert checkpoint.newest(run.checkpoints) == (run.checkpoints / "step-000001", [])


def test_signal_while_loading_leaves_no_run_folder(configure, data_folder):
    rows = [chat(f"Question {i}", "Answer") for i in range(10_000)]  # some seconds to read
    write_rows(data_folder / "train.jsonl", rows)
    with started(configure(), "r") as process:
        wait_for(process, RunFolder(RUNS / "r"), events.Stage, 2)
        _, error = stopped(process, signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert error.startswith("stopped before the first step")
    assert len(error.splitlines()) == 1
    assert not RUNS.exists()


def signal_in(monkeypatch: pytest.MonkeyPatch, module: object, name: str, number: int) -> None:
    """Make this process send itself a signal at its first call of a function."""
    function = getattr(module, name)
    waiting = [number]

    def call(*arguments, **options):
        if waiting:
            assert signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler)
            os.kill(os.getpid(), waiting.pop())
        return function(*arguments, **options)

    monkeypatch.setattr(module, name, call)


@pytest.mark.parametrize("number", stopping.SIGNALS, ids=lambda number: number.name)
def test_each_signal_has_its_exit_status(configure, settings, monkeypatch, capsys, number):
    run = folder.create(configure(run="r", max_steps=ENDLESS, **settings))
    signal_in(monkeypatch, checkpoint, "prune", number)
    handlers = [signal.getsignal(n) for n in stopping.SIGNALS]
    status, output, error = call(capsys, "train", "--resume", "r")
    assert (status, error) == (128 + number, "")
    assert output.splitlines()[-1] == "  your_ai train --resume r"
    assert [signal.getsignal(n) for n in stopping.SIGNALS] == handlers
    assert checkpoint.newest(run.checkpoints)[1] == []


def test_ctrl_c_while_a_resumed_run_loads_changes_nothing(configure, settings, monkeypatch, capsys):
    run = train(configure(run="r", max_steps=2, **settings))
    before = final_files(run)
    with monkeypatch.context() as patch:
        signal_in(patch, recipe, "prepare", signal.SIGINT)
        status, _, error = call(capsys, "train", "--resume", "r", "--max-steps", "4")
    assert status == 128 + signal.SIGINT
    assert len(error.splitlines()) == 1
    assert "nothing was kept" not in error  # everything was kept
    assert final_files(run) == before
    assert_resumes_exactly(run, configure, settings)


def test_ctrl_c_after_the_last_step_loses_nothing(configure, settings, monkeypatch, capsys):
    run = folder.create(configure(run="r", max_steps=2, **settings))
    signal_in(monkeypatch, checkpoint, "save_adapter", signal.SIGINT)
    assert call(capsys, "train", "--resume", "r")[0] in (0, 128 + signal.SIGINT)
    assert resume(run) == 0
    assert final_files(run) == final_files(train_once(configure(run="w", max_steps=2, **settings)))


def test_signal_after_the_run_writes_to_no_other_file(configure, own_folder):
    """The event log is closed by then; files opened later may reuse its descriptor."""
    stop = stopping.Stop()
    config = configure(run="r", max_steps=1)
    process.train_until_done(folder.create(config), config, stop)
    with contextlib.ExitStack() as opened:
        others = [opened.enter_context((own_folder / str(i)).open("wb")) for i in range(9)]
        with contextlib.suppress(Exception):
            stop.on_first()
        assert [os.fstat(other.fileno()).st_size for other in others] == [0] * 9
