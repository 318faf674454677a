"""Quantized layers for the CPU: dequantize a slice of the weight, multiply, free it.

MLX's CPU `quantized_matmul` runs at a few GFLOP/s, whichever BLAS library is installed. With a
BLAS library, dequantizing and then multiplying is up to 60 times faster for a batch of tokens.
Working in slices needs little extra memory; the backward pass dequantizes again.
On a GPU, MLX's own kernels are faster, and nothing here is used.

Shapes: N tokens, D inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from your_ai.memory.sizes import DEQUANTIZED_SLICE_BYTES
from your_ai.nets.head import rows_at_once
from your_ai.nets.mlx_types import custom_function

FEW_TOKENS = 4  # up to this many, as in generation, dequantizing costs more than it saves
Layer = TypeVar("Layer", bound=nn.Module)


@lru_cache
def sliced_matmul(group_size: int, bits: int, mode: str = "affine") -> Callable[..., mx.array]:
    """Make f(x, weight, scales, biases) = x @ dequantize(weight).T; x: (N, D) -> (N, O).

    Omit `biases` if the mode has none. Differentiable only in x: quantized weights are frozen.
    """

    def slices(weight: mx.array, inputs: int) -> list[slice]:
        rows = rows_at_once(DEQUANTIZED_SLICE_BYTES, inputs, bits, mode)
        return [slice(i, i + rows) for i in range(0, weight.shape[0], rows)]

    def dequantize(
        part: slice, weights: tuple[mx.array, ...], after: list[mx.array], dtype: mx.Dtype
    ) -> mx.array:
        """Dequantize the rows `part`, but only after the arrays `after` are computed.

        Without `dtype`, modes of 4-bit and 8-bit floats give bfloat16, and a product a copy of it.
        """
        weight, scales, *biases = mx.depends([array[part] for array in weights], after)
        how = (biases[0] if biases else None, group_size, bits, mode)
        return mx.dequantize(weight, scales, *how, dtype=dtype)

    @custom_function
    def matmul(x: mx.array, *weights: mx.array) -> mx.array:
        outputs: list[mx.array] = []
        for part in slices(weights[0], x.shape[-1]):
            w = dequantize(part, weights, outputs[-1:] or [x], x.dtype)
            outputs.append(x @ w.T)
        return outputs[0] if len(outputs) == 1 else mx.concatenate(outputs, axis=-1)

    @matmul.vjp
    def matmul_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        x, *weights = primals
        grad: mx.array | None = None
        for part in slices(weights[0], x.shape[-1]):
            w = dequantize(part, tuple(weights), [cotangent if grad is None else grad], x.dtype)
            piece = cotangent[:, part] @ w
            grad = piece if grad is None else grad + piece
        assert grad is not None
        return grad, *(mx.zeros_like(array) for array in weights)

    return matmul


def multiply(x: mx.array, layer: nn.Module) -> mx.array:
    """x @ W.T for a quantized layer; x: (..., D) -> (..., O)."""
    weights = [layer[name] for name in ("weight", "scales", "biases") if name in layer]
    tokens = x.size // x.shape[-1]
    if tokens <= FEW_TOKENS:
        how = (layer.get("biases"), True, layer.group_size, layer.bits, layer.mode)
        return mx.quantized_matmul(x, layer.weight, layer.scales, *how)
    product = sliced_matmul(layer.group_size, layer.bits, layer.mode)
    y = product(x.reshape(tokens, -1), *weights)
    return y.reshape(*x.shape[:-1], -1)


class DequantizedLinear(nn.Module):
    """An nn.QuantizedLinear with the same parameters."""

    @staticmethod
    def from_base(base: nn.Module) -> DequantizedLinear:
        return _with_parameters_of(base, DequantizedLinear())

    def __call__(self, x: mx.array) -> mx.array:
        y = multiply(x, self)
        return y + self.bias if "bias" in self else y


class DequantizedEmbedding(nn.Module):
    """An nn.QuantizedEmbedding with the same parameters."""

    @staticmethod
    def from_base(base: nn.Module) -> DequantizedEmbedding:
        return _with_parameters_of(base, DequantizedEmbedding())

    def __call__(self, tokens: mx.array) -> mx.array:
        rows = (self.weight[tokens], self.scales[tokens], self.biases[tokens])
        return mx.dequantize(*rows, group_size=self.group_size, bits=self.bits)

    def as_linear(self, x: mx.array) -> mx.array:
        return multiply(x, self)


def _with_parameters_of(base: nn.Module, layer: Layer) -> Layer:
    for name, array in base.items():
        layer[name] = array
    layer.group_size, layer.bits, layer.mode = base.group_size, base.bits, base.mode
    layer.freeze()
    return layer


REPLACEMENTS: dict[type[nn.Module], type[DequantizedLinear] | type[DequantizedEmbedding]] = {
    nn.QuantizedLinear: DequantizedLinear,
    nn.QuantizedEmbedding: DequantizedEmbedding,
}


def dequantize_on_the_cpu(model: nn.Module) -> None:
    """Replace the quantized layers of a model with the layers of this file, if it runs on the CPU.

    Call it after adapters are added: mlx-lm adapts only its own layers. Embeddings whose
    quantization mode is not affine are left unchanged.
    """
    if mx.default_device().type != mx.cpu:
        return
    replaced = [
        (name, REPLACEMENTS[type(layer)].from_base(layer))
        for name, layer in model.named_modules()
        if type(layer) in REPLACEMENTS and "global_scale" not in layer
        if layer.mode == "affine" or type(layer) is nn.QuantizedLinear
    ]
    model.update_modules(tree_unflatten(replaced))
