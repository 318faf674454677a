"""The plans train models with mixers in chunks, with the gradients of mlx-lm's own code."""

from __future__ import annotations

import pytest

from tests import conftest
from tests.conftest import VOCABULARY, calls_of, make_model
from tests.engine.test_fused import assert_step, encode, engine_loss, load
from tests.engine.test_plans import by_plan
from tests.nets.mixers.models import MODELS, SIZES
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.nets.mixers import chunks

CASES = [
    ("qwen3_next", ("fused", "staged", "streamed")),
    ("jamba", ("fused", "staged")),
    ("falcon_h1", ("fused",)),
    ("lfm2", ("staged",)),
]


@pytest.mark.parametrize(("architecture", "plans"), CASES)
def test_every_plan_gives_the_gradients_of_mlx_lm(tmp_path, monkeypatch, architecture, plans):
    config = {**SIZES, **MODELS[architecture], "vocab_size": VOCABULARY}
    monkeypatch.setitem(conftest.EXTRA, architecture, config)
    folder = make_model(tmp_path / "m", architecture, None, factor=2)
    network, tokenizer, adapters = load(folder)
    dequantize_on_the_cpu(network)  # as `build_engine` does
    expected = engine_loss(network, adapters, encode(tokenizer, tmp_path), seed=3)
    used = calls_of(monkeypatch, chunks, "_over_chunks")
    for plan in plans:
        used.clear()
        found = by_plan(folder, tmp_path, plan)
        assert bool(used) == (architecture != "lfm2")  # which has convolutions alone
        assert_step(found, *expected, 1e-4)
