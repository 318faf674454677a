"""Run a function over chunks of tokens, one after another, forward and backward.

Shapes: B rows, T tokens per row, n tokens per chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.nets import numerics
from your_ai.nets.mlx_types import custom_function

Step = Callable[..., tuple[mx.array, mx.array]]
"""(state, *pieces, *constants) -> (next state, output of the chunk).

pieces: (B, n, ...), the sequences' tokens of a chunk. The output is (B, n, ...).
"""


def in_chunks(
    step: Step,
    tokens: int,
    state: mx.array,
    sequences: Sequence[mx.array],
    constants: Sequence[mx.array] = (),
) -> tuple[mx.array, mx.array]:
    """Run `step` on chunks of `tokens` tokens -> output (B, T, ...), last state.

    step: a module's function, or one that is made once; programs are kept by it.
    state: float32; the state before the first token.
    sequences: (B, T, ...) each. constants: used by all chunks.

    Differentiable in the state, the sequences and the constants. The backward pass keeps the
    state before each chunk, not what a chunk computes.
    """
    found = _over_chunks(step, tokens, len(sequences))(state, *sequences, *constants)
    return found[0], found[1]


@lru_cache
def _over_chunks(step: Step, tokens: int, count: int) -> Callable[..., tuple[mx.array, ...]]:
    """Make f(state, *sequences, *constants) -> output, last state, states between chunks.

    count: the number of sequences.
    """

    @custom_function
    def run(state: mx.array, *arrays: mx.array) -> tuple[mx.array, ...]:
        sequences, constants = arrays[:count], arrays[count:]
        outputs: list[mx.array] = []
        states: list[mx.array] = []
        done = [state]
        for rows in _chunks(sequences[0].shape[1], tokens):
            # Begin a chunk when the one before it is computed, so that few are in memory.
            pieces = mx.depends([x[:, rows] for x in sequences], done)
            state, output = step(state, *pieces, *constants)
            outputs.append(output)
            states.append(state)
            done = [state, output]
        return mx.concatenate(outputs, axis=1), state, *states[:-1]

    @run.vjp
    def run_vjp(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
        first, *arrays = primals
        sequences, constants = arrays[:count], arrays[count:]
        cotangent, of_state = cotangents[:2]
        states = [first, *results[2:]]
        chunks = list(_chunks(sequences[0].shape[1], tokens))
        pieces_of: list[list[mx.array]] = [[] for _ in sequences]
        sums = [mx.zeros(x.shape, mx.float32) for x in constants]
        done = [cotangent]  # prevents mx.compile from sharing what the forward pass computed
        for state, rows in zip(reversed(states), reversed(chunks), strict=True):
            given = [state, *(x[:, rows] for x in sequences), cotangent[:, rows]]
            *given, of_output = mx.depends(given, done)
            given += constants
            _, grads = mx.vjp(step, given, [of_state, of_output])
            of_state, *more = grads
            for found, grad in zip(pieces_of, more, strict=False):
                found.insert(0, grad)
            sums = [total + grad for total, grad in zip(sums, more[count:], strict=True)]
            done = [of_state, *more[:count], *sums]
        return (
            of_state,
            *(mx.concatenate(found, axis=1) for found in pieces_of),
            *(total.astype(x.dtype) for total, x in zip(sums, constants, strict=True)),
        )

    return run


def _chunks(tokens: int, step: int) -> Iterator[slice]:
    for start in range(0, tokens, step):
        yield slice(start, min(start + step, tokens))


# Decays between the tokens of a chunk, computed from logarithms


STRONGEST = -1e4  # smaller logarithms, -inf among them, count as this: the decay is 0 long before


@custom_function
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


class ScalarDecays(NamedTuple):
    """The decays of a chunk that are the same for all features; `scalar_decays` makes them."""

    from_start: mx.array
    """(..., n): from before the chunk to each token, the token's own included."""
    to_end: mx.array
    """(..., n): from each token to the last one, without the token's own."""
    between: mx.array
    """(..., n, n): from token i to token t in row t; 1 for i = t, 0 for i > t."""


def scalar_decays(logs: mx.array) -> ScalarDecays:
    """logs: (..., n)"""
    n = logs.shape[-1]
    terms = mx.where(lower(n, -1), logs[..., None], 0.0)
    between = mx.where(lower(n), exp(mx.cumsum(terms, axis=-2)), 0.0)
    from_start = exp(mx.cumsum(logs, axis=-1))
    return ScalarDecays(from_start, between[..., -1, :], between)


class Decays(NamedTuple):
    """The decays of a chunk for each feature; `decays_of` makes them."""

    from_start: mx.array
    """(..., n, D): from before the chunk to each token, the token's own included."""
    to_end: mx.array
    """(..., n, D): from each token to the last one, without the token's own."""
    levels: mx.array
    """(..., L, n, D): to the border of the token's block, or from it, at each level."""


def decays_of(logs: mx.array) -> Decays:
    """logs: (..., n, D)

    Where a GPU rounds the inputs of matrix products (TF32), the sums are as rounded as those.
    """
    n = logs.shape[-2]
    found = exp(_sums(n) @ mx.maximum(logs, STRONGEST))
    found = mx.unflatten(found, -2, (-1, n))
    return Decays(found[..., 0, :, :], found[..., 1, :, :], found[..., 2:, :, :])


def products(rows: mx.array, keys: mx.array, decays: Decays) -> mx.array:
    """x_t . (decay from i to t) k_i for i < t, 0 for i >= t: x, k (..., n, D) -> (..., n, n)."""
    if rows.shape[-2] == 1:
        return mx.zeros_like(rows @ keys.swapaxes(-1, -2))
    rows, keys = (x[..., None, :, :] * decays.levels for x in (rows, keys))
    return (_masks(rows.shape[-2]) * (rows @ keys.swapaxes(-1, -2))).sum(axis=-3)


@custom_function
def unit_lower_inverse(a: mx.array) -> mx.array:
    """(I + A)^-1 for strictly lower triangular A, (..., n, n).

    The blocks of each level are inverted from those of the level below. Powers of A, as in
    (I - A)(I + A^2)(I + A^4) ..., would be huge if the keys are alike, although the inverse
    is not.
    """
    found = mx.eye(a.shape[-1])
    for level in range(len(_sizes(a.shape[-1]))):
        below = _masks(a.shape[-1])[level] * a
        found = found - (found @ below @ found if level else below)
    return found if a.shape[-1] > 1 else mx.ones_like(a)


@unit_lower_inverse.vjp
def _unit_lower_inverse_vjp(a: mx.array, cotangent: mx.array, result: mx.array) -> mx.array:
    turned = result.swapaxes(-1, -2)
    return -(turned @ cotangent @ turned)


@lru_cache
def _masks(tokens: int) -> mx.array:
    """(L, n, n) of 0 and 1: the level at which row t sees column i; made once, not per chunk."""
    found = [_seen(tokens, size) for size in _sizes(tokens)]
    return mx.array(np.array(found, np.float32).reshape(-1, tokens, tokens))


@lru_cache
def _sums(tokens: int) -> mx.array:
    """((2 + L) n, n) of 0 and 1: the terms of the sums that `decays_of` needs."""
    row, column = np.arange(tokens)[:, None], np.arange(tokens)
    found = [column <= row, column > row]
    for size in _sizes(tokens):
        border = row // (2 * size) * (2 * size) + size  # the first token of the second half
        later = (border <= column) & (column <= row)
        earlier = (row < column) & (column < border)
        found.append(np.where(row >= border, later, earlier))
    return mx.array(np.concatenate(found).astype(np.float32))


def _sizes(tokens: int) -> list[int]:
    """The size of the halves at each level."""
    return [1 << level for level in range((tokens - 1).bit_length())]


def _seen(tokens: int, size: int) -> np.ndarray:
    place = np.arange(tokens) // size
    return np.asarray((place[:, None] == place + 1) & (place % 2 == 0))
