"""Showing and controlling a run, on a real terminal and without one."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import chat, events_of, train_once, wait_until, write_rows, write_site
from tests.fault.processes import ENDLESS, call, started, wait_for
from tests.terminal import CLOSED, OPENED, on_terminal
from your_ai.config import to_yaml
from your_ai.run import checkpoint, child, events, requests
from your_ai.run.folder import RUNS, RunFolder, is_running, owner

PATIENCE_S = 60.0


@pytest.fixture
def run():
    """The run r; its processes are killed after the test."""
    run = RunFolder(RUNS / "r")
    yield run
    for _ in range(200):
        pid = owner(run)
        if not pid:
            break
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


@pytest.fixture
def arguments(configure):
    """The arguments of an endless run."""
    config = configure(max_steps=ENDLESS, supervise=True, run="")
    Path("endless.yaml").write_text(to_yaml(config))
    return ["train", "--config", "endless.yaml", "--run", "r"]


def your_ai(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "your_ai", *arguments],
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def test_keys_on_a_terminal_pause_save_and_detach(arguments, run):
    with on_terminal(*arguments) as terminal:
        terminal.wait_for(lambda: events_of(run, events.Step))
        assert OPENED in terminal.written
        terminal.press("p")
        terminal.wait_for("paused")
        terminal.wait_for(lambda: events_of(run, events.Paused))
        done = len(events_of(run, events.Step))
        time.sleep(0.5)
        assert len(events_of(run, events.Step)) == done
        saved = len(events_of(run, events.Checkpoint))
        terminal.press("p")
        terminal.wait_for(lambda: len(events_of(run, events.Step)) > done)
        terminal.press("c")
        terminal.wait_for(lambda: len(events_of(run, events.Checkpoint)) > saved)
        terminal.resize(100, 30)
        terminal.wait_for("step")
        terminal.press("\x1a")  # without a shell there is nobody to continue the job
        terminal.wait_for(lambda: terminal.written.count(OPENED) == 2)
        terminal.press("q")
        assert terminal.end() == 0
        assert terminal.is_as_it_was
        text = terminal.written[terminal.written.rindex(CLOSED) :].decode()
        assert "your_ai watch r" in text
        assert is_running(run)
        done = len(events_of(run, events.Step))
        wait_until(lambda: len(events_of(run, events.Step)) > done)


def test_ctrl_c_stops_the_run_and_restores_the_terminal(arguments, run):
    with on_terminal(*arguments) as terminal:
        terminal.wait_for(lambda: events_of(run, events.Step))
        terminal.press("\x03")
        assert terminal.end() == 128 + signal.SIGINT
        assert terminal.is_as_it_was
        assert b"--resume r" in terminal.written[terminal.written.rindex(CLOSED) :]
    assert len(events_of(run, events.Finished)) == 1
    assert not is_running(run)


def test_error_is_printed_on_the_restored_terminal(arguments, run):
    write_rows(Path("data/train.jsonl"), [chat("Ask", "too long" * 9000)])
    with on_terminal(*arguments) as terminal:
        assert terminal.end() == 2
        assert terminal.is_as_it_was
        assert b"error: " in terminal.written[terminal.written.rfind(CLOSED) :]


def test_failing_display_restores_the_terminal(arguments, run):
    with on_terminal(*arguments) as terminal:
        terminal.wait_for(lambda: events_of(run, events.Step))
        run.events.rename("elsewhere")
        run.events.mkdir()  # cannot be read
        terminal.wait_for(lambda: CLOSED in terminal.written)
        run.events.rmdir()
        Path("elsewhere").rename(run.events)
        terminal.press("\x03")
        terminal.end()
        assert terminal.is_as_it_was
        assert b"note: the display failed, but not the run" in terminal.written


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs a shell with job control")
def test_ctrl_z_restores_the_terminal_until_the_job_continues(arguments, run):
    with on_terminal(program=["bash", "--norc", "--noprofile", "-i"]) as terminal:
        terminal.press(shlex.join([sys.executable, "-m", "your_ai", *arguments]) + "\n")
        terminal.wait_for(lambda: events_of(run, events.Step))
        terminal.press("\x1a")
        terminal.wait_for("Stopped")
        assert terminal.written.count(OPENED) == terminal.written.count(CLOSED) == 1
        done = len(events_of(run, events.Step))
        wait_until(lambda: len(events_of(run, events.Step)) > done)  # training does not stop
        terminal.press("fg\n")
        terminal.wait_for(lambda: terminal.written.count(OPENED) == 2)
        terminal.press("q")
        terminal.wait_for("Detached")


def test_dumb_terminal_gets_lines_and_reads_no_keys(arguments, run):
    with on_terminal(*arguments, TERM="dumb") as terminal:
        terminal.wait_for("step 1/")
        assert OPENED not in terminal.written
        assert terminal.is_as_it_was
        terminal.press("q")
        done = len(events_of(run, events.Step))
        terminal.wait_for(lambda: len(events_of(run, events.Step)) > done)
        assert terminal.process.poll() is None
        terminal.press("\x03")
        assert terminal.end() == 130
        assert b"\x1b" not in terminal.written


def test_locale_without_unicode_gets_ascii(arguments, run):
    with on_terminal(*arguments, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0") as terminal:
        terminal.wait_for(lambda: len(events_of(run, events.Step)) > 3)
        terminal.wait_for("step")
        terminal.press("q")
        terminal.end()
        assert terminal.written.isascii()


def test_detached_run_that_cannot_start_reports_the_error(arguments, run):
    Path("data/train.jsonl").write_text("{\n")
    done = your_ai(*arguments, "--detach")
    assert done.returncode == 2
    assert "data/train.jsonl:1: is not valid JSON" in done.stderr
    assert not run.path.exists()


def test_killed_front_end_stops_the_run(configure, run):
    with started(configure(max_steps=ENDLESS), "r", supervise=True) as process:
        wait_for(process, run, events.Step, 2)
        process.kill()
        wait_until(lambda: not is_running(run))
    assert len(events_of(run, events.Finished)) == 1  # it saved


def test_killed_supervisor_is_reported_in_one_line(configure, run):
    with started(configure(max_steps=ENDLESS), "r", supervise=True) as process:
        wait_for(process, run, events.Step, 2)
        os.kill(owner(run), signal.SIGKILL)
        _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert len(error.splitlines()) == 1
    assert "your_ai train --resume r" in error
    wait_until(lambda: not is_running(run))


def test_json_output_has_every_event_and_nothing_else(configure, run):
    Path("short.yaml").write_text(to_yaml(configure(supervise=True, run="")))
    done = your_ai("train", "--config", "short.yaml", "--run", "r", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    printed = [json.loads(line) for line in done.stdout.splitlines()]
    assert printed == [json.loads(line) for line in run.events.read_text().splitlines()]
    assert printed[-1]["event"] == "finished"


def test_paused_run_stays_paused_if_a_resume_is_refused_and_a_stop_loses_no_step(arguments, run):
    """A detached run goes on, and can be stopped by its name."""
    done = your_ai(*arguments, "--detach")
    assert (done.returncode, done.stderr) == (0, "")
    assert "your_ai watch r" in done.stdout
    assert is_running(run)
    wait_until(lambda: len(events_of(run, events.Step)) > 2)
    requests.ask(run, requests.PAUSE)
    wait_until(lambda: events_of(run, events.Paused))
    second = your_ai("train", "--resume", "r")
    assert second.returncode == 2
    assert "is working on this run" in second.stderr
    assert events_of(run, events.Continued) == []
    (paused,) = events_of(run, events.Paused)
    assert checkpoint.step_of(checkpoint.list_checkpoints(run.checkpoints)[0]) == paused.step
    assert your_ai("runs", "stop", "r").returncode == 0
    wait_until(lambda: not is_running(run))
    (finished,) = events_of(run, events.Finished)
    assert (finished.step, finished.reason) == (paused.step, "stopped on request")


def test_repeated_sighup_finishes_the_run_once(arguments, run):
    with on_terminal(*arguments) as terminal:
        terminal.wait_for(lambda: events_of(run, events.Step))
        requests.ask(run, requests.PAUSE)
        for _ in range(3):
            terminal.process.send_signal(signal.SIGHUP)
            time.sleep(0.06)
        assert terminal.end() == 128 + signal.SIGHUP
        assert terminal.is_as_it_was
    assert len(events_of(run, events.Finished)) == 1


def test_front_end_killed_after_ctrl_c_is_not_a_second_signal(configure, data_folder, run):
    rows = [chat(f"Question {i}", "Answer " * 10) for i in range(80)]
    write_rows(data_folder / "train.jsonl", rows)  # a step takes a second or more
    config = configure(max_steps=ENDLESS, grad_accumulation=40, lora_layers=1)
    with started(config, "r", supervise=True) as process:
        wait_for(process, run, events.Step)
        process.send_signal(signal.SIGINT)
        wait_for(process, run, events.Stopping)
        process.kill()
        wait_until(lambda: not is_running(run))
    assert len(events_of(run, events.Finished)) == 1


def test_closed_output_pipe_does_not_end_the_run(configure, run):
    Path("short.yaml").write_text(to_yaml(configure(supervise=True, run="", max_steps=9)))
    command = f"{sys.executable} -m your_ai train --config short.yaml --run r | head -1"
    subprocess.run(["sh", "-c", command], capture_output=True, timeout=PATIENCE_S, check=True)
    assert events_of(run, events.Finished)[0].reason == "done"


@pytest.mark.parametrize("before_handlers", [False, True])
def test_signal_during_startup_leaves_no_run_folder(
    tmp_path, arguments, run, monkeypatch, before_handlers
):
    """Before the supervisor handles any, Python ends with status 1, not by the signal."""
    if before_handlers:
        slow = "import sys, time\nif 'your_ai.session.supervisor' in sys.orig_argv: time.sleep(30)"
        monkeypatch.setenv("PYTHONPATH", str(write_site(tmp_path / "site", slow)))
    process = subprocess.Popen(
        [sys.executable, "-m", "your_ai", *arguments], stderr=subprocess.PIPE, text=True
    )
    wait_until((run.path / child.LOG).exists)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert error == "stopped before the first step; nothing was changed\n"
    assert process.returncode == 130
    assert not run.path.exists()


def test_watch_shows_why_a_detached_run_failed(arguments, run):
    # After the first step it saves only when asked to, so nothing changes while it is deleted.
    your_ai(*arguments, "--detach", "--valid", "none", "--save-every", "0")
    wait_until(lambda: events_of(run, events.Step))
    shutil.rmtree(run.checkpoints)
    run.checkpoints.write_text("in the way")
    requests.ask(run, requests.SAVE)
    wait_until(lambda: not is_running(run))
    assert "cannot be written" in your_ai("watch", "r").stdout


# -- watching


@pytest.fixture
def finished(configure):
    return train_once(configure(max_steps=3))


def test_watch_shows_a_finished_run_once(finished, capsys):
    status, output, error = call(capsys, "watch", "r")
    assert (status, error) == (0, "")
    assert "done: 3 steps" in output
    before = output.partition("done: 3 steps")[0]
    for part in ("memory", "loss", "finished"):  # of the last screen
        assert part in before
    assert "memory" not in call(capsys, "watch", "r", "--json")[1].partition("\n")[0]


def test_watch_without_a_name_shows_the_newest_run(finished, capsys):
    assert "adapter: runs/r/adapter" in call(capsys, "watch")[1]


def test_replay_shows_every_step(finished, capsys):
    _, output, _ = call(capsys, "watch", "r", "--replay", "--speed", "1000", "--json")
    steps = [json.loads(line) for line in output.splitlines()]
    assert [event["step"] for event in steps if event["event"] == "step"] == [1, 2, 3]


def test_watching_does_not_change_the_run_and_follows_it_to_its_end(arguments, run):
    your_ai(*arguments, "--detach")
    with on_terminal("watch", "r") as terminal:
        terminal.wait_for("step")
        terminal.press("\x03")
        assert terminal.end() == 0
        assert terminal.is_as_it_was
    # Nor does a watcher whose output is closed, which ends.
    command = f"{sys.executable} -m your_ai watch r --json | head -1"
    subprocess.run(["sh", "-c", command], capture_output=True, timeout=PATIENCE_S, check=True)
    assert is_running(run)
    with on_terminal("watch", "r") as terminal:
        terminal.wait_for("step")
        os.kill(owner(run), signal.SIGTERM)
        assert terminal.end() == 0
        assert b"stopped by SIGTERM" in terminal.written


def test_folder_deleted_while_watched_is_reported_in_one_line(arguments, run):
    your_ai(*arguments, "--detach")
    pid = owner(run)
    watching = subprocess.Popen(
        [sys.executable, "-m", "your_ai", "watch", "r", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    watching.stdout.readline()  # it has begun
    shutil.rmtree(run.path, ignore_errors=True)
    shutil.rmtree(run.path, ignore_errors=True)
    _, error = watching.communicate(timeout=PATIENCE_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    assert watching.returncode == 1
    assert error == "error: runs/r: was deleted while it was watched\n"


def test_rm_without_an_answer_removes_nothing(finished):
    done = subprocess.run(
        [sys.executable, "-m", "your_ai", "runs", "rm", "r"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 130
    assert "bug" not in done.stderr
    assert finished.path.exists()


def test_watch_opens_a_long_run_quickly(finished, capsys):
    records, _ = events.tail(finished.events)
    (line,) = (events.to_line(r) for r in records[-200:] if getattr(r.event, "step", 0) == 2
               and isinstance(r.event, events.Step))  # fmt: skip
    with finished.events.open("a") as file:
        file.writelines([line] * 20_000)
    before = time.process_time()
    assert "done: 3 steps" in call(capsys, "watch", "r")[1]
    assert time.process_time() - before < 3  # 0.7 s on an idle machine


def test_watch_and_runs_do_not_import_mlx(finished):
    code = """
import sys
from your_ai.cli import main
for command in (["watch", "r"], ["watch", "r", "--replay", "--speed", "1000"], ["runs"]):
    try:
        main(command)
    except SystemExit as end:
        assert not end.code
print("mlx" in sys.modules or "numpy" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "False", done


def test_run_waits_alone_for_another_and_goes_on_where_it_ended(arguments, run):
    gb = f"{0.7 * psutil.virtual_memory().total / 1e9:.2f}"  # two do not fit
    limited = [*arguments, "--max-memory", gb, "--detach"]
    assert your_ai(*limited).returncode == 0
    begun = your_ai(*limited, "--run", "second", "--wait")
    assert begun.returncode == 0, begun.stderr
    assert "waiting for the memory of r (" in begun.stdout
    second = RunFolder(RUNS / "second")
    try:
        assert " waiting " in your_ai("runs").stdout
        your_ai("runs", "stop", "second")
        wait_until(lambda: not is_running(second))
        assert " stopped " in your_ai("runs").stdout
        assert your_ai("train", "--resume", "second", "--wait", "--detach").returncode == 0
        assert not events_of(second, events.Started)
        your_ai("runs", "stop", "r")
        wait_until(lambda: events_of(second, events.Step))
    finally:
        your_ai("runs", "stop", "second")
        wait_until(lambda: not is_running(second))
