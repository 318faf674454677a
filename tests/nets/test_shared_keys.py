import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.architectures import write_model
from your_ai.engine.weights import open_model
from your_ai.nets.shared_keys import share_keys

TOKENS = mx.array([[5, 6, 7, 8, 9, 10, 11, 12]])


@pytest.mark.parametrize("model_type", ["gemma3n", "gemma4", "gemma3", "qwen3"])
def test_a_pass_without_a_cache_computes_the_same_as_one_with_a_cache(tmp_path, model_type):
    network = open_model(write_model(tmp_path / "model", model_type), mx.float32).network
    cached = network(TOKENS, cache=make_prompt_cache(network))
    assert mx.allclose(network(TOKENS), cached, rtol=1e-5, atol=1e-5)


def test_blocks_that_share_nothing_stay_as_they_are(tmp_path):
    network = open_model(write_model(tmp_path / "model", "qwen3"), mx.float32).network
    kinds = [type(block) for block in network.layers]
    share_keys(network)
    assert [type(block) for block in network.layers] == kinds


def test_keys_that_nobody_reads_have_no_gradient(tmp_path):
    network = open_model(write_model(tmp_path / "model", "gemma3n"), mx.float32).network
    own = network.layers[-1].self_attn.k_proj.weight

    def loss(weight: mx.array) -> mx.array:
        network.layers[-1].self_attn.k_proj.weight = weight
        return mx.square(network(TOKENS)).sum()

    assert mx.abs(mx.grad(loss)(own)).max().item() == 0
