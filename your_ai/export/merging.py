"""Merge the LoRA layers of several adapters: the arithmetic, without files and models.

A LoRA layer adds delta = A B to its weight (transposed). Two methods merge the deltas of a layer:

- linear: their weighted sum. It has low rank again: the A side by side, the B below each other.
- TIES (Yadav et al., 2023, arXiv:2306.01708): of each delta keep the largest values (trim), choose
  the sign with the larger weighted sum (elect), and take the weighted mean of the values that have
  it (disjoint mean). The result has full rank and is approximated by its largest singular values.

Shapes: I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

EXACT_SIZE = 512  # smaller sides than this are decomposed exactly
EXTRA, ITERATIONS = 16, 6  # of the randomized decomposition: more columns, and power iterations


@dataclass(frozen=True)
class Factors:
    """delta = a @ b"""

    a: Array
    """(I, r)"""
    b: Array
    """(r, O)"""

    @property
    def rank(self) -> int:
        return int(self.a.shape[1])


@dataclass(frozen=True)
class Reduced:
    """The best approximation of a delta with a lower rank."""

    factors: Factors
    squared_error: float
    """Sum of the squared differences from the delta."""
    squared_norm: float
    """Sum of the squared values of the delta."""


def squared_norm(factors: Factors) -> float:
    """Sum of the squared values of the delta, without the delta."""
    a, b = factors.a.astype(np.float64), factors.b.astype(np.float64)
    return max(0.0, float(np.sum((a.T @ a) * (b @ b.T))))


def summed(layers: Sequence[Factors], weights: Sequence[float]) -> Factors:
    """The factors of the weighted sum of deltas, exactly; their rank is the sum of the ranks."""
    a = np.concatenate([layer.a for layer in layers], axis=1)
    b = np.concatenate([w * layer.b for layer, w in zip(layers, weights, strict=True)], axis=0)
    return Factors(a, b)


def ties(layers: Sequence[Factors], weights: Sequence[float], density: float) -> Array:
    """The deltas merged with TIES: (I, O) float32.

    weights: above 0; only their ratio counts.
    density: the share of the values of each delta that is kept.

    Holds a few deltas in memory, however many layers there are: each is computed three times.
    """
    shares = list(map(np.float32, weights))
    least = [least_kept(single(layer), density) for layer in layers]
    every = list(zip(layers, shares, least, strict=True))
    total = np.zeros((len(layers[0].a), layers[0].b.shape[1]), np.float32)
    for layer, share, bound in every:
        total += share * trimmed(single(layer), bound)
    sign = np.sign(total, out=total)
    values, counted = np.zeros_like(sign), np.zeros_like(sign)
    for layer, share, bound in every:
        delta = trimmed(single(layer), bound)
        agrees = delta * sign > 0
        values += share * np.where(agrees, delta, 0)
        counted += share * agrees
    return np.divide(values, counted, out=values, where=counted > 0)


def single(layer: Factors) -> Array:
    """The delta in float32."""
    return layer.a.astype(np.float32) @ layer.b.astype(np.float32)


def least_kept(delta: Array, density: float) -> float:
    """The size of the smallest value that is kept: of a share of `density`, at least one value."""
    place = delta.size - max(1, int(density * delta.size))
    return float(np.partition(np.abs(delta), place, axis=None)[place])


def trimmed(delta: Array, least: float) -> Array:
    """The delta, with 0 in place of the values smaller than `least`."""
    delta[np.abs(delta) < np.float32(least)] = 0
    return delta


def reduced(factors: Factors, rank: int) -> Reduced:
    """The best approximation of the factors' delta with `rank`; never computes the delta."""
    q_a, r_a = np.linalg.qr(factors.a.astype(np.float64))
    q_b, r_b = np.linalg.qr(factors.b.astype(np.float64).T)
    u, sizes, v = np.linalg.svd(r_a @ r_b.T, full_matrices=False)
    lost = float(np.sum(sizes[rank:] ** 2))
    return Reduced(balanced(q_a @ u, sizes, v @ q_b.T, rank), lost, float(np.sum(sizes**2)))


def factored(delta: Array, rank: int) -> Reduced:
    """The approximation of a delta with `rank`, by its largest singular values.

    A large delta is decomposed in a random subspace (Halko et al., 2011, arXiv:0909.4061), from a
    fixed seed.
    """
    columns = min(rank + EXTRA, *delta.shape)
    basis = None
    if min(delta.shape) > max(EXACT_SIZE, columns):
        start = np.random.default_rng(0).standard_normal((delta.shape[1], columns))
        basis, _ = np.linalg.qr(delta @ start.astype(delta.dtype))
        for _ in range(ITERATIONS):
            other, _ = np.linalg.qr(delta.T @ basis)
            basis, _ = np.linalg.qr(delta @ other)
    inside = delta if basis is None else basis.T @ delta
    u, sizes, v = np.linalg.svd(inside.astype(np.float64), full_matrices=False)
    u = u if basis is None else basis @ u
    norm = float(np.sum(np.square(delta, dtype=np.float64)))
    lost = max(0.0, norm - float(np.sum(sizes[:rank] ** 2)))
    return Reduced(balanced(u, sizes, v, rank), lost, norm)


def balanced(u: Array, sizes: Array, v: Array, rank: int) -> Factors:
    """The first `rank` of u @ diag(sizes) @ v, with the sizes shared by both factors."""
    roots = np.sqrt(sizes[:rank])
    return Factors(u[:, :rank] * roots, roots[:, None] * v[:rank])


def padded(factors: Factors, rank: int) -> Factors:
    """The same delta with a higher rank, by zeros."""
    more = rank - factors.rank
    return Factors(np.pad(factors.a, ((0, 0), (0, more))), np.pad(factors.b, ((0, more), (0, 0))))
