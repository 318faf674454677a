"""Compare split heads with the logits of the models."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_map
from mlx_lm.tuner.lora import LoRALinear

from tests.conftest import peak_of
from tests.engine.test_fused import relative_error
from your_ai.engine.dequantized import DequantizedEmbedding, dequantize_on_the_cpu
from your_ai.nets import head as head_module
from your_ai.nets.head import LayerRows, LinearHead, linear_head
from your_ai.nets.split import split

D, V = 64, 320
COMMON = {
    "hidden_size": D, "num_hidden_layers": 1, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": V,
}  # fmt: skip
GRANITE = {
    "logits_scaling": 6.0, "attention_multiplier": 0.25, "embedding_multiplier": 12.0,
    "residual_multiplier": 0.2, "max_position_embeddings": 128, "attention_bias": False,
    "mlp_bias": False, "rope_theta": 10000.0,
}  # fmt: skip
MINICPM = {"dim_model_base": 16, "scale_depth": 1.4, "scale_emb": 12.0}
# (architecture, its settings, whether its head has a `before`, whether it has an `after`)
MODELS = {
    "llama tied": ("llama", {"tie_word_embeddings": True}, False, False),
    "llama untied": ("llama", {"tie_word_embeddings": False}, False, False),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}, False, False),
    "gemma2": ("gemma2", {"head_dim": 16, "final_logit_softcapping": 3.0}, False, True),
    "cohere": ("cohere", {"logit_scale": 0.0625}, False, True),
    "granite tied": ("granite", GRANITE, False, True),
    "granite untied": ("granite", {**GRANITE, "tie_word_embeddings": False}, False, True),
    "minicpm": ("minicpm", MINICPM, True, False),
}


def make(architecture: str, settings: dict[str, Any], kind: str = "float") -> nn.Module:
    """A model with random weights; kind: float, quantized, or dequantized (as on the CPU)."""
    module = importlib.import_module(f"mlx_lm.models.{architecture}")
    mx.random.seed(0)
    config = {"model_type": architecture, **COMMON, **settings}
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: 3 * p, model.parameters()))
    if kind != "float":
        nn.quantize(model, group_size=32, bits=4)
    if kind == "dequantized":
        dequantize_on_the_cpu(model)
    model.freeze()
    return model


def logits_of(head: LinearHead, hidden: mx.array, step: int) -> mx.array:
    """(S, V) logits, computed slice by slice."""
    inputs, starts = head.inputs(hidden), range(0, head.rows.shape[0], step)
    parts = [head.rows.part(i, min(i + step, head.rows.shape[0])) for i in starts]
    return mx.concatenate([head.logits(part.forward(inputs)) for part in parts], axis=1)


@pytest.mark.parametrize("kind", ["float", "quantized", "dequantized"])
@pytest.mark.parametrize("name", MODELS)
def test_slices_give_the_logits_of_the_model(name, kind):
    architecture, settings, has_before, has_after = MODELS[name]
    plain = split(make(architecture, settings, kind)).head
    found = linear_head(plain, D, mx.float32)
    assert (found.before is not None, found.after is not None) == (has_before, has_after)
    assert tuple(found.rows.shape) == (V, D)
    hidden = mx.random.normal((7, D))
    whole = plain(hidden[None])[0]
    for step in (1000, 100, 33):
        assert relative_error(logits_of(found, hidden, step), whole) < 1e-5


def test_finds_half_precision_heads():
    for dtype in (mx.float16, mx.bfloat16):
        model = make("gemma2", MODELS["gemma2"][1])
        model.set_dtype(dtype)
        found = linear_head(split(model).head, D, dtype)
        hidden = mx.random.normal((7, D)).astype(dtype)
        assert logits_of(found, hidden, 100).dtype == dtype


class WritingHead(nn.Module):
    """As phi3small's: it writes to the logits of certain tokens. Notes the widths it is run on."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.lm_head = nn.Linear(D, V, bias=False)
        self.widths: list[int] = []

    def __call__(self, hidden: mx.array) -> mx.array:
        logits = self.lm_head(hidden)
        self.widths.append(logits.shape[-1])
        logits = logits if self.scale == 1 else self.scale * logits
        logits[..., mx.array([0])] = -mx.inf
        return logits


@pytest.mark.parametrize("scale", [1, 2])
def test_a_head_that_writes_to_certain_tokens_is_never_computed_on_a_slice(scale):
    """MLX does not check indices: a write beyond a slice would damage other memory."""
    head = WritingHead(scale)
    assert linear_head(head, D, mx.float32) is None
    assert set(head.widths) == {V}  # also where it is only traced


def test_linear_head_does_not_change_the_model():
    model = make("llama", {"tie_word_embeddings": False})
    modules = dict(model.named_modules())
    linear_head(split(model).head, D, mx.float32)
    assert dict(model.named_modules()) == modules


@pytest.mark.parametrize("start", [0, 128])
def test_slopes_are_the_derivatives_of_after(start):
    found = linear_head(split(make("gemma2", MODELS["gemma2"][1])).head, D, mx.float32)
    products = mx.random.normal((4, 32), scale=5)
    logits, slopes = found.logits_and_slopes(products)
    assert relative_error(logits, 3 * mx.tanh(products / 3)) < 1e-5
    assert relative_error(slopes, 1 - mx.tanh(products / 3) ** 2) < 1e-5


class Shell(nn.Module):
    """A head for tests, in the form that `split.split` returns."""

    def __init__(self, layer: nn.Module, after=lambda x: x) -> None:
        super().__init__()
        self.lm_head = layer
        self._after = after

    def __call__(self, hidden: mx.array) -> mx.array:
        return self._after(self.lm_head(hidden))


def linear(bias: bool = False) -> nn.Linear:
    mx.random.seed(0)
    layer = nn.Linear(D, V, bias)
    layer.freeze()
    return layer


def test_slices_include_the_bias():
    layer = linear(bias=True)
    layer.bias = mx.random.normal((V,))
    for shell in (Shell(layer), Shell(nn.QuantizedLinear.from_linear(layer, 32, 4))):
        found = linear_head(shell, D, mx.float32)
        hidden = mx.random.normal((3, D))
        assert relative_error(logits_of(found, hidden, 90), shell(hidden)) < 1e-5


@pytest.mark.parametrize(
    "shell",
    [
        Shell(linear(), lambda x: mx.softmax(x, axis=-1)),
        Shell(linear(), lambda x: x * mx.arange(V)),
        Shell(linear(), lambda x: x[..., : V - 1]),
        Shell(linear(), lambda x: x - x.max()),
        Shell(LoRALinear.from_base(linear())),
        Shell(nn.Sequential(linear(), nn.Tanh())),
        Shell(nn.Conv1d(D, V, 1)),
    ],
    ids=["softmax", "by token", "cut", "by all rows", "lora", "deep", "no linear layer"],
)
def test_nonlinear_heads_are_rejected(shell):
    assert linear_head(shell, D, mx.float32) is None


def test_head_that_uses_its_layer_twice_is_rejected():
    class Twice(Shell):
        def __call__(self, hidden: mx.array) -> mx.array:
            return self.lm_head(hidden) + self.lm_head(2 * hidden)

    assert linear_head(Twice(linear()), D, mx.float32) is None


def test_tied_minicpm_head_which_bypasses_its_layer_is_rejected():
    model = make("minicpm", {**MINICPM, "tie_word_embeddings": True})
    assert linear_head(split(model).head, D, mx.float32) is None


def layers() -> dict[str, nn.Module]:
    mx.random.seed(1)
    embedding = nn.Embedding(V, D)
    quantized = nn.QuantizedEmbedding.from_embedding(embedding, 32, 4)
    return {
        "linear": nn.Linear(D, V),
        "embedding": embedding,
        "quantized": quantized,
        "quantized linear": nn.QuantizedLinear.from_linear(nn.Linear(D, V, bias=False), 32, 8),
        "mxfp4": nn.QuantizedEmbedding.from_embedding(embedding, 32, 4, mode="mxfp4"),
        "dequantized": DequantizedEmbedding.from_base(quantized),
    }


def dense_weight(layer: nn.Module) -> mx.array:
    if "scales" not in layer:
        return layer.weight
    return mx.dequantize(
        *(layer.weight, layer.scales, layer.get("biases")),
        group_size=layer.group_size,
        bits=layer.bits,
        mode=getattr(layer, "mode", "affine"),
    )


@pytest.mark.parametrize("device", [mx.cpu, mx.gpu], ids=["cpu", "as on a gpu"])
@pytest.mark.parametrize("name", layers())
def test_layer_rows_of_each_kind_of_layer(name, device, monkeypatch):
    layer = layers()[name]
    weight, rows = dense_weight(layer), LayerRows(layer)
    bias = layer.get("bias", mx.zeros((V,)))[50:130]
    monkeypatch.setattr(head_module.mx, "default_device", lambda: SimpleNamespace(type=device))
    hidden, shares = mx.random.normal((5, D)), mx.random.normal((5, 80))
    part = rows.part(50, 130, [hidden])
    assert (part.count, tuple(rows.shape)) == (80, (V, D))
    assert relative_error(part.forward(hidden), hidden @ weight[50:130].T + bias) < 1e-5
    assert relative_error(part.backward(shares), shares @ weight[50:130]) < 1e-5
    tokens = mx.array([3, 319, 3, 0])
    assert mx.array_equal(rows.gather(tokens), weight[tokens])


@pytest.mark.memory
def test_slice_of_a_dense_weight_is_not_copied():
    layer = nn.Embedding(20_000, 256)
    hidden = mx.zeros((2, 256))
    mx.eval(layer.state, hidden)
    part = LayerRows(layer).part(1000, 15_000, [hidden])
    assert peak_of(lambda: part.backward(part.forward(hidden))) < 1e6  # the slice has 14 MB


@pytest.mark.parametrize("count", [1, 10, 1000])
def test_slices_cover_the_vocabulary_in_order(count):
    head = LinearHead(LayerRows(linear()), slice_bytes=4 * D * 50)
    slices = list(head.slices(count))
    assert [i for start, stop in slices for i in range(start, stop)] == list(range(V))
    assert all(
        (stop - start) * 4 * max(D, count) <= max(4 * D * 50, 4 * count) for start, stop in slices
    )
