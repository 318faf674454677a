"""Servers of Tinker's API in processes of their own, and what tests ask of them."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.conftest import DEMO_FOLDER, TOKENIZER_FILES, events_of
from your_ai.run import events
from your_ai.run.folder import RUNS, RunFolder

NAME = "Qwen/Qwen3-8B-Base"  # what loops call the base: the cookbook knows how it is prompted
LONGEST = 1024  # tokens
RANK = 8  # of what the tests train, where they may choose; the server plans for its default
START_S = 60.0


@dataclass(frozen=True)
class Served:
    """A server, and the folder in which it works."""

    url: str
    folder: Path
    process: subprocess.Popen

    @property
    def runs(self) -> list[RunFolder]:
        """Those of all models, the newest last."""
        found = [path for path in (self.folder / RUNS).glob("*") if path.is_dir()]
        return [RunFolder(path) for path in sorted(found, key=lambda path: path.stat().st_ctime)]

    def steps(self, run: int = -1) -> list[events.Step]:
        """What a run says of its updates."""
        return [event for event in events_of(self.runs[run]) if isinstance(event, events.Step)]


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str) -> Iterator[Served]:
    """Serve a model until the end of the block. folder: is made, if it is not there."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "your_ai", "tinker", "--port", "0", "--name", NAME]
    command += ["--model", str(model), "--max-seq-length", str(LONGEST)]
    process = subprocess.Popen(
        [*command, *options],
        cwd=folder,
        env={**os.environ, "YOUR_AI_HOME": str(folder / "home")},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        first = process.stdout.readline()  # it ends with its process
        yield Served(first.partition(" at ")[2].partition(";")[0], folder, process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def put_tokenizer(folder: Path, name: str = NAME, **renamed: str) -> None:
    """Put the demo's tokenizer where `AutoTokenizer` finds it by a name, from `folder`.

    renamed: other names for its special tokens, `user` for that of users.
    """
    place = folder / name
    place.mkdir(parents=True)
    shutil.copy(DEMO_FOLDER / "config.json", place)
    for file in TOKENIZER_FILES:
        text = (DEMO_FOLDER / file).read_text()
        for old, new in renamed.items():
            text = text.replace(f"<|{old}|>", f"<|{new}|>")
        (place / file).write_text(text)
