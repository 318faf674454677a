"""kill -9 of `your_ai tune`: its trial is saved, ends, and is continued; no step is done twice."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import call, events_of
from tests.conftest import wait_until as wait_until_done
from tests.fault.processes import PATIENCE_S, steps_done, wait_until
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder, is_running
from your_ai.session.tuning import TUNES, TuneFolder

STEPS = 60


@pytest.mark.slow
def test_killed_tune_continues_its_trial(capsys, tiny_model, data_folder):
    flags = ["--model", tiny_model, "--data", data_folder, "--name", "t", "--trials", 2]
    flags += ["--max-steps", STEPS, "--eval-every", 20, "--batch-size", 2, "--epochs", STEPS]
    flags += ["--lora-layers", 1, "--prefix-cache", "disk", "--max-memory", 0.3]
    tune = TuneFolder(TUNES / "t")
    first, second = tune.trial(0), tune.trial(1)
    process = subprocess.Popen(
        [sys.executable, "-m", "your_ai", "tune", *map(str, flags)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    with process:
        try:
            wait_until(process, lambda: len(events_of(second, events.Step)) > 2)
        finally:
            process.kill()
    wait_until_done(lambda: not is_running(second), PATIENCE_S)
    done = steps_done(second)
    assert 2 < done < STEPS
    assert checkpoint.step_of(checkpoint.list_checkpoints(second.checkpoints)[0]) == done

    capsys.readouterr()
    assert call("tune", "--resume", "t", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [trial["state"] for trial in told["trials"]] == ["finished"] * 2
    assert all(trial["peak_bytes"] < trial["limit_bytes"] for trial in told["trials"])
    for run in (first, second):
        assert [e.step for e in events_of(run, events.Step)] == [*range(1, STEPS + 1)]
    # The second trial has the tokens and the frozen blocks of the first.
    assert files_read(first) == ["reading train.jsonl", "reading valid.jsonl"]
    assert files_read(second) == []
    shared = {run.read_config().prefix_cache_folder for run in (first, second)}
    assert shared == {str(tune.prefix.resolve())}
    assert not tune.prefix.exists()
    best = tune.trial(told["best"])
    assert checkpoint.adapter_step(best.adapter) is not None
    assert [run.adapter.exists() for run in (first, second)].count(True) == 1


def files_read(run: RunFolder) -> list[str]:
    stages = [event.text for event in events_of(run, events.Stage)]
    return [text for text in stages if text.startswith("reading")]
