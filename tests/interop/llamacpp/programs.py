"""llama.cpp itself, by the package node-llama-cpp, which brings a build of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

PACKAGES = "YOUR_AI_NODE_LLAMA_CPP"  # a folder with node_modules/node-llama-cpp
VERSION = "3.22.1"
SCRIPT = Path(__file__).with_name("evaluate.mjs")


def packages_in(folder: Path) -> Path:
    """The folder of the package, installed into `folder` if none is named; else skips the test."""
    named = os.environ.get(PACKAGES)
    if shutil.which("node") is None or (named is None and shutil.which("npm") is None):
        pytest.skip("node and npm are not on PATH")
    if named is not None:
        return Path(named)
    names = [f"{name}@{VERSION}" for name in ("node-llama-cpp", "@node-llama-cpp/linux-x64")]
    options = ("--ignore-scripts", "--no-audit", "--no-fund", "--omit=optional")
    done = subprocess.run(
        ["npm", "install", *options, *names], cwd=folder, capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"npm cannot install node-llama-cpp: {done.stderr.decode()[-300:]}")
    return folder


@dataclass(frozen=True)
class Job:
    """What llama.cpp is to generate with a model."""

    model: Path
    prompts: list[list[int]]
    tokens: int
    vocabulary: int
    file: Path
    """Where it writes what it finds."""
    adapters: tuple[Path, ...] = ()

    @property
    def entry(self) -> dict[str, object]:
        paths = {"model": str(self.model), "file": str(self.file)}
        return {**vars(self), **paths, "adapters": [str(path) for path in self.adapters]}


@dataclass(frozen=True)
class Found:
    """What llama.cpp generated, or the error instead."""

    tokens: np.ndarray
    """(P, T)"""
    probabilities: np.ndarray
    """(P, T, V)"""
    error: str = ""


def evaluate(packages: Path, folder: Path, jobs: list[Job]) -> list[Found]:
    """Run the jobs in one process of Node."""
    (folder / "jobs.json").write_text(json.dumps([job.entry for job in jobs]))
    done = subprocess.run(
        ["node", str(SCRIPT), str(packages), str(folder / "jobs.json")],
        capture_output=True, text=True, check=False,
        env={name: text for name, text in os.environ.items() if name != "LD_PRELOAD"},
    )  # fmt: skip
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"file"')]
    errors = {line["file"]: line.get("error", "") for line in lines}
    ended = f"node ended with {done.returncode}: "
    return [read(job, errors.get(str(job.file), ended), done.stderr) for job in jobs]


def read(job: Job, error: str, said: str) -> Found:
    if error:
        return Found(np.zeros(0), np.zeros(0), f"{error} {said[-1500:]}")
    found = np.fromfile(job.file, np.float32)
    found = found.reshape(len(job.prompts), job.tokens, 1 + job.vocabulary)
    return Found(found[..., 0].astype(np.int64), found[..., 1:])
