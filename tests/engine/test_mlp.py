"""A sliced MLP computes the same as the whole MLP, with less memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear

from tests.conftest import peak_of
from tests.nets.test_attention import relative_error
from tests.scheduling import compute_in_order
from your_ai.engine import dequantized, mlp
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.mlp import SlicedMLP, can_be_sliced, cut
from your_ai.memory import facts
from your_ai.nets.adapter_kinds import normed_layers, norms_of, use_norms
from your_ai.nets.dora import DoRA
from your_ai.nets.model import DropoutKeys, KeyedDropout, TokenKeys
from your_ai.nets.parts import arrays_of, put

KERNELS = "measured"  # they make the peaks smaller


HIDDEN, INNER = 64, 384


class MLP(nn.Module):
    def __init__(self, inner: int = INNER, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, inner, bias=bias)
        self.up_proj = nn.Linear(HIDDEN, inner, bias=bias)
        self.down_proj = nn.Linear(inner, HIDDEN, bias=bias)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Sparse(MLP):
    """As in gemma3n: drops features that are small compared with the others."""

    def __call__(self, x: mx.array) -> mx.array:
        gate = self.gate_proj(x)
        gate = mx.maximum(gate - gate.mean(axis=-1, keepdims=True), 0)
        return self.down_proj(gate * self.up_proj(x))


class Curious(MLP):
    """Reads the weights of its layers directly."""

    def __call__(self, x: mx.array) -> mx.array:
        return super().__call__(x) * self.gate_proj.weight.size


MODES = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}  # bits, group size


def quantize(network: nn.Module, bits: int | str, dense: str) -> None:
    """bits: of a mode that is affine, or the name of another; dense: a layer that stays dense."""
    mode = bits if isinstance(bits, str) else "affine"
    bits, group_size = MODES.get(mode, (bits, 32))
    nn.quantize(network, group_size, bits, mode=mode, class_predicate=lambda path, _: path != dense)


def adapted(
    bits: int | str | None,
    bias: bool,
    dropout: float,
    layer: type = LoRALinear,
    dora: bool = False,
    dense: str = "",
    rank: int = 4,
    **kind: Any,
):
    """(an MLP with nonzero adapters, its dropout keys); bits, dense: as of `quantize`."""
    mx.random.seed(2)
    keys = DropoutKeys([None])
    network = MLP(bias=bias, **kind)
    if bits:
        quantize(network, bits, dense)
    network.freeze()
    for number, name in enumerate(("gate_proj", "up_proj", "down_proj")):
        network[name] = layer.from_base(network[name], r=rank)
        if dora:
            network[name] = DoRA.from_base(network[name])
        network[name].lora_b = 0.1 * mx.random.normal(network[name].lora_b.shape)
        network[name].dropout = KeyedDropout(dropout, number, keys)
    dequantize_on_the_cpu(network)
    return network, keys


def gradients(
    network: nn.Module, keys: DropoutKeys, x: mx.array, drawn: TokenKeys | None = None
) -> list[mx.array]:
    """Gradients of x and of the trained arrays, compiled as in the staged engine."""
    trained = dict(tree_flatten(network.trainable_parameters()))
    names, arrays = list(trained), list(trained.values())

    def both(x: mx.array, *arrays: mx.array):
        def forward(x: mx.array, *arrays: mx.array) -> mx.array:
            put(network, dict(zip(names, arrays, strict=True)))
            keys.set(drawn)
            y = network(x)
            keys.set(None)
            return y

        return mx.vjp(forward, [x, *arrays], [mx.cos(x)])[1]

    found = mx.compile(both)(x, *arrays)
    put(network, dict(zip(names, arrays, strict=True)))
    return found


@settings(max_examples=12, deadline=None)
@given(
    bits=st.sampled_from([None, 4, 8]),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.3]),
    fewest=st.sampled_from([128, 256, 300]),
    batch=st.integers(1, 3),
)
def test_slices_equal_the_whole_mlp(bits, bias, dropout, fewest, batch):
    network, keys = adapted(bits, bias, dropout)
    x = mx.random.normal((batch, 9, HIDDEN))
    rows = mx.arange(batch, dtype=mx.uint32)[:, None]
    drawn = TokenKeys(rows, mx.arange(9, dtype=mx.uint32)[None])
    expected = gradients(network, keys, x, drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(facts, "FEWEST_FEATURES", fewest)
        found = gradients(SlicedMLP.from_base(network, keys), keys, x, drawn)
        keys.set(drawn)
        y = SlicedMLP.from_base(network, keys)(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5
    assert relative_error(y, network(x)) < 1e-5


@pytest.mark.parametrize("trained", [(), ("gate_proj",), ("down_proj",), ("gate_proj", "up_proj")])
@pytest.mark.parametrize(
    ("bits", "bias", "dense"),
    [(4, False, ""), (None, True, ""), (3, True, "gate_proj"), (6, False, "down_proj"),
     *((mode, mode == "nvfp4", "") for mode in MODES), ("mxfp4", False, "up_proj")],
)  # fmt: skip
def test_slices_of_mlps_with_few_adapters_or_none_equal_the_whole(
    monkeypatch, bits, bias, dense, trained
):
    network, keys = adapted(bits, bias, 0.0, dense=dense)
    assert can_be_sliced(network)
    dict.update(network, {n: network[n].linear for n in network.children() if n not in trained})
    x = mx.random.normal((2, 9, HIDDEN))
    expected = gradients(network, keys, x)
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 128)
    sliced = SlicedMLP.from_base(network, keys)
    found = gradients(sliced, keys, x)
    assert len(found) == 1 + 2 * len(trained)
    assert relative_error(sliced(x), network(x)) < 1e-5
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.parametrize("are_given", [True, False])
@pytest.mark.parametrize(("bits", "bias", "dropout"), [(4, False, 0.3), (None, True, 0.0)])
def test_slices_with_dora_equal_the_whole_mlp(monkeypatch, bits, bias, dropout, are_given):
    """The norms are of whole rows; a slice of down_proj is not enough to compute them."""
    network, keys = adapted(bits, bias, dropout, DoRALinear, dora=True)
    x = mx.random.normal((2, 9, HIDDEN))
    drawn = TokenKeys(mx.arange(2, dtype=mx.uint32)[:, None], mx.arange(9, dtype=mx.uint32)[None])
    expected = gradients(network, keys, x, drawn)
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 128)
    sliced = SlicedMLP.from_base(network, keys)
    layers = normed_layers(network) if are_given else []
    with use_norms(layers, norms_of(layers)):
        found = gradients(sliced, keys, x, drawn)
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) < 1e-5


@pytest.mark.memory
def test_gradients_of_a_high_rank_are_in_memory_once(monkeypatch):
    """Parts of a gradient that are joined in the end would be there beside the whole one."""
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 256)
    network, keys = adapted(4, False, 0.0, inner=4096, rank=128)
    x = mx.random.normal((1, 4, HIDDEN))
    mx.eval(network.parameters(), x)
    sliced = SlicedMLP.from_base(network, keys)
    sizes = sum(array.nbytes for _, array in tree_flatten(network.trainable_parameters()))
    assert peak_of(lambda: gradients(sliced, keys, x)) < 1.5 * sizes


@pytest.mark.parametrize("bits", [4, "mxfp4"])
def test_slices_of_quantized_weights_are_arrays_of_their_own_on_cuda(bits, monkeypatch):
    """CUDA's products take no columns of a larger array: "No implementation for problem shape"."""
    monkeypatch.setattr(mlp, "device", lambda: "cuda")
    network, _ = adapted(bits, False, 0.0)
    found = cut(arrays_of(network), slice(128, 256), INNER)
    packed = {path: np.asarray(array) for path, array in found.items() if "linear" in path}
    assert {path: array.shape[1] for path, array in packed.items() if "down" in path}
    for path, array in packed.items():
        assert array.flags.c_contiguous, path


@pytest.mark.memory
@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "not trained"])
def test_slicing_lowers_peak_memory(kind):
    layer = DoRALinear if kind == "DoRA" else LoRALinear
    network, keys = adapted(4, False, 0.0, layer, dora=kind == "DoRA", inner=4096)
    if kind == "not trained":
        dict.update(network, {name: network[name].linear for name in network.children()})
    x = mx.random.normal((1, 256, HIDDEN))
    compute_in_order()

    def peak(network: nn.Module) -> int:
        layers = normed_layers(network)
        with use_norms(layers, norms_of(layers)):
            mx.eval(network.parameters())
            return peak_of(lambda: gradients(network, keys, x))

    assert peak(SlicedMLP.from_base(network, keys)) < peak(network) / 3


@pytest.mark.compiled
@pytest.mark.memory
def test_projections_in_turn_lower_the_peak_memory_of_the_forward_pass(monkeypatch):
    """By two of the outputs of an inward projection, if weights are dequantized in slices."""
    monkeypatch.setattr(dequantized, "DEQUANTIZED_SLICE_BYTES", 1 << 16)
    network, keys = adapted(4, False, 0.0, inner=1024)
    x = mx.random.normal((1, 256, HIDDEN))
    networks = SlicedMLP.from_base(network, keys), network
    mx.eval(network.parameters(), [network(x) for network in networks])  # compiles
    # As MLX computes ahead: a thread that is late holds back the others.
    sliced, whole = (max(peak_of(lambda n=n: n(x)) for _ in range(9)) for n in networks)
    output_bytes = 4 * 256 * 1024
    assert sliced < whole - 1.5 * output_bytes


@pytest.mark.memory
def test_slices_lower_the_peak_memory_of_the_forward_pass(monkeypatch):
    """Against the same MLP in one slice; of dense weights, a slice would be a copy."""
    monkeypatch.setattr(dequantized, "DEQUANTIZED_SLICE_BYTES", 1 << 16)
    network, keys = adapted(4, False, 0.0, inner=8192)
    sliced, x = SlicedMLP.from_base(network, keys), mx.random.normal((1, 256, HIDDEN))
    found = forward_peak(sliced, x)
    monkeypatch.setattr(mlp, "forward_features", lambda hidden: 8192)
    assert found < forward_peak(sliced, x) / 2


@pytest.mark.memory
def test_slices_of_quantized_weights_are_not_all_copied_at_once(monkeypatch):
    monkeypatch.setattr(dequantized, "DEQUANTIZED_SLICE_BYTES", 1 << 18)
    monkeypatch.setattr(mlp, "forward_features", lambda hidden: 1 << 14)
    network, keys = adapted(8, False, 0.0, inner=1 << 16)
    x = mx.random.normal((1, 5, HIDDEN))
    down_bytes = network.down_proj.linear.weight.nbytes
    assert forward_peak(SlicedMLP.from_base(network, keys), x) < down_bytes


def forward_peak(network: nn.Module, x: mx.array) -> int:
    """Bytes of a forward pass at its peak."""
    compute_in_order()
    mx.eval(network.parameters())
    return peak_of(lambda: network(x))


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda network: adapted(None, False, 0.0, DoRALinear)[0],  # DoRA layers of mlx-lm
        lambda network: network.gate_proj,
        lambda network: Sparse(),
        lambda network: Curious(),
        lambda network: None,
        lambda network: network.update_modules({"up_proj": nn.RMSNorm(8)}),
    ],
)
def test_other_mlps_cannot_be_sliced(spoilt):
    network, _ = adapted(4, False, 0.0)
    assert can_be_sliced(network)
    assert not can_be_sliced(spoilt(network))


@pytest.mark.parametrize("weights", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("inputs", [mx.float32, mx.bfloat16])
def test_the_dtype_of_the_output_is_that_of_the_whole_mlp(monkeypatch, weights, inputs):
    network, keys = adapted(4, False, 0.0)
    network.set_dtype(weights)
    x = mx.random.normal((1, 9, HIDDEN)).astype(inputs)
    monkeypatch.setattr(facts, "FEWEST_FEATURES", 128)
    assert SlicedMLP.from_base(network, keys)(x).dtype == network(x).dtype
