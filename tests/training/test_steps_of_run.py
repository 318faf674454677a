"""What the rows of a run say about the time of its steps."""

from __future__ import annotations

import numpy as np
import pytest

from your_ai.config import TrainConfig
from your_ai.data.examples import Examples, RowCounts
from your_ai.memory.workload import StepSizes
from your_ai.training.job import step_sizes
from your_ai.training.run_data import RunData


def data_of(lengths: list[int], trained_tokens: int = 0) -> RunData:
    """Rows with so many inputs."""
    starts = np.cumsum([0, *(length + 1 for length in lengths)])
    tokens = np.zeros(starts[-1], np.uint32)
    tally = RowCounts(trained_tokens=trained_tokens)
    weights = np.ones(len(lengths), np.float32)
    examples = Examples(tokens, np.ones(len(tokens), bool), starts, weights, tally)
    return RunData({"train": examples}, [], None, [64], 0, 0)


def test_rows_are_counted_by_their_padded_lengths():
    config = TrainConfig(batch_size=2, epochs=3, max_steps=None)
    found = step_sizes(config, data_of([60] * 6 + [500] * 2, trained_tokens=600))
    assert found.rows_of_length == ((64, 6), (512, 2))
    assert found.steps == 12
    assert found.trained_share == pytest.approx(4 / 8)  # 600 of 1,408, in eighths


def test_a_run_with_pairs_counts_both_rows():
    config = TrainConfig(objective="dpo", batch_size=2, epochs=1, max_steps=None)
    found = step_sizes(config, data_of([60, 50, 60, 60]))
    assert found.rows_of_length == ((64, 4),)
    assert found.steps == 1
    assert found.trained_share == 1.0


def test_nothing_is_known_without_rows():
    assert step_sizes(TrainConfig(), RunData({}, [], None, [64], 0, 0)) == StepSizes()
