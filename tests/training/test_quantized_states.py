"""Optimizer states in 8 bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from your_ai.training.optimizer_states import BLOCK, codebook, dequantize, in_blocks, quantize


def spread(seed: int, shape: tuple[int, ...]) -> mx.array:
    """Values over many decades."""
    keys = mx.random.split(mx.random.key(seed))
    return mx.random.normal(shape, key=keys[0]) * mx.exp(3 * mx.random.normal(shape, key=keys[1]))


def numbers(signed: bool) -> np.ndarray:
    """All numbers that codes stand for, ascending, written out."""
    found = [0.0, 1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        step = 0.9 / count
        found += [10.0 ** (decade - 6) * (0.1 + (i + 0.5) * step) for i in range(count)]
    found += [-x for x in found if 0 < x < 1] if signed else []
    return np.array(sorted(found))


@pytest.mark.parametrize("signed", [True, False])
def test_each_value_becomes_the_nearest_number(signed):
    assert len(numbers(signed)) == 256
    values = spread(1, (37, 113)) if signed else mx.abs(spread(1, (37, 113)))
    back = dequantize(quantize(values, signed), signed, values.shape)
    blocks = np.array(in_blocks(values), np.float64)
    scales = np.abs(blocks).max(axis=1, keepdims=True)
    book = numbers(signed)
    middles = (book[1:] + book[:-1]) / 2
    nearest = (book[np.searchsorted(middles, blocks / scales)] * scales).reshape(-1)
    nearest = nearest[: values.size]
    wrong = np.abs(nearest - np.array(back).reshape(-1)) > 1e-5 * np.abs(nearest)
    assert wrong.mean() < 1e-4  # float32 rounds a few in the middle of two to the other


@pytest.mark.parametrize("values", [[0.0] * 5, [3.0] * BLOCK, [-2.0, 0.0, 2.0]])
def test_zeros_and_the_largest_values_are_kept(values):
    back = dequantize(quantize(mx.array(values), signed=True), True, (len(values),))
    assert back.tolist() == pytest.approx(values, rel=8e-3)  # the largest negative one is -0.993
    assert mx.array_equal(back == 0, mx.array(values) == 0)


def test_rounding_at_random_has_the_right_mean_and_depends_on_the_noise_alone():
    values = mx.abs(spread(2, (4, BLOCK)))
    total = mx.zeros(values.shape)
    for seed in range(200):
        noise = mx.random.uniform(shape=values.shape, key=mx.random.key(seed))
        total += dequantize(quantize(values, False, noise), False, values.shape)
    large = values > 1e-4 * in_blocks(values).max(axis=1)[:, None]
    error = mx.where(large, mx.abs(total / 200 - values) / values, 0)
    assert error.max().item() < 0.03
    nearest = dequantize(quantize(values, False), False, values.shape)
    assert (mx.abs(nearest - values) / values).max().item() > 0.03
    twice = [quantize(values, False, noise).codes for _ in range(2)]
    assert mx.array_equal(*twice)


def test_codes_use_all_of_8_bits():
    book = codebook(True)
    assert (len(book.numbers), len(codebook(False).numbers)) == (129, 256)
    codes = np.array(quantize(mx.array(numbers(True)), True).codes)[:256]
    assert set(codes.tolist()) == {*range(256)}
