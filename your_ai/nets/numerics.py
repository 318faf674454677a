"""The backend of MLX, and replacements for functions that are slow or inaccurate on the CPU."""

from __future__ import annotations

import re
from collections.abc import Sequence

import mlx.core as mx

SUM_BLOCK = 128
# The first MLX version whose causal attention and gated delta rule have fused backward passes.
METAL_VJP = (0, 32, 4)
EXP2 = (1.0, 0.69314719, 0.24022107, 0.05550357, 0.00967603, 0.00133909)  # of 2**x, |x| <= 1/2
ROUNDING = 1.5 * 2.0**23  # a float32 of this size has no fractional digits


def mlx_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", mx.__version__)[:3]))  # type: ignore[attr-defined]


def settled(state: Sequence[mx.array]) -> list[mx.array]:
    """Return the same arrays, made to depend on one another.

    So all sums of a slice of the vocabulary are computed before the next slice begins, and compiled
    kernels end where a slice ends, so that all slices share them.
    """
    found: list[mx.array] = mx.depends(list(state), list(state))
    return found


def compute_dtype(name: str) -> mx.Dtype:
    """The dtype that `--dtype` means on this device."""
    if name == "auto":
        return mx.bfloat16 if mx.default_device().type == mx.gpu else mx.float32
    dtype: mx.Dtype = getattr(mx, name)
    return dtype


def device() -> str:
    """cpu, metal or cuda."""
    if mx.default_device().type == mx.cpu:
        return "cpu"
    return "metal" if mx.metal.is_available() else "cuda"


def exp(x: mx.array) -> mx.array:
    """exp(x) for float32 x <= 0.

    mx.exp takes 11.5 ns per element on an x86 CPU, a fifth of a training step; this function
    takes 1 ns. Its absolute error is at most 2e-7 and its relative error at most 4e-6 (mx.exp:
    2e-6).
    """
    return _exp_by_polynomial(x) if mx.default_device().type == mx.cpu else mx.exp(x)


@mx.compile
def _exp_by_polynomial(x: mx.array) -> mx.array:
    """exp(x) = 2**k 2**f: k an integer, stored in the exponent bits, and f in [-1/2, 1/2].

    2**f is a polynomial of degree 5 from Chebyshev interpolation, accurate to 1e-7. It is
    evaluated with Estrin's scheme, a chain so short that mx.compile makes few kernels of it.
    """
    z = mx.maximum(x * 1.44269504, -127.0)  # log2(e); 2**-127 becomes 0
    rounded = z + ROUNDING
    f = z - (rounded - ROUNDING)
    square = f * f
    c = EXP2
    y = (c[0] + c[1] * f) + square * ((c[2] + c[3] * f) + square * (c[4] + c[5] * f))
    return y * mx.view((mx.view(rounded, mx.int32) << 23) + (127 << 23), mx.float32)


def sum_in_blocks(values: mx.array) -> mx.array:
    """The sum of (S,) values, computed as a sum of block sums.

    A single running float32 sum of many similar values loses digits: on the CPU backend,
    70,000 times log 4 is 6e-4 too small, and the losses of an untrained model are similar.
    """
    padded = mx.pad(values, (0, -len(values) % SUM_BLOCK))
    return padded.reshape(-1, SUM_BLOCK).sum(axis=1).sum()
