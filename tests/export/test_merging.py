"""The arithmetic of merging, against plain readings with whole deltas."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.export import merged_run
from your_ai.export.merged_run import Factors


@st.composite
def adapters(draw):
    """One to four adapters of a layer, of any ranks and sizes of values, and their weights."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    inputs, outputs = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    layers, weights = [], []
    for _ in range(draw(st.integers(1, 4))):
        rank, scale = draw(st.integers(1, 8)), 10 ** draw(st.floats(-3, 3))
        a = rng.standard_normal((inputs, rank)).astype(np.float32)
        layers.append(Factors(a, scale * rng.standard_normal((rank, outputs))))
        weights.append(draw(st.floats(0.01, 10)))
    return layers, weights


def product(layer: Factors) -> np.ndarray:
    """The delta of a layer."""
    return layer.a @ layer.b


def size(array):
    return float(np.linalg.norm(array))


@given(adapters(), st.booleans())
def test_summed_delta_is_the_weighted_sum_of_the_deltas(given, negative):
    layers, weights = given
    weights = [-w if negative and index % 2 else w for index, w in enumerate(weights)]
    found = merged_run.summed(layers, weights)
    wanted = sum(
        w * layer.a.astype(np.float64) @ layer.b for layer, w in zip(layers, weights, strict=True)
    )
    sizes = [size(product(layer)) for layer in layers]
    largest = sum(abs(w) * each for each, w in zip(sizes, weights, strict=True))
    assert found.rank == sum(layer.rank for layer in layers)
    assert size(product(found) - wanted) <= 1e-12 * largest
    assert merged_run.squared_norm(found) == pytest.approx(size(wanted) ** 2, abs=1e-9 * largest**2)


@given(adapters(), st.integers(1, 32))
def test_reduced_delta_is_the_best_of_its_rank(given, rank):
    found = merged_run.summed(*given)
    result = merged_run.reduced(found, rank)
    sizes = np.linalg.svd(product(found), compute_uv=False)
    best, norm = size(sizes[rank:]), size(sizes)
    assert size(product(result.factors) - product(found)) == pytest.approx(best, abs=1e-6 * norm)
    assert result.squared_error**0.5 == pytest.approx(best, abs=1e-6 * norm)
    assert result.squared_norm**0.5 == pytest.approx(norm)


def plain_ties(deltas, weights, density):
    """TIES as in the paper, value by value."""
    result = np.zeros_like(deltas[0])
    kept = []
    for delta in deltas:
        order = sorted(np.abs(delta).ravel(), reverse=True)
        least = order[max(1, int(density * delta.size)) - 1]
        kept.append(np.where(np.abs(delta) >= least, delta, 0))
    for place in np.ndindex(result.shape):
        values = [(delta[place], weight) for delta, weight in zip(kept, weights, strict=True)]
        total = np.float32(0)
        for value, weight in values:
            total += np.float32(weight) * value
        agreeing = [(value, weight) for value, weight in values if value * total > 0]
        if agreeing:
            shares = sum(weight for _, weight in agreeing)
            result[place] = sum(value * weight for value, weight in agreeing) / shares
    return result


@given(adapters(), st.floats(0.01, 1))
def test_ties_gives_what_a_plain_reading_gives(given, density):
    layers, weights = given
    deltas = [layer.a @ layer.b.astype(np.float32) for layer in layers]
    found = merged_run.ties(layers, weights, density)
    wanted = plain_ties(deltas, weights, density)
    assert np.abs(found - wanted).max() <= 1e-5 * max(np.abs(delta).max() for delta in deltas)


def test_ties_of_the_papers_example():
    """Trim the smallest, elect the sign of the larger sum, take the mean of what agrees."""
    rows = ([[4.0, -1.0, 3.0, 0.1]], [[-2.0, -3.0, 5.0, 0.2]], [[-1.0, 0.5, 1.0, 9.0]])
    layers = [Factors(np.ones((1, 1), np.float32), np.array(row)) for row in rows]
    found = merged_run.ties(layers, [1.0, 1.0, 1.0], 0.75)
    assert found.tolist() == [[4.0, -2.0, 3.0, 9.0]]


def test_only_the_ratio_of_weights_counts_for_ties():
    rng = np.random.default_rng(1)
    layers = [Factors(rng.random((5, 2)) - 0.5, rng.random((2, 7)) - 0.5) for _ in range(3)]
    ours, theirs = (merged_run.ties(layers, [w, w, 2 * w], 0.5) for w in (1.0, 0.25))
    assert np.allclose(ours, theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("exact_size", [0, 512], ids=["random subspace", "exact"])
def test_factored_delta_is_nearly_the_best_of_its_rank(monkeypatch, exact_size):
    monkeypatch.setattr(merged_run, "EXACT_SIZE", exact_size)
    rng = np.random.default_rng(0)
    low = rng.standard_normal((120, 6)) @ rng.standard_normal((6, 90))
    delta = np.where(rng.random(low.shape) < 0.5, low, 0).astype(np.float32)  # of full rank
    found = merged_run.factored(delta, 8)
    sizes = np.linalg.svd(delta, compute_uv=False)
    error = size(product(found.factors) - delta)
    assert size(sizes[8:]) <= error * (1 + 1e-5)
    assert error <= 1.001 * size(sizes[8:])
    assert found.squared_error**0.5 == pytest.approx(error, rel=1e-4)


def test_padding_does_not_change_the_delta():
    layer = Factors(np.ones((3, 2)), np.ones((2, 4)))
    more = merged_run.padded(layer, 5)
    assert (more.rank, product(more).tolist()) == (5, product(layer).tolist())
