"""Short convolutions of each channel with its own weights, as sums of shifted products.

For 1,024 tokens of 2,048 channels and K = 4 on two CPU cores, MLX's own convolution takes 0.3 s
and 59 MB, forward and backward; this takes 0.03 s and 25 MB.

Shapes: B rows, n outputs per row, C channels, K weights per channel.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from your_ai.nets.mlx_types import custom_function


@custom_function
def convolution(x: mx.array, weight: mx.array) -> mx.array:
    """y_t = sum over j of w_j x_{t+j}: x (B, n + K - 1, C), weight (C, K, 1) -> (B, n, C).

    Computed in float32; the output has the dtype that x w has. Differentiable in both.
    """
    return _shifted_sum(x, weight.squeeze(-1)).astype(mx.result_type(x, weight))


@convolution.vjp
def _convolution_vjp(primals: Any, cotangent: mx.array, result: Any) -> tuple[mx.array, mx.array]:
    x, weight = primals
    K, n = weight.shape[1], cotangent.shape[1]
    padded = mx.pad(cotangent, [(0, 0), (K - 1, K - 1), (0, 0)])
    of_x = _shifted_sum(padded, weight.squeeze(-1)[:, ::-1]).astype(x.dtype)
    of_weight = [_sum_of_products(x[:, j : j + n], cotangent) for j in range(K)]
    return of_x, mx.stack(of_weight, axis=1)[..., None].astype(weight.dtype)


@mx.compile
def _shifted_sum(x: mx.array, weight: mx.array) -> mx.array:
    """x: (B, n + K - 1, C), weight: (C, K) -> (B, n, C), in float32."""
    K = weight.shape[1]
    n = x.shape[1] - K + 1
    shifted = [x[:, j : j + n].astype(mx.float32) * weight[:, j] for j in range(K)]
    return sum(shifted[1:], shifted[0])


def _sum_of_products(x: mx.array, y: mx.array) -> mx.array:
    """(B, n, C) each -> (C,)"""
    return (x.astype(mx.float32) * y).sum(axis=(0, 1))
