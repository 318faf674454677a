"""Gradients through a policy's own tokens by ordinary backward passes over the whole rows.

Each sweep carries credit one token further back: the cotangents of the inputs that one sweep finds
are the credit of the tokens in the next. The result is exact after T - 1 sweeps, and the error
falls geometrically. A sweep reads each block once, so the weights may be streamed.

Shapes: B rows, S tokens of a padded row, T completion tokens, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import mlx.core as mx

from your_ai.nets.gumbel import Noisy
from your_ai.nets.mlx_types import Arrays
from your_ai.soft import passes
from your_ai.soft.roles import CreditLength, Network, SoftRows, SoftSettings, noisy_head
from your_ai.soft.terms import Terms, cotangent_of


class Swept(NamedTuple):
    """The result of all sweeps."""

    gradients: dict[int, Arrays]
    """Of each trained block."""
    residual: float
    """The relative difference of the credits of the last two sweeps: 1 before the second, and 0 if
    the result is exact."""
    sweeps: int
    """That carried credit."""


def sweep(
    policy: Network,
    settings: SoftSettings,
    rows: SoftRows,
    inputs: list[mx.array],
    terms: Terms,
) -> Swept:
    """inputs: of each block, (B, S, D). They are removed."""
    noisy, exact = noisy_head(policy, settings), rows.count - 1
    later, residual, done = None, 1.0, 0
    while not is_enough(settings.credit, done, residual, exact):
        settings.step(len(rows.prompts))
        cotangent = passes.backward(policy, inputs, of_outputs(policy, noisy, rows, terms, later))
        found = next_credit(policy, rows, cotangent)
        mx.eval(found)
        residual, later, done = difference(found, later), found, done + 1
        if residual == 0:
            break
    settings.step(len(rows.prompts))
    cotangent = of_outputs(policy, noisy, rows, terms, later)
    grads = passes.parameter_gradients(policy, inputs, cotangent)
    return Swept(grads, 0.0 if done >= exact else residual, done)


def is_enough(credit: CreditLength, done: int, residual: float, exact: int) -> bool:
    """Whether no further sweep is needed; exact: the number that makes the result exact."""
    if done >= exact:
        return True
    if credit == "exact":
        return False
    if isinstance(credit, int):
        return done >= credit
    return done > 0 and residual <= credit


def of_outputs(
    policy: Network, noisy: Noisy, rows: SoftRows, terms: Terms, later: mx.array | None
) -> mx.array:
    """(B, S, D) cotangent of the output of the last block."""
    found = cotangent_of(noisy, terms, policy.embedding.rows, later)
    empty = mx.zeros((*rows.tokens.shape, found.shape[-1]), found.dtype)
    return rows.scatter(found, -1, empty)


def next_credit(policy: Network, rows: SoftRows, cotangent: mx.array) -> mx.array:
    """(B, T, D) of each token's embedding row, from the cotangent of the first block's input."""
    found = rows.gather(policy.embedding.cotangent(cotangent), 0)
    return mx.where(rows.is_real[..., None], found, 0)


def difference(new: mx.array, old: mx.array | None) -> float:
    """|new - old| / |new|; 0 if both are 0."""
    apart = new if old is None else new - old
    size = float(mx.sqrt(mx.square(new.astype(mx.float32)).sum()))
    return float(mx.sqrt(mx.square(apart.astype(mx.float32)).sum())) / max(size, 1e-30)
