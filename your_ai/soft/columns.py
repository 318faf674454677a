"""Exact gradients through a policy's own tokens, in the memory of a KV cache and one token.

The keys and values of all positions are computed first, without gradients. Then time runs
backwards: the column of a token goes through all blocks, one vector-Jacobian product per block
against the cached keys and values, and adds to cotangents of the cache. The cotangent of the
column's input is the credit of the token before it. The prompt is the last column, in pieces.

The arithmetic is that of one ordinary backward pass, and every column reads all weights, so they
should be resident.

Shapes: B rows, P tokens of the longest prompt, T tokens of the longest completion, N = P + T - 1
positions (the cache has room for a multiple of data.batches.MULTIPLE), D hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.data.batches import MULTIPLE
from your_ai.memory.sizes import HEAD_ROWS, PREFILL_TOKENS
from your_ai.nets.gumbel import NoisePlaces, Noisy, Relaxed, credit, divergence, pieces, relax
from your_ai.nets.head import HeadRows
from your_ai.nets.mlx_types import Arrays
from your_ai.soft.cached_blocks import (
    CacheColumn,
    CachedBlocks,
    Pair,
    column_inputs,
    empty_cache,
    stored,
)
from your_ai.soft.roles import SoftRows, SoftSettings, noisy_head

# What the loss of a batch depends on at the head of the policy


POSITIONS = HEAD_ROWS // 4  # positions that go through the head together


class Terms(NamedTuple):
    """Terms of every completion token, without credit from later tokens."""

    hidden: mx.array
    """(B, T, D) output of the last block that predicts the token."""
    keys: mx.array
    """(B, T) uint32, as in `NoisePlaces`."""
    positions: mx.array
    """(B, T) uint32"""
    log_sum: mx.array
    """(B, T), as in `Relaxed`."""
    mean: mx.array
    """(B, T, D) float32, as in `Relaxed`."""
    grad: mx.array
    """(B, T, D) float32, gradient with respect to the inputs of the linear head."""
    kl: mx.array
    """(B, T) float32; 0 without a reference."""

    def at(self, part: slice) -> Terms:
        """Terms of some of the tokens of each row."""
        return Terms(*(array[:, part] for array in self))


def find_terms(
    noisy: Noisy,
    hidden: mx.array,
    places: tuple[mx.array, mx.array],
    embedding: HeadRows,
    cotangents: mx.array,
    reference: mx.array | None,
    kl_weights: mx.array,
) -> Terms:
    """The terms of the rewards' cotangents, and of the KL divergence.

    hidden: (B, T, D) outputs of the last block. embedding, cotangents: of the reward model, with
    one cotangent of an embedding row for each token. reference: (B, T, D) inputs of the linear
    head, or None. kl_weights: (B, T), the factor of each token's KL in the loss.
    """
    shape = hidden.shape[:2]
    keys, positions, weights = (a.reshape(-1) for a in (*places, kl_weights))
    flat, given = _flat(hidden), _flat(cotangents)
    others = None if reference is None else _flat(reference)
    found: list[list[mx.array]] = []
    for part in pieces(len(flat), POSITIONS):
        inputs = noisy.head.inputs(flat[part])
        at = NoisePlaces(keys[part], positions[part])
        relaxed = relax(noisy, inputs, at, embedding, given[part])
        grad, kl = relaxed.grad, mx.zeros(len(inputs))
        if others is not None:
            apart = divergence(noisy.head, inputs, others[part])
            grad, kl = grad + apart.grad * weights[part, None], apart.kl
        found.append([relaxed.log_sum, relaxed.mean, grad, kl])
        mx.eval(found[-1])
    arrays = [mx.concatenate([*each]) for each in zip(*found, strict=True)]
    arrays = [array.reshape(*shape, *array.shape[1:]) for array in arrays]
    return Terms(hidden, *places, *arrays)


def cotangent_of(
    noisy: Noisy, terms: Terms, embedding: HeadRows, later: mx.array | None
) -> mx.array:
    """(B, T, D) cotangent of `terms.hidden`.

    later: (B, T, D) the credit that each token gets from later ones, a cotangent of its row of
    `embedding`, the policy's own; None for none.
    """
    flat = Terms(*(array.reshape(-1, *array.shape[2:]) for array in terms))
    given = None if later is None else _flat(later)
    found: list[mx.array] = []
    for part in pieces(len(flat.hidden), POSITIONS):
        hidden = flat.hidden[part]
        inputs, grad = noisy.head.inputs(hidden), flat.grad[part]
        if given is not None:
            at = NoisePlaces(flat.keys[part], flat.positions[part])
            known = Relaxed(flat.log_sum[part], flat.mean[part], grad)
            grad = grad + credit(noisy, inputs, at, known, embedding, given[part])
        _, (cotangent,) = mx.vjp(noisy.head.inputs, [hidden], [grad.astype(inputs.dtype)])
        found.append(cotangent)
        mx.eval(cotangent)
    return mx.concatenate(found).reshape(terms.hidden.shape)


def _flat(values: mx.array) -> mx.array:
    return values.reshape(-1, values.shape[-1])


TOGETHER = 16  # columns of a token whose block inputs are computed together


class FilledCaches(NamedTuple):
    """The forward pass."""

    inputs: mx.array
    """(B, N, D) of the first block."""
    caches: list[Pair]
    """For each block."""
    hidden: mx.array
    """(B, T, D) output of the last block that predicts each token."""


def left_padding(rows: SoftRows) -> mx.array:
    """(B,) int32"""
    return mx.array((rows.starts.max() - rows.starts).astype(np.int32))


def fill(blocks: CachedBlocks, rows: SoftRows, soft: mx.array | None) -> FilledCaches:
    """Compute the keys and values of all positions, few at a time.

    soft: (B, T, D) embedding rows of relaxed tokens, or None.
    """
    network, longest = blocks.network, int(rows.starts.max())
    size = longest + rows.count - 1
    tokens = np.zeros((len(rows.prompts), size), np.int32)
    for row, prompt in enumerate(rows.prompts):
        tokens[row, longest - len(prompt) : longest] = prompt
        tokens[row, longest:] = rows.sampled.tokens[row, : rows.count - 1]
    given = network.embedding.hard(mx.array(tokens))
    if soft is not None:
        given = mx.concatenate([given[:, :longest], soft[:, :-1].astype(given.dtype)], axis=1)
    inputs = network.embedding.after(given)
    mx.eval(inputs)
    room = -(-size // MULTIPLE) * MULTIPLE  # so that few lengths need graphs of their own
    caches = [
        empty_cache(blocks, index, network.arrays(index), inputs[:, :1], room)
        for index in range(len(blocks.calls))
    ]
    found: list[mx.array] = []
    width = width_of(rows)
    for start in range(0, size, width):
        column = CacheColumn(start, min(size, start + width))
        hidden = inputs[:, column.start : column.stop]
        at = column_inputs(column, left_padding(rows), room)
        for index, cache in enumerate(caches):
            arrays = network.arrays(index)
            hidden, *new = blocks.forward(index, arrays, hidden, cache, at)
            stored(cache, column, *new)
            mx.eval(hidden, cache)
        first = max(0, longest - 1 - start)
        found.append(hidden[:, first:])
    return FilledCaches(inputs, caches, mx.concatenate(found, axis=1))


def width_of(rows: SoftRows) -> int:
    """The number of positions that are computed together where they need not be apart."""
    return max(TOGETHER, PREFILL_TOKENS // len(rows.prompts))


def groups(longest: int, size: int, width: int) -> Iterator[list[CacheColumn]]:
    """The columns, backwards in time, in groups whose block inputs are computed together.

    longest: P; size: N. A token is a column; so are up to `width` tokens of the prompts.
    """
    for stop in range(size, longest, -TOGETHER):
        start = max(longest, stop - TOGETHER)
        yield [CacheColumn(place, place + 1) for place in reversed(range(start, stop))]
    for start in reversed(range(0, longest, width)):
        yield [CacheColumn(start, min(longest, start + width))]


def gradients(
    blocks: CachedBlocks,
    settings: SoftSettings,
    rows: SoftRows,
    filled: FilledCaches,
    terms: Terms,
) -> dict[int, Arrays]:
    """The gradients of each trained block."""
    network, (inputs, caches, _) = blocks.network, filled
    noisy = noisy_head(network, settings)
    longest, left = int(rows.starts.max()), left_padding(rows)
    size, room = inputs.shape[1], caches[0][0].shape[2]
    # In float32, because each is a sum over all later columns.
    cotangents = [(mx.zeros(keys.shape), mx.zeros(values.shape)) for keys, values in caches]
    total: dict[int, Arrays] = {}
    later: mx.array | None = None
    for group in groups(longest, size, width_of(rows)):
        whole = CacheColumn(group[-1].start, group[0].stop)
        of_blocks = block_inputs(blocks, inputs, caches, whole, left)
        for column in group:
            settings.step(len(rows.prompts))
            cotangent = mx.zeros_like(inputs[:, column.start : column.stop])
            token = column.stop - longest  # the index of the token that the column predicts
            if token >= 0:
                part = slice(token, token + 1)
                last = cotangent_of(noisy, terms.at(part), network.embedding.rows, later)
                cotangent[:, -1:] = last
            here = slice(column.start - whole.start, column.stop - whole.start)
            at = column_inputs(column, left, room)
            lowest = network.first if column.start < longest else 0
            for index in reversed(range(lowest, len(caches))):
                dtype = caches[index][0].dtype
                keys, values = (array.astype(dtype) for array in column.of(cotangents[index]))
                cotangent, of_cache, grads = blocks.backward(
                    index, network.arrays(index), of_blocks[index][:, here], caches[index],
                    at, (cotangent, keys, values),
                )  # fmt: skip
                cotangents[index] = added(cotangents[index], of_cache)
                before = total.pop(index, None)
                total[index] = grads if before is None else added_arrays(before, grads)
                del of_cache, keys, values, grads, before
                mx.eval(cotangent, cotangents[index], total[index])
            later = network.embedding.cotangent(cotangent) if token > 0 else None
    return {index: grads for index, grads in total.items() if grads}


def block_inputs(
    blocks: CachedBlocks, inputs: mx.array, caches: list[Pair], column: CacheColumn, left: mx.array
) -> list[mx.array]:
    """(B, w, D) the input of each block at the positions of a column."""
    hidden, found = inputs[:, column.start : column.stop], []
    at = column_inputs(column, left, caches[0][0].shape[2])
    for index, cache in enumerate(caches):
        found.append(hidden)
        if index + 1 < len(caches):
            arrays = blocks.network.arrays(index)
            hidden, *_ = blocks.forward(index, arrays, hidden, cache, at)
            mx.eval(hidden)
    return found


def added(total: Pair, more: Pair) -> Pair:
    return total[0] + more[0], total[1] + more[1]


def added_arrays(total: Arrays, more: Arrays) -> Arrays:
    """The sums, in float32."""
    return {path: array.astype(mx.float32) + more[path] for path, array in total.items()}
