from __future__ import annotations

from pathlib import Path

import pytest

from tests.export.runs import make_trained
from your_ai.nets.saved_adapter import Trained


@pytest.fixture
def trained(tiny_model: Path) -> Trained:
    """A run that adapted all linear layers of all blocks."""
    return make_trained(tiny_model, lora_layers="all", lora_targets=["all-linear"])
