"""Fake packages of trackers that write each call as a line of JSON into the file $CALLS.

$FAULTS names what fails: `wandb:init` and `wandb:log` raise in these calls, `wandb:hang` never
returns from a log call, and `wandb:first` exits the first time the package is opened.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMON = """
import json, os, time

OPENED = []


def note(package, call, **fields):
    if package + ":" + call in os.environ.get("FAULTS", ""):
        raise OSError(package + " is away,\\nat " + call)
    if call == "init":
        OPENED.append(package)
        if package + ":first" in os.environ.get("FAULTS", "") and OPENED.count(package) == 1:
            raise SystemExit(3)
    if call == "log" and package + ":hang" in os.environ.get("FAULTS", ""):
        time.sleep(600)
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([package, call, fields]) + "\\n")


def settings(prefix):
    return {name: value for name, value in os.environ.items() if name.startswith(prefix)}
"""

WANDB = """
from faketracker import note, settings


class Table:
    def __init__(self, columns, data):
        self.content = {"columns": columns, "data": data}


class Run:
    def define_metric(self, name, step_metric=None):
        note("wandb", "define_metric", name=name, step_metric=step_metric)

    def log(self, values):
        plain = {k: v.content if isinstance(v, Table) else v for k, v in values.items()}
        note("wandb", "log", **plain)

    def finish(self, exit_code):
        note("wandb", "finish", exit_code=exit_code)


def init(**fields):
    note("wandb", "init", **fields, **settings("WANDB_"))
    return Run()


def teardown():
    note("wandb", "teardown")
"""

SWANLAB = """
from faketracker import note, settings


class Text:
    def __init__(self, content):
        self.content = content


class Run:
    def log(self, values, step):
        plain = {k: v.content if isinstance(v, Text) else v for k, v in values.items()}
        note("swanlab", "log", step=step, **plain)

    def finish(self, state="success", error=None):
        note("swanlab", "finish", state=state, error=error)


def init(**fields):
    note("swanlab", "init", **fields, **settings("SWANLAB_"))
    return Run()
"""

TENSORBOARDX = """
from faketracker import note


class SummaryWriter:
    def __init__(self, logdir, flush_secs):
        note("tensorboardX", "init", logdir=logdir)

    def add_scalar(self, name, value, step):
        note("tensorboardX", "log", name=name, value=value, step=step)

    def add_text(self, name, text, step=None):
        note("tensorboardX", "text", name=name, text=text, step=step)

    def close(self):
        note("tensorboardX", "finish")
"""

SOURCES = {"faketracker": COMMON, "wandb": WANDB, "swanlab": SWANLAB, "tensorboardX": TENSORBOARDX}


OFTEN = "from your_ai.trackers import upload\nupload.POLL_S = 0.1\n"


def write(folder: Path) -> Path:
    """Write the packages as modules to `folder`, which must come first in sys.path.

    A process that has it there looks for new events often.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(OFTEN)
    for name, source in SOURCES.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def calls(path: Path, package: str, call: str = "") -> list[dict[str, Any]]:
    """The arguments of each call of a package, from the file $CALLS."""
    lines = path.read_text().splitlines() if path.exists() else []
    made = map(json.loads, lines)
    return [fields for p, c, fields in made if p == package and call in ("", c)]
