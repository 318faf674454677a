"""Quantize and dequantize the weights of layers, as MLX's layers and llama.cpp's types hold them.

Shapes: O outputs, D inputs; leading axes, as of experts, are free.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.config.rounding import AFFINE, GGML_TYPES, Rounding

WRITTEN = "written_dtype"  # an attribute: the name of the dtype of scales or weights in the files
MLX_PARTS = ("weight", "scales", "biases")  # the arrays of a quantized weight


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
    return dict(zip(MLX_PARTS, (values, *others), strict=False))


def quantized_arrays(
    arrays: Mapping[str, mx.array],
) -> tuple[mx.array, mx.array, mx.array | None]:
    """Weight, scales and biases of a quantized layer, from its arrays by name."""
    return arrays["weight"], arrays["scales"], arrays.get("biases")


def dense(
    arrays: Mapping[str, mx.array], quantization: dict[str, Any], dtype: mx.Dtype | None = None
) -> mx.array:
    """The weight of a layer as a dense array.

    quantization: the arguments of mx.dequantize, or {} if the layer is not quantized.
    dtype: of quantized rows. Without it, modes of 4-bit and 8-bit floats give bfloat16, which each
    product with float32 would copy.
    """
    if not quantization:
        return arrays["weight"]
    return mx.dequantize(*quantized_arrays(arrays), **quantization, dtype=dtype)


def float32_weight(arrays: Mapping[str, mx.array], rounding: Rounding | None) -> mx.array:
    """The weight of a layer, dequantized in float32 also where its scales have fewer digits."""
    if rounding is None:
        return arrays["weight"].astype(mx.float32)
    if rounding.mode == AFFINE:
        others = {name: arrays[name].astype(mx.float32) for name in MLX_PARTS[1:]}
        arrays = {"weight": arrays["weight"], **others}
    return dense(arrays, rounding.options, mx.float32)


def rounded(weight: mx.array, rounding: Rounding, dtype: mx.Dtype) -> mx.array:
    """(O, D) float32, rounded; dtype: as in `packed`."""
    if rounding.mode not in GGML_TYPES:
        return float32_weight(packed(weight, rounding, dtype), rounding)
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
