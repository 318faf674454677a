"""The best approximation with a low rank, against a whole decomposition in float64."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from your_ai.nets import low_rank
from your_ai.nets.low_rank import largest_part


def drawn(outputs: int, inputs: int, decay: float) -> np.ndarray:
    """A matrix whose singular values fall like 1 / i ** decay; of noise for 0."""
    rng = np.random.default_rng(3)
    noise = rng.standard_normal((outputs, inputs))
    if not decay:
        return noise.astype(np.float32)
    u, sizes, v = np.linalg.svd(noise, full_matrices=False)
    return (u @ np.diag(np.arange(1, len(sizes) + 1) ** -decay) @ v).astype(np.float32)


def approximated(matrix: np.ndarray, rank: int, step: int = 50, seed: int = 1) -> np.ndarray:
    whole = mx.array(matrix)
    parts = [slice(i, min(i + step, len(matrix))) for i in range(0, len(matrix), step)]
    a, b = largest_part(lambda rows, after: whole[rows], parts, matrix.shape, rank, seed)
    assert (a.shape, b.shape) == ((matrix.shape[1], rank), (rank, matrix.shape[0]))
    return np.array(a, np.float64) @ np.array(b, np.float64)


def least_error(matrix: np.ndarray, rank: int) -> float:
    sizes = np.linalg.svd(matrix.astype(np.float64), compute_uv=False)
    return float(np.sqrt((sizes[rank:] ** 2).sum()))


@pytest.mark.parametrize("shape", [(40, 90), (90, 40), (300, 30)])
def test_small_matrices_are_decomposed_exactly(shape):
    matrix = drawn(*shape, decay=0)
    error = np.linalg.norm(matrix.T - approximated(matrix, 8))
    assert error == pytest.approx(least_error(matrix, 8), rel=1e-5)


@pytest.mark.parametrize(("decay", "most"), [(1.0, 1.0001), (0.3, 1.002), (0.0, 1.005)])
def test_large_matrices_are_close_to_the_best(decay, most):
    matrix = drawn(420, 380, decay)
    error = np.linalg.norm(matrix.T - approximated(matrix, 8))
    assert error <= most * least_error(matrix, 8)


def test_slices_do_not_change_it_and_seeds_decide_it():
    matrix = drawn(420, 380, 0.3)
    first, again = (approximated(matrix, 4) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.abs(first - approximated(matrix, 4, step=420)).max() < 1e-5
    assert not np.array_equal(first, approximated(matrix, 4, seed=2))


def test_rank_above_the_matrix_adds_zeros():
    matrix = drawn(6, 9, 0)
    assert np.allclose(approximated(matrix, 8), matrix.T, atol=1e-5)


def test_factors_of_large_matrices_need_less_memory_than_these():
    assert low_rank.factors_bytes((14336, 4096), 16) < 4 * 14336 * 4096 / 4
