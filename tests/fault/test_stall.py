"""A training process that no longer gets on is ended, and the run continues from its checkpoint."""

from __future__ import annotations

import sys
from statistics import median

from tests.conftest import events_of, losses_of, train_once
from tests.fault.processes import final_files
from your_ai.run import events, folder
from your_ai.run.child import DONE
from your_ai.session.stalls import Patience
from your_ai.session.supervisor import supervise

LEAST_S = 2.0
SLACK_S = 2.0  # for the stack, the polling, and a busy machine

# Two steps never end, the first time that they are done. The first one could answer a signal.
TRAIN = """
import os, signal, time
from pathlib import Path
from your_ai.training import process, train

whole = train.train_step


def wait_for_data_that_never_comes():
    time.sleep(1e6)


def train_step(loop, state):
    marker = Path(f"hung-{state.step}")
    if state.step in (5, 10) and not marker.exists():
        marker.touch()
        if state.step == 5:
            wait_for_data_that_never_comes()
        os.kill(os.getpid(), signal.SIGSTOP)
    return whole(loop, state)


train.train_step = train_step
process.main()
"""


def test_stalled_training_continues_with_the_same_result(configure, own_folder):
    settings = {"max_steps": 12, "save_every": 2, "eval_every": 4, "lora_dropout": 0.2}
    run = folder.create(configure(run="stalled", **settings))
    patience = Patience(least_s=LEAST_S, look_s=0.05)
    assert supervise(run, [], command=[sys.executable, "-c", TRAIN], patience=patience) == DONE

    records, _ = events.tail(run.events)
    asleep, stopped = [record for record in records if isinstance(record.event, events.Died)]
    assert asleep.event.reason.startswith("stalled: no progress for 2 s after step 5, where a step")
    assert asleep.event.reason.endswith(
        "s; its stack is in runs/stalled/process.log; continuing from step 4"
    )
    assert stopped.event.reason.endswith(
        "s; it was stopped by a signal, so it cannot show its stack; continuing from step 10"
    )
    log = (run.path / "process.log").read_text()
    assert "in wait_for_data_that_never_comes" in log
    assert log.count("the stacks of its threads") == 1

    usual_s = median(event.seconds for event in events_of(run, events.Step))
    for died, marker in ((asleep, "hung-5"), (stopped, "hung-10")):
        waited_s = died.time - (own_folder / marker).stat().st_mtime
        assert waited_s < max(10 * usual_s, LEAST_S) + SLACK_S

    whole = train_once(configure(run="whole", **settings))
    assert final_files(run) == final_files(whole)
    assert losses_of(run) == losses_of(whole)
