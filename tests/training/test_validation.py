"""The best validation loss decides the result of a run, and --patience its end."""

from __future__ import annotations

import dataclasses
import json
import math
import signal

import mlx.core as mx
import pytest

from tests.conftest import (
    Killed,
    chat,
    events_of,
    make_model,
    notices_of,
    resume,
    train,
    train_once,
    write_rows,
)
from your_ai.config import TrainConfig, build, to_yaml
from your_ai.evaluation.dataset_scores import MeanLoss
from your_ai.files import read_text, sha256
from your_ai.nets import model
from your_ai.nets.saved_adapter import open_trained
from your_ai.run import checkpoint, events, folder
from your_ai.run.checkpoint import TrainState
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training import train as recipe
from your_ai.training import validation
from your_ai.training.process import train_until_done
from your_ai.training.validation import after_validation

# Of the validations, in order; step 4 is the best. Repeated steps take theirs again.
LOSSES = {2: 3.0, 4: 1.0, 6: 2.0, 8: math.nan, 10: 1.0}


@pytest.fixture
def losses(monkeypatch) -> dict[int, float]:
    """The validation loss of each step, instead of the model's."""
    given, measure = dict(LOSSES), validation.validate

    def validate(prepared, state, log, stop, meter=None):
        def mean_loss(*_):
            return None if stop else MeanLoss(given[state.step], 9)

        monkeypatch.setattr(validation.measures, "mean_loss", mean_loss)
        return measure(prepared, state, log, stop)

    monkeypatch.setattr("your_ai.training.train.validate", validate)
    return given


@pytest.fixture
def settings(data_folder) -> dict[str, object]:
    """Of runs of ten short steps."""
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "Yes") for i in range(20)])
    write_rows(data_folder / "valid.jsonl", [chat("Ask", "Yes")])
    return {"max_steps": 10, "eval_every": 2, "save_every": 0, "keep": 1, "lora_dropout": 0.2}


@pytest.fixture
def whole(configure, settings, losses) -> RunFolder:
    """A run that nothing happens to."""
    return train_once(configure(run="whole", **settings))


def steps_kept(run: RunFolder) -> list[int]:
    return [checkpoint.step_of(path) for path in checkpoint.list_checkpoints(run.checkpoints)]


def state_of(run: RunFolder) -> TrainState:
    """Its newest state, without what only float16 uses."""
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    return dataclasses.replace(checkpoint.load_state(newest), good_steps=0)


def files_of(run: RunFolder) -> dict[str, bytes]:
    """What must be equal: the adapter, and everything in the checkpoints."""
    files = [run.adapter / name for name in (checkpoint.ADAPTERS, checkpoint.ADAPTER_CONFIG)]
    for path in checkpoint.list_checkpoints(run.checkpoints):
        files += [path / name for name in checkpoint.CONTENT]
    return {str(path.relative_to(run.path)): path.read_bytes() for path in files}


def assert_result(run: RunFolder, step: int) -> None:
    """The adapter is that of the checkpoint of this step."""
    assert checkpoint.adapter_step(run.adapter) == step
    path = checkpoint.path_at(run.checkpoints, step)
    assert sha256(run.adapter / checkpoint.ADAPTERS) == sha256(path / checkpoint.ADAPTERS)
    (*_, end) = events_of(run, events.Finished)
    assert (end.reason, end.adapter_step) == ("done", step)


def test_result_of_a_run_is_its_best_checkpoint(configure, settings, losses):
    run = train(configure(**settings))
    assert steps_kept(run) == [10, 4]
    assert_result(run, 4)
    assert state_of(run) == TrainState(step=10, best_loss=1.0, best_step=4, without_better=3)
    best = [event.step for event in events_of(run, events.Validation) if event.best]
    assert best == [2, 4]
    assert open_trained("r").note == ""
    assert open_trained("r").adapter.step == 4
    assert open_trained("r", "best").adapter.folder == run.checkpoints / "step-000004"


def test_without_keep_best_the_last_adapter_is_the_result(configure, settings, losses):
    run = train(configure(keep_best=False, **settings))
    assert steps_kept(run) == [10]
    assert_result(run, 10)
    assert state_of(run).best_step == 4


def test_model_that_overfits_keeps_its_best(configure, data_folder, tmp_path):
    """It learns one answer, so the loss of others falls first, if at all, and then rises."""
    write_rows(data_folder / "train.jsonl", [chat(f"Ask {i}", "yes yes yes") for i in range(4)])
    write_rows(data_folder / "valid.jsonl", [chat("Ask 9", "42 17 Oslo")])
    base = make_model(tmp_path / "m")
    run = train(configure(model=str(base), max_steps=12, eval_every=2, save_every=0, keep=1))
    measured = {event.step: event.loss for event in events_of(run, events.Validation)}
    best = min(measured, key=measured.get)
    assert best < 12
    assert_result(run, best)


def test_measures_after_training_are_of_the_adapter_that_is_written(
    configure, settings, losses, monkeypatch
):
    seen, trainers, prepare = [], [], recipe.prepare

    def prepared(*args):
        trainers.append(prepare(*args))
        return trainers[-1]

    def measured(*_):
        arrays = model.adapter_arrays(trainers[-1].model)
        seen.append(sum(mx.abs(a).sum().item() for _, a in sorted(arrays.items())))
        return 1

    monkeypatch.setattr(recipe, "prepare", prepared)
    monkeypatch.setattr(validation.measures, "exact_matches", measured)
    run = train(configure(exact_match=True, **settings))
    written = mx.load(str(run.adapter / checkpoint.ADAPTERS))
    assert seen[-1] == sum(mx.abs(a).sum().item() for _, a in sorted(written.items()))
    assert_result(run, 4)


@pytest.mark.parametrize("stop_at", [1, 4, 9])
def test_stopped_and_resumed_run_has_the_same_result(
    configure, settings, losses, whole, monkeypatch, stop_at
):
    """A stop at a step with a validation interrupts it; the resumed run does it first."""
    cut = folder.create(configure(run="cut", **settings))
    stop, write = Stop(), events.EventLog.write

    def stopping(log, event):
        write(log, event)
        if isinstance(event, events.Step) and event.step == stop_at:
            stop.received = signal.SIGINT

    monkeypatch.setattr(events.EventLog, "write", stopping)
    assert train_until_done(cut, cut.read_config(), stop) == 130
    assert not cut.adapter.exists()
    assert state_of(cut).validation_due == (stop_at % 2 == 0)
    monkeypatch.setattr(events.EventLog, "write", write)
    assert resume(cut) == 0
    assert files_of(cut) == files_of(whole)
    steps = [event.step for event in events_of(cut, events.Validation)]
    assert steps == [2, 4, 6, 8, 10]


@pytest.mark.parametrize("die_at", [3, 4, 9])
def test_killed_and_resumed_run_has_the_same_result(
    configure, settings, losses, monkeypatch, die_at
):
    """die_at: the number of the checkpoint or validation that is not written any more."""
    settings["save_every"] = 3
    whole = train_once(configure(run="whole", **settings))
    killed = folder.create(configure(run="killed", **settings))
    write, count = events.EventLog.write, 0

    def dying(log, event):
        nonlocal count
        count += isinstance(event, events.Validation | events.Checkpoint)
        if count == die_at:
            raise Killed
        write(log, event)

    monkeypatch.setattr(events.EventLog, "write", dying)
    with pytest.raises(Killed):
        resume(killed)
    monkeypatch.setattr(events.EventLog, "write", write)
    assert resume(killed) == 0
    assert files_of(killed) == files_of(whole)


@pytest.mark.parametrize("damage", ["damaged", "gone"])
def test_last_adapter_replaces_a_best_one_that_is_lost(configure, settings, losses, damage):
    run = train_once(configure(**{**settings, "max_steps": 8}))
    best = run.checkpoints / "step-000004"
    if damage == "damaged":
        (best / checkpoint.ADAPTERS).write_bytes(b"")
    else:
        best.rename("elsewhere")
    assert resume(run, max_steps=10) == 0
    assert_result(run, 10)
    (told,) = [text for text in notices_of(run) if "instead of the best" in text]
    assert "step-000004" in told


def test_patience_ends_a_run(configure, settings, losses, whole):
    run = train(configure(patience=2, **settings))
    assert max(event.step for event in events_of(run, events.Step)) == 8
    assert steps_kept(run) == [8, 4]
    assert_result(run, 4)
    assert "stopped after 2 validations without improvement; best at step 4" in notices_of(run)
    assert resume(run, patience=3) == 0  # it may continue
    assert max(event.step for event in events_of(run, events.Step)) == 10
    assert files_of(run) == files_of(whole)


def test_without_validation_rows_keep_best_and_patience_do_nothing(configure, settings):
    run = train(configure(valid="none", patience=1, **{**settings, "max_steps": 4}))
    assert steps_kept(run) == [4]
    assert_result(run, 4)
    assert state_of(run) == TrainState(step=4)
    assert sum("--patience: has no effect" in text for text in notices_of(run)) == 1


def test_patience_alone_gives_no_notice_with_validation_rows(configure, settings, losses):
    run = train(configure(patience=9, **settings))
    assert not any("--patience" in text for text in notices_of(run))


def test_run_from_before_these_settings_ends_as_it_would_have(configure, settings, losses):
    """Its config.yaml and its state lack them; its last adapter is the result."""
    run = train(configure(keep_best=False, **{**settings, "max_steps": 4}))
    lines = read_text(run.config, 1 << 20).splitlines(keepends=True)
    run.config.write_text("".join(x for x in lines if not x.startswith(("keep_best", "patience"))))
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    content = json.loads((newest / checkpoint.STATE).read_text())
    for name in ("best_loss", "best_step", "without_better", "validation_due"):
        del content["state"][name]
    checkpoint.write_json(newest / checkpoint.STATE, content)
    sums = json.loads((newest / checkpoint.CHECKSUMS).read_text())
    sums[checkpoint.STATE] = sha256(newest / checkpoint.STATE)
    checkpoint.write_json(newest / checkpoint.CHECKSUMS, sums)

    assert (run.read_config().keep_best, run.read_config().patience) == (False, 0)
    assert checkpoint.load(newest).state == TrainState(step=4, good_steps=4)
    assert resume(run, max_steps=10) == 0
    assert_result(run, 10)


def test_new_settings_are_read_back_and_may_change_on_resume():
    config = build({"keep_best": False, "patience": "7"}, "test")
    assert (config.keep_best, config.patience) == (False, 7)
    assert "patience: 7" in to_yaml(config)
    assert not {"keep_best", "patience"} & TrainConfig().fixed_on_resume().keys()


@pytest.mark.parametrize("loss", [math.nan, math.inf, 2.0, 3.0])
def test_only_a_lower_finite_loss_is_better(loss):
    state = TrainState(step=7, best_loss=2.0, best_step=5, without_better=1)
    assert after_validation(state, loss) == dataclasses.replace(state, without_better=2)
    first = after_validation(TrainState(step=7), loss)
    assert first.best_step == (7 if math.isfinite(loss) else None)
    better = after_validation(state, 1.999)
    assert better == TrainState(step=7, best_loss=1.999, best_step=7)
