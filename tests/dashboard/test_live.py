from __future__ import annotations

import io
import time

import pytest
from rich.console import Console

from tests.dashboard.frames import step
from your_ai.dashboard import live
from your_ai.run import events
from your_ai.run.events import EventLog


def console(**options: object) -> Console:
    return Console(file=io.StringIO(), width=80, highlight=False, **options)


@pytest.fixture
def log(own_folder):
    log = EventLog(own_folder / "events.jsonl")
    yield log
    log.close()


def test_lines_where_there_is_no_terminal(own_folder, log):
    out = console()
    with live.following(own_folder / "events.jsonl", out):
        log.write(events.Notice(text="one"))
        for i in range(1, 11):
            log.write(step(i))
    lines = out.file.getvalue().splitlines()
    assert lines[0] == "note: one"
    # The first, the last, and none of the many in between within a few seconds.
    assert [line.split()[1] for line in lines[1:]] == ["1/10", "10/10"]


def test_it_shows_events_while_they_happen(own_folder, log):
    out = console()
    with live.following(own_folder / "events.jsonl", out):
        log.write(events.Notice(text="soon"))
        deadline = time.monotonic() + 5
        while "soon" not in out.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "soon" in out.file.getvalue()


def test_what_happened_before_is_known_but_not_shown(own_folder, log):
    log.write(events.ExactMatch(when="before", correct=1, rows=2))
    log.write(events.Notice(text="old"))
    out = console()
    with live.following(own_folder / "events.jsonl", out) as follower:
        pass
    assert out.file.getvalue() == ""
    assert follower.state.match_before.correct == 1


def test_a_terminal_gets_a_view_that_is_taken_away_again(own_folder, log):
    out = console(force_terminal=True)
    with live.following(own_folder / "events.jsonl", out) as follower:
        log.write(events.Stage(text="loading"))
        deadline = time.monotonic() + 5
        while "loading ..." not in out.file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert follower.live.is_started
    text = out.file.getvalue()
    assert "loading ..." in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # the cursor is back


def test_a_file_that_never_comes_is_no_error(own_folder):
    out = console()
    with live.following(own_folder / "nowhere.jsonl", out) as follower:
        pass
    follower.print_summary("r")
    assert out.file.getvalue() == ""


def test_a_view_that_fails_does_not_end_the_run(own_folder, log, monkeypatch):
    def broken(*arguments: object) -> str:
        raise ValueError("no such view")

    monkeypatch.setattr(live.view, "event_line", broken)
    with live.following(own_folder / "events.jsonl", console()) as follower:
        log.write(events.Notice(text="one"))
    assert isinstance(follower.failure, ValueError)
