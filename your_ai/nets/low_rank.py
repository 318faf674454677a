"""The best approximation of a matrix with a low rank, from its rows in slices.

The matrix is never whole. Subspace iteration with random columns (Halko, Martinsson and Tropp,
"Finding structure with randomness", 2011, arXiv 0909.4061, algorithm 4.4) reads its rows
ITERATIONS + 1 times. A matrix with a short side is decomposed exactly.

Shapes: O outputs, D inputs, r rank, n rows of a slice, k columns of the subspace.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import mlx.core as mx
import numpy as np

EXACT_SIZE = 256  # matrices with a side up to this are decomposed exactly
EXTRA, ITERATIONS = 16, 6  # more columns than the rank, and products with M^T M
RowsOf = Callable[[slice, Sequence[mx.array]], mx.array]
"""f(rows, after): rows (n, D) float32 of a matrix, computed only after the arrays `after`."""


def factors_bytes(shape: tuple[int, int], rank: int) -> int:
    """Peak bytes of the decomposition, without the slices of the matrix."""
    if min(shape) <= EXACT_SIZE:
        return 8 * 5 * math.prod(shape)
    return 8 * 6 * sum(shape) * (rank + EXTRA)


def largest_part(
    rows_of: RowsOf, parts: Sequence[slice], shape: tuple[int, int], rank: int, seed: int
) -> tuple[mx.array, mx.array]:
    """A (D, r) and B (r, O), float32, of the largest r singular values of M (O, D): M ~ (A B)^T.

    parts: the slices of the rows. A and B share the singular values: each has their roots. A rank
    above the sides of M adds zeros.
    """
    basis = None
    if min(shape) <= EXACT_SIZE:
        inside = np.concatenate([np.array(rows_of(part, []), np.float64) for part in parts])
    else:
        columns = min(rank + EXTRA, *shape)
        basis = np.random.default_rng(seed).standard_normal((shape[1], columns))
        for _ in range(ITERATIONS):
            basis, _ = np.linalg.qr(products(rows_of, parts, basis)[1])
        inside, _ = products(rows_of, parts, basis)
    u, sizes, v = np.linalg.svd(inside, full_matrices=False)
    v = v if basis is None else v @ basis.T
    roots = np.sqrt(sizes[:rank])
    a, b = v[:rank].T * roots, roots[:, None] * u[:, :rank].T
    missing = rank - len(roots)
    a, b = np.pad(a, ((0, 0), (0, missing))), np.pad(b, ((0, missing), (0, 0)))
    return mx.array(a.astype(np.float32)), mx.array(b.astype(np.float32))


def products(
    rows_of: RowsOf, parts: Sequence[slice], basis: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """M X (O, k) and M^T M X (D, k) float64 for X (D, k), in one pass over the rows of M."""
    x = mx.array(basis.astype(np.float32))
    total, found = mx.zeros_like(x), list[np.ndarray]()
    for part in parts:
        rows = rows_of(part, [total])
        product = rows @ x
        total = total + rows.T @ product
        mx.eval(total, product)
        found.append(np.array(product))
    return np.concatenate(found).astype(np.float64), np.array(total).astype(np.float64)
