"""Layers of different ranks and scales: gradients under each plan, and the bytes of adapters."""

from __future__ import annotations

import functools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_unflatten

from tests.conftest import TINY, load_base, make_model
from tests.engine.test_fused import assert_step, encode, load, plain_loss, weight_of
from tests.engine.test_plans import by_plan, small_pieces
from your_ai.config import TrainConfig
from your_ai.errors import UserError
from your_ai.memory.estimate_adapters import adapter_bytes
from your_ai.memory.facts import facts_of
from your_ai.memory.workload import DataSizes, ProcessFacts, workload_of
from your_ai.nets.model import adapter_arrays, add_adapters

__all__ = ["small_pieces"]  # a fixture
MIXED = {
    "lora_rank": "4,mlp=6,block.1=3,block.0-1.q_proj=8",
    "lora_alpha": "10,v_proj=7,block.1.mlp=5",
    "lora_layers": "all",
    "lora_targets": ("all-linear",),
}


def size_of(path: str) -> tuple[int, float]:
    """The rank and the scale of a layer under MIXED, by hand."""
    is_mlp, is_second = ".mlp." in path, ".layers.1." in path
    rank = 3 if is_second else 6 if is_mlp else 4
    if "q_proj" in path and (is_second or ".layers.0." in path):
        rank = 8
    alpha = 7 if "v_proj" in path else 5 if is_second and is_mlp else 10
    return rank, alpha / rank


class Plain(nn.Module):
    """A linear layer with LoRA or DoRA in one formula, differentiated by MLX."""

    def __init__(self, layer: nn.Module, scale: float) -> None:
        super().__init__()
        self.lora_a, self.lora_b = layer.lora_a, layer.lora_b
        if "m" in layer:
            self.m = layer.m
        self._scale, self._linear = scale, [layer.linear]

    def __call__(self, x: mx.array) -> mx.array:
        (linear,) = self._linear
        weight = weight_of(linear) + self._scale * (self.lora_a @ self.lora_b).T
        if "m" in self:
            norms = mx.stop_gradient(mx.linalg.norm(weight, axis=1))
            weight = (self.m / norms)[:, None] * weight
        y = x @ weight.T
        return y + linear.bias if "bias" in linear else y


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Makes a model, and the loss and gradients of `Plain` layers; once for each case."""

    @functools.cache
    def make(architecture: str, bits: int | None, dora: bool):
        place = tmp_path_factory.mktemp("case")
        folder = make_model(place / "m", architecture, bits, **TINY)
        network, tokenizer, _ = load(folder, use_dora=dora, **MIXED)
        layers = {n: m for n, m in network.named_modules() if "lora_a" in m}
        plain = [(name, Plain(layer, size_of(name)[1])) for name, layer in layers.items()]
        network.update_modules(tree_unflatten(plain))
        examples = encode(tokenizer, place)
        loss, grads = nn.value_and_grad(network, plain_loss)(network, examples)
        return folder, loss.item(), dict(tree_flatten(grads))

    return make


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed", "kept"])
@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
@pytest.mark.parametrize(("architecture", "bits"), [("llama", 4), ("qwen2", None)])
def test_gradients_are_those_of_plain_layers(tmp_path, reference, architecture, bits, dora, plan):
    folder, *expected = reference(architecture, bits, dora)
    assert_step(by_plan(folder, tmp_path, plan, use_dora=dora, **MIXED), *expected)


def test_layers_get_their_ranks_and_scales(tmp_path):
    network, _ = load_base(make_model(tmp_path / "m", **TINY), mx.float32)
    adapters = add_adapters(network, TrainConfig(**MIXED))
    layers = {n: m for n, m in network.named_modules() if "lora_a" in m}
    for path, layer in layers.items():
        assert (layer.lora_a.shape[1], layer.scale) == size_of(path), path
        assert layer.lora_b.shape[0] == size_of(path)[0]
    parameters = adapters.config["lora_parameters"]
    assert parameters["rank"] == 8
    assert parameters["by_layer"] == {path: list(size_of(path)) for path in layers}


def test_patterns_that_change_nothing_give_a_plain_adapter(tmp_path):
    folder = make_model(tmp_path / "m", **TINY)
    found = []
    for rank in (4, "8,block.0-99=4"):
        network, _ = load_base(folder, mx.float32)
        adapters = add_adapters(network, TrainConfig(lora_rank=rank, lora_targets=("q_proj",)))
        found.append((adapters.config, adapter_arrays(network)))
    (config, arrays), (other, others) = found
    assert config == other
    assert all(mx.array_equal(arrays[name], others[name]) for name in arrays)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": "4,mpl=8"}, "--lora-rank mpl=8: no adapted layer has mpl .*mean mlp"),
        ({"lora_alpha": "4,block.0=8"}, "--lora-alpha block.0=8: selects no adapted layer"),
        ({"lora_rank": "4,q_proj=129"}, "--lora-rank 129: the adapted layers have at most"),
    ],
)
def test_patterns_that_do_not_fit_the_model_are_refused(tmp_path, settings, message):
    network, _ = load_base(make_model(tmp_path / "m"), mx.float32)
    config = TrainConfig(lora_layers=2, **settings)
    with pytest.raises(UserError, match=f"^{message}"):
        add_adapters(network, config)


FEWER = {**MIXED, "lora_layers": 2, "lora_rank": "4,mlp=6,block.1=3"}
EXPERTS = {**MIXED, "lora_rank": "4,switch_mlp=2,block.1=3", "lora_experts": True}


@pytest.mark.parametrize("adapter_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("architecture", "settings", "dora"),
    [
        ("llama", MIXED, False), ("llama", MIXED, True), ("llama", FEWER, False),
        ("qwen3_moe", EXPERTS, False),
    ],
)  # fmt: skip
def test_adapters_have_the_estimated_bytes(tmp_path, architecture, settings, dora, adapter_dtype):
    folder = make_model(tmp_path / "m", architecture)
    config = TrainConfig(**settings, use_dora=dora, adapter_dtype=adapter_dtype)
    network, _ = load_base(folder, mx.float32)
    add_adapters(network, config)
    real = sum(array.nbytes for array in adapter_arrays(network).values())
    workload = workload_of(config, facts_of(folder, 4), DataSizes(lengths=(32,)), ProcessFacts())
    assert adapter_bytes(workload.facts, workload.training) == real
