"""Gumbel noise as a pure function of its place, and the walks over the vocabulary that use it.

A token is sampled as argmax(z + g), z its logits and g Gumbel noise, and y = softmax((z + g) / tau)
is its relaxation (Jang et al. 2016, arXiv:1611.01144). No walk allocates more of the vocabulary
than a slice, so the gradient of y needs two more sums: for the cotangent a of y, (V,),

    dL/dz_v = y_v (a_v - sum(y a)) / tau
    dL/dx   = (sum(y a s W) - sum(y a) sum(y s W)) / tau

x are the inputs of the linear head with the rows W_v, and s the slopes of what follows it, such
as a soft cap. a = E_rm u + E c comes from cotangents of embeddings: u of the reward model's input,
c of the policy's own next input.

Shapes: S positions, D hidden size, V vocabulary, n tokens per slice of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import mlx.core as mx

from your_ai.nets.embedding import same_rows
from your_ai.nets.head import HeadRows, HeadSlice, LinearHead
from your_ai.nets.numerics import exp, settled

ARRAYS = 8  # of a slice, (S, n), that a walk with gradients has in memory at a time
LARGEST_UNIFORM = 1 - 2.0**-24  # the largest float32 below 1


class NoisePlaces(NamedTuple):
    """The inputs of the noise of each position, besides the token."""

    keys: mx.array
    """(S,) uint32, the key of the row."""
    positions: mx.array
    """(S,) uint32, the index of the token in its completion."""


@dataclass(frozen=True)
class Noisy:
    """A head whose logits get noise."""

    head: LinearHead
    tau: float
    """The temperature of the relaxation. It does not change which token is sampled."""


class Drawn(NamedTuple):
    """Sampled tokens."""

    tokens: mx.array
    """(S,) int32"""
    means: list[mx.array]
    """For each embedding, (S, D) float32: sum(y E), the mean row of the relaxed tokens."""


class Relaxed(NamedTuple):
    """The findings of one walk about the relaxed tokens."""

    log_sum: mx.array
    """(S,) log(sum(exp((z + g) / tau)))"""
    mean: mx.array
    """(S, D) float32, sum(y s W)"""
    grad: mx.array
    """(S, D) float32, the gradient with respect to x for the cotangents u."""


class Divergence(NamedTuple):
    """KL(p || p_ref) at each position, with p = softmax(z): no noise, no temperature."""

    kl: mx.array
    """(S,) float32"""
    grad: mx.array
    """(S, D) float32, its gradient with respect to x."""


# -- noise --------------------------------------------------------------------------------


def gumbel(places: NoisePlaces, tokens: mx.array) -> mx.array:
    """(S, n) float32 Gumbel noise; tokens: (n,) uint32 token ids."""
    return noise_of(random_bits(places.keys, places.positions, tokens))


@mx.compile
def random_bits(keys: mx.array, positions: mx.array, tokens: mx.array) -> mx.array:
    """(S, n) uniform uint32; keys, positions: (S,) uint32, as in `NoisePlaces`.

    murmur3's 32-bit finalizer over a counter (Appleby, 2011), applied for the key, the position
    and the token in turn. The second number of a position keeps the bits of one position from
    being those of another one, shifted by some tokens.
    """
    first = _mix(_mix(keys) + positions * _uint32(0x9E3779B9))
    second = _mix(first ^ _uint32(0xC2B2AE3D))
    return _mix(_mix(first[:, None] + tokens * _uint32(0x85EBCA77)) ^ second[:, None])


def noise_of(bits: mx.array) -> mx.array:
    """Gumbel noise, float32, of uniform uint32 bits."""
    uniform = (bits.astype(mx.float32) + 0.5) * 2.0**-32
    return -mx.log(-mx.log1p(-mx.minimum(uniform, LARGEST_UNIFORM)))


def _mix(h: mx.array) -> mx.array:
    h = (h ^ (h >> 16)) * _uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * _uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def _uint32(value: int) -> mx.array:
    return mx.array(value, mx.uint32)


# -- walks --------------------------------------------------------------------------------


def draw(
    noisy: Noisy, inputs: mx.array, places: NoisePlaces, embeddings: Sequence[HeadRows] = ()
) -> Drawn:
    """Sample a token for each of `inputs`, (S, D), the inputs of the linear head.

    embeddings: for which mean rows are computed.
    """
    count = len(inputs)
    best, top = mx.zeros(count, mx.int32), mx.full(count, -mx.inf)
    total = mx.zeros(count)
    means = [mx.zeros((count, rows.shape[1])) for rows in embeddings]
    for start, stop in noisy.head.slices(count):
        parts = _VocabularySlice(noisy.head, embeddings, start, stop, [top, *means])
        logits = noisy.head.logits(parts.head.forward(inputs)).astype(mx.float32)
        scores = logits + gumbel(places, mx.arange(start, stop, dtype=mx.uint32))
        largest = scores.max(axis=-1)
        best = mx.where(largest > top, scores.argmax(axis=-1).astype(mx.int32) + start, best)
        before, top = top, mx.maximum(largest, top)
        if embeddings:
            shrink = mx.exp((before - top) / noisy.tau)
            shares = exp((scores - top[:, None]) / noisy.tau)
            total = total * shrink + shares.sum(axis=-1)
            for index, rows in enumerate(embeddings):
                added = parts.of(rows).backward(shares.astype(inputs.dtype))
                means[index] = means[index] * shrink[:, None] + added
        best, top, total, *means = settled([best, top, total, *means])
    return Drawn(best, [mean / total[:, None] for mean in means])


def relax(
    noisy: Noisy, inputs: mx.array, places: NoisePlaces, embedding: HeadRows, cotangents: mx.array
) -> Relaxed:
    """The relaxed tokens at `inputs`, (S, D), and their gradient.

    cotangents: u, of rows of `embedding`, one for each position.
    """
    count, tau = len(inputs), noisy.tau
    top, total = mx.full(count, -mx.inf), mx.zeros(count)
    weighed = mx.zeros(count)
    sums = mx.zeros((2 * count, inputs.shape[1]))
    for start, stop in noisy.head.slices(ARRAYS * count):
        parts = _VocabularySlice(noisy.head, [embedding], start, stop, [sums])
        products, of_rows = parts.products(inputs, embedding, cotangents)
        scores, slopes = _scores(noisy, products, places, start, stop)
        before, top = top, mx.maximum(scores.max(axis=-1), top)
        shrink, shares = mx.exp(before - top), exp(scores - top[:, None])
        products = shares * of_rows
        total = total * shrink + shares.sum(axis=-1)
        weighed = weighed * shrink + products.sum(axis=-1)
        both = mx.concatenate([_times(shares, slopes), _times(products, slopes)])
        added = parts.head.backward(both.astype(inputs.dtype))
        sums = sums * mx.concatenate([shrink, shrink])[:, None] + added
        top, total, weighed, sums = settled([top, total, weighed, sums])
    mean, grad = sums[:count] / total[:, None], sums[count:] / total[:, None]
    grad = (grad - (weighed / total)[:, None] * mean) / tau
    return Relaxed(top + mx.log(total), mean, grad)


def credit(
    noisy: Noisy,
    inputs: mx.array,
    places: NoisePlaces,
    relaxed: Relaxed,
    embedding: HeadRows,
    cotangents: mx.array,
) -> mx.array:
    """(S, D) float32, the gradient with respect to `inputs` for further cotangents of y.

    relaxed: of these positions. cotangents: c, of rows of `embedding`, one for each position.
    """
    count = len(inputs)
    weighed, grad = mx.zeros(count), mx.zeros(inputs.shape)
    for start, stop in noisy.head.slices(ARRAYS * count):
        parts = _VocabularySlice(noisy.head, [embedding], start, stop, [grad])
        products, of_rows = parts.products(inputs, embedding, cotangents)
        scores, slopes = _scores(noisy, products, places, start, stop)
        shares = exp(mx.minimum(scores - relaxed.log_sum[:, None], 0))
        products = shares * of_rows
        weighed = weighed + products.sum(axis=-1)
        grad = grad + parts.head.backward(_times(products, slopes).astype(inputs.dtype))
        weighed, grad = settled([weighed, grad])
    return (grad - weighed[:, None] * relaxed.mean) / noisy.tau


def divergence(head: LinearHead, inputs: mx.array, reference: mx.array) -> Divergence:
    """KL to a reference over the whole vocabulary, and its gradient.

    inputs, reference: (S, D) inputs of the linear head, of the model and of the reference.

    With d_v = z_v - z_ref,v: KL = sum(p d) - log Z + log Z_ref, and
    dKL/dz_v = p_v (log p_v - log p_ref,v - KL) = p_v (d_v - sum(p d)).
    """
    count = len(inputs)
    both = mx.concatenate([inputs, reference])
    top, total = mx.full(2 * count, -mx.inf), mx.zeros(2 * count)
    apart = mx.zeros(count)
    sums = mx.zeros((2 * count, inputs.shape[1]))
    for start, stop in head.slices(ARRAYS * count):
        parts = _VocabularySlice(head, [], start, stop, [sums])
        logits, slopes = head.logits_and_slopes(parts.head.forward(both))
        logits = logits.astype(mx.float32)
        before, top = top, mx.maximum(logits.max(axis=-1), top)
        shrink, shares = mx.exp(before - top), exp(logits - top[:, None])
        total = total * shrink + shares.sum(axis=-1)
        ours, slopes = shares[:count], None if slopes is None else slopes[:count]
        products = ours * (logits[:count] - logits[count:])
        apart = apart * shrink[:count] + products.sum(axis=-1)
        rows = mx.concatenate([_times(ours, slopes), _times(products, slopes)])
        added = parts.head.backward(rows.astype(inputs.dtype))
        sums = sums * mx.concatenate([shrink[:count], shrink[:count]])[:, None] + added
        top, total, apart, sums = settled([top, total, apart, sums])
    log_sum, apart = top + mx.log(total), apart / total[:count]
    mean, grad = sums[:count] / total[:count, None], sums[count:] / total[:count, None]
    kl = apart - log_sum[:count] + log_sum[count:]
    return Divergence(kl, grad - apart[:, None] * mean)


class _VocabularySlice:
    """The rows of a slice of the head and of embeddings; rows that are the same are read once."""

    def __init__(
        self,
        head: LinearHead,
        embeddings: Sequence[HeadRows],
        start: int,
        stop: int,
        after: Sequence[mx.array],
    ) -> None:
        self.read: list[tuple[HeadRows, HeadSlice]] = []
        for rows in (head.rows, *embeddings):
            if not any(same_rows(rows, other) for other, _ in self.read):
                self.read.append((rows, rows.part(start, stop, after)))
        self.rows, self.head = head.rows, self.of(head.rows)

    def products(
        self, inputs: mx.array, rows: HeadRows, cotangents: mx.array
    ) -> tuple[mx.array, mx.array]:
        """(S, n) of the inputs with the head, and (S, n) float32 of the cotangents with `rows`.

        Both come from one product where the rows are the same, which costs little more than one.
        """
        cotangents = cotangents.astype(inputs.dtype)
        if not same_rows(rows, self.rows):
            found = self.head.forward(inputs), self.of(rows).forward(cotangents)
        else:
            both = self.head.forward(mx.concatenate([inputs, cotangents]))
            found = both[: len(inputs)], both[len(inputs) :]
        return found[0], found[1].astype(mx.float32)

    def of(self, rows: HeadRows) -> HeadSlice:
        return next(part for other, part in self.read if same_rows(rows, other))


def _scores(
    noisy: Noisy, products: mx.array, places: NoisePlaces, start: int, stop: int
) -> tuple[mx.array, mx.array | None]:
    """(S, n) float32 (z + g) / tau, and the slopes of z."""
    logits, slopes = noisy.head.logits_and_slopes(products)
    noise = gumbel(places, mx.arange(start, stop, dtype=mx.uint32))
    return (logits.astype(mx.float32) + noise) / noisy.tau, slopes


def _times(shares: mx.array, slopes: mx.array | None) -> mx.array:
    return shares if slopes is None else shares * slopes


def pieces(count: int, most: int) -> Iterator[slice]:
    """Cut `count` positions into pieces of at most `most`, of about equal size."""
    size = -(-count // max(1, -(-count // most)))
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + size, count))
