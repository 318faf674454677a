"""Compare numeric functions with NumPy in float64."""

import mlx.core as mx
import numpy as np
import pytest

from your_ai.nets.numerics import exp, sum_in_blocks


def test_exp_is_accurate():
    x = -mx.concatenate([mx.arange(0, 87, 1e-3), mx.array([1e-8, 1e-30])])
    exact = np.exp(np.array(x, np.float64))
    assert np.abs(np.array(exp(x)) - exact).max() < 2e-7
    assert np.abs(np.array(exp(x)) / exact - 1).max() < 4e-6  # mx.exp: 1.8e-6


def test_exp_of_large_negative_values_is_zero_and_of_nan_is_nan():
    assert exp(mx.array([-89.0, -1e4, -3e38, -mx.inf])).tolist() == [0, 0, 0, 0]
    assert mx.isnan(exp(mx.array([mx.nan]))).item()


def test_exp_of_zero_is_one():
    assert exp(mx.array([0.0, -0.0])).tolist() == [1, 1]


def test_sum_of_many_similar_values_is_accurate():
    values = mx.full(70_001, 1.3862944)  # a running sum would be 6e-4 too small
    assert sum_in_blocks(values).item() == pytest.approx(70_001 * 1.3862944, rel=5e-6)
