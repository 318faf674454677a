"""The live pages of runs in the studio: drawn in processes of their own, which come and go."""

from __future__ import annotations

import contextlib

import psutil
import pytest

from tests.conftest import wait_until
from tests.dashboard.test_report import STORY
from tests.studio.client import Client
from your_ai.config import TrainConfig
from your_ai.run import events
from your_ai.run.folder import RunFolder, create
from your_ai.studio import boards


@pytest.fixture
def run(own_folder) -> RunFolder:
    folder = create(TrainConfig(model="m", run="r"))
    for event in STORY:
        events.write_event(folder.events, event)
    return folder


def drawing() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ends now
            if "your_ai.studio.worker" in " ".join(child.cmdline()):
                found.append(child)
    return found


def test_a_page_is_drawn_in_a_process_that_ends_when_nobody_watches(
    client: Client, run, monkeypatch
):
    monkeypatch.setattr(boards, "UNWATCHED_S", 3.0)
    monkeypatch.setattr("your_ai.serving.live_page.SEEN_S", 1.0)
    assert "finished" in client.get("runs/r/live/").text
    assert len(drawing()) == 1
    wait_until(lambda: not drawing())
    assert "finished" in client.get("runs/r/live/").text


def test_a_page_whose_process_was_killed_is_drawn_in_another(client: Client, run):
    client.get("runs/r/live/")
    (killed,) = drawing()
    killed.kill()
    events.write_event(run.events, events.Notice(text="still here"))
    wait_until(lambda: "still here" in client.get("runs/r/live/").text)
    assert drawing() != [killed]
