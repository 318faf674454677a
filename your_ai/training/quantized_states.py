"""States of an optimizer in 8 bits, by blockwise dynamic quantization, and parameters in bfloat16.

"8-bit Optimizers via Block-wise Quantization" (Dettmers et al., 2021, arXiv 2110.02861). Each
block of values is divided by its largest absolute value, and each quotient is replaced by one of
256 numbers. These are denser near 0: seven decades, each with twice the numbers of the one below
it, so that small values have a small relative error, too.

No search is needed. The exponent and the first bits of a quotient select a cell of a table. A
cell has at most one number in it, so that a comparison with that number finds the one below.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.memory.sizes import QUANTIZED_BLOCK as BLOCK

DECADES = 7
MANTISSA_BITS = 8  # that select a cell, together with the exponent
TINY = 1e-30
SMALLEST_EXPONENT = -24  # quotients below 2 to this power are in the first cell


class Quantized(NamedTuple):
    """An array in 8 bits, of n values after padding to whole blocks."""

    codes: mx.array
    """(n,) uint8"""
    scales: mx.array
    """(n / BLOCK,) float32, the largest absolute value of each block."""


class Codebook(NamedTuple):
    """The numbers that replace absolute quotients."""

    numbers: mx.array
    """(count,) float32, ascending from 0 to 1."""
    below: mx.array
    """(cells,) uint8, the index of the largest number that is not above the cell's values; if a
    number is in the cell, of the one before it."""


@lru_cache
def codebook(signed: bool) -> Codebook:
    """129 numbers if codes also have a sign, else 256."""
    numbers = [0.0]
    for decade in range(DECADES):
        edges = np.linspace(0.1, 1.0, 2 ** (decade + (not signed)) + 1)
        numbers += (10.0 ** (decade + 1 - DECADES) * (edges[:-1] + edges[1:]) / 2).tolist()
    found = np.array([*numbers, 1.0], np.float32)
    cells = -SMALLEST_EXPONENT << MANTISSA_BITS
    first = (127 + SMALLEST_EXPONENT) << MANTISSA_BITS
    bits = (np.arange(cells + 1) + first).astype(np.uint32) << (23 - MANTISSA_BITS)
    edges = bits.view(np.float32)  # the smallest value of each cell
    below = np.searchsorted(found, edges, side="right") - 1
    assert np.all(np.diff(below) <= 1)
    below[0] = 0
    return Codebook(mx.array(found), mx.array(below.astype(np.uint8)))


def cells_of(sizes: mx.array) -> mx.array:
    """The cell of each quotient, 0 to 1."""
    first = (127 + SMALLEST_EXPONENT) << MANTISSA_BITS
    bits = (sizes.view(mx.uint32) >> (23 - MANTISSA_BITS)).astype(mx.int32)
    return mx.clip(bits - first, 0, -SMALLEST_EXPONENT << MANTISSA_BITS)


def next_of(index: mx.array, numbers: mx.array) -> mx.array:
    """uint8, the index of the next larger number, or of the largest."""
    return index + (index < len(numbers) - 1).astype(mx.uint8)


def quantize(values: mx.array, signed: bool, noise: mx.array | None = None) -> Quantized:
    """Quantize float32 values of any shape; signed: whether some may be below 0.

    noise: values from 0 to 1 in the shape of `values`. With it, a value becomes the number above
    it with the probability that makes the mean exact (stochastic rounding); without it, the
    nearest.
    """
    numbers, below = codebook(signed)
    blocks = in_blocks(values)
    scales = mx.abs(blocks).max(axis=1)
    quotients = blocks / mx.where(scales > 0, scales, 1.0)[:, None]
    sizes = mx.abs(quotients)
    low = below[cells_of(sizes)]
    above = numbers[next_of(low, numbers)]
    low = mx.where(sizes >= above, next_of(low, numbers), low)
    under, high = numbers[low], next_of(low, numbers)
    share = (sizes - under) / mx.maximum(numbers[high] - under, TINY)
    index = mx.where(share > (0.5 if noise is None else in_blocks(noise)), high, low)
    if signed:  # the largest negative number has no code: 127 numbers, 0, and 128 numbers
        index = mx.where(quotients < 0, 127 - mx.minimum(index, 127), 127 + index)
    return Quantized(index.astype(mx.uint8).reshape(-1), scales)


def dequantize(found: Quantized, signed: bool, shape: tuple[int, ...]) -> mx.array:
    """The float32 values, in `shape`."""
    numbers = codebook(signed).numbers
    index = found.codes.reshape(-1, BLOCK).astype(mx.int32)
    quotients = numbers[mx.abs(index - 127)] * mx.sign(index - 127) if signed else numbers[index]
    flat = (quotients * found.scales[:, None]).reshape(-1)
    return flat[: int(np.prod(shape))].reshape(shape)


def in_bfloat16(values: mx.array, noise: mx.array) -> mx.array:
    """Round float32 values to bfloat16 at random, so that the mean is exact.

    bfloat16 is the upper half of float32: `noise`, from 0 to 1 (exclusive) in the shape of
    `values`, is added to the lower half, which is cut off.
    """
    bits = values.view(mx.uint32) + (noise * 2.0**16).astype(mx.uint32)
    return (bits & mx.array(0xFFFF0000, mx.uint32)).view(mx.float32).astype(mx.bfloat16)


def in_blocks(values: mx.array) -> mx.array:
    """(n / BLOCK, BLOCK), padded with zeros."""
    flat = values.reshape(-1)
    return mx.pad(flat, (0, -flat.size % BLOCK)).reshape(-1, BLOCK)
