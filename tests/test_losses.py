from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from your_ai.losses import cross_entropy_sum


def reference(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """In float64, straight from the definition."""
    logits = logits.astype(np.float64)
    total = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        shifted = row - row.max()
        total += weight * (np.log(np.exp(shifted).sum()) - shifted[target])
    return total


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_equals_the_definition(scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.standard_normal((37, 101))).astype(np.float32)
    targets = rng.integers(0, 101, 37)
    weights = rng.random(37).astype(np.float32)
    got = cross_entropy_sum(mx.array(logits), mx.array(targets), mx.array(weights)).item()
    assert got == pytest.approx(reference(logits, targets, weights), rel=1e-5)


def test_a_weight_of_zero_hides_even_an_infinite_target():
    logits = mx.array([[0.0, 1.0], [0.0, 1.0]])
    loss = cross_entropy_sum(logits, mx.array([0, 1]), mx.array([0.0, 1.0])).item()
    assert loss == pytest.approx(np.log1p(np.e) - 1, rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = mx.zeros((70_000, 4), mx.float16)  # the sum is above float16's largest number
    targets = mx.zeros((70_000,), mx.int32)
    loss = cross_entropy_sum(logits, targets, mx.ones((70_000,)))
    assert loss.dtype == mx.float32
    assert loss.item() == pytest.approx(70_000 * np.log(4), rel=1e-5)
