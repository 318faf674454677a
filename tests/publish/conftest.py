"""A finished run whose folders and rows must stay private."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import chat, train, working_in, write_rows
from tests.hub.conftest import account, hub, no_hub  # noqa: F401
from your_ai.config import build
from your_ai.publish.contents import Contents
from your_ai.run.folder import RunFolder

# Words from folders, files, the run and its rows. None of them may reach the hub.
PRIVATE = ("cellar", "patients", "visits", "vault", "noon")


@pytest.fixture(scope="session")
def finished(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run of three steps with a checkpoint after each, in a separate folder."""
    home = tmp_path_factory.mktemp("cellar")
    rows = [chat(f"When does vault {i} open?", "At noon " * (i + 1)) for i in range(6)]
    write_rows(home / "patients" / "train.jsonl", rows)
    write_rows(home / "patients" / "valid.jsonl", rows[:2])
    write_rows(home / "patients" / "test.jsonl", rows[2:4])
    settings = {
        "model": str(tiny_model), "data": str(home / "patients"), "run": "visits",
        "max_steps": 3, "save_every": 1, "eval_every": 2, "batch_size": 2, "lora_layers": 2,
        "lora_rank": 4, "learning_rate": 1e-2, "supervise": False, "samples": 1,
        "exact_match": True,
    }  # fmt: skip
    with working_in(home):
        return RunFolder(train(build(settings, "test")).path.absolute())


@pytest.fixture
def contents(own_folder: Path) -> Contents:
    """Something small to push."""
    weights = own_folder / "weights"
    weights.write_bytes(bytes(range(256)) * 400)
    files = {"README.md": b"---\nlicense: mit\n---\n", "adapters.safetensors": weights}
    return Contents(files, "adapter of step 3")
