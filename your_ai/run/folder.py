"""runs/<name>/: where its files lie, and that one process at a time writes them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from your_ai.config import TrainConfig, build, nearest, read_yaml, to_yaml
from your_ai.errors import UserError

RUNS = Path("runs")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
LOCK_WAIT_S = 5.0  # a killed process takes a moment to let go


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def adapter(self) -> Path:
        return self.path / "adapter"

    def read_config(self) -> TrainConfig:
        return build(read_yaml(self.config), str(self.config))

    def write_config(self, config: TrainConfig) -> None:
        temporary = self.config.with_suffix(".tmp")
        temporary.write_text(to_yaml(config), encoding="utf-8")
        os.replace(temporary, self.config)


def default_name(config: TrainConfig) -> str:
    """A name made of model, data and time."""
    parts = [Path(config.model).name, Path(config.data).stem]
    parts = list(dict.fromkeys(re.sub(r"[^A-Za-z0-9.]+", "-", p).strip("-.") for p in parts))
    return "-".join([*filter(None, parts), time.strftime("%Y%m%d-%H%M%S")])


def create(config: TrainConfig) -> RunFolder:
    """Make the folder of a new run with its config.yaml.

    Raises UserError where the name is taken or the folder cannot be written.
    """
    name = config.run or default_name(config)
    if not NAME.fullmatch(name):
        raise UserError(f"--run {name}: use letters, digits, dots, dashes and underscores alone")
    folder = RunFolder(RUNS / name)
    if folder.path.exists():
        raise UserError(
            f"--run {name}: {folder.path} exists; choose another name, or go on with "
            f"it: your_ai train --resume {name}"
        )
    try:
        folder.path.mkdir(parents=True)
        folder.write_config(config)
    except OSError as error:
        discard(folder)
        raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from error
    return folder


def find(run: str) -> RunFolder:
    """The folder of an existing run, by its name or path. Raises UserError if there is none."""
    for path in (RUNS / run, Path(run)):
        folder = RunFolder(path)
        if folder.config.is_file():
            return folder
    names = [p.parent.name for p in RUNS.glob("*/config.yaml")]
    raise UserError(f"no run named {run} in {RUNS}{nearest(run, names)}")


def discard(folder: RunFolder) -> None:
    """Remove a run that never began, and `runs` too if that leaves it empty."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with contextlib.suppress(OSError):
        RUNS.rmdir()


@contextlib.contextmanager
def locked(folder: RunFolder) -> Iterator[None]:
    """Hold the run for this process. Raises UserError where another one has it."""
    try:
        file = open(folder.path / "lock", "a+")  # noqa: SIM115 (closed below; the lock is its)
    except OSError as error:
        raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from error
    with file:
        deadline = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() > deadline:
                    file.seek(0)
                    pid = file.read().strip() or "unknown"
                    raise UserError(
                        f"{folder.path}: process {pid} is working on this run; wait for it, "
                        "or stop it"
                    ) from None
                time.sleep(0.1)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
