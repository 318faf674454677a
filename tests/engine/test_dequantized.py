"""Compare the quantized layers for the CPU with MLX's own."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.conftest import load_base, make_model, peak_of
from tests.engine.test_fused import relative_error
from tests.scheduling import compute_in_order
from your_ai.config import TrainConfig
from your_ai.engine import dequantized
from your_ai.engine.dequantized import (
    DequantizedEmbedding,
    DequantizedLinear,
    dequantize_on_the_cpu,
)
from your_ai.nets import model
from your_ai.nets.head import LayerRows

TOKENS = mx.array([[5, 300, 17, 42, 99, 260, 700]])


def quantized_linear(
    bits: int = 4, bias: bool = True, mode: str = "affine", group_size: int = 32
) -> nn.QuantizedLinear:
    mx.random.seed(bits)
    return nn.QuantizedLinear.from_linear(nn.Linear(128, 96, bias), group_size, bits, mode=mode)


@pytest.mark.parametrize("slice_bytes", [1, 128 * 4 * 40, 1 << 30], ids=["one row", "some", "all"])
@pytest.mark.parametrize("shape", [(3, 7, 128), (9, 128), (1, 2, 128), (128,)])
@pytest.mark.parametrize("bits", [4, 8])
def test_output_and_gradient_equal_mlx(monkeypatch, bits, shape, slice_bytes):
    monkeypatch.setattr(dequantized, "DEQUANTIZED_SLICE_BYTES", slice_bytes)
    base = quantized_linear(bits)
    ours = DequantizedLinear.from_base(base)
    x = mx.random.normal(shape)
    assert relative_error(ours(x), base(x)) < 1e-5

    def gradient(layer: nn.Module) -> mx.array:
        return mx.grad(lambda x: mx.square(layer(x)).sum())(x)

    assert relative_error(gradient(ours), gradient(base)) < 1e-5
    assert relative_error(mx.compile(lambda: gradient(ours))(), gradient(base)) < 1e-5


@pytest.mark.parametrize(
    "kind", [(3,), (5,), (6,), (4, True, "mxfp4"), (4, True, "nvfp4", 16), (8, False, "mxfp8")]
)
def test_every_quantization_mode_equals_mlx(kind):
    network = nn.Sequential(quantized_linear(*kind))
    base = network.layers[0]
    dequantize_on_the_cpu(network)
    ours = network.layers[0]
    assert type(ours) is DequantizedLinear
    for tokens in (2, 9):
        x = mx.random.normal((tokens, 128))
        assert relative_error(ours(x), base(x)) < 1e-5
        grads = [
            mx.grad(lambda x, layer=layer: mx.square(layer(x)).sum())(x) for layer in (ours, base)
        ]
        assert relative_error(*grads) < 1e-5


def test_embedding_and_tied_head_equal_mlx():
    base = nn.QuantizedEmbedding.from_embedding(nn.Embedding(96, 128), 64, 4)
    ours = DequantizedEmbedding.from_base(base)
    assert mx.array_equal(ours(TOKENS % 96), base(TOKENS % 96))
    x = mx.random.normal((2, 9, 128))
    assert relative_error(ours.as_linear(x), base.as_linear(x)) < 1e-5


@pytest.mark.memory
@pytest.mark.parametrize("bits", [4, 5, 6])
def test_slices_bound_peak_memory(bits):
    """Forward and backward pass of a layer whose dequantized weight takes 64 MB."""
    base = nn.QuantizedLinear.from_linear(nn.Linear(1024, 16384, bias=False), 64, bits)
    ours = DequantizedLinear.from_base(base)
    x = mx.random.normal((8, 1024))
    mx.eval(base.parameters(), x)
    assert peak_of(lambda: mx.grad(lambda x: ours(x).sum())(x)) < 32 << 20


def peaks_of(bits: int, group_size: int, mode: str) -> dict[str, int]:
    """Bytes of a layer's forward and backward pass, and of a head's slice in both directions."""
    linear = nn.Linear(1024, 2816, bias=False)
    base = nn.QuantizedLinear.from_linear(linear, group_size, bits, mode=mode)
    ours, rows = DequantizedLinear.from_base(base), LayerRows(base)
    x, cotangent = mx.random.normal((64, 1024)), mx.ones((64, 2816))
    mx.eval(base.parameters(), x, cotangent)

    def in_both_directions() -> mx.array:
        part = rows.part(0, 2048)
        return part.backward(part.forward(x))

    compute_in_order()
    found = {}
    for name, run in {
        "forward": lambda: ours(x),
        "backward": lambda: mx.vjp(ours, [x], [cotangent])[1],
        "head": in_both_directions,
    }.items():
        mx.eval(run())
        found[name] = peak_of(run)
    return found


@pytest.mark.memory
@pytest.mark.parametrize("kind", [(4, 32, "mxfp4"), (4, 16, "nvfp4"), (8, 32, "mxfp8")])
def test_floats_of_few_bits_need_little_more_memory_than_integers(kind):
    found, of_integers = peaks_of(*kind), peaks_of(kind[0], 32, "affine")
    assert all(found[name] <= 1.25 * of_integers[name] for name in found), (found, of_integers)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "qwen3_moe"])
def test_model_output_is_unchanged(tmp_path, architecture):
    network, _ = load_base(make_model(tmp_path / "m", architecture), mx.float32)
    expected = network(TOKENS)
    names = [name for name, _ in tree_flatten(network.parameters())]
    dequantize_on_the_cpu(network)
    assert relative_error(network(TOKENS), expected) < 1e-5
    assert [name for name, _ in tree_flatten(network.parameters())] == names
    assert not any(type(m) is nn.QuantizedLinear for m in network.modules())


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_are_unchanged(tiny_model, dora):
    network, _ = load_base(tiny_model, mx.float32)
    config = TrainConfig(lora_layers=2, lora_targets=("all-linear",), use_dora=dora)
    model.add_adapters(network, config)
    expected, names = network(TOKENS), set(model.adapter_arrays(network))
    dequantize_on_the_cpu(network)
    assert set(model.adapter_arrays(network)) == names
    assert relative_error(network(TOKENS), expected) < 1e-5


def test_layers_are_not_replaced_on_a_gpu(tiny_model, monkeypatch):
    network, _ = load_base(tiny_model, mx.float32)
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    dequantize_on_the_cpu(network)
    assert isinstance(network.model.embed_tokens, nn.QuantizedEmbedding)
