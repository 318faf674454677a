"""--qat under each plan: LoRA's gradients at the rounded weights, slice by slice."""

from __future__ import annotations

import functools

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_unflatten

from tests.conftest import TINY, load_base, make_model
from tests.engine.test_fused import assert_step, encode, engine_loss, load, weight_of
from tests.engine.test_plans import by_plan, small_pieces
from your_ai.config import TrainConfig
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.errors import UserError
from your_ai.nets import lora
from your_ai.nets.model import add_adapters
from your_ai.nets.rounding import rounded

__all__ = ["small_pieces"]  # a fixture
ALL = {"lora_targets": ("all-linear",), "lora_layers": "all"}


class Whole(nn.Module):
    """The layer in one formula, differentiated by MLX."""

    def __init__(self, layer: lora.RoundedLayer) -> None:
        super().__init__()
        self.linear, self.lora_a, self.lora_b = layer.linear, layer.lora_a, layer.lora_b
        self.scale, self.rounding = layer.scale, layer.rounding

    def __call__(self, x: mx.array) -> mx.array:
        parts = {"lora_a": self.lora_a, "lora_b": self.lora_b}
        weight = lora.fused_rows(weight_of(self.linear), parts, self.scale, slice(None))
        weight = weight + mx.stop_gradient(rounded(weight, self.rounding, mx.float32) - weight)
        y = x @ weight.T
        return y + self.linear.bias if "bias" in self.linear else y


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Makes a model, and the loss and gradients of `Whole` layers; once for each case."""

    @functools.cache
    def make(architecture: str, bits: int | None, qat: str):
        place = tmp_path_factory.mktemp("case")
        folder = make_model(place / "m", architecture, bits, **TINY)
        network, tokenizer, adapters = load(folder, qat=qat, **ALL)
        dequantize_on_the_cpu(network)
        layers = {n: m for n, m in network.named_modules() if isinstance(m, lora.RoundedLayer)}
        assert layers
        network.update_modules(tree_unflatten([(n, Whole(m)) for n, m in layers.items()]))
        return folder, *engine_loss(network, adapters, encode(tokenizer, place), seed=3)

    return make


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed", "kept", "partly kept"])
@pytest.mark.parametrize(
    ("architecture", "bits", "qat"),
    [("llama", 4, "same"), ("llama", None, "4:32"), ("qwen2", None, "q4_0"), ("qwen3", 8, "q8_0")],
)
def test_gradients_are_those_of_lora_at_the_rounded_weights(
    tmp_path, reference, architecture, bits, qat, plan
):
    folder, *expected = reference(architecture, bits, qat)
    assert_step(by_plan(folder, tmp_path, plan, qat=qat, **ALL), *expected)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"qat": "4", "use_dora": True}, "--qat: not supported with --use-dora"),
        ({"qat": "4", "lora_dropout": 0.1}, "--qat: not supported with --lora-dropout"),
        ({"qat": "q5_k_m"}, "--qat 'q5_k_m': give same, BITS"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    ("bits", "qat", "message"),
    [
        (None, "same", "q_proj is not quantized; give its bits"),
        (4, "4:128", "q_proj has 32 inputs, no multiple of 128"),
    ],
)
def test_layers_that_cannot_be_rounded_so_are_named(tmp_path, bits, qat, message):
    network, _ = load_base(make_model(tmp_path / "m", "llama", bits, **TINY), mx.float32)
    with pytest.raises(UserError, match=rf"^--qat {qat}: .*{message}"):
        add_adapters(network, TrainConfig(qat=qat, lora_targets=("q_proj",), lora_rank=2))


def test_experts_are_refused(tmp_path):
    network, _ = load_base(make_model(tmp_path / "m", "qwen3_moe", 4), mx.float32)
    config = TrainConfig(qat="same", lora_experts=True, lora_rank=2)
    with pytest.raises(UserError, match="--qat: not supported on the expert layers"):
        add_adapters(network, config)
