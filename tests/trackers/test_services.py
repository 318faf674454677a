from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.trackers import fakes
from your_ai.trackers.rows import StepFigures, Texts
from your_ai.trackers.services import OPEN, About, Tracker, markdown

VARIABLES = ("WANDB_", "SWANLAB_")
TABLE = Texts(4, "samples/after", ("prompt", "answer"), (("a|b", "c\nd"),))


@pytest.fixture
def called(own_folder, monkeypatch):
    """The file with the calls, of fakes that are imported instead of the packages."""
    for name in [*fakes.SOURCES]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(fakes.write(own_folder / "fakes")))
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    path = own_folder / "calls"
    monkeypatch.setenv("CALLS", str(path))
    monkeypatch.setenv("SWANLAB_TERMINAL_PROXY_TYPE", "none")  # as it is set, and unset after
    yield path
    for name in fakes.SOURCES:
        sys.modules.pop(name, None)


def opened(name: str) -> Tracker:
    return OPEN[name](About(Path("/runs/r"), "r", "cafe", {"seed": 3, "epochs": None}))


def test_wandb_is_told_of_the_run(called):
    opened("wandb")
    assert fakes.calls(called, "wandb", "init") == [
        {
            "project": "your_ai",
            "name": "r",
            "id": "cafe",
            "resume": "allow",
            "dir": "/runs/r",
            "config": {"seed": 3, "epochs": None},
            "allow_val_change": True,
            "settings": {"console": "off"},
        }
    ]


def test_wandbs_steps_are_a_metric(called):
    opened("wandb").figures(StepFigures(7, {"train/loss": 0.5}))
    assert {"name": "*", "step_metric": "step"} in fakes.calls(called, "wandb", "define_metric")
    assert fakes.calls(called, "wandb", "log") == [{"step": 7, "train/loss": 0.5}]


def test_wandb_forgets_a_run_that_it_could_not_open(called, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:init")
    with pytest.raises(OSError, match="away"):
        opened("wandb")
    assert len(fakes.calls(called, "wandb", "teardown")) == 1


def test_wandb_has_tables(called):
    opened("wandb").texts(TABLE)
    content = {"columns": ["prompt", "answer"], "data": [["a|b", "c\nd"]]}
    assert fakes.calls(called, "wandb", "log") == [{"step": 4, "samples/after": content}]


def test_swanlab_is_told_of_the_run(called):
    opened("swanlab")
    assert fakes.calls(called, "swanlab", "init") == [
        {
            "project": "your_ai",
            "name": "r",
            "id": "cafe",
            "resume": "allow",
            "log_dir": "/runs/r/swanlog",
            "config": {"seed": 3},
            "reinit": True,
        }
    ]


def test_swanlab_logs_at_steps(called):
    tracker = opened("swanlab")
    tracker.figures(StepFigures(7, {"train/loss": 0.5}))
    tracker.texts(TABLE)
    assert fakes.calls(called, "swanlab", "log") == [
        {"step": 7, "train/loss": 0.5},
        {"step": 4, "samples/after": markdown(TABLE)},
    ]


@pytest.mark.parametrize(
    ("name", "variable", "argument"),
    [
        ("wandb", "WANDB_PROJECT", "project"),
        ("wandb", "WANDB_NAME", "name"),
        ("wandb", "WANDB_RUN_ID", "id"),
        ("wandb", "WANDB_RESUME", "resume"),
        ("wandb", "WANDB_DIR", "dir"),
        ("swanlab", "SWANLAB_PROJECT_NAME", "project"),
        ("swanlab", "SWANLAB_PROJ_NAME", "project"),
        ("swanlab", "SWANLAB_EXP_NAME", "name"),
        ("swanlab", "SWANLAB_RUN_ID", "id"),
        ("swanlab", "SWANLAB_LOG_DIR", "log_dir"),
    ],
)
def test_the_users_environment_wins(called, monkeypatch, name, variable, argument):
    monkeypatch.setenv(variable, "theirs")
    opened(name)
    [given] = fakes.calls(called, name, "init")
    assert given.get(argument, "theirs") == "theirs"  # SwanLab's own code reads the variable


@pytest.mark.parametrize(
    ("ended", "wandb", "swanlab"),
    [("done", 0, "success"), ("stopped by SIGINT", 1, "aborted"), ("", 1, "crashed")],
)
def test_how_the_run_ended_is_told(called, ended, wandb, swanlab):
    for name in OPEN:
        opened(name).close(ended)
    assert fakes.calls(called, "wandb", "finish") == [{"exit_code": wandb}]
    assert fakes.calls(called, "swanlab", "finish")[0]["state"] == swanlab
    assert fakes.calls(called, "tensorboardX", "text")[-1]["text"] == (ended or "unknown")


def test_tensorboard_lies_in_the_runs_folder(called):
    tracker = opened("tensorboard")
    tracker.figures(StepFigures(7, {"train/loss": 0.5}))
    assert fakes.calls(called, "tensorboardX", "init") == [{"logdir": "/runs/r/tensorboard"}]
    logged = fakes.calls(called, "tensorboardX", "log")
    assert logged == [{"name": "train/loss", "value": 0.5, "step": 7}]


def test_a_table_is_markdown_with_a_row_on_a_line():
    assert markdown(TABLE).splitlines() == [
        "| prompt | answer |",
        "| --- | --- |",
        "| a\\|b | c<br>d |",
    ]


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="is not installed")
def test_tensorboards_files_hold_the_figures(own_folder):
    from tensorboardX.proto.event_pb2 import Event

    tracker = OPEN["tensorboard"](About(own_folder, "r", "cafe", {"seed": 3}))
    for number in (1, 2):
        tracker.figures(StepFigures(number, {"train/loss": number / 2}))
    tracker.texts(TABLE)
    tracker.close("done")

    [path] = (own_folder / "tensorboard").iterdir()
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):  # size, checksum of the size, record, checksum of the record
        size = int.from_bytes(data[at : at + 8], "little")
        event = Event.FromString(data[at + 12 : at + 12 + size])
        found += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        at += size + 16
    assert [f for f in found if f[1] == "train/loss"] == [
        (1, "train/loss", 0.5),
        (2, "train/loss", 1.0),
    ]
    assert {tag for _, tag, _ in found} > {"config/text_summary", "samples/after/text_summary"}
