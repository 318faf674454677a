"""Run training in separate processes, and inspect the files they leave."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import events_of
from your_ai import cli
from your_ai.config import TrainConfig, to_yaml
from your_ai.files import TEMPORARY
from your_ai.run import checkpoint, events
from your_ai.run.folder import RunFolder

PATIENCE_S = 120.0
POLL_S = 0.005
ENDLESS = 1_000_000  # steps
COMMAND = "from your_ai.cli import main; main()"
DIE = """
import importlib, os, signal, sys
from pathlib import Path
from your_ai.run.folder import RunFolder
from your_ai.run.stopping import Stop
from your_ai.training.process import train_until_done

run, module, owner, name, last, *words = sys.argv[1:]
run, owner, calls = RunFolder(Path(run)), getattr(importlib.import_module(module), owner), 0
genuine = getattr(owner, name)

def dying(*args):
    global calls
    calls += not words or any(word in str(args) for word in words)
    if calls == int(last):
        os.kill(os.getpid(), signal.SIGKILL)
    return genuine(*args)

setattr(owner, name, dying)
train_until_done(run, run.read_config(), Stop())
"""


@contextlib.contextmanager
def started(
    config: TrainConfig, run: str, before: str = "", supervise: bool = False
) -> Iterator[subprocess.Popen]:
    """Start `your_ai train` in a process that is killed when the block ends.

    before: Python source that the process runs first.
    supervise: the process starts a second one, which trains.
    """
    preset = Path(f"{run}.yaml")
    preset.write_text(to_yaml(dataclasses.replace(config, run="", supervise=supervise)))
    flags = ["train", "--config", str(preset), "--run", run]
    command = ["-c", f"{before}\n{COMMAND}"] if before else ["-m", "your_ai"]
    process = subprocess.Popen(
        [sys.executable, *command, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def train_and_die(run: RunFolder, place: str, last: int, *words: str) -> None:
    """Train a run in a process that is killed at a call of the function `module:owner.name`.

    words: only calls with one of them in their arguments count.
    """
    module, _, function = place.partition(":")
    command = [sys.executable, "-c", DIE, str(run.path), module, *function.split("."), str(last)]
    died = subprocess.run([*command, *words], check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr


def wait_until(process: subprocess.Popen, done: Callable[[], object]) -> None:
    """Wait until `done()` is true, while the process runs."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the condition never became true"
        time.sleep(POLL_S)


def wait_for(process: subprocess.Popen, run: RunFolder, kind: type, count: int = 1) -> None:
    """Wait until the run has written `count` events of a kind."""
    told = Told(run)
    wait_until(process, lambda: sum(isinstance(event, kind) for event in told.read()) >= count)


@dataclasses.dataclass
class Told:
    """The events of a run, each line read once."""

    run: RunFolder
    events: list[events.Event] = dataclasses.field(default_factory=list)
    offset: int = 0

    def read(self) -> list[events.Event]:
        records, self.offset = events.tail(self.run.events, self.offset)
        self.events += [record.event for record in records]
        return self.events


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Run the command line in this process; return its exit status, stdout and stderr."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    captured = capsys.readouterr()
    return int(caught.value.code or 0), captured.out, captured.err


def final_files(run: RunFolder) -> dict[str, bytes]:
    """The finished adapter, and the state in the newest checkpoint."""
    newest = checkpoint.list_checkpoints(run.checkpoints)[0]
    state = json.loads((newest / checkpoint.STATE).read_text())["state"]
    return {
        "adapter": (run.adapter / checkpoint.ADAPTERS).read_bytes(),
        "optimizer": (newest / checkpoint.OPTIMIZER).read_bytes(),
        "state": json.dumps(state).encode(),
    }


def steps_done(run: RunFolder) -> int:
    return max((event.step for event in events_of(run, events.Step)), default=0)


def leftovers(run: RunFolder) -> list[Path]:
    return list(run.path.rglob(f"{TEMPORARY}*"))
