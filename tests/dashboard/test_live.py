from __future__ import annotations

import io
import itertools
import time

import pytest
from rich.console import Console

from tests.conftest import wait_until
from tests.dashboard.frames import started, step
from your_ai.dashboard import live
from your_ai.dashboard.live import Follower
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events
from your_ai.run.events import EventLog


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, **options)


@pytest.fixture
def log(own_folder):
    log = EventLog(own_folder / "events.jsonl")
    yield log
    log.close()


def test_without_a_terminal_events_are_printed_as_lines(own_folder, log):
    out = console()
    with live.following(Follower(own_folder / "events.jsonl", out)):
        log.write(events.Notice(text="one"))
        for i in range(1, 11):
            log.write(step(i))
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "note: one"
    # Only the first and the last: lines of steps are printed every few seconds.
    assert [line.split()[1] for line in lines[1:]] == ["1/10", "10/10"]


def phase(text: str, in_step: bool = True) -> events.Phase:
    return events.Phase(text=text, in_step=in_step)


STARTED = started()


def test_lines_name_each_long_phase_of_a_step_once(own_folder):
    out = console()
    follower = Follower(own_folder / "events.jsonl", out)
    follower.show([events.Record(0.0, STARTED)], 0.0)
    for begin in (10.0, 40.0):
        at = int(begin > 10)
        for number, text in enumerate(("generating completions", "waiting for rewards")):
            now = begin + 10 * number
            follower.show([events.Record(now, phase(text))], now)
            for tenth in range(90):
                follower.show([], now + tenth / 10)
            follower.show([events.Record(now + 9, phase(text))], now + 9)  # of the next wave
        follower.show([events.Record(begin + 21, phase("computing gradients"))], begin + 21)
        follower.show([], begin + 24)
        follower.show([events.Record(begin + 25, step(at + 1))], begin + 25)
    follower.show([events.Record(70.0, phase("validating", in_step=False))], 76.0)
    lines = out.file.getvalue().splitlines()[1:]
    assert [line.partition("  ")[0] for line in lines] == [
        "step 1/10: generating completions ...",
        "step 1/10: waiting for rewards ...",
        "step 1/10",
        "step 2/10: generating completions ...",
        "step 2/10: waiting for rewards ...",
        "step 2/10",
        "step 2/10: validating ...",
    ]


def test_phases_that_are_over_have_no_line(own_folder):
    out = console()
    follower = Follower(own_folder / "events.jsonl", out)
    happened = [STARTED, phase("generating completions"), step(1)]
    records = [events.Record(10.0 * n, event) for n, event in enumerate(happened)]
    follower.show(records, 100.0)
    assert "generating" not in out.file.getvalue()


def test_keys_that_do_nothing_are_not_shown():
    keys = "q detach   c checkpoint   p pause"
    ended = events.Finished(step=1, reason="done", adapter="", seconds=1.0)
    paused = fold(ViewState(), events.Record(0.0, events.Paused(step=1)))
    assert live.keys_now(keys, ViewState()) == keys
    assert live.keys_now(keys, paused) == "q detach   c checkpoint   p continue"
    assert live.keys_now(keys, fold(ViewState(), events.Record(0.0, ended))) == "q detach"


@pytest.mark.parametrize("settings", [{"TERM": "dumb"}, {"TERM": "unknown"}])
def test_a_terminal_that_cannot_be_drawn_on_has_lines(settings):
    out = console(force_terminal=True, _environ=settings)
    assert live.style_for(out) == "lines"


def test_events_are_shown_while_they_happen(own_folder, log):
    out = console()
    with live.following(Follower(own_folder / "events.jsonl", out)):
        log.write(events.Notice(text="soon"))
        wait_until(lambda: "soon" in out.file.getvalue(), 5.0)


def test_earlier_events_are_folded_in_but_not_shown(own_folder, log):
    log.write(events.ExactMatch(when="before", correct=1, rows=2))
    log.write(events.Notice(text="old"))
    out = console()
    with live.following(Follower(own_folder / "events.jsonl", out)) as follower:
        pass
    assert out.file.getvalue() == ""
    assert follower.state.match_before.correct == 1


def test_screen_is_removed_at_the_end(own_folder, log):
    out = console(force_terminal=True, height=24)
    follower = Follower(own_folder / "events.jsonl", out, live.style_for(out))
    with live.following(follower):
        log.write(events.Stage(text="loading m"))
        wait_until(lambda: "loading m" in out.file.getvalue(), 5.0)
        assert follower.live.is_started
    text = out.file.getvalue()
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is shown again
    assert text.rindex("\x1b[?1049l") > text.rindex("\x1b[?1049h")  # and so is the main screen


def test_screen_is_drawn_at_most_four_times_per_second(own_folder, log, monkeypatch):
    drawn = []
    monkeypatch.setattr(live, "screen", lambda *_, **__: drawn.append(time.monotonic()) or "")
    follower = Follower(own_folder / "events.jsonl", console(force_terminal=True), "screen")
    follower.open()
    deadline = time.monotonic() + 1.2
    while time.monotonic() < deadline:
        log.write(step(1))
        follower.catch_up()
        time.sleep(0.001)
    follower.close()
    gaps = [b - a for a, b in itertools.pairwise(drawn)]
    assert len(gaps) >= 2
    assert min(gaps) > 0.2


def test_without_new_events_the_screen_is_drawn_once_per_second(own_folder, log, monkeypatch):
    drawn = []
    monkeypatch.setattr(live, "screen", lambda *_, **__: drawn.append(1) or "")
    follower = Follower(own_folder / "events.jsonl", console(force_terminal=True), "screen")
    follower.open()
    for tenth in range(20):
        follower.show([], 1000 + tenth / 10)
    follower.close()
    assert len(drawn) == 2


def test_json_output_equals_the_event_file(own_folder, log):
    out = console()
    with live.following(Follower(own_folder / "events.jsonl", out, "json")) as follower:
        log.write(events.Notice(text="[b]one[/b] " + "long " * 50))
    follower.print_summary("r")
    assert out.file.getvalue() == (own_folder / "events.jsonl").read_text()


def test_missing_event_file_is_not_an_error(own_folder):
    out = console()
    with live.following(Follower(own_folder / "nowhere.jsonl", out)) as follower:
        pass
    assert out.file.getvalue() == ""
    assert follower.failure is None


def test_failing_view_does_not_end_the_run(own_folder, log, monkeypatch):
    def broken(*arguments: object) -> str:
        raise ValueError("no such view")

    monkeypatch.setattr(live.view, "event_line", broken)
    with live.following(Follower(own_folder / "events.jsonl", console())) as follower:
        log.write(events.Notice(text="one"))
    assert isinstance(follower.failure, ValueError)
