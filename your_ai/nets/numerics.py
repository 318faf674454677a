"""Elementary functions where MLX's own are slow, or lose digits."""

from __future__ import annotations

import mlx.core as mx

SUM_BLOCK = 128
EXP2 = (1.0, 0.69314719, 0.24022107, 0.05550357, 0.00967603, 0.00133909)  # of 2**x, |x| <= 1/2
ROUNDING = 1.5 * 2.0**23  # a float32 of this size has no digits after the point


def exp(x: mx.array) -> mx.array:
    """exp(x) for float32 x <= 0.

    MLX's own takes 11.5 ns an element on an x86 CPU, which was a fifth of a training step;
    this takes 1. It is right to 2e-7 of 1, and to 4e-6 of the result (MLX's own to 2e-6).
    """
    return _exp_by_polynomial(x) if mx.default_device().type == mx.cpu else mx.exp(x)


@mx.compile
def _exp_by_polynomial(x: mx.array) -> mx.array:
    """2**k 2**f: k a whole number, in the exponent's bits, and f in [-1/2, 1/2].

    2**f is a polynomial of degree 5, by Chebyshev interpolation right to 1e-7, in
    Estrin's order: so short a chain that mx.compile makes few kernels of it.
    """
    z = mx.maximum(x * 1.44269504, -127.0)  # log2(e); 2**-127 comes out as 0
    rounded = z + ROUNDING
    f = z - (rounded - ROUNDING)
    square = f * f
    c = EXP2
    y = (c[0] + c[1] * f) + square * ((c[2] + c[3] * f) + square * (c[4] + c[5] * f))
    return y * mx.view((mx.view(rounded, mx.int32) << 23) + (127 << 23), mx.float32)


def sum_in_blocks(values: mx.array) -> mx.array:
    """The sum of (S,) values, by sums of blocks.

    One running float32 sum of many like values loses digits: 70,000 times log 4 comes
    out 6e-4 too small on the CPU backend, and the losses of an untrained model are alike.
    """
    padded = mx.pad(values, (0, -len(values) % SUM_BLOCK))
    return padded.reshape(-1, SUM_BLOCK).sum(axis=1).sum()
