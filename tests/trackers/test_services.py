from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.trackers import fakes
from your_ai.config import TrainConfig
from your_ai.run.folder import RunFolder, create
from your_ai.trackers.upload import OPEN, TextTable, Tracker, TrackerRow, markdown

VARIABLES = ("WANDB_", "SWANLAB_")
TABLE = TextTable(("prompt", "answer"), (("a|b", "c\nd"),))
SAMPLES = TrackerRow(4, {"samples/after": TABLE})


@pytest.fixture
def called(own_folder, monkeypatch):
    """The file with the calls of the fakes, which are imported instead of the packages."""
    for name in [*fakes.SOURCES]:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(fakes.write(own_folder / "fakes")))
    for name in [name for name in os.environ if name.startswith(VARIABLES)]:
        monkeypatch.delenv(name)
    path = own_folder / "calls"
    monkeypatch.setenv("CALLS", str(path))
    before = dict(os.environ)
    yield path
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    for name in fakes.SOURCES:
        sys.modules.pop(name, None)


def opened(name: str) -> Tracker:
    folder = RunFolder(Path("runs/r"))
    if not folder.path.exists():
        create(TrainConfig(data="rows.jsonl", run="r", seed=3))
    return OPEN[name](folder, "cafe")


def place_of(folder: Path, name: str) -> str:
    return str((folder / "runs" / "r").resolve() / name).rstrip("/")


GIVEN = {
    "wandb": {
        "allow_val_change": True, "WANDB_PROJECT": "your_ai", "WANDB_NAME": "r",
        "WANDB_RUN_ID": "cafe", "WANDB_RESUME": "allow", "WANDB_CONSOLE": "off",
    },
    "swanlab": {
        "reinit": True, "SWANLAB_PROJ_NAME": "your_ai", "SWANLAB_EXP_NAME": "r",
        "SWANLAB_RUN_ID": "cafe", "SWANLAB_RESUME": "allow", "SWANLAB_TERMINAL_PROXY_TYPE": "none",
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "variable", "folder"),
    [("wandb", "WANDB_DIR", ""), ("swanlab", "SWANLAB_LOGDIR", "swanlog")],
)
def test_a_service_gets_the_run_and_its_settings(called, own_folder, name, variable, folder):
    opened(name)
    [given] = fakes.calls(called, name, "init")
    config = given.pop("config")
    assert config["seed"] == 3
    assert name == "wandb" or None not in config.values()
    assert given == {**GIVEN[name], variable: place_of(own_folder, folder)}


def test_wandb_gets_the_step_as_a_metric(called):
    opened("wandb").log(TrackerRow(7, {"train/loss": 0.5}))
    assert {"name": "*", "step_metric": "step"} in fakes.calls(called, "wandb", "define_metric")
    assert fakes.calls(called, "wandb", "log") == [{"step": 7, "train/loss": 0.5}]


def test_wandb_is_torn_down_if_a_run_cannot_be_opened(called, monkeypatch):
    monkeypatch.setenv("FAULTS", "wandb:init")
    with pytest.raises(OSError, match="away"):
        opened("wandb")
    assert len(fakes.calls(called, "wandb", "teardown")) == 1


def test_wandb_gets_tables(called):
    opened("wandb").log(SAMPLES)
    content = {"columns": ["prompt", "answer"], "data": [["a|b", "c\nd"]]}
    assert fakes.calls(called, "wandb", "log") == [{"step": 4, "samples/after": content}]


def test_swanlab_logs_with_the_step(called):
    tracker = opened("swanlab")
    tracker.log(TrackerRow(7, {"train/loss": 0.5}))
    tracker.log(SAMPLES)
    assert fakes.calls(called, "swanlab", "log") == [
        {"step": 7, "train/loss": 0.5},
        {"step": 4, "samples/after": markdown(TABLE)},
    ]


@pytest.mark.parametrize(
    ("name", "variable"), [("wandb", "WANDB_PROJECT"), ("swanlab", "SWANLAB_PROJ_NAME")]
)
@pytest.mark.parametrize(("users", "used"), [("theirs", "theirs"), ("", "your_ai")])
def test_environment_variables_of_the_user_win(called, monkeypatch, name, variable, users, used):
    monkeypatch.setenv(variable, users)
    opened(name)
    [given] = fakes.calls(called, name, "init")
    assert given[variable] == used
    assert "project" not in given


@pytest.mark.parametrize(
    ("ended", "wandb", "swanlab"),
    [("done", 0, "success"), ("stopped by SIGINT", 1, "aborted"), ("", 1, "crashed")],
)
def test_trackers_get_the_reason_for_the_end_of_the_run(called, ended, wandb, swanlab):
    for name in OPEN:
        opened(name).close(ended)
    assert fakes.calls(called, "wandb", "finish") == [{"exit_code": wandb}]
    assert fakes.calls(called, "swanlab", "finish")[0]["state"] == swanlab
    assert fakes.calls(called, "tensorboardX", "text")[-1]["text"] == (ended or "unknown")


def test_tensorboard_files_are_in_the_folder_of_the_run(called, own_folder):
    tracker = opened("tensorboard")
    tracker.log(TrackerRow(7, {"train/loss": 0.5}))
    assert fakes.calls(called, "tensorboardX", "init") == [
        {"logdir": place_of(own_folder, "tensorboard")}
    ]
    logged = fakes.calls(called, "tensorboardX", "log")
    assert logged == [{"name": "train/loss", "value": 0.5, "step": 7}]


def test_each_row_of_a_markdown_table_is_one_line():
    assert markdown(TABLE).splitlines() == [
        "| prompt | answer |",
        "| --- | --- |",
        "| a\\|b | c<br>d |",
    ]


@pytest.mark.skipif(not importlib.util.find_spec("tensorboardX"), reason="is not installed")
def test_tensorboard_files_contain_the_metrics(own_folder):
    from tensorboardX.proto.event_pb2 import Event

    folder = create(TrainConfig(data="rows.jsonl", run="r"))
    tracker = OPEN["tensorboard"](folder, "cafe")
    for number in (1, 2):
        tracker.log(TrackerRow(number, {"train/loss": number / 2}))
    tracker.log(SAMPLES)
    tracker.close("done")

    [path] = (folder.path / "tensorboard").iterdir()
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
