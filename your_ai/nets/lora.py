"""LoRA: y = W x + s B A x, with mlx-lm's layers; or with weights that are rounded in training.

With `--qat`, y = Q(W + s B A) x: Q rounds to the format that the result is written in, so what is
trained is what `fuse` writes (quantization-aware training). The gradient of Q is taken as that of
the identity (the straight-through estimator; Bengio, Leonard and Courville, arXiv 1308.3432): A
and B get LoRA's gradients at the rounded weights. The weight is dequantized, adapted, rounded and
multiplied slice by slice, and again in the backward pass, so no dense weight is ever whole.

Shapes: N tokens, D inputs, O outputs, r rank, n rows of a slice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.lora import LoRALinear as Layer
from mlx_lm.tuner.utils import linear_to_lora_layers

from your_ai.config.rounding import OPTION, Rounding, rounding_of
from your_ai.memory.sizes import DEQUANTIZED_SLICE_BYTES
from your_ai.nets.head import rows_at_once
from your_ai.nets.mlx_types import custom_function
from your_ai.nets.rounding import MLX_PARTS, WRITTEN, float32_weight, quantization_of, rounded

__all__ = ["Layer", "RoundedLayer", "fused_rows", "limits", "put"]


def put(model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
    """Add layers to the last `count` blocks: mlx-lm's, or with a rounding those of this file.

    Raises ValueError if a layer cannot be rounded so.
    """
    linear_to_lora_layers(model, count, parameters)
    if parameters.get(OPTION) is not None:
        put_rounding(model, parameters[OPTION])


def fused_rows(
    weight: mx.array, parts: Mapping[str, mx.array], scale: float, rows: slice
) -> mx.array:
    """Rows of W + scale * B A, separately for each expert if a layer has experts.

    lora_a, lora_b: (I, r) and (r, O), or (E, r, I) and (E, O, r) with experts.
    """
    a, b = (parts[name].astype(mx.float32) for name in ("lora_a", "lora_b"))
    if a.ndim == 3:
        return weight + (scale * b[rows]) @ a[rows]
    return weight + (scale * b[:, rows].T) @ a.T


def limits(model: nn.Module) -> str:
    """Nothing: everything that reads adapters reads these."""
    return ""


@lru_cache
def rounded_matmul(
    rounding: Rounding, own: Rounding | None, scale: float, written: str
) -> Callable[..., mx.array]:
    """Make f(x, lora_a, lora_b, weight, *others) = x @ Q(W + scale * B A).T; x: (N, D) -> (N, O).

    own: the format of W, whose arrays are `weight` and `others`. written: the dtype of the scales
    of the result; "" for that of x. Differentiable in x, A and B.
    """

    kept: mx.Dtype | None = getattr(mx, written) if written else None
    formats = [(each.bits, each.mode) for each in (rounding, own) if each is not None]

    def slices(weight: mx.array, inputs: int) -> list[slice]:
        rows = min(rows_at_once(DEQUANTIZED_SLICE_BYTES, inputs, *each) for each in formats)
        return [slice(i, min(i + rows, weight.shape[0])) for i in range(0, weight.shape[0], rows)]

    def rows_of(
        part: slice, lora_a: mx.array, lora_b: mx.array, arrays: tuple[mx.array, ...],
        after: list[mx.array], dtype: mx.Dtype,
    ) -> mx.array:  # fmt: skip
        """Rounded rows, (n, D), computed only after the arrays `after`."""
        given = mx.depends([array[part] for array in arrays], after)
        weight = float32_weight(dict(zip(MLX_PARTS, given, strict=False)), own)
        adapted = fused_rows(weight, {"lora_a": lora_a, "lora_b": lora_b}, scale, part)
        return rounded(adapted, rounding, kept or dtype).astype(dtype)

    @custom_function
    def matmul(x: mx.array, lora_a: mx.array, lora_b: mx.array, *arrays: mx.array) -> mx.array:
        outputs: list[mx.array] = []
        for part in slices(arrays[0], x.shape[-1]):
            w = rows_of(part, lora_a, lora_b, arrays, outputs[-1:] or [x], x.dtype)
            outputs.append(x @ w.T)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)

    @matmul.vjp
    def matmul_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        x, lora_a, lora_b, *arrays = primals
        grad: mx.array | None = None
        for part in slices(arrays[0], x.shape[-1]):
            after = [cotangent if grad is None else grad]
            w = rows_of(part, lora_a, lora_b, tuple(arrays), after, x.dtype)
            piece = cotangent[:, part] @ w
            grad = piece if grad is None else grad + piece
        assert grad is not None
        back = scale * (cotangent @ lora_b.T.astype(x.dtype))
        grad_a = (x.T @ back).astype(lora_a.dtype)
        grad_b = (scale * ((x @ lora_a.astype(x.dtype)).T @ cotangent)).astype(lora_b.dtype)
        return grad, grad_a, grad_b, *(mx.zeros_like(array) for array in arrays)

    return matmul


class RoundedLayer(nn.Module):
    """A linear layer, quantized or not, with LoRA, whose weight is rounded.

    linear: the wrapped layer; lora_a: (D, r), lora_b: (r, O).
    """

    rounding: Rounding
    written: str
    """The dtype of the scales that `fuse` writes; "" for a network without files."""

    @staticmethod
    def from_base(base: Layer, rounding: Rounding | None, path: str) -> RoundedLayer:
        """base: a new layer; rounding: None for its own. Raises ValueError if it cannot be."""
        layer = RoundedLayer()
        layer.linear, layer.dropout, layer.scale = base.linear, base.dropout, base.scale
        layer.lora_a, layer.lora_b = base.lora_a, base.lora_b
        own = rounding or quantization_of(base.linear)
        if own is None:
            raise ValueError(f"{path} is not quantized; give its bits")
        inputs = base.lora_a.shape[0]
        if inputs % own.group_size:
            raise ValueError(f"{path} has {inputs} inputs, no multiple of {own.group_size}")
        layer.rounding, layer.written = own, getattr(base.linear, WRITTEN, "")
        return layer

    def __call__(self, x: mx.array) -> mx.array:
        """x: (..., D) -> (..., O)"""
        arrays = [self.linear[name] for name in MLX_PARTS if self.linear.get(name) is not None]
        own = quantization_of(self.linear)
        product = rounded_matmul(self.rounding, own, float(self.scale), self.written)
        y = product(x.reshape(-1, x.shape[-1]), self.lora_a, self.lora_b, *arrays)
        y = y.reshape(*x.shape[:-1], -1)
        return y + self.linear.bias if "bias" in self.linear else y


def put_rounding(model: nn.Module, text: str) -> None:
    """Replace the LoRA layers of a model by layers whose weights are rounded.

    text: the format, as of `--qat`. Raises ValueError if a layer cannot be rounded to it.
    """
    rounding = rounding_of(text)
    replaced = [
        (name, RoundedLayer.from_base(layer, rounding, name))
        for name, layer in model.named_modules()
        if type(layer) is Layer
    ]
    model.update_modules(tree_unflatten(replaced))
