"""Experts of streamed models are read only where tokens are routed to them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from tests.conftest import calls_of, make_model
from your_ai.engine.weights import FileTensor, open_model, prepare_for_generation

EXPERTS = 16


@pytest.mark.parametrize("bits", [None, 4])
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_logits_are_those_of_weights_in_memory(tmp_path, monkeypatch, bits, tokens):
    folder = make_model(tmp_path / "m", "qwen3_moe", bits=bits, num_experts=EXPERTS)
    read = calls_of(monkeypatch, FileTensor, "gather")
    whole, streamed = (
        prepare_for_generation(open_model(folder, mx.float32), streams=each)
        for each in (False, True)
    )
    row = mx.random.randint(1, 60, (1, tokens), key=mx.random.key(0))
    assert mx.allclose(streamed(row), whole(row), rtol=1e-4, atol=1e-4)
    given = [call.given for call in read]
    experts = [len(at) for tensor, at in given if "switch_mlp" in tensor.name]
    used = streamed.args.num_experts_per_tok
    if tokens == 1:
        assert set(experts) == {used}
    if tokens == 40:
        assert not experts  # nearly all are used, so that the layers are read as a whole
