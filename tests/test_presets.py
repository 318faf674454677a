"""Each preset in configs/ is trained for one step on a small substitute for its model."""

from __future__ import annotations

import pytest

from tests.conftest import TINY, call, make_model
from your_ai.files import packaged

STAND_IN = "models/Meta-Llama-3.1-8B-Instruct-4bit"
PRESETS = sorted(path.stem for path in packaged("configs").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
def test_preset_trains_one_step(own_folder, small_demo, preset):
    make_model(own_folder / STAND_IN, **{**TINY, "num_hidden_layers": 4})
    extra = (
        ["--batch-size", 2, "--samples", 1] if preset == "demo" else ["--data", small_demo / "data"]
    )
    assert call("train", "--config", preset, "--max-steps", 1, *extra) == 0
