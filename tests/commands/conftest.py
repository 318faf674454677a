from __future__ import annotations

import pytest

from tests.generation.test_generate import train_in
from your_ai.run.folder import RunFolder


@pytest.fixture(scope="session")
def run(tmp_path_factory, tiny_model) -> RunFolder:
    """A run that answers, for tests that leave it as it is."""
    return train_in(tmp_path_factory.mktemp("runs"), tiny_model)
