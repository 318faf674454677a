"""The dashboard in a notebook cell, with a fake IPython."""

from __future__ import annotations

import io
import sys
from types import ModuleType

import pytest
from rich.console import Console

from tests.dashboard.frames import step
from your_ai.dashboard.live import Follower, as_html, style_for
from your_ai.dashboard.screen import screen
from your_ai.dashboard.state import ViewState, fold
from your_ai.run import events
from your_ai.run.events import EventLog, Record


class HTML:
    def __init__(self, data: str) -> None:
        self.data = data


@pytest.fixture
def shown(monkeypatch) -> list[tuple[str, str]]:
    """The calls to IPython's display: the function, and the page."""
    calls: list[tuple[str, str]] = []

    class Handle:
        def update(self, page: HTML) -> None:
            calls.append(("update", page.data))

    def display(page: HTML, display_id: bool = False) -> Handle:
        calls.append(("display", page.data))
        return Handle()

    module = ModuleType("IPython.display")
    module.HTML, module.display = HTML, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return calls


def test_notebook_is_detected_by_its_console():
    console = Console(force_jupyter=True, file=io.StringIO())
    assert style_for(console) == "notebook"
    assert style_for(console, as_json=True) == "json"


def test_frames_replace_each_other_in_the_same_cell(own_folder, shown):
    log = EventLog(own_folder / "events.jsonl")
    console = Console(force_jupyter=True, file=io.StringIO())
    follower = Follower(own_folder / "events.jsonl", console, "notebook")
    follower.open()
    for number in (1, 2, 3):
        log.write(step(number, loss=number / 8))
        follower.catch_up(at_once=True)
    follower.close()
    log.write(step(4))
    follower.catch_up(at_once=True)
    log.close()
    assert follower.failure is None
    assert [how for how, _ in shown] == ["display", "update", "update"]
    assert "0.3750" in shown[-1][1]


def test_names_from_outside_are_escaped():
    stage = events.Stage(text="<script>alert(1)</script>")
    state = fold(ViewState(), Record(1.0, stage))
    page = as_html(screen(state, "<b>run</b>", 100, 30, 2.0))
    assert "<script" not in page
    assert "<b>" not in page
    assert page.startswith("<pre")
