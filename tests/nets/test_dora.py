"""DoRA layers: equality with mlx-lm's, peak memory, and when norms are computed."""

from __future__ import annotations

import contextlib
import gc
import itertools
import weakref
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given as examples
from hypothesis import strategies as st
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRALinear

from tests.conftest import Call, calls_of, peak_of
from tests.engine.test_fused import relative_error
from your_ai.engine import dequantized
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.nets import dora
from your_ai.nets.adapter_kinds import normed_layers, norms_of, use_norms
from your_ai.nets.dora import DoRA, put_dora, row_norms
from your_ai.nets.parts import skeleton, structure

AFFINE = [("affine", size, bits) for size, bits in itertools.product((32, 64), (2, 3, 4, 5, 6, 8))]
KINDS = [None, *AFFINE, ("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)]
INPUTS, OUTPUTS, RANK = 128, 96, 4


class Box(nn.Module):
    """A model with one layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


def linear_of(kind, bias: bool = True, dtype: mx.Dtype = mx.float32, shape=(INPUTS, OUTPUTS)):
    mx.random.seed(2)
    linear = nn.Linear(*shape, bias=bias)
    if kind is not None:
        mode, group_size, bits = kind
        linear = nn.QuantizedLinear.from_linear(linear, group_size, bits, mode=mode)
    linear.set_dtype(dtype)
    linear.freeze()
    return linear


def inputs_of(layer: nn.Module) -> int:
    return dora.LayerRows(layer.linear).shape[1]


def drawn_adapter(layer: nn.Module, seed: int = 3) -> dict[str, mx.array]:
    """A random adapter for a layer, like one that has been trained."""
    mx.random.seed(seed)
    outputs = len(layer.m)
    return {
        "lora_a": 0.1 * mx.random.normal((inputs_of(layer), RANK)),
        "lora_b": mx.random.normal((RANK, outputs)),
        "m": layer.m * (1 + 0.1 * mx.random.normal((outputs,))),
    }


def both(kind, on_the_cpu: bool = True, **options) -> tuple[DoRALinear, DoRA]:
    """mlx-lm's layer and ours, with the same arrays."""
    theirs = DoRALinear.from_base(linear_of(kind, **options), r=RANK, scale=2.0)
    ours = Box(DoRA.from_base(theirs))
    adapter = drawn_adapter(ours.layer)
    theirs.update(adapter)
    ours.layer.update(adapter)
    if on_the_cpu:
        dequantize_on_the_cpu(ours)
    return theirs, ours.layer


def gradients(layer: nn.Module, x: mx.array, compiled: bool = False) -> list[mx.array]:
    """A loss, and its gradients with respect to x and the adapter."""
    names = ("lora_a", "lora_b", "m")
    arrays = [layer[name] for name in names]

    def loss(x: mx.array, *arrays: mx.array) -> mx.array:
        layer.update(dict(zip(names, arrays, strict=True)))
        return mx.square(layer(x).astype(mx.float32)).sum()

    def run(x: mx.array, *arrays: mx.array) -> list[mx.array]:
        value, grads = mx.value_and_grad(loss, argnums=(0, 1, 2, 3))(x, *arrays)
        return [value, *grads]

    found = (mx.compile(run) if compiled else run)(x, *arrays)
    layer.update(dict(zip(names, arrays, strict=True)))
    return found


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The norms of layers that are computed from now on."""
    return calls_of(monkeypatch, dora, "row_norms")


# -- results


@examples(
    kind=st.sampled_from(KINDS),
    bias=st.booleans(),
    on_the_cpu=st.booleans(),
    slice_bytes=st.sampled_from([1, 4 * INPUTS * 40, 1 << 30]),
    tokens=st.sampled_from([(9,), (2, 7), (1, 3)]),
)
def test_output_and_gradients_equal_mlx_lm(kind, bias, on_the_cpu, slice_bytes, tokens):
    theirs, ours = both(kind, on_the_cpu, bias=bias)
    x = mx.random.normal((*tokens, INPUTS))
    expected = [theirs(x), *gradients(theirs, x)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dora, "SLICE_BYTES", slice_bytes)
        found = [ours(x), *gradients(ours, x)]
    for array, other in zip(found, expected, strict=True):
        assert relative_error(array, other) < 2e-6


@pytest.mark.parametrize("kind", [None, ("affine", 64, 4)])
def test_compiled_gradients_equal_mlx_lm(kind):
    theirs, ours = both(kind)
    x = mx.random.normal((9, INPUTS))
    for found, expected in zip(gradients(ours, x, True), gradients(theirs, x), strict=True):
        assert relative_error(found, expected) < 2e-6


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("kind", [None, ("affine", 64, 4)])
def test_half_precision_is_as_accurate_as_mlx_lm(kind, dtype):
    exact, _ = both(kind)
    theirs, ours = both(kind, dtype=dtype)
    x = mx.random.normal((16, INPUTS)).astype(dtype)
    assert ours(x).dtype == dtype
    wanted = gradients(exact, x.astype(mx.float32))
    for found, other, right in zip(gradients(ours, x), gradients(theirs, x), wanted, strict=True):
        assert found.dtype == other.dtype
        found, other = found.astype(mx.float32), other.astype(mx.float32)
        assert relative_error(found, right) < 1.5 * relative_error(other, right) + 1e-6


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_new_layer_computes_the_same_as_the_wrapped_layer(kind):
    linear = linear_of(kind, bias=False)
    layer = DoRA.from_base(DoRALinear.from_base(linear, r=RANK))
    x = mx.random.normal((9, INPUTS))
    assert layer.lora_a.shape == (INPUTS, RANK)
    assert mx.array_equal(layer(x), linear(x))


def test_new_layers_are_initialized_like_mlx_lm_layers():
    linear = linear_of(("affine", 64, 4))
    mx.random.seed(5)
    theirs = DoRALinear.from_base(linear, r=RANK)
    mx.random.seed(5)
    model = Box(DoRALinear.from_base(linear, r=RANK))
    put_dora(model)
    assert type(model.layer) is DoRA
    ours, theirs = (dict(tree_flatten(a.trainable_parameters())) for a in (model.layer, theirs))
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert mx.array_equal(array, theirs[name]), name


def test_zero_rows_and_zero_magnitudes_stay_finite():
    linear = linear_of(None)
    linear.weight = mx.concatenate([mx.zeros((1, INPUTS)), linear.weight[1:]])
    theirs = DoRALinear.from_base(linear, r=RANK)
    ours = DoRA.from_base(theirs)
    x = mx.random.normal((9, INPUTS))
    assert all(mx.isfinite(array).all().item() for array in [ours(x), *gradients(ours, x)])
    assert mx.allclose(ours(x), linear(x), rtol=1e-5, atol=1e-6)
    theirs, ours = both(None)
    for layer in (theirs, ours):
        layer.m = mx.concatenate([mx.zeros(1), layer.m[1:]])
    for found, expected in zip(gradients(ours, x), gradients(theirs, x), strict=True):
        assert relative_error(found, expected) < 2e-6


# -- memory


@pytest.mark.memory
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        (None, True),
        (("affine", 64, 4), False),
        (("affine", 64, 4), True),
        (("affine", 64, 6), False),
        (("mxfp4", 32, 4), True),
    ],
)
def test_no_dense_weight_is_allocated(monkeypatch, kind, compiled):
    """The dense weight of the layer would take 16 MB, in slices of a quarter of their bytes."""
    for module, name in ((dora, "SLICE_BYTES"), (dequantized, "DEQUANTIZED_SLICE_BYTES")):
        monkeypatch.setattr(module, name, getattr(module, name) // 4)
    _, layer = both(kind, bias=False, shape=(1024, 4096))
    x = mx.random.normal((8, 1024))

    def held(function: Callable[[], list[mx.array]]) -> int:
        mx.eval(layer.parameters(), x)
        gc.collect()
        return peak_of(function)

    assert held(lambda: [row_norms(layer.linear)]) < 5 << 20
    layers = [("layer", layer)]
    with use_norms(layers, norms_of(layers)):
        assert held(lambda: gradients(layer, x, compiled)) < 8 << 20


# -- when norms are computed


@pytest.fixture
def layer() -> DoRA:
    return both(("affine", 64, 4))[1]


def test_norms_are_computed_once_per_adapter(layer, computed):
    x = mx.random.normal((9, INPUTS))
    for _ in range(3):
        mx.eval(layer(x))
        norms_of([("layer", layer)])
    assert len(computed) == 1


@pytest.mark.parametrize("name", ["lora_a", "lora_b"])
def test_norms_are_recomputed_for_a_new_adapter(layer, computed, name):
    x = mx.random.normal((9, INPUTS))
    mx.eval(layer(x))
    first = {name: layer[name]}
    for seed in (7, 8):
        layer.update({name: drawn_adapter(layer, seed)[name]})
        expected = row_norms(layer.linear, layer.lora_a, layer.lora_b, layer.scale)
        (found,) = norms_of([("layer", layer)]).values()
        assert mx.array_equal(found, expected)
    layer.update(first)
    computed.clear()
    mx.eval(layer(x))
    assert len(computed) == 1


def test_new_magnitudes_do_not_recompute_norms(layer, computed):
    norms_of([("layer", layer)])
    layer.m = 2 * layer.m
    norms_of([("layer", layer)])
    assert len(computed) == 1


def test_replaced_adapter_is_freed(layer):
    norms_of([("layer", layer)])
    before = [weakref.ref(layer[name]) for name in ("lora_a", "lora_b")]
    layer.update(drawn_adapter(layer, 9))
    gc.collect()
    assert [array() for array in before] == [None, None]


def test_traced_norms_are_not_cached(layer):
    x = mx.random.normal((9, INPUTS))
    expected = layer(x)
    gradients(layer, x, compiled=True)
    assert mx.array_equal(layer(x), expected)


def test_given_norms_are_used_until_the_with_block_ends(layer, computed):
    x = mx.random.normal((9, INPUTS))
    expected = layer(x) - layer.linear.bias
    layers = [("layer", layer)]
    norms = {name: 2 * array for name, array in norms_of(layers).items()}
    names = [name for name, _ in tree_flatten(layer.parameters())]
    computed.clear()
    with contextlib.suppress(KeyError), use_norms(layers, norms):
        assert mx.allclose(2 * (layer(x) - layer.linear.bias), expected, atol=1e-5)
        assert [name for name, _ in tree_flatten(layer.parameters())] == names
        raise KeyError
    assert mx.allclose(layer(x) - layer.linear.bias, expected, atol=1e-5)
    assert computed == []


def test_norms_of_uses_the_frozen_weights_passed_in(layer):
    frozen = {f"layer.linear.{name}": array for name, array in layer.linear.items()}
    (expected,) = norms_of([("layer", layer)]).values()
    layer.lora_b = mx.array(layer.lora_b)  # so that the norms are computed again
    layer.linear.weight = mx.zeros_like(layer.linear.weight)
    (found,) = norms_of([("layer", layer)], frozen).values()
    assert mx.array_equal(found, expected)


def test_equal_layers_have_equal_structure():
    first, second = (Box(both(("affine", 64, 4))[1]) for _ in range(2))
    norms_of(normed_layers(first))
    assert structure(first) == structure(second) == structure(skeleton(second))
    assert structure(first) != structure(Box(both(("affine", 32, 4))[1]))
