"""A run that has done all its steps is not trained again."""

from __future__ import annotations

import pytest

from tests.conftest import events_of, train, train_once
from tests.fault.processes import call
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.dashboard.view import advice_line
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder


@pytest.fixture
def run(configure) -> RunFolder:
    return train_once(configure(max_steps=2))


def changed_files(run: RunFolder) -> dict[str, tuple[bytes, int]]:
    files = (p for p in run.path.rglob("*") if p.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def test_run_resumed_at_its_end_says_so_and_changes_nothing(run, capsys):
    before = changed_files(run)
    for flags in ((), ("--max-steps", "2"), ("--patience", "5")):
        status, out, error = call(capsys, "train", "--resume", "r", *flags)
        assert (status, out, error.count("\n")) == (0, "", 1)
        assert "runs/r: already finished, with 2 steps" in error
    assert changed_files(run) == before


def test_run_resumed_with_more_steps_continues(run, capsys):
    status, _, error = call(capsys, "train", "--resume", "r", "--max-steps", "3")
    assert (status, "already finished" in error) == (0, False)
    assert [event.step for event in events_of(run, events.Step)] == [1, 2, 3]


@pytest.mark.parametrize("length", [{"max_steps": 4}, {"max_steps": None, "epochs": 2}])
def test_command_of_the_advice_trains_twice_as_long(configure, capsys, length):
    run = train(configure(lora_targets="all-linear", eval_every=1, **length))
    steps = len(events_of(run, events.Step))
    state = fold_all(ViewState(), events.tail(run.events)[0])
    command = advice_line(state, "r").partition("go on with: your_ai ")[2]
    assert call(capsys, *command.split())[0] == 0
    assert [event.step for event in events_of(run, events.Step)] == [*range(1, 2 * steps + 1)]


def test_run_with_other_settings_for_its_end_does_it_again(run, capsys):
    call(capsys, "train", "--resume", "r", "--samples", "1")
    assert [event.when for event in events_of(run, events.Samples)] == ["after"]


def test_damaged_adapter_is_written_again(run, capsys):
    (run.adapter / checkpoint.ADAPTERS).write_bytes(b"")
    assert call(capsys, "train", "--resume", "r")[0] == 0
    assert checkpoint.adapter_step(run.adapter) == 2


def test_run_that_patience_ended_is_finished_until_there_is_more(configure, capsys):
    run = train(configure(max_steps=9, eval_every=1, patience=1, learning_rate=1e-30))
    done = events_of(run, events.Step)[-1].step
    assert done < 9
    error = call(capsys, "train", "--resume", "r")[2]
    assert f"already finished, with {done} steps" in error
    assert "--patience 0" in error
    call(capsys, "train", "--resume", "r", "--patience", "0")
    assert events_of(run, events.Step)[-1].step == 9
