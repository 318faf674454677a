"""Objectives in engines, with DPO. `test_gradients` compares gradients with a plain reading."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.test_fused import relative_error
from your_ai.data.batches import make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.nets import losses
from your_ai.objectives.dpo import DPO
from your_ai.objectives.objective import Scores, Targets

# -- heads: linear, or any function


def case(count: int = 40) -> tuple[mx.array, Targets, mx.array]:
    """Hidden states, targets of four texts, and a head's weight."""
    mx.random.seed(2)
    texts = mx.array(np.repeat(np.arange(4), count // 4).astype(np.int32))
    tokens, reference = mx.random.randint(0, 300, (count,)), -mx.random.uniform(shape=(count,))
    targets = Targets(mx.arange(count), tokens, mx.ones(count), texts, {"reference": reference})
    return mx.random.normal((count, 32)), targets, mx.random.normal((300, 32))


def test_chunked_head_gives_the_gradient_of_full_logits(monkeypatch):
    """The weights depend on targets in other chunks, and the logits cannot be kept."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", 7)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    hidden, targets, weight = case()

    def whole(hidden: mx.array) -> mx.array:
        logits = hidden @ weight.T
        scores = mx.take_along_axis(logits, targets.tokens[:, None], -1).squeeze(-1)
        return DPO().weigh(Scores(scores - mx.logsumexp(logits, -1)), targets).loss

    def in_chunks(hidden: mx.array) -> mx.array:
        head = lambda rows: rows @ weight.T  # noqa: E731
        return losses.trainable_loss(hidden, targets, DPO(), mx.array(0.5), head).loss

    expected, expected_grad = mx.value_and_grad(whole)(hidden)
    loss, grad = mx.value_and_grad(in_chunks)(hidden)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(grad, 0.5 * expected_grad) < 1e-5


# -- batches


@given(
    st.lists(st.tuples(st.integers(2, 60), st.integers(2, 60)), min_size=1, max_size=12),
    st.integers(1, 8),
    st.integers(1, 4),
    st.sampled_from([None, 64, 256]),
    st.integers(0, 5),
)
def test_groups_stay_together_in_any_batch(lengths, batch_size, pairs_per_step, packed, seed):
    sizes = [length for pair in lengths for length in pair]
    starts = np.cumsum([0, *sizes])
    text = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)  # the token id is the row
    trained = np.ones(len(text), bool)
    examples = Examples(text, trained, starts, np.ones(len(sizes), np.float32), RowCounts())
    schedule = make_schedule(
        examples, batch_size, 2 * pairs_per_step, seed, packed, rows_together=2
    )
    seen: list[int] = []
    for step in range(schedule.steps_per_epoch):
        for batch in schedule.batches_of(step):
            n = batch.trained_tokens
            by_text = dict(zip(batch.texts[:n].tolist(), batch.targets[:n].tolist(), strict=True))
            rows = [by_text[index] for index in sorted(by_text)]
            assert sorted(by_text) == list(range(len(rows)))
            assert all(
                b == a + 1 and a % 2 == 0 for a, b in zip(rows[::2], rows[1::2], strict=True)
            )
            seen += rows
    assert sorted(seen) == list(range(len(sizes)))
