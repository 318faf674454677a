"""Decays between the tokens of a chunk, computed from logarithms.

A decay from token i to a later token t is exp(l_{i+1} + ... + l_t) for logarithms l <= 0. Each
sum is added up from its own terms. A difference of two running sums, as in
exp(c_t) exp(-c_i), would overflow after strong decays, and lose digits before that.

Shapes: n tokens per chunk, D features; ... are any leading axes.
"""

from __future__ import annotations

import mlx.core as mx

from your_ai.nets import numerics


@mx.custom_function
def exp(x: mx.array) -> mx.array:
    """exp(x) for float32 x <= 0, -inf included; differentiable."""
    return numerics.exp(x)


@exp.vjp
def _exp_vjp(x: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    return cotangent * result


def lower(tokens: int, diagonal: int = 0) -> mx.array:
    """(n, n) bool: True where the row is at least `-diagonal` tokens later than the column."""
    places = mx.arange(tokens)
    return places[:, None] + diagonal >= places


def from_start(logs: mx.array, axis: int) -> mx.array:
    """The decay from before the chunk to each token, the token's own included."""
    return exp(mx.cumsum(logs, axis=axis))


def to_end(logs: mx.array, axis: int) -> mx.array:
    """The decay from each token to the last one, without the token's own."""
    return exp(mx.cumsum(logs, axis=axis, reverse=True, inclusive=False))


def between(logs: mx.array) -> mx.array:
    """(..., n) -> (..., n, n): the decay from token i to token t; 1 for i = t, 0 for i > t."""
    n = logs.shape[-1]
    terms = mx.where(lower(n, -1), logs[..., None], 0.0)
    return mx.where(lower(n), exp(mx.cumsum(terms, axis=-2)), 0.0)


def decayed_products(
    rows: list[mx.array], inclusive: list[bool], keys: mx.array, logs: mx.array
) -> list[mx.array]:
    """The products of rows with earlier keys, with a decay per feature, for each of `rows`.

    x_t . (decay from i to t) k_i for i < t, 0 for i >= t: (..., n, n) for x, k and l (..., n, D).
    inclusive: whether the decay includes row t's own; otherwise it ends at t - 1.

    The chunk is halved again and again: the rows of a second half see the keys of the first
    half through the decays up to the border between them, both of which are at most 1.
    """
    n = logs.shape[-2]
    padding = (1 << (n - 1).bit_length()) - n
    if padding:
        *rows, keys, logs = (_pad(x, padding) for x in (*rows, keys, logs))
    leading = [mx.broadcast_shapes(x.shape[:-2], keys.shape[:-2], logs.shape[:-2]) for x in rows]
    found = [mx.zeros((*axes, n + padding, 1, 1)) for axes in leading]
    size = 1
    while size < n:
        first, second = _halves(logs, size)
        early = (_halves(keys, size)[0] * to_end(first, -2)).swapaxes(-1, -2)
        for i, own in enumerate(inclusive):
            late = exp(mx.cumsum(second, axis=-2, inclusive=own))
            cross = (_halves(rows[i], size)[1] * late) @ early
            found[i] = _assemble(found[i], cross)
        size *= 2
    return [x.squeeze(-3)[..., :n, :n] for x in found]


def unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A, (..., n, n).

    Blocks are inverted and joined to blocks of twice the size. Powers of A, as in
    (I - A)(I + A^2)(I + A^4) ..., would be huge if the keys are alike, although the inverse
    is not.
    """
    return _unit_lower_inverse(a)


@mx.custom_function
def _unit_lower_inverse(a: mx.array) -> mx.array:
    n = a.shape[-1]
    total = 1 << (n - 1).bit_length()
    if total > n:
        a = mx.pad(a, [(0, 0)] * (a.ndim - 2) + [(0, total - n)] * 2)
    found = mx.ones((*a.shape[:-2], total, 1, 1))
    size = 1
    while size < n:
        # (..., blocks, blocks, size, size) -> the block below each pair's first
        blocks = mx.unflatten(mx.unflatten(a, -1, (-1, 2, size)), -4, (-1, 2, size))
        below = mx.diagonal(blocks[..., :, 1, :, :, 0, :], 0, -4, -2)
        below = mx.moveaxis(below, -1, -3)
        pairs = mx.unflatten(found, -3, (-1, 2))
        cross = -(pairs[..., 1, :, :] @ below @ pairs[..., 0, :, :])
        found = _assemble(found, cross)
        size *= 2
    return found.squeeze(-3)[..., :n, :n]


@_unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(a: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    turned = result.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)


def _pad(x: mx.array, tokens: int) -> mx.array:
    return mx.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, tokens), (0, 0)])


def _halves(x: mx.array, size: int) -> tuple[mx.array, mx.array]:
    """(..., n, D) -> the first and the second half, (..., n / 2 size, size, D), of each block."""
    blocks = mx.unflatten(x, -2, (-1, 2, size))
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def _assemble(blocks: mx.array, cross: mx.array) -> mx.array:
    """Join blocks (..., 2 m, s, s) and what is below each pair's first (..., m, s, s)."""
    pairs = mx.unflatten(blocks, -3, (-1, 2))
    first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
    above = mx.concatenate([first, mx.zeros_like(first)], axis=-1)
    return mx.concatenate([above, mx.concatenate([cross, second], axis=-1)], axis=-2)
