from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.studio.client import Client
from tests.studio.test_server import run_named
from your_ai.config import TrainConfig
from your_ai.gates.programs import python_module
from your_ai.studio import jobs
from your_ai.studio.ship_page import DESTINATIONS


@pytest.fixture
def begun(monkeypatch):
    """The commands that are begun, which are not run."""
    found = []

    def begin(title, *words, then=""):
        found.append(words)
        return jobs.StudioJob(Path("x"), title, words, 0, None, (), then)

    monkeypatch.setattr(jobs, "begin", begin)
    return found


def test_each_form_begins_a_command_that_there_is(client: Client, begun):
    run_named("r")
    for place in DESTINATIONS:
        dtype = {"dtype": place.kinds[0]} if place.kinds else {}
        assert client.post("ship/r/export", to=place.to, **dtype).place == "jobs/x"
    assert client.post("ship/r/push", to="me/mine").place == "jobs/x"
    for words in begun:  # each gets as far as the run, which has no adapter
        done = subprocess.run(
            python_module("your_ai", *words), capture_output=True, text=True, check=False
        )
        assert done.returncode == 2
        assert any(
            text in done.stderr for text in ("runs/r", "adapter", "LM Studio", "logged in")
        ), done.stderr


NO_NAMES = ("", "x", "../..", "a/b/c", "--dry-run", "a b/c", "a/b\n")


@pytest.mark.parametrize(
    ("what", "to", "fault"),
    [*(("push", name, "OWNER/NAME") for name in NO_NAMES), ("export", "zip", "choose mlx")],
)
def test_names_that_no_hub_has_and_formats_that_are_none(client: Client, begun, what, to, fault):
    run_named("r")
    assert fault in client.post(f"ship/r/{what}", to=to).fault
    assert not begun


def test_only_runs_with_a_result_are_shipped(client: Client):
    assert "No run has finished" in client.get("ship").text
    run_named("r").write_config(TrainConfig(model="demo", data="demo"))
    assert "no finished adapter" in client.get("ship?run=r").fault
