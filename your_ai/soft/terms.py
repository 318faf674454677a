"""What the loss of a batch depends on at the head of the policy.

Shapes: B rows, T completion tokens, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from your_ai.memory.sizes import HEAD_ROWS
from your_ai.nets.gumbel import NoisePlaces, Noisy, Relaxed, credit, divergence, pieces, relax
from your_ai.nets.head import HeadRows

POSITIONS = HEAD_ROWS // 4  # positions that go through the head together


class Terms(NamedTuple):
    """Of every completion token, without credit from later tokens."""

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
        """Of some of the tokens of each row."""
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
