"""Rows that are long enough for tiles of their usual size: the gradients of a plain reading."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import make_model
from tests.engine.test_fused import assert_gradients
from tests.objectives.plain import plain_gradients, plain_model
from tests.objectives.test_gradients import OBJECTIVES, VOCABULARY, load
from your_ai.data.batches import make_schedule
from your_ai.data.examples import Examples, RowCounts
from your_ai.engine.build import build_engine
from your_ai.engine.gradients import HeldGradients
from your_ai.engine.weights import tensors_of
from your_ai.memory.estimate_kept import everything
from your_ai.memory.sizes import tiles_of
from your_ai.memory.workload import NOTHING, Kept
from your_ai.nets import model
from your_ai.objectives.grpo import GRPO
from your_ai.training.steps import accumulate

# Small, because the plain reading is in float64, with whole attention.
SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "head_dim": 16,
         "num_key_value_heads": 1, "num_hidden_layers": 2, "vocab_size": VOCABULARY}  # fmt: skip
TOLERANCE = 1e-5
KEPT = {"nothing": NOTHING, "attention": Kept(0, 1, 0), "everything": everything(2)}
SLOW = bool(os.environ.get("YOUR_AI_SLOW"))


@dataclass(frozen=True, kw_only=True)
class Long:
    """Rows, and how a step trains them."""

    rows: int
    """An even number: the plain reading takes them in pairs, which have one weight."""
    tokens: int
    share: float
    """Of the tokens that are trained; 1 for all but the first."""
    objective: str = "sft"
    plan: str = "staged"
    kept: str = "nothing"
    packed_tokens: int | None = None


CASES = [
    Long(rows=2, tokens=640, share=1.0),
    Long(rows=4, tokens=608, share=0.02, plan="streamed"),
    Long(rows=4, tokens=600, share=0.3, objective="dpo", kept="attention"),
    Long(rows=4, tokens=640, share=0.01, objective="grpo-k3"),
    Long(rows=6, tokens=620, share=0.1, packed_tokens=2048),
]
if SLOW:
    CASES += [
        Long(rows=rows, tokens=tokens, share=share, objective=objective, plan=plan, kept=kept,
             packed_tokens=packed)
        for rows, tokens in ((2, 3200), (6, 600), (4, 1500))
        for plan in ("fused", "staged", "streamed")
        for kept in (KEPT if plan != "fused" else ("nothing",))
        for share, objective, packed in (
            (1.0, "sft", None), (0.004, "sft", None), (0.2, "sft", 3200), (0.1, "simpo", None),
        )
    ]  # fmt: skip


def examples_of(case: Long) -> Examples:
    """Rows of slightly different lengths; which tokens are trained is drawn."""
    rng = np.random.default_rng(case.rows * case.tokens)
    lengths = [case.tokens - 3 * row for row in range(case.rows)]
    texts = [rng.integers(0, VOCABULARY, length + 1).astype(np.uint32) for length in lengths]
    if case.objective != "sft":  # both answers to one prompt
        for first, second in zip(texts[::2], texts[1::2], strict=True):
            second[: case.tokens // 4] = first[: case.tokens // 4]
    trained = [rng.random(length + 1) < case.share for length in lengths]
    for own in trained:
        own[0], own[-1] = False, True
        if case.objective != "sft":
            own[: case.tokens // 4] = False
    tokens = np.concatenate(texts)
    near = rng.normal(-np.log(VOCABULARY), 0.3, (2, len(tokens))).astype(np.float32)
    more = {"reference": near[0]}
    if isinstance(OBJECTIVES[case.objective], GRPO):
        advantages = rng.normal(0.5, 1, len(tokens)).astype(np.float32)
        more |= {"advantages": advantages, "old": near[1]}
    weights = np.repeat([1.0, 2.5, 0.5], 2)[: case.rows].astype(np.float32)
    starts = np.cumsum([0, *map(len, texts)])
    return Examples(tokens, np.concatenate(trained), starts, weights, RowCounts(), more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("long") / "m", "llama", None, factor=1, **SHAPE)


@pytest.fixture(scope="module")
def expected(folder):
    """A function from a case to its loss and gradients; those of the same rows are shared."""
    base, _ = model.load_network(folder, mx.float32)
    plain = plain_model(base)

    @cache
    def of_rows(rows: int, tokens: int, share: float, objective: str):
        network, _, scale = load(folder, False)
        adapters = dict(tree_flatten(network.trainable_parameters()))
        case = Long(rows=rows, tokens=tokens, share=share, objective=objective)
        return plain_gradients(
            OBJECTIVES[objective], plain, adapters, scale, examples_of(case), 1.0
        )

    return lambda case: of_rows(case.rows, case.tokens, case.share, case.objective)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_long_rows_have_the_gradients_of_a_plain_reading(folder, expected, case):
    objective = OBJECTIVES[case.objective]
    network, keys, _ = load(folder, False)
    built = build_engine(
        network,
        keys,
        case.plan,
        packing=case.packed_tokens is not None,
        tensors=tensors_of(model.load_network(folder, mx.float32)[0], folder),
        objective=objective,
        kept=KEPT[case.kept],
    )
    assert (built.plan, built.notices) == (case.plan, ())
    examples = examples_of(case)
    schedule = make_schedule(
        examples, case.rows, case.rows, 0, case.packed_tokens, objective.rows_together
    )
    batches = schedule.batches_of(0)
    assert any(len(tiles_of(*batch.tokens.shape)) > 1 for batch in batches)
    denominator = objective.denominator(batches)
    sums = accumulate(built.engine, batches, 1 / denominator, 0, total := HeldGradients())
    loss, grads = expected(case)
    alone = sum(built.engine.loss(batch).loss.item() for batch in batches)
    losses = [sums.loss / denominator, alone / denominator]
    assert losses == pytest.approx([loss] * 2, rel=TOLERANCE)
    assert_gradients(total.arrays, grads, TOLERANCE)
