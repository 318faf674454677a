"""Quantize and dequantize the weights of layers, as MLX's layers and llama.cpp's types hold them.

Shapes: O outputs, D inputs; leading axes, as of experts, are free.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import mlx.nn as nn

from your_ai.config.rounding import AFFINE, LLAMA_CPP, Rounding

PARTS = ("weight", "scales", "biases")


def quantization_of(layer: nn.Module) -> Rounding | None:
    """The format of a layer's weight; None if it is not quantized."""
    if layer.get("scales") is None:
        return None
    return Rounding(layer.bits, layer.group_size, getattr(layer, "mode", AFFINE))


def packed(weight: mx.array, rounding: Rounding, dtype: mx.Dtype) -> dict[str, mx.array]:
    """The arrays of MLX's layer with the weight (O, D) float32, quantized; dtype: of the scales and
    biases, if the mode does not decide it."""
    values, *others = mx.quantize(weight, **rounding.options)
    if rounding.mode == AFFINE:
        others = [array.astype(dtype) for array in others]
    return dict(zip(PARTS, (values, *others), strict=False))


def dense(parts: Mapping[str, mx.array], rounding: Rounding | None) -> mx.array:
    """The weight of a layer in float32, from its arrays by name."""
    weight, *others = (parts[name] for name in PARTS if name in parts)
    if rounding is None:
        return weight.astype(mx.float32)
    if rounding.mode == AFFINE:
        others = [array.astype(mx.float32) for array in others]
    scales, biases = others[0], others[1] if len(others) > 1 else None
    return mx.dequantize(weight, scales, biases, **rounding.options, dtype=mx.float32)


def rounded(weight: mx.array, rounding: Rounding, dtype: mx.Dtype) -> mx.array:
    """(O, D) float32, rounded; dtype: as in `packed`."""
    if rounding.mode not in LLAMA_CPP:
        return dense(packed(weight, rounding, dtype), rounding)
    return rounded_by_ggml(weight, rounding)


def rounded_by_ggml(weight: mx.array, rounding: Rounding) -> mx.array:
    """Round as llama.cpp's quantize_row_q4_0_ref and quantize_row_q8_0_ref do; (O, D) float32.

    Scales are float16. q4_0: the value that is largest, without its sign, becomes -8.
    """
    groups = weight.reshape(*weight.shape[:-1], -1, rounding.group_size)
    most = mx.abs(groups).max(-1, keepdims=True)
    if rounding.mode == "q8_0":
        scale = most / 127
        values = mx.round(groups * reciprocal(scale))
    else:
        lowest = groups.min(-1, keepdims=True)
        scale = mx.where(-lowest == most, lowest, most) / -8
        values = mx.minimum(mx.floor(groups * reciprocal(scale) + 8.5), 15) - 8
    exact = scale.astype(mx.float16).astype(mx.float32)
    return (values * exact).reshape(weight.shape)


def reciprocal(scale: mx.array) -> mx.array:
    """1 / scale, and 0 for 0."""
    return mx.where(scale == 0, 0, 1 / mx.where(scale == 0, 1, scale))
