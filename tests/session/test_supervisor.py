"""The supervisor, with children that do what each test needs."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import events_of, wait_until
from tests.dashboard import frames
from your_ai.config import TrainConfig
from your_ai.errors import RunError, UserError
from your_ai.run import events, host
from your_ai.run.child import CRASHED, DONE, FAILED, OUT_OF_MEMORY, RESTART, USER
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import SIGNALS, Interrupted, recorded_signals
from your_ai.session.stalls import Patience
from your_ai.session.supervisor import (
    FAULTS,
    Decision,
    Life,
    Lost,
    after_death,
    summarize_process,
    supervise,
)

PATIENCE_S = 20.0

# A training process. Its n-th start runs the n-th text in lives.json, and then always the last.
CHILD = """
import json, os, signal, sys, time
from pathlib import Path

from your_ai.run import events
from your_ai.run.child import watch_parent
from your_ai.run.stopping import Interrupted, stop_signals

folder, level = Path(sys.argv[1]), int(sys.argv[3])
assert (sys.argv[2], sys.argv[4]) == ("--level", "--parent-fd")
log = events.EventLog(folder / "events.jsonl")
watch_parent(int(sys.argv[5]))


def plan(level):
    log.write(events.Planned(
        plan="", micro_tokens=1, spill=False, level=level, estimate_bytes=1, text=""
    ))


def act(kind):
    log.write(events.Action(
        step=1, kind=kind, cause="", before_bytes=2, after_bytes=1, seconds=0.0
    ))


def start(step=0):
    log.write(events.Started(
        step=step, steps=9, steps_per_epoch=9, model="m", rows=1, trainable_parameters=1,
        dtype="float32", plan="",
    ))


def step(step, process_bytes=None):
    log.write(events.Step(
        step=step, steps=9, epoch=1, loss=1.0, grad_norm=1.0, learning_rate=1.0, tokens=1,
        padded_tokens=1, trained_tokens=1, seconds=1.0, process_bytes=process_bytes,
    ))


def limit(size):
    log.write(events.Limit(limit_bytes=size, reason=""))


def save(step):
    log.write(events.Checkpoint(step=step, folder="", seconds=1.0))


def die(number=signal.SIGKILL):
    os.kill(os.getpid(), number)
    time.sleep(60)


def finish(number=0):
    log.write(events.Finished(step=1, reason="", adapter="", seconds=1.0))
    sys.exit(128 + number if number else 0)


with (folder / "levels").open("a") as file:
    file.write(f"{level} ")
lives = json.loads((folder / "lives.json").read_text())
life = len((folder / "levels").read_text().split()) - 1
exec(lives[min(life, len(lives) - 1)])
"""

# Runs until a stop signal, as your_ai.training.train does.
TRAIN = """
try:
    with stop_signals() as stop:
        start()
        stop.on_first = lambda: log.write(events.Notice(text="stopping"))
        stop.graceful = True
        step(1)
        while not stop or SLOW:
            time.sleep(0.01)
        finish(stop.received)
except Interrupted as interrupted:
    sys.exit(128 + interrupted.number)
"""

SUPERVISOR = """
import sys
from pathlib import Path

from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Interrupted, recorded_signals
from your_ai.session.supervisor import supervise


try:
    with recorded_signals() as received:
        sys.exit(supervise(RunFolder(Path(sys.argv[1])), received, command=sys.argv[2:]))
except Interrupted as interrupted:
    print("before the first step")
    sys.exit(128 + interrupted.number)
"""


@pytest.fixture
def run(own_folder: Path) -> RunFolder:
    (own_folder / "runs" / "r").mkdir(parents=True)
    (own_folder / "child.py").write_text(CHILD)
    return RunFolder(Path("runs/r"))


def children(run: RunFolder, *lives: str) -> list[str]:
    """The command whose n-th start runs the n-th of `lives`."""
    (run.path / "lives.json").write_text(json.dumps(lives))
    return [sys.executable, "child.py"]


def supervised(run: RunFolder, *lives: str, **options: Any) -> int:
    with recorded_signals() as received:
        return supervise(run, received, command=children(run, *lives), **options)


def levels(run: RunFolder) -> list[int]:
    """The level that each child was started with."""
    return [int(level) for level in (run.path / "levels").read_text().split()]


def log_of(run: RunFolder) -> str:
    return (run.path / "process.log").read_text()


def test_default_command_is_the_training_module(run):
    """That module refuses a folder without a config."""
    with pytest.raises((UserError, RunError)):
        supervise(run, [])
    assert "No module named" not in log_of(run)


@pytest.mark.parametrize(("status", "kind"), [(USER, UserError), (FAILED, RunError)])
def test_error_printed_by_the_child_is_raised(run, status, kind):
    life = f"print('error: first\\nerror: runs/r: é\\nmore', flush=True); sys.exit({status})"
    with pytest.raises(kind, match=r"\Aruns/r: é\Z") as caught:
        supervised(run, life)
    assert type(caught.value) is kind
    assert events_of(run, events.Died) == []


@pytest.mark.parametrize("status", [USER, FAILED])
def test_failure_without_an_error_line_names_the_log(run, status):
    lives = ["print('error: old', flush=True); die()", f"print('why?'); sys.exit({status})"]
    with pytest.raises(Lost, match=rf"status {status} \(why\?\).* runs/r/process.log"):
        supervised(run, *lives)


def test_error_is_raised_even_if_the_folder_is_deleted(run):
    life = "folder.rename('elsewhere'); print('error: runs/r: is gone'); sys.exit(1)"
    with pytest.raises(RunError, match="is gone"):
        supervised(run, life)
    assert not run.path.exists()


def test_all_output_is_appended_to_the_log(run):
    (run.path / "process.log").write_text("before\n")
    supervised(run, "os.write(2, b'first\\n'); die()", "print('second')")
    assert log_of(run) == "before\nfirst\nsecond\n"


def test_unwritable_log_is_reported(run):
    (run.path / "process.log").mkdir()
    with pytest.raises(UserError, match=r"runs/r/process.log: cannot be written \(Is a dir"):
        supervised(run, "")


def test_child_that_cannot_be_started_is_reported(run):
    with pytest.raises(RunError, match="cannot be started"):
        supervise(run, [], command=["./none"])


def test_child_has_its_own_session_and_no_input(run):
    life = "print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))"
    supervised(run, life)
    assert log_of(run) == "True ''\n"


def test_child_inherits_only_the_read_end_of_the_pipe(run):
    """With other inherited file descriptors it would never see the end of the pipe."""
    supervised(run, "print(*os.listdir('/dev/fd'))")
    listed = {int(fd) for fd in log_of(run).split()}
    assert len(listed - {0, 1, 2}) == 3  # the pipe, the event log, the listing itself


def test_deaths_with_new_checkpoints_are_always_restarted(run):
    lives = [f"start({i}); step({i + 1}); save({i + 1}); die()" for i in range(5)]
    assert supervised(run, *lives, "finish()") == DONE
    assert levels(run) == [0] * 6
    reasons = [died.reason for died in events_of(run, events.Died)]
    assert reasons[1] == "killed by SIGKILL after step 2; continuing from step 2"
    assert [died.level for died in events_of(run, events.Died)] == [0] * 5


def test_gives_up_at_the_third_death_without_a_new_checkpoint(run):
    with pytest.raises(Lost) as caught:
        supervised(run, "start(); save(0); step(1); die(signal.SIGKILL)")
    assert str(caught.value) == (
        "runs/r: training died: killed by SIGKILL after step 1; 3 deaths in a row without a new "
        "checkpoint; its output is in runs/r/process.log; continue with: your_ai train --resume r"
    )
    found = [(died.step, died.level) for died in events_of(run, events.Died)]
    assert found == [(1, 0), (1, 0), (1, None)]


@pytest.mark.parametrize(("plan", "advice"), [("auto", ""), ("fused", ", or no --plan")])
def test_a_run_whose_memory_is_never_enough_says_what_to_give_it(run, plan, advice):
    needs = f"it needs more than its limit: give it a larger --max-memory{advice}; its output"
    life = f"start(); save(0); sys.exit({OUT_OF_MEMORY})"
    with pytest.raises(Lost, match=needs):
        supervised(run, life, config=TrainConfig(plan=plan))


@pytest.mark.parametrize("number", ["SIGSEGV", "SIGBUS", "SIGABRT"])
def test_after_three_faults_of_the_program_a_smaller_plan_is_tried_once(run, number):
    with pytest.raises(Lost) as caught:
        supervised(run, f"start(); save(0); step(1); die(signal.{number})")
    assert str(caught.value) == (
        f"runs/r: training died: killed by {number} after step 1; 4 deaths in a row without a new "
        "checkpoint; this is a bug in your_ai or in MLX: please report it, with the file that this "
        "command writes: your_ai doctor --report FILE; its output is in runs/r/process.log; "
        "continue with: your_ai train --resume r"
    )
    assert [died.level for died in events_of(run, events.Died)] == [0, 0, 1, None]
    assert levels(run) == [0, 0, 0, 1]


def test_run_goes_on_under_the_smaller_plan_that_has_no_fault(run):
    fault = "start(); save(0); step(1); die(signal.SIGSEGV)"
    assert supervised(run, fault, fault, fault, "start(); step(1); finish()") == DONE
    died = events_of(run, events.Died)[-1]
    assert died.reason == (
        "killed by SIGSEGV after step 1, 3 times in a row; trying the next smaller plan once"
    )


def test_other_deaths_among_the_faults_give_up_at_the_third(run):
    lives = [f"start(); save(0); step(1); die(signal.SIG{n})" for n in ("SEGV", "KILL", "SEGV")]
    with pytest.raises(Lost, match="3 deaths in a row"):
        supervised(run, *lives)
    assert levels(run) == [0, 0, 0]


def test_death_after_a_resume_continues_from_the_resumed_step(run):
    assert supervised(run, "start(6); die()", "finish()") == DONE
    (died,) = events_of(run, events.Died)
    assert died.step == 6
    assert died.reason.endswith("continuing from step 6")


def test_death_for_lack_of_memory_takes_the_next_smaller_plan(run):
    lives = [
        "plan(0); start(); save(0); limit(100); step(1, 95); die()",
        f"plan(2); sys.exit({OUT_OF_MEMORY})",
        "finish()",
    ]
    assert supervised(run, *lives) == DONE
    assert levels(run) == [0, 1, 3]
    assert [died.reason for died in events_of(run, events.Died)] == [
        "killed by SIGKILL after step 1, with 95% of its limit in use; continuing from step 0 "
        "with the next smaller plan",
        "ran out of memory before its first step; continuing from step 0 with the next smaller "
        "plan",
    ]


def test_events_before_the_supervisor_started_do_not_count(run):
    before = events.EventLog(run.events)
    before.write(events.Limit(limit_bytes=100, reason=""))
    before.write(
        events.Planned(plan="", micro_tokens=1, spill=False, level=4, estimate_bytes=1, text="")
    )
    before.write(events.Checkpoint(step=7, folder="", seconds=1.0))
    before.close()
    with run.events.open("a") as file:
        file.write('{"event": "pla')  # half a line
    assert supervised(run, "start(); step(1, 95); die()", "finish()") == DONE
    assert levels(run) == [0, 0]
    (died,) = events_of(run, events.Died)
    assert died.reason == "killed by SIGKILL after step 1; restarting"


def test_half_written_event_of_a_dead_child_is_ended(run):
    assert supervised(run, "os.write(log.file, b'{\"event\"'); die()", "finish()") == DONE
    assert len(events_of(run, events.Died)) == 1


SOON = Patience(steps=0.0, longest=0.0, least_s=0.2, other_s=60.0, look_s=0.05, dump_s=0.5)


def test_gives_up_at_the_third_stall_without_a_new_checkpoint(run):
    """Each of them is given more time than the one before."""
    life = "start(); save(0); [step(n) for n in (1, 2, 3)]; time.sleep(60)"
    with pytest.raises(Lost) as caught:
        supervised(run, life, patience=SOON)
    assert "it did not answer with its stack; 3 stalls in a row without a new" in str(caught.value)
    deaths = [record for record in events.tail(run.events)[0] if type(record.event) is events.Died]
    assert [died.event.level for died in deaths] == [0, 0, None]
    waits = [float(died.event.reason.split("for ")[1].split(" s ")[0]) for died in deaths]
    assert waits == sorted(waits)


def test_paused_process_does_not_stall(run):
    life = "start(); step(1); log.write(events.Paused(step=1)); time.sleep(1.5); finish()"
    assert supervised(run, life, patience=SOON) == DONE
    assert events_of(run, events.Died) == []


def test_process_in_a_debugger_is_left_alone(run, monkeypatch):
    monkeypatch.setattr(host, "process_state", lambda pid: "debugged")
    life = "start(); step(1); time.sleep(1.5); finish()"
    assert supervised(run, life, patience=SOON) == DONE
    (notice,) = events_of(run, events.Notice)
    assert "a debugger has stopped process" in notice.text
    assert events_of(run, events.Died) == []


def test_process_that_goes_on_after_all_is_left_alone(run):
    """It writes its next event while its stack is awaited."""
    answer = (
        "def answer(*_): print('(most recent call first)', flush=True); heard.append(step(2))\n"
    )
    hear = "heard = []; signal.signal(signal.SIGUSR1, answer)\n"
    stall = "while not heard: time.sleep(0.05)\n"
    life = f"{answer}{hear}start(); step(1)\n{stall}time.sleep(0.5); finish()"
    assert supervised(run, life, patience=dataclasses.replace(SOON, least_s=1.0)) == DONE
    (notice,) = events_of(run, events.Notice)
    assert "but then it went on; its stack is in runs/r/process.log" in notice.text


def test_stalled_run_that_was_asked_to_stop_is_not_restarted(run):
    life = "start(); step(1); os.kill(os.getpid(), signal.SIGSTOP)"
    received: list[int] = []

    def stop() -> None:
        wait_until(lambda: events_of(run, events.Step))
        received.append(signal.SIGINT)

    threading.Thread(target=stop).start()
    command = children(run, life)
    assert supervise(run, received, command=command, patience=SOON) == 128 + signal.SIGINT
    (died,) = events_of(run, events.Died)
    assert died.level is None
    assert died.reason.endswith("; not restarted, because a stop was requested")


def test_restart_is_not_a_death(run):
    life = f"start(); step(1); save(1); sys.exit({RESTART})"
    assert supervised(run, *[life] * 4, "finish()") == DONE
    assert levels(run) == [0] * 5
    assert events_of(run, events.Died) == []


@pytest.mark.parametrize(
    ("written", "level"),
    [
        ("plan(1)", 1),
        ("plan(1); act('smaller_plan')", 2),
        ("plan(1); act('smaller_plan'); plan(2)", 2),  # done by this child
        ("plan(1); act('smaller_plan'); plan(2); act('reload')", 2),
        ("act('smaller_plan')", 1),
        ("pass", 0),
    ],
)
def test_restart_uses_the_level_from_the_events(run, written, level):
    assert supervised(run, f"{written}; sys.exit({RESTART})", "finish()") == DONE
    assert levels(run) == [0, level]


def test_gives_up_after_three_restarts_without_a_step(run):
    with pytest.raises(Lost, match="requested a restart before its first step, 3 times in a row"):
        supervised(run, f"start(); sys.exit({RESTART})")
    assert levels(run) == [0, 0, 0]
    assert [died.level for died in events_of(run, events.Died)] == [None]


def test_restarts_with_a_step_between_them_continue(run):
    idle, busy = f"sys.exit({RESTART})", f"step(1); sys.exit({RESTART})"
    assert supervised(run, idle, idle, busy, idle, idle, "finish()") == DONE


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_child_stopped_by_a_signal_is_not_restarted(run, number):
    assert supervised(run, f"start(); finish({int(number)})") == 128 + number
    assert levels(run) == [0]


@pytest.mark.parametrize(
    "life", ["sys.exit(143)", "die(signal.SIGTERM)"], ids=["handled", "too early to be handled"]
)
def test_stop_before_training_began_raises_interrupted(run, life):
    with pytest.raises(Interrupted) as caught:
        supervised(run, life)
    assert caught.value.number == signal.SIGTERM
    assert events_of(run, events.Died) == []
    (end,) = events_of(run, events.Finished)
    assert (end.step, end.reason) == (0, "stopped by SIGTERM")


def test_stop_while_reloading_after_a_death_returns_its_status(run):
    lives = ["start(); save(0); step(1); die()", "sys.exit(130)"]
    assert supervised(run, *lives) == 130


def test_signal_between_two_children_ends_the_run(run):
    life = "start(); os.kill(os.getppid(), signal.SIGTERM); die()"
    ignored = "signal.signal(signal.SIGTERM, signal.SIG_IGN); "  # the supervisor passes it on
    assert supervised(run, ignored + life) == 143
    assert levels(run) == [0]
    (died,) = events_of(run, events.Died)
    assert died.level is None
    assert "a stop was requested" in died.reason


def test_signal_before_a_restart_ends_the_run(run):
    life = f"start(); step(1); os.kill(os.getppid(), signal.SIGINT); sys.exit({RESTART})"
    assert supervised(run, f"signal.signal(signal.SIGINT, signal.SIG_IGN); {life}") == 130
    assert levels(run) == [0]
    assert events_of(run, events.Died) == []


def test_signal_before_the_first_child_starts_no_child(run):
    with pytest.raises(Interrupted):
        supervise(run, [signal.SIGTERM], command=children(run, "finish()"))
    assert not (run.path / "levels").exists()


def test_signal_handlers_are_restored(run):
    before = [signal.getsignal(number) for number in SIGNALS]
    supervised(run, "finish()")
    with pytest.raises(RunError):
        supervised(run, "sys.exit(1)")
    assert [signal.getsignal(number) for number in SIGNALS] == before


@contextlib.contextmanager
def running(
    run: RunFolder, life: str, first: type = events.Step
) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in another process, once its child has written a first event of this kind."""
    command = [sys.executable, "-c", SUPERVISOR, str(run.path), *children(run, life)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        wait_until(lambda: events_of(run, first))
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_first_signal_lets_the_child_finish(run, number):
    with running(run, "SLOW = False" + TRAIN) as process:
        process.send_signal(number)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (128 + number, "")
    assert len(events_of(run, events.Finished)) == 1


def test_ctrl_c_in_the_terminal_reaches_the_child_only_once(run):
    """The whole foreground process group gets it; the child must not be in that group."""
    with running(run, "SLOW = True" + TRAIN) as process:
        os.killpg(process.pid, signal.SIGINT)
        wait_until(lambda: events_of(run, events.Notice))
        time.sleep(0.2)
        assert process.poll() is None


def test_second_signal_ends_the_run_immediately(run):
    with running(run, "SLOW = True" + TRAIN) as process:
        process.send_signal(signal.SIGINT)
        wait_until(lambda: events_of(run, events.Notice))
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, "")
    assert events_of(run, events.Finished) == []
    assert events_of(run, events.Died) == []


def test_third_signal_kills_a_child_that_ignores_signals(run):
    life = "signal.signal(signal.SIGINT, lambda *_: act('heard')); start(); step(1)\n"
    with running(run, life + "while True: time.sleep(0.01)") as process:
        for heard in (1, 2):
            process.send_signal(signal.SIGINT)
            wait_until(lambda heard=heard: len(events_of(run, events.Action)) == heard)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (130, "")
    assert [died.level for died in events_of(run, events.Died)] == [None]


def test_signal_while_the_child_loads_is_before_the_first_step(run):
    life = "limit(1)\nwith stop_signals(): time.sleep(60)"
    catch = f"try:\n exec({life!r})\nexcept Interrupted as stop: sys.exit(128 + stop.number)"
    with running(run, catch, events.Limit) as process:
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, output) == (143, "before the first step\n")


def test_child_ends_when_the_supervisor_is_killed(run):
    hold = "import fcntl\nheld = (folder / 'held').open('w')\nfcntl.flock(held, fcntl.LOCK_EX)\n"
    with running(run, f"{hold}SLOW = False{TRAIN}") as process:

        def gone() -> bool:
            with (run.path / "held").open() as held, contextlib.suppress(BlockingIOError):
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            return False

        assert not gone()
        process.kill()
        wait_until(gone)
    assert len(events_of(run, events.Finished)) == 1


def sample(number: int, **gauges: int) -> events.Step:
    return frames.step(number, **{"process_bytes": None, **gauges})


LIMIT = events.Limit(limit_bytes=1000, reason="")


@pytest.mark.parametrize(
    ("written", "used", "critical"),
    [
        ([], None, False),
        ([LIMIT, sample(1)], None, False),
        ([sample(1, process_bytes=900)], None, False),
        ([LIMIT, sample(1, process_bytes=900), sample(2, process_bytes=500)], 0.9, False),
        ([LIMIT, sample(1, process_bytes=900), *[sample(2, process_bytes=1)] * 5], 0.001, False),
        ([LIMIT, sample(1, process_bytes=500, highest_bytes=950)], 0.95, False),
        ([sample(1, pressure=2)], None, False),
        ([sample(1, pressure=4), sample(2, pressure=1)], None, True),
        ([sample(1, pressure=4), *[sample(2, pressure=1)] * 5], None, False),
    ],
)
def test_memory_use_is_taken_from_the_last_samples(written, used, critical):
    life = summarize_process(Life(), 0, -9, written)
    assert (life.used, life.critical) == (used, critical)


def test_repeated_checkpoint_does_not_count_as_new():
    before = Life(checkpoint=10, step=17)
    again = events.Checkpoint(step=5, folder="", seconds=1.0)
    assert summarize_process(before, 0, -9, [again]).checkpoint == 10


KILLED = Life(status=-signal.SIGKILL, level=1, moved=True, step=17, checkpoint=10)


@pytest.mark.parametrize(
    ("changes", "level", "words"),
    [
        ({}, 1, "killed by SIGKILL after step 17; continuing from step 10"),
        ({"used": 0.85}, 1, "killed by SIGKILL after step 17; continuing from step 10"),
        (
            {"used": 0.951},
            2,
            "killed by SIGKILL after step 17, with 95% of its limit in use; continuing from "
            "step 10 with the next smaller plan",
        ),
        (
            {"critical": True, "status": -signal.SIGABRT},
            2,
            "killed by SIGABRT after step 17, under critical memory pressure; continuing from step "
            "10 with the next smaller plan",
        ),
        (
            {"status": OUT_OF_MEMORY, "moved": False, "checkpoint": None},
            2,
            "ran out of memory before its first step; restarting with the next smaller plan",
        ),
        (
            {"status": CRASHED},
            1,
            "failed because of a bug in your_ai after step 17; continuing from step 10",
        ),
        ({"status": 3}, 1, "ended with status 3 after step 17; continuing from step 10"),
        (
            {"smaller": True},
            2,
            "killed by SIGKILL after step 17; continuing from step 10 with the next smaller plan",
        ),
        ({"smaller": True, "used": 1.2}, 2, None),
        ({"status": -63}, 1, None),  # a signal without a name, on some systems
    ],
)
def test_decision_after_a_death(changes, level, words):
    decision = after_death([], dataclasses.replace(KILLED, **changes))
    assert decision.level == level
    assert words in (None, decision.reason)


DEATHS = st.builds(
    Life,
    status=st.sampled_from([-9, -6, -11, OUT_OF_MEMORY, CRASHED, 3]),
    level=st.integers(0, 9),
    smaller=st.booleans(),
    moved=st.booleans(),
    used=st.none() | st.floats(0, 2),
    critical=st.booleans(),
    step=st.integers(0, 99),
)


@given(st.lists(st.tuples(DEATHS, st.booleans()), min_size=1, max_size=9))
def test_run_is_restarted_as_long_as_it_makes_progress(history):
    """history: deaths, and whether there was a new checkpoint since the previous death."""
    deaths: list[Life] = []
    in_a_row, saved = 0, 0
    for death, new in history:
        saved += new
        in_a_row = 1 if new else in_a_row + 1
        death = dataclasses.replace(death, checkpoint=saved)
        decision = after_death(deaths, death)
        deaths.append(death)
        faults = all(life.status in FAULTS for life in deaths[-in_a_row:])
        if in_a_row >= 3 and not (faults and in_a_row == 3):
            assert decision.level is None
            return
        assert decision.level in (death.level, death.level + 1)
        assert ("smaller plan" in decision.reason) == (decision.level > death.level)


@given(DEATHS)
def test_more_memory_in_use_never_means_a_larger_plan(death):
    def level(used: float) -> int:
        decision: Decision = after_death([], dataclasses.replace(death, used=used))
        assert decision.level is not None
        return decision.level

    shares = [level(used) for used in (0.1, 0.8, 0.86, 1.0, 3.0)]
    assert shares == sorted(shares)
