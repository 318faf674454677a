"""Recurrences without matrix products, in chunks: Mamba 1 and RG-LRU.

h_t = a_t h_{t-1} + x_t, element by element. In its backward pass, the same recurrence runs from
the last token to the first.

Shapes: B rows, T tokens per row, n tokens per chunk, D channels, N states per channel.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from your_ai.memory.sizes import LRU_CHUNK, SELECTIVE_CHUNK
from your_ai.nets.mixers.chunks import exp, in_chunks
from your_ai.nets.mlx_types import custom_function


def selective_scan(
    x: mx.array,
    delta: mx.array,
    A: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Mamba 1 (Gu and Dao, 2023, arXiv 2312.00752): -> output (B, T, D), last state (B, D, N).

    h_t = exp(delta_t A) h_{t-1} + delta_t x_t B_t',  y_t = h_t C_t + D x_t

    x, delta: (B, T, D); A: (D, N), at most 0; B, C: (B, T, N); D: (D,); state: (B, D, N),
    float32, zeros by default. tokens: per chunk.

    The output has the dtype that x D has. Computed in float32. Differentiable in all arrays.
    """
    if state is None:
        state = mx.zeros((x.shape[0], *A.shape), mx.float32)
    tokens = tokens or SELECTIVE_CHUNK
    return in_chunks(_selective_step, tokens, state, (x, delta, B, C), (A, D))


def _selective_step(
    state: mx.array,
    x: mx.array,
    delta: mx.array,
    B: mx.array,
    C: mx.array,
    A: mx.array,
    D: mx.array,
) -> tuple[mx.array, mx.array]:
    dtype = mx.result_type(x, D)
    x, delta, B, C, A, D = (y.astype(mx.float32) for y in (x, delta, B, C, A, D))
    decay = exp(delta[..., None] * A)
    h = token_by_token(decay, (delta * x)[..., None] * B[:, :, None], state)
    y = (h @ C[..., None]).squeeze(-1) + D * x
    return mx.contiguous(h[:, -1]), y.astype(dtype)  # a view would keep h of the whole chunk


def real_gated_lru(
    x: mx.array,
    a: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """RG-LRU (De et al., 2024, arXiv 2402.19427): -> output (B, T, D), last state (B, D).

    x, a: (B, T, D), the inputs and the decays; state: (B, D), float32, zeros by default.
    tokens: per chunk.

    The output has the dtype of x. Computed in float32. Differentiable in all arrays.
    """
    if state is None:
        state = mx.zeros((x.shape[0], x.shape[2]), mx.float32)
    return in_chunks(_lru_step, tokens or LRU_CHUNK, state, (x, a))


def _lru_step(state: mx.array, x: mx.array, a: mx.array) -> tuple[mx.array, mx.array]:
    h = by_doubling(a.astype(mx.float32), x.astype(mx.float32), state)
    return mx.contiguous(h[:, -1]), h.astype(x.dtype)


@custom_function
def token_by_token(a: mx.array, x: mx.array, state: mx.array) -> mx.array:
    """h of all tokens, (B, n, ...), from a and x (B, n, ...) and state (B, ...).

    One operation per token: as quick as can be where a token has many elements.
    """
    found, h = [], state[:, None]
    for of_a, of_x in zip(_tokens(a), _tokens(x), strict=True):
        h = _multiply_add(of_a, h, of_x)
        found.append(h)
    return mx.concatenate(found, axis=1)


@token_by_token.vjp
def _token_by_token_vjp(primals: Any, cotangent: mx.array, h: mx.array) -> tuple[mx.array, ...]:
    a, _, state = primals
    *earlier, last = _tokens(cotangent)
    found = [last]
    for of_a, of_h in zip(_tokens(a)[:0:-1], earlier[::-1], strict=True):
        found.append(_multiply_add(of_a, found[-1], of_h))
    return _gradients(a, state, h, mx.concatenate(found[::-1], axis=1))


def _tokens(x: mx.array) -> list[mx.array]:
    """(B, n, ...) -> n times (B, 1, ...)"""
    return x.split(x.shape[1], axis=1)


@custom_function
def by_doubling(a: mx.array, x: mx.array, state: mx.array) -> mx.array:
    """The same as `token_by_token` in log2(n) operations on whole chunks.

    Hillis and Steele, 1986: after each of them, h_t covers twice as many tokens.
    """
    first = _multiply_add(a[:, :1], state[:, None], x[:, :1])
    return _doubled(a, mx.concatenate([first, x[:, 1:]], axis=1))


@by_doubling.vjp
def _by_doubling_vjp(primals: Any, cotangent: mx.array, h: mx.array) -> tuple[mx.array, ...]:
    a, _, state = primals
    later = mx.concatenate([mx.zeros_like(a[:, :1]), a[:, :0:-1]], axis=1)
    return _gradients(a, state, h, _doubled(later, cotangent[:, ::-1])[:, ::-1])


def _doubled(a: mx.array, h: mx.array) -> mx.array:
    size, n = 1, h.shape[1]
    while size < n:
        more = _multiply_add(a[:, size:], h[:, :-size], h[:, size:])
        h = mx.concatenate([h[:, :size], more], axis=1)
        if 2 * size < n:
            a = mx.concatenate([a[:, :size], a[:, size:] * a[:, :-size]], axis=1)
        size *= 2
    return h


def _gradients(
    a: mx.array, state: mx.array, h: mx.array, of_x: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """The gradients of a, x and the state; of_x: that of x, which is that of h in full."""
    of_a = of_x * mx.concatenate([state[:, None], h[:, :-1]], axis=1)
    return of_a, of_x, a[:, 0] * of_x[:, 0]


@mx.compile
def _multiply_add(a: mx.array, h: mx.array, x: mx.array) -> mx.array:
    return a * h + x


# Short convolutions of each channel with its own weights, as sums of shifted products


@custom_function
def convolution(x: mx.array, weight: mx.array) -> mx.array:
    """y_t = sum over j of w_j x_{t+j}: x (B, n + K - 1, C), weight (C, K, 1) -> (B, n, C).

    Computed in float32; the output has the dtype that x w has. Differentiable in both.
    """
    return _shifted_sum(x, weight.squeeze(-1)).astype(mx.result_type(x, weight))


@convolution.vjp
def _convolution_vjp(primals: Any, cotangent: mx.array, result: Any) -> tuple[mx.array, mx.array]:
    x, weight = primals
    K, n = weight.shape[1], cotangent.shape[1]
    padded = mx.pad(cotangent, [(0, 0), (K - 1, K - 1), (0, 0)])
    of_x = _shifted_sum(padded, weight.squeeze(-1)[:, ::-1]).astype(x.dtype)
    of_weight = [_sum_of_products(x[:, j : j + n], cotangent) for j in range(K)]
    return of_x, mx.stack(of_weight, axis=1)[..., None].astype(weight.dtype)


@mx.compile
def _shifted_sum(x: mx.array, weight: mx.array) -> mx.array:
    """x: (B, n + K - 1, C), weight: (C, K) -> (B, n, C), in float32."""
    K = weight.shape[1]
    n = x.shape[1] - K + 1
    shifted = [x[:, j : j + n].astype(mx.float32) * weight[:, j] for j in range(K)]
    return sum(shifted[1:], shifted[0])


def _sum_of_products(x: mx.array, y: mx.array) -> mx.array:
    """(B, n, C) each -> (C,)"""
    return (x.astype(mx.float32) * y).sum(axis=(0, 1))
