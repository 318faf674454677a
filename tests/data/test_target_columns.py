"""Named columns of targets: laid out, padded, cut and joined without knowing their names."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.data.test_batches import make_examples
from your_ai.data.batches import make_schedule
from your_ai.data.target_columns import COLUMNS, Column
from your_ai.engine.scoring import ScoredTexts, as_targets
from your_ai.objectives.objective import Targets


@pytest.mark.parametrize("packed_tokens", [None, 64])
def test_a_new_column_comes_to_the_targets(monkeypatch, packed_tokens):
    """One by row and one by token, which hold the row and the place of each token."""
    monkeypatch.setitem(COLUMNS, "row", Column(np.int32, "row", padding=-1))
    monkeypatch.setitem(COLUMNS, "place", Column(np.float32, "token"))
    examples = make_examples([9, 20, 31, 5, 12])
    examples = examples.with_columns(
        {"row": np.arange(len(examples)), "place": np.arange(len(examples.tokens))}
    )
    batches = make_schedule(examples, 2, 5, 0, packed_tokens).batches_of(0)
    for batch in batches:
        count, slots = batch.trained_tokens, len(batch.targets)
        rows, places = batch.columns["row"], batch.columns["place"]
        assert (rows.dtype, places.dtype) == (np.int32, np.float32)
        # tokens are 1, 2, 3, ...
        assert np.array_equal(places[:count] + 1, batch.targets[:count])
        starts = examples.starts[rows[:count]], examples.starts[rows[:count] + 1]
        assert ((starts[0] <= places[:count]) & (places[:count] < starts[1])).all()
        assert rows[count:].tolist() == [-1] * (slots - count)
        assert not places[count:].any()
        part = Targets.of(batch).part(mx.array([1, 0]))
        assert part.columns["place"].tolist() == places[[1, 0]].tolist()

    scored = [ScoredTexts.of(batch, np.zeros(batch.trained_tokens)) for batch in batches]
    _, targets = as_targets(scored)
    every = np.concatenate([batch.targets[: batch.trained_tokens] for batch in batches])
    assert targets.columns["place"].tolist() == (every - 1).tolist()
