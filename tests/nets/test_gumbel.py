"""Gumbel noise, and the walks over the vocabulary that use it."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from your_ai.nets.gumbel import (
    NoisePlaces,
    Noisy,
    Relaxed,
    credit,
    divergence,
    draw,
    gumbel,
    noise_of,
    pieces,
    random_bits,
    relax,
)
from your_ai.nets.head import LayerRows, LinearHead

STATES, WIDTH, VOCABULARY, TAU = 7, 16, 150, 0.6
PLACES = NoisePlaces(
    mx.array([1, 1, 1, 2, 2**32 - 1, 5, 6], mx.uint32), mx.array([0, 1, 2, 0, 0, 9, 4], mx.uint32)
)
SLICES = [[(0, 150)], [(0, 149), (149, 150)], [(i, i + 10) for i in range(0, 150, 10)]]


def cap(products: mx.array) -> mx.array:
    return 3 * mx.tanh(products / 3)


@pytest.fixture(params=[None, cap], ids=["plain", "capped"])
def head(request) -> LinearHead:
    mx.random.seed(3)
    return LinearHead(LayerRows(nn.Linear(WIDTH, VOCABULARY)), after=request.param)


@pytest.fixture(params=SLICES, ids=["1", "2", "15"])
def sliced(request, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LinearHead, "slices", lambda head, count: iter(request.param))


def table(seed: int, width: int = WIDTH) -> nn.Embedding:
    mx.random.seed(seed)
    return nn.Embedding(VOCABULARY, width)


def normal(seed: int, width: int = WIDTH) -> mx.array:
    return mx.random.normal((STATES, width), key=mx.random.key(seed))


def whole_logits(head: LinearHead, inputs: mx.array) -> mx.array:
    layer = head.rows.layer
    return head.logits(inputs @ layer.weight.T + layer.get("bias", 0))


def whole_noise() -> mx.array:
    return gumbel(PLACES, mx.arange(VOCABULARY, dtype=mx.uint32))


def whole_gradient(head: LinearHead, inputs: mx.array, layer: nn.Module, u: mx.array) -> mx.array:
    """That of the mean embeddings under the softmax of all noisy logits, weighed by u."""

    def total(inputs: mx.array) -> mx.array:
        y = mx.softmax((whole_logits(head, inputs) + whole_noise()) / TAU, axis=-1)
        return ((y @ layer.weight) * u).sum()

    return mx.grad(total)(inputs)


def close(found: mx.array, expected: mx.array, tolerance: float = 2e-6) -> None:
    assert mx.abs(found - expected).max().item() <= tolerance * mx.abs(expected).max().item()


def test_noise_is_a_function_of_key_position_and_token():
    noise = np.array(whole_noise())
    for start, stop in [(0, 3), (17, 140)]:
        rows = slice(2, 5)
        places = NoisePlaces(PLACES.keys[rows], PLACES.positions[rows])
        part = gumbel(places, mx.arange(start, stop, dtype=mx.uint32))
        np.testing.assert_array_equal(np.array(part), noise[rows, start:stop])
    assert len(np.unique(noise)) > 0.99 * noise.size


def test_noise_is_gumbel():
    tokens = mx.arange(100_000, dtype=mx.uint32)
    places = NoisePlaces(mx.array([12, 13], mx.uint32), mx.array([3, 3], mx.uint32))
    first, second = np.array(gumbel(places, tokens), np.float64)
    for noise in (first, second):
        assert np.isfinite(noise).all()
        assert noise.mean() == pytest.approx(np.euler_gamma, abs=0.02)
        assert noise.var() == pytest.approx(np.pi**2 / 6, rel=0.03)
        for quantile in (0.001, 0.1, 0.5, 0.9, 0.999):
            expected = -np.log(-np.log(quantile))
            assert (noise < expected).mean() == pytest.approx(quantile, abs=0.004)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < 0.02


def test_positions_do_not_share_shifted_noise():
    """Of a million bits some are equal by chance, but then not those of the next token, too."""
    positions = mx.arange(100_000, dtype=mx.uint32)
    keys = mx.full((100_000,), 3, mx.uint32)
    bits = np.array(random_bits(keys, positions, mx.arange(10, dtype=mx.uint32)), np.uint64)
    assert len(np.unique(bits)) < bits.size
    pairs = (bits[:, :-1] << np.uint64(32)) | bits[:, 1:]
    assert len(np.unique(pairs)) == pairs.size


def test_noise_of_the_smallest_and_largest_bits_is_finite():
    bits = mx.array([0, 1, 2**31, 2**32 - 129, 2**32 - 2, 2**32 - 1], mx.uint32)
    noise = noise_of(bits).tolist()
    assert noise == sorted(noise, reverse=True)
    uniform = (np.array([0, 1, 2**31]) + 0.5) / 2**32
    np.testing.assert_allclose(noise[:3], -np.log(-np.log1p(-uniform)), rtol=1e-5)
    assert noise[-1] == pytest.approx(-np.log(24 * np.log(2)), rel=1e-5)


def test_tokens_follow_the_softmax():
    head = LinearHead(LayerRows(nn.Linear(4, 9)))
    mx.random.seed(8)
    head.rows.layer.weight = mx.random.normal((9, 4))
    inputs = mx.broadcast_to(mx.random.normal((1, 4)), (40_000, 4))
    positions = mx.arange(40_000, dtype=mx.uint32)
    places = NoisePlaces(mx.full((40_000,), 77, mx.uint32), positions)
    tokens = np.array(draw(Noisy(head, TAU), inputs, places).tokens)
    logits = inputs[:1] @ head.rows.layer.weight.T + head.rows.layer.bias
    expected = np.array(mx.softmax(logits[0]))
    np.testing.assert_allclose(np.bincount(tokens, minlength=9) / 40_000, expected, atol=0.01)


def test_sampled_tokens_have_the_largest_noisy_logit(head, sliced):
    inputs, embeddings = normal(0), [table(1), table(2, 24)]
    drawn = draw(Noisy(head, TAU), inputs, PLACES, [LayerRows(layer) for layer in embeddings])
    scores = whole_logits(head, inputs) + whole_noise()
    assert drawn.tokens.tolist() == scores.argmax(axis=-1).tolist()
    for mean, layer in zip(drawn.means, embeddings, strict=True):
        close(mean, mx.softmax(scores / TAU, axis=-1) @ layer.weight)


def test_gradients_are_those_of_the_whole_softmax(head, sliced):
    inputs, reward, own = normal(0), table(1, 24), table(2)
    u, c = normal(3, 24), normal(4)
    noisy = Noisy(head, TAU)
    relaxed = relax(noisy, inputs, PLACES, LayerRows(reward), u)
    close(relaxed.grad, whole_gradient(head, inputs, reward, u))
    assert isinstance(relaxed, Relaxed)
    found = credit(noisy, inputs, PLACES, relaxed, LayerRows(own), c)
    close(found, whole_gradient(head, inputs, own, c))


def test_credit_of_a_tied_embedding(head, sliced):
    """The head and the embedding are one layer, whose rows are read once."""
    inputs, c, layer = normal(0), normal(4), head.rows.layer
    layer.pop("bias")
    noisy, rows = Noisy(head, TAU), LayerRows(layer)
    relaxed = relax(noisy, inputs, PLACES, rows, c)
    expected = whole_gradient(head, inputs, layer, c)
    close(relaxed.grad, expected)
    close(credit(noisy, inputs, PLACES, relaxed, rows, c), expected)


def test_divergence_is_that_of_the_whole_vocabulary(head, sliced):
    inputs, reference = 3 * normal(0), 3 * normal(5)

    def kl(inputs: mx.array) -> mx.array:
        ours, other = whole_logits(head, inputs), whole_logits(head, reference)
        logp = ours - mx.logsumexp(ours, axis=-1, keepdims=True)
        logq = other - mx.logsumexp(other, axis=-1, keepdims=True)
        return (mx.exp(logp) * (logp - logq)).sum(axis=-1)

    found = divergence(head, inputs, reference)
    close(found.kl, kl(inputs), 1e-5)
    close(found.grad, mx.grad(lambda inputs: kl(inputs).sum())(inputs), 1e-5)


def test_no_divergence_from_itself(head):
    found = divergence(head, normal(0), normal(0))
    assert mx.abs(found.kl).max().item() < 1e-6
    assert mx.abs(found.grad).max().item() < 1e-6


@pytest.mark.parametrize(("count", "most"), [(1, 4), (4, 4), (9, 4), (8, 3)])
def test_pieces_cover_all_positions(count: int, most: int):
    found = list(pieces(count, most))
    assert [i for part in found for i in range(part.start, part.stop)] == list(range(count))
    assert all(part.stop - part.start <= most for part in found)
