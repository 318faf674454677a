"""Run folders with files of a wrong kind: one error line, no traceback, no hang."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import call
from tests.generation.test_generate import train_in
from your_ai.run.folder import RunFolder

LIMIT_S = 10


def endless(path: Path) -> None:
    """10 GB of one line, in a sparse file that takes no disk space."""
    with path.open("wb") as file:
        file.truncate(10_000_000_000)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as found:
        here = os.getcwd()
        os.chdir(path.parent)
        try:
            found.bind(path.name)
        finally:
            os.chdir(here)


def unreadable(path: Path) -> None:
    path.write_text("{}\n")
    path.chmod(0)


KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "loop": lambda path: path.symlink_to(path.name),
    "nowhere": lambda path: path.symlink_to("nowhere"),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 4096),
    "empty": Path.touch,
    "endless": endless,
    "socket_file": socket_file,
    "unreadable": unreadable,
}
PLACES = [
    *("events.jsonl", "config.yaml", "checkpoints", "adapter", "adapter/adapters.safetensors"),
    *("adapter/adapter_config.json", "adapter/checksums.json", "lock", "supervisor.lock"),
    *("evaluation.json", "imported.json", "process.log"),
    *("checkpoints/step-000003/state.json", "checkpoints/step-000003/checksums.json"),
    "checkpoints/step-000003/optimizer.safetensors",
]
COMMANDS = [
    ("runs",),
    ("runs", "--json"),
    ("runs", "stop", "r"),
    ("watch", "r"),
    ("watch",),
    ("watch", "r", "--replay", "--speed", "1000000"),
    ("report", "r"),
    ("generate", "r", "--prompt", "a", "--max-tokens", "1"),
    ("eval", "r"),
    ("export", "r", "--to", "peft", "--out", "out"),
    ("train", "--resume", "r"),
    ("runs", "rm", "r", "--yes"),
]


TEXTS = [place for place in PLACES if not place.endswith("safetensors")]
GRID = [
    *itertools.product(PLACES[:1], KINDS),
    *itertools.product(PLACES[1:], ["folder", "fifo", "device", "endless"]),
]
# Each kind at each place with one command, taken in turn; events.jsonl with all commands.
CASES = [(place, kind, COMMANDS[n % len(COMMANDS)]) for n, (place, kind) in enumerate(GRID)]
CASES += itertools.product(["events.jsonl"], ["fifo"], COMMANDS)
CASES += [("events.jsonl", ("folder", "endless")[n % 2], each) for n, each in enumerate(COMMANDS)]
CASES = [case for case in CASES if case[1] != "endless" or case[0] in TEXTS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_model) -> RunFolder:
    return train_in(tmp_path_factory.mktemp("runs"), tiny_model)


@pytest.fixture
def limited():
    """Stop a command that hangs."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"took more than {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    ("place", "kind", "arguments"),
    CASES,
    ids=[f"{place} {kind} {' '.join(arguments[:2])}" for place, kind, arguments in CASES],
)
def test_a_file_of_the_wrong_kind_is_one_error_line_at_most(
    trained: RunFolder, capfd, limited, place: str, kind: str, arguments: tuple[str, ...]
):
    shutil.copytree(trained.path, "runs/r", symlinks=True)
    path = Path("runs/r") / place
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)
    status = call(*arguments)
    _, error = capfd.readouterr()
    assert status in (0, 1, 2)
    assert "Traceback" not in error
    assert "a bug in your_ai" not in error
    assert len([line for line in error.splitlines() if line.startswith("error: ")]) <= 1
    assert (status == 0) == ("error: " not in error)
