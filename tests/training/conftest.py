"""Runs on completions, which several files train."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import write_rows
from your_ai.config import TrainConfig


@pytest.fixture
def rewarded(configure: Callable[..., TrainConfig], own_folder: Path) -> Callable[..., TrainConfig]:
    """A function that makes the config of a short run on rewards, with changed settings."""
    asked = ["Ask", "Ask please", "Ask for more, please", "What is it?"]
    rows = [{"prompt": text, "answer": str(i), "wanted": "e"} for i, text in enumerate(asked)]
    data = write_rows(own_folder / "prompts.jsonl", rows)
    return partial(
        configure, data=str(data), valid="none", objective="grpo", reward=["length:3"], rollouts=3,
        prompts_per_step=2, max_new_tokens=6, max_steps=3,
    )  # fmt: skip
