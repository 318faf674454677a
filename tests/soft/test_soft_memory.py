"""The memory of columns grows with the caches, and not with tokens x vocabulary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tests.conftest import TINY, make_model, peak_of
from tests.objectives.test_gradients import load
from your_ai.nets import model
from your_ai.nets.head import LinearHead
from your_ai.soft import passes
from your_ai.soft.engine import column_engine
from your_ai.soft.roles import RewardNetwork, Roles, SoftSettings, network_of

pytestmark = pytest.mark.memory

VOCABULARY, ROWS, SLICE_BYTES = 8192, 2, 1 << 16


@pytest.mark.parametrize("relaxed", [False, True], ids=["straight-through", "relaxed"])
def test_memory_hardly_grows_with_the_completion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relaxed: bool
):
    slices = LinearHead.slices
    monkeypatch.setattr(
        LinearHead,
        "slices",
        lambda head, count: slices(replace(head, slice_bytes=SLICE_BYTES), count),
    )
    monkeypatch.setattr(passes, "GROUP_TOKENS", 32)
    folder = make_model(tmp_path / "m", "llama", None, **{**TINY, "vocab_size": VOCABULARY})
    policy = network_of(load(folder, False)[0])
    reference, reward = (network_of(model.load_network(folder, mx.float32)[0]) for _ in range(2))
    roles = Roles(policy, RewardNetwork(reward, mx.ones((32,))), reference)
    engine = column_engine(roles, SoftSettings(kl_beta=0.1, relaxed=relaxed))
    mx.eval(policy.model.parameters(), reward.model.parameters(), reference.model.parameters())
    prompts, keys = [np.array([1, 2, 3])] * ROWS, np.arange(ROWS, dtype=np.uint32)

    def peak(tokens: int) -> int:
        sampled = engine.sample(prompts, keys, tokens, [])

        def step() -> object:
            return engine.gradients(prompts, sampled, keys, np.ones(ROWS), 1.0)

        mx.eval(step())  # graphs are compiled
        mx.clear_cache()
        mx.synchronize()
        return peak_of(step)

    grown = peak(40) - peak(16)
    logits = 4 * ROWS * (40 - 16) * VOCABULARY
    assert grown < logits / 3, grown / logits
