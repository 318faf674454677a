"""A run and rows of every kind. Each module has a copy of the run, which is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import chat, train_once, working_in, write_rows
from your_ai.config import build
from your_ai.evaluation.compare import Comparison, Request, compare
from your_ai.evaluation.rows import choose_file
from your_ai.nets.saved_adapter import Trained, open_trained

TRAINING = [
    chat(f"Question {i}" + " please" * (4 * i), f"Answer {i}" * (1 + i % 4)) for i in range(4)
]
ROWS = [
    TRAINING[3],  # the run was trained on it and knows it
    chat("A question that is new " * 3, "An answer"),
    {"text": "A text, of which every token is supervised."},
    chat("Another", "With twice the weight", weight=2.0),
    {"prompt": "A prompt", "completion": "and what completes it"},
    chat("Ignored", "A row without any weight", weight=0),
    {"messages": [*chat("One", "Two")["messages"], *chat("Three", "Four " * 30)["messages"]]},
    TRAINING[1],
]
SETTINGS = {
    "run": "r", "max_steps": 40, "batch_size": 2, "learning_rate": 5e-3, "lora_layers": 2,
    "lora_rank": 4, "lora_targets": ("all-linear",), "supervise": False, "warmup_steps": 0,
    "eval_every": 0, "samples": 0,
}  # fmt: skip


def trained_run(root: Path, model: Path, **settings: Any) -> Path:
    """Train a run below `root` on TRAINING, with ROWS as its valid and test files."""
    write_rows(root / "data" / "train.jsonl", TRAINING)
    for name in ("valid", "test"):
        write_rows(root / "data" / f"{name}.jsonl", ROWS)
    data = {"model": str(model), "data": str(root / "data")}
    with working_in(root):
        train_once(build({**SETTINGS, **data, **settings}, "test"))
    return root / "runs" / "r"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    return trained_run(tmp_path_factory.mktemp("run"), tiny_model)


def carry_out(steps: Any) -> Any:
    """Run a generator to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def compared(run: Path | Trained, data: Path | None = None, **request: Any) -> Comparison:
    """Measure the test rows of a run, or the rows of a file."""
    found = open_trained(str(run)) if isinstance(run, Path) else run
    path = choose_file(None if data is None else str(data), found.config)
    return carry_out(compare(found, path, Request(**{"batch_size": 2, **request})))
