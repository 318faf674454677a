"""Weights are rounded as MLX's layers and llama.cpp's types hold them."""

from __future__ import annotations

import gguf
import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from your_ai.config.rounding import Rounding, rounding_of
from your_ai.nets.rounding import float32_weight, packed, rounded

TYPES = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("same", None),
        ("4", Rounding(4, 64)),
        ("8:32", Rounding(8, 32)),
        ("q4_0", Rounding(4, 32, "q4_0")),
        ("q8_0", Rounding(8, 32, "q8_0")),
    ],
)
def test_formats_are_read(text, wanted):
    assert rounding_of(text) == wanted


@pytest.mark.parametrize("text", ["", "7", "4:", "4:48", "q4_k_m", "4:64:2", "-4", "٤", "16"])
def test_unknown_formats_are_refused_with_the_known_ones(text):
    with pytest.raises(ValueError, match=r"^give same, BITS or BITS:GROUP"):
        rounding_of(text)


@pytest.mark.parametrize("name", TYPES)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), size=st.floats(1e-6, 1e4), zeros=st.booleans())
def test_llama_cpp_types_are_those_of_the_library_gguf(name, seed, size, zeros):
    """Values between two levels may be rounded either way: those are at most a few."""
    weight = size * np.random.default_rng(seed).standard_normal((8, 96)).astype(np.float32)
    if zeros:
        weight[2, 32:64] = 0
    wanted = gguf.quants.dequantize(gguf.quants.quantize(weight, TYPES[name]), TYPES[name])
    found = np.array(rounded(mx.array(weight), rounding_of(name), mx.float32))
    differs = np.abs(found - wanted) > 1e-6 * np.abs(weight).max()
    assert differs.mean() < 0.005
    step = np.abs(weight).max() / (7 if name == "q4_0" else 100)
    assert np.abs(found - wanted).max() <= step


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("text", ["2:32", "4", "5:64", "8:128"])
def test_rounded_weights_are_those_of_the_layer_that_holds_them(text, dtype):
    weight, rounding = mx.random.normal((6, 128), key=mx.random.key(1)), rounding_of(text)
    parts = packed(weight, rounding, dtype)
    assert parts["scales"].dtype == dtype
    layer = float32_weight(parts, rounding)
    assert mx.array_equal(rounded(weight, rounding, dtype), layer)
    assert mx.abs(layer - weight).max() < mx.abs(weight).max()
