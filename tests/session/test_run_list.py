"""The listing of runs, and removing and stopping them, with real folders and processes."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import your_ai
from tests.dashboard.frames import reward_validation, rewarded, started, step, validation
from tests.run.holding import held
from your_ai.config import TrainConfig
from your_ai.dashboard import history, view
from your_ai.dashboard.report import report_page
from your_ai.dashboard.run_comparison import figures_of
from your_ai.dashboard.screen import screen
from your_ai.errors import UserError
from your_ai.files import TEMPORARY, clean
from your_ai.gates.text import loss_text
from your_ai.publish import card
from your_ai.run import events, requests
from your_ai.run.events import Event, Record
from your_ai.run.folder import LOCK, RUNS, SUPERVISOR_LOCK, RunFolder, create
from your_ai.session import run_list
from your_ai.session.run_list import RunRow

NOW = 1_800_000_000.0
STATES = ("running", "waiting", "paused", *run_list.ENDED)
STAGE = events.Stage(text="loading m")
STARTED = started(model="org/m")
DONE = events.Finished(step=10, reason="done", adapter="runs/r/adapter", seconds=61.0)
STOPPED = events.Finished(step=4, reason="stopped by Ctrl-C", adapter="", seconds=9.0)
PAUSED = events.Paused(step=3)
CONTINUED = events.Continued(step=3, seconds=40.0)
KILLED = """
import os, shutil, signal, sys, tempfile
from pathlib import Path
from your_ai.session import run_list
from your_ai.run.folder import RunFolder

def kill(path="", *rest, **options):
    if sys.argv[2] == "rmtree":
        os.unlink(Path(path) / "config.yaml")  # half of it is deleted
    os.kill(os.getpid(), signal.SIGKILL)

module = {"mkdtemp": tempfile, "rename": os, "rmtree": shutil}[sys.argv[2]]
setattr(module, sys.argv[2], kill)
run_list.remove(RunFolder(Path(sys.argv[1])))
"""


def made(name: str = "r", *happened: Event, at: float | None = None) -> RunFolder:
    """A run with these events, one second apart, the last at `at` (default: now)."""
    folder = create(TrainConfig(model="models/m", data="data", run=name))
    end = time.time() if at is None else at
    times = [end - back for back in reversed(range(len(happened)))]
    records = map(Record, times, happened)
    folder.events.write_text("".join(events.to_line(record) for record in records))
    return folder


def only() -> RunRow:
    (row,) = run_list.run_rows()
    return row


def drawn(rows: list[RunRow], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(run_list.runs_table(rows, NOW, width))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row(name: str = "r", **changes: object) -> RunRow:
    return RunRow(**{"name": name, "state": "finished", "changed_at": NOW - 125, **changes})


FULL = row(
    "a-run", model="org/model-1b", step=120, steps=1000, last_loss=1.25, best_loss=1.2,
    best_validation=1.5, peak_bytes=4_730_000_000, limit_bytes=8_000_000_000, seconds=3725.0,
    size_bytes=412_000_000,
)  # fmt: skip


# --- The row of a run


def test_rows_of_a_missing_folder_are_empty():
    assert run_list.run_rows() == []


def test_row_has_all_figures_of_a_run():
    limit = events.Limit(limit_bytes=8_000_000_000, reason="asked")
    steps = step(1, loss=2.0), step(2, loss=1.0, highest_bytes=5_500_000_000)
    folder = made("r", STAGE, limit, STARTED, *steps, validation(2, 1.5), DONE, at=NOW)
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    assert only() == RunRow(
        name="r", state="finished", model="org/m", step=2, steps=10, last_loss=1.0, best_loss=1.0,
        best_validation=1.5, peak_bytes=5_500_000_000, limit_bytes=8_000_000_000, seconds=6.0,
        changed_at=NOW, size_bytes=sum(path.stat().st_size for path in files),
    )  # fmt: skip


def test_the_best_running_mean_is_one_figure_in_every_view():
    saved = events.Checkpoint(step=25, folder="c", seconds=0.1)
    first = [step(n, loss=3.0 - n / 20) for n in range(1, 26)]
    lost = [step(n, loss=0.01) for n in range(26, 50)]
    again = [step(n, loss=1.5 + n % 3 / 9) for n in range(26, 61)]
    restarted = started(25, model="org/m")
    folder = made("r", STAGE, STARTED, *first, saved, *lost, STAGE, restarted, *again)
    best = only().best_loss
    assert best > 1.5
    records, _ = events.tail(folder.events)
    past = history.read_history(records)
    assert figures_of(past)["best running mean"] == loss_text(best)
    assert f"best running mean {loss_text(best)} at step" in report_page(past, "r", "")
    frame = screen(past.state, "r", 140, 45, NOW).plain
    assert f"lowest {loss_text(best)}" in frame


def test_the_best_validation_is_one_figure_in_every_view():
    """By --best-metric, whatever the losses, and not the mean of the training losses."""

    def checked(at: int, loss: float, accuracy: float, **best: bool) -> events.Validation:
        return validation(at, loss, metrics={"exact_match": accuracy}, **best)

    steps = [step(n, loss=0.0121) for n in range(1, 31)]
    found = (checked(10, 0.5, 0.5, best=True), checked(20, 0.0128, 0.9, best=True))
    lost, last = checked(28, 0.002, 1.0, best=True), checked(30, 0.012, 0.8)
    restarted = started(25, model="org/m")
    folder = made(
        "r", STAGE, STARTED, *steps[:10], found[0], *steps[10:20], found[1], *steps[20:28], lost,
        STAGE, restarted, *steps[25:], last,
    )  # fmt: skip
    records, _ = events.tail(folder.events)
    past = history.read_history(records)
    at_the_end = "validation loss: 0.0120 at the end, best 0.0128 at step 20"
    assert view.result_lines(past.state)[0] == at_the_end
    assert only().best_validation == 0.0128
    heads, cells = ("\n".join(drawn([only()], 120))).split("\n")
    assert cells[: heads.index("best ") + 4].split()[-1] == "0.0128"
    assert figures_of(past)["best validation"] == "0.0128 at step 20"
    assert "at step 20; last 0.0120" in report_page(past, "r", "")
    assert "validation 0.0120, best 0.0128" in screen(past.state, "r", 140, 45, NOW).plain
    assert your_ai.load_run(str(folder.path)).best_validation == (20, 0.0128)
    rows = dict(card.figure_rows(card.figures_of(records), None))
    assert rows["best validation loss"] == "0.0128 at step 20"


def test_validations_of_rewards_are_shown_as_rewards():
    made("r", STAGE, STARTED, step(1), reward_validation(1, 0.75), reward_validation(2, 0.5))
    assert (only().best_reward, only().best_validation) == (0.75, None)
    assert "reward 0.75" in "\n".join(drawn([only()], 200))


def test_run_that_trains_on_rewards_shows_them_instead_of_its_loss():
    made("r", STAGE, STARTED, rewarded(1, reward=0.25), rewarded(2, reward=0.75), rewarded(3, 0.0))
    found = only()
    assert (found.last_loss, found.best_loss) == (None, None)
    assert (found.last_reward, found.best_mean_reward) == (0.0, 0.375)
    assert "3/10 reward 0 - reward 0.375" in " ".join(drawn([found], 200)[1].split())


@pytest.mark.parametrize(
    ("happened", "state"),
    [
        ([], "died"),
        ([STAGE], "died"),
        ([STAGE, STARTED, step(1)], "died"),
        ([STAGE, STARTED, step(1), PAUSED], "died"),
        ([STAGE, STARTED, STOPPED], "stopped"),
        ([STAGE, STARTED, DONE], "finished"),
        ([STAGE, STARTED, STOPPED, STAGE, STARTED, DONE], "finished"),
        ([STAGE, STARTED, DONE, STAGE], "finished"),  # a resume that failed immediately
        ([STAGE, STARTED, DONE, STAGE, STARTED, step(11)], "died"),
    ],
)
def test_state_of_a_run_without_a_process(happened, state):
    made("r", *happened)
    assert only().state == state


@pytest.mark.parametrize("lock", [LOCK, SUPERVISOR_LOCK])
def test_run_with_a_locked_folder_is_running(lock):
    with held(made("r", STARTED, DONE), lock):
        assert only().state == "running"
    assert only().state == "finished"


@pytest.mark.parametrize(
    ("happened", "state"), [([PAUSED], "paused"), ([PAUSED, CONTINUED], "running")]
)
def test_state_is_paused_until_the_run_continues(happened, state):
    with held(made("r", STAGE, STARTED, step(3), *happened)):
        assert only().state == state


def worked_s(records: list[Record]) -> float:
    work = run_list.WorkedTime()
    for record in records:
        work.add(record)
    return work.seconds


def test_what_is_added_to_the_events_is_read_and_what_was_there_is_not_read_again(monkeypatch):
    monkeypatch.setattr(run_list, "PART_BYTES", 100)
    folder = made("r", STAGE, STARTED, step(1), step(2))
    assert only().step == 2
    read, parse = [], events.from_line
    monkeypatch.setattr(events, "from_line", lambda line: read.append(line) or parse(line))
    log = events.EventLog(folder.events)
    log.write(step(3))
    log.close()
    assert (only().step, len(read)) == (3, 1)
    shutil.rmtree(folder.path)
    made("r", STAGE, STARTED, step(1))  # another run of the same name
    assert only().step == 1


def test_a_run_whose_events_take_long_to_read_has_figures_of_all_of_them_later(monkeypatch):
    monkeypatch.setattr(run_list, "PART_BYTES", 2000)
    monkeypatch.setattr(run_list, "LAST_BYTES", 2000)
    checked = events.Validation(step=3, loss=0.5, trained_tokens=9, seconds=1.0, best=True)
    steps = [step(n) for n in range(1, 31)]
    folder = made("r", STAGE, STARTED, *steps[:3], checked, *steps[3:], DONE)
    run_list.known_runs().clear()
    (first,) = run_list.run_rows(read_s=0.0)
    assert (first.state, first.step, first.last_loss) == ("finished", 30, step(30).loss)
    assert first.best_loss is first.best_validation is first.peak_bytes is first.seconds is None
    offsets = [found.rest.offset for found in run_list.known_runs().values()]
    while run_list.read_on(0.0):
        offsets += [found.rest.offset for found in run_list.known_runs().values()]
    assert sorted(offsets) == offsets
    assert len({*offsets}) > 3
    assert offsets[-1] == folder.events.stat().st_size
    (row,) = run_list.run_rows(read_s=0.0)
    run_list.known_runs().clear()
    assert row == only()
    assert row.best_validation == 0.5


def test_wait_is_no_work():
    waiting = events.Waiting(text="waiting for a", since=0.0, pid=1, needed_bytes=None)
    times = zip((0, 40, 50), (waiting, STAGE, STARTED), strict=True)
    assert worked_s([Record(time, event) for time, event in times]) == 10


def test_row_of_a_run_that_never_began_uses_its_config():
    folder = made("r")
    os.utime(folder.config, (NOW, NOW))
    folder.events.unlink()
    found = only()
    assert (found.model, found.changed_at) == ("models/m", NOW)
    assert found.step is found.seconds is None


def test_resumed_run_shows_its_checkpoint_step_until_the_next_step():
    resumed = dataclasses.replace(STARTED, step=5, steps=20)
    made("r", STARTED, step(7), STAGE, resumed)
    assert (only().step, only().steps) == (5, 20)


def test_a_skipped_step_counts():
    skipped = events.Skipped(step=4, reason="the loss is nan", in_a_row=1, total=1)
    made("r", STARTED, step(3), skipped)
    assert (only().step, only().steps) == (4, 10)


def test_seconds_exclude_pauses_and_time_between_processes():
    happened = [
        (0, STAGE), (10, STARTED), (20, step(1)), (21, PAUSED), (61, CONTINUED), (71, STOPPED),
        (90, STAGE), (95, step(2)), (5000, STAGE), (5010, step(3)),
    ]  # fmt: skip
    records = [Record(NOW + at, event) for at, event in happened]
    assert worked_s(records) == 21 + 10 + 5 + 10


def test_long_step_without_gauges_counts():
    records = [Record(NOW, STARTED), Record(NOW + 500, step(1, seconds=400.0))]
    assert worked_s(records) == 400


# --- Order, and runs that are damaged


def test_rows_are_sorted_by_last_change():
    for name, at in (("b", NOW), ("c", NOW + 9), ("a", NOW)):
        made(name, STARTED, at=at)
    assert [found.name for found in run_list.run_rows()] == ["c", "a", "b"]


def test_entries_that_are_not_runs_are_skipped():
    made("r")
    for name in ("notes", f"{TEMPORARY}r-1", ".hidden"):
        (RUNS / name).mkdir()
    (RUNS / f"{TEMPORARY}r-1" / "config.yaml").touch()
    (RUNS / "readme.txt").touch()
    (RUNS / "gone").symlink_to("nowhere")
    (RUNS / "loop").symlink_to("loop")
    assert [found.name for found in run_list.run_rows()] == ["r"]


def test_runs_path_that_is_a_file_is_refused():
    RUNS.touch()
    with pytest.raises(UserError, match=r"^runs: cannot be read \(Not a directory\)$"):
        run_list.run_rows()


def test_damaged_lines_are_skipped():
    folder = made("r", STARTED, step(1), step(2))
    with folder.events.open("ab") as file:
        file.write(b'{"event": "unheard of", "time": 1}\n\xff\xfe\n[]\n{"event": "step"}\n{"eve')
    assert (only().step, only().state) == (2, "died")


@pytest.mark.parametrize("spoil", ["empty", "missing", "a folder", "a loop"])
def test_run_without_events_has_a_row(spoil):
    folder = made("r")
    folder.events.unlink()
    if spoil == "empty":
        folder.events.touch()
    elif spoil == "a folder":
        folder.events.mkdir()
    elif spoil == "a loop":
        folder.events.symlink_to(folder.events.name)
    assert (only().name, only().state, only().step) == ("r", "died", None)
    assert only().changed_at == pytest.approx(time.time(), abs=60)


@pytest.mark.parametrize(
    "text", [b"", b"model: [", b"- a", b"\xff", b"model: 2001-99-99", b"[" * 600, b"model: {}"]
)
def test_run_with_a_broken_config_has_a_row(text):
    made("r").config.write_bytes(text)
    assert (only().model, only().state) == (None, "died")


def test_folder_deleted_while_it_is_read_is_skipped(monkeypatch):
    folder = made("r", STARTED)
    read = events.EventsTail.read

    def deleted(rest, most_bytes):
        if folder.path.exists():
            run_list.remove(folder)
        return read(rest, most_bytes)

    monkeypatch.setattr(events.EventsTail, "read", deleted)
    assert run_list.run_rows() == []


def test_unreadable_folder_has_a_row():
    folder = made("r", STARTED)
    folder.path.chmod(0)
    try:
        if os.access(folder.path, os.R_OK):
            pytest.skip("root may read everything")
        assert only() == RunRow(name="r", state="died")
        assert run_list.newest() == folder
        with pytest.raises(UserError, match="cannot be written"):
            run_list.remove(folder)
    finally:
        folder.path.chmod(0o755)


SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.just(10**400), st.floats(), st.text(max_size=5),
    st.lists(st.integers(), max_size=2),
)  # fmt: skip


EVENTS = st.sampled_from(
    [
        *(STAGE, STARTED, DONE, STOPPED, PAUSED, CONTINUED),
        *(step(n, loss=1.0 / n, process_bytes=n, swap_bytes=n) for n in range(1, 5)),
        events.Gauges(process_bytes=7),
        events.Validation(step=1, loss=0.5, trained_tokens=1, seconds=1.0),
        events.Died(step=1, reason="killed", level=None),
        events.Notice(text="n"),
        events.Action(step=1, kind="restart", cause="c", before_bytes=1, after_bytes=1, seconds=1),
    ]
)


@st.composite
def odd_lines(draw) -> str:
    """An event with some fields of any type."""
    fields = json.loads(events.to_line(Record(NOW, draw(EVENTS))))
    names = draw(st.lists(st.sampled_from(sorted(fields)), max_size=3))
    return json.dumps({**fields, **{name: draw(SCALARS) for name in names}})


@given(st.lists(odd_lines(), max_size=12))
def test_fields_of_any_type_give_a_row_that_can_be_shown(lines):
    folder = RunFolder(RUNS / "r")
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.events.write_text("".join(line + "\n" for line in lines))
    json.dumps(run_list.rows_as_json(run_list.run_rows()), allow_nan=False)
    assert len(drawn(run_list.run_rows(), width=200)) == 2
    assert run_list.newest() == folder


def test_many_long_runs_are_listed_within_seconds():
    first = made("r0", STAGE, STARTED, *(step(n + 1, loss=9 / (n + 1)) for n in range(800)))
    for index in range(1, 15):
        create(TrainConfig(model="m", data="d", run=f"r{index}"))
        os.link(first.events, RUNS / f"r{index}" / "events.jsonl")
    began = time.process_time()
    found = run_list.run_rows()
    took_s = time.process_time() - began
    assert [each.step for each in found] == [800] * 15
    assert took_s < 1.5  # less than 0.4 on an idle machine


# --- The newest


def test_newest_run_is_the_last_changed():
    for name, at in (("a", NOW), ("b", NOW + 9), ("c", NOW)):
        made(name, STARTED, *[step(1)] * 99, at=at)  # more than newest() reads of the end
    assert run_list.newest() == RunFolder(RUNS / "b")


def test_newest_prefers_a_running_run():
    running = made("a", STARTED, at=NOW)
    made("b", STARTED, at=NOW + 9)
    with held(running):
        assert run_list.newest() == running


@pytest.mark.parametrize("find", [run_list.newest, run_list.newest_trained])
def test_newest_without_runs_raises(find):
    with pytest.raises(UserError, match=r"^no runs in runs; start one: your_ai train$"):
        find()


def test_newest_trained_has_an_adapter_or_a_checkpoint():
    older, newer, newest = (made(name, STARTED, at=NOW + i) for i, name in enumerate("abc"))
    with pytest.raises(UserError, match=r"^no run in runs has an adapter or a checkpoint; .* c: "):
        run_list.newest_trained()
    older.adapter.mkdir()
    assert run_list.newest_trained() == (older, False)
    (newer.checkpoints / "step-000003").mkdir(parents=True)
    assert run_list.newest_trained() == (newer, False)
    newest.adapter.mkdir()
    assert run_list.newest_trained() == (newest, True)


# --- The table


def test_table_in_eighty_columns():
    assert drawn([FULL, row("another", state="died")]) == [
        "run      state         step    loss    best       peak of limit   changed",
        "a-run    finished  120/1000  1.2500  1.5000  4.73 GB of 8.00 GB  2:05 ago",
        "another  died             -       -       -                   -  2:05 ago",
    ]


def test_wide_table_shows_all_columns():
    assert drawn([FULL], width=160)[1].split() == (
        "a-run finished 120/1000 1.2500 1.5000 1.2000 4.73 GB of 8.00 GB 1:02:05 2:05 ago 412 MB "
        "model-1b"
    ).split()  # fmt: skip


@given(width=st.integers(20, 200), length=st.integers(1, 100), count=st.integers(0, 3))
def test_table_fits_into_its_width(width, length, count):
    lines = drawn([dataclasses.replace(FULL, name="x" * length)] * count, width)
    assert len(lines) == count + 1
    assert max(map(len, lines)) <= width
    assert all("finished" in line for line in lines[1:])


def test_long_name_is_shortened_in_the_middle():
    name = "Llama-3.2-1B-Instruct-4bit-train-20270101-120000"
    head, line = drawn([dataclasses.replace(FULL, name=name)], width=70)
    assert line.startswith("Llama-3.2-")
    assert "...ain-20270101-120000  finished" in line
    assert head.split() == ["run", "state", "step", "loss"]


@pytest.mark.parametrize("length", [21, 27, 40])
def test_name_that_has_room_is_not_shortened(length):
    """Columns that say less are left out for it."""
    name = "x" * length
    assert name in drawn([dataclasses.replace(FULL, name=name)], width=80)[1]


def test_table_shows_states_without_color(monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    console = Console(file=io.StringIO(), width=80, force_terminal=True)
    console.print(run_list.runs_table([row(state=state) for state in STATES], NOW))
    assert all(state in console.file.getvalue() for state in STATES)
    assert "\x1b[3" not in console.file.getvalue()


def test_control_characters_in_names_are_escaped():
    line = drawn([dataclasses.replace(FULL, name="[b]\x1b[2J\n", model="\ud800m\x07")], 160)[1]
    assert line.startswith("[b]␛[2J␊")
    assert line.endswith("\ufffdm␇")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        *((-5, "0 s ago"), (5, "5 s ago"), (125, "2:05 ago"), (7325, "2:02:05 ago")),
        *((86_400, "1 day ago"), (3 * 86_400 + 9, "3 days ago")),
    ],
)
def test_ago_formats_seconds_and_days(seconds, text):
    assert run_list.ago(seconds) == text


# --- Removing


def test_remove_deletes_the_run_and_returns_its_size():
    folder = made("r", STARTED)
    (folder.path / "checkpoints" / "step-1").mkdir(parents=True)
    (folder.path / "checkpoints" / "step-1" / "weights").write_bytes(bytes(1000))
    size = only().size_bytes
    assert run_list.remove(folder) == size > 1000
    assert list(RUNS.iterdir()) == []


@pytest.mark.parametrize("lock", [LOCK, SUPERVISOR_LOCK])
def test_running_run_is_not_removed(lock):
    folder = made("r")
    with (
        held(folder, lock),
        pytest.raises(UserError, match=r"runs/r: is running; .*: your_ai runs stop r$"),
    ):
        run_list.remove(folder)
    assert folder.config.is_file()


def test_run_resumed_during_the_removal_is_not_removed(monkeypatch):
    """It is resumed between the check and the removal."""
    folder = made("r")
    monkeypatch.setattr(run_list, "is_running", lambda folder: False)
    monkeypatch.setattr("your_ai.run.folder.LOCK_WAIT_S", 0.2)
    with held(folder), pytest.raises(UserError, match="is working on this run"):
        run_list.remove(folder)
    assert folder.config.is_file()


def test_symbolic_link_is_not_removed(own_folder):
    target = own_folder / "elsewhere"
    made("r").path.rename(target)
    (RUNS / "r").symlink_to(target)
    with pytest.raises(UserError, match="is a symbolic link"):
        run_list.remove(RunFolder(RUNS / "r"))
    assert (target / "config.yaml").is_file()


@pytest.mark.parametrize("path", ["elsewhere/r", "runs/../elsewhere/r", "runs/a/r"])
def test_run_outside_the_runs_folder_is_not_removed(path):
    made("a")
    Path("elsewhere").mkdir()
    made("r").path.rename(path)
    with pytest.raises(UserError, match="is not in runs"):
        run_list.remove(RunFolder(Path(path)))
    assert Path(path, "config.yaml").is_file()


def test_run_in_a_linked_runs_folder_is_removed(own_folder):
    made("r")
    RUNS.rename("large disk")
    RUNS.symlink_to("large disk")
    run_list.remove(RunFolder(own_folder / RUNS / "r"))
    assert run_list.run_rows() == []


@pytest.mark.parametrize("name", ["notes", "nowhere", "."])
def test_folder_that_is_not_a_run_is_not_removed(name):
    RUNS.mkdir()
    (RUNS / "notes").mkdir()
    with pytest.raises(UserError, match="is not a run"):
        run_list.remove(RunFolder(RUNS / name))
    assert (RUNS / "notes").is_dir()


@pytest.mark.parametrize("point", ["mkdtemp", "rename", "rmtree"])
def test_killed_removal_leaves_the_whole_run_or_nothing(point):
    folder = made("r", STARTED)
    killed = subprocess.run([sys.executable, "-c", KILLED, str(folder.path), point], check=False)
    assert killed.returncode == -signal.SIGKILL
    if point == "rmtree":
        assert run_list.run_rows() == []
    else:
        assert only().model == "org/m"
        assert folder.read_config()
    clean(RUNS)
    assert list(RUNS.iterdir()) == ([] if point == "rmtree" else [folder.path])


def test_incomplete_removal_names_what_is_left(monkeypatch):
    folder = made("r")
    monkeypatch.setattr(run_list.shutil, "rmtree", lambda path, ignore_errors: None)
    with pytest.raises(UserError, match=r"^runs/\.tmp-.*: the rest of r; remove it by hand"):
        run_list.remove(folder)
    assert run_list.run_rows() == []


# --- Pruning

ROWS = st.builds(
    row,
    name=st.text("ab", min_size=1, max_size=3),
    state=st.sampled_from(STATES),
    changed_at=st.none() | st.floats(NOW - 100, NOW + 10),
)


@given(
    rows=st.lists(ROWS, max_size=8),
    states=st.sets(st.sampled_from(run_list.ENDED)).map(sorted),
    older_than_s=st.floats(0, 100),
)
def test_prunable_filters_by_state_and_age(rows, states, older_than_s):
    chosen = run_list.prunable(rows, states, older_than_s, NOW)
    assert chosen == [
        r for r in rows
        if r.state in states and r.changed_at is not None
        and (older_than_s == 0 or NOW - r.changed_at >= older_than_s)
    ]  # fmt: skip


def test_by_default_unfinished_runs_are_pruned():
    rows = [row(state, state=state) for state in STATES]
    assert [r.state for r in run_list.prunable(rows)] == ["stopped", "died"]


@pytest.mark.parametrize("state", ["running", "paused", "dead"])
def test_running_and_unknown_states_cannot_be_pruned(state):
    with pytest.raises(UserError, match=f"^{state}: "):
        run_list.prunable([row(state="running")], [state])


# --- Stopping


@pytest.mark.parametrize("lock", [LOCK, SUPERVISOR_LOCK])
def test_stop_interrupts_the_process_of_the_run(lock):
    folder = made("r")
    with held(folder, lock) as process:
        assert run_list.stop(folder) == process.pid
        assert process.wait(10) == -signal.SIGINT
    assert requests.is_asked(folder, requests.STOP)  # so that the run says that it was no Ctrl-C


def test_run_that_is_not_running_cannot_be_stopped():
    with pytest.raises(UserError, match=r"^runs/r: is not running$"):
        run_list.stop(made("r"))


def test_process_with_unknown_id_cannot_be_stopped():
    folder = made("r")
    with held(folder):
        (folder.path / LOCK).write_text("")
        with pytest.raises(UserError, match="is not known"):
            run_list.stop(folder)


@pytest.mark.parametrize(
    ("error", "text"),
    [(PermissionError, "belongs to another user"), (ProcessLookupError, "is no longer running")],
)
def test_failure_to_signal_the_process_is_reported(monkeypatch, error, text):
    folder = made("r")
    with held(folder), monkeypatch.context() as patch:
        patch.setattr(run_list.os, "kill", Mock(side_effect=error))
        with pytest.raises(UserError, match=text):
            run_list.stop(folder)
