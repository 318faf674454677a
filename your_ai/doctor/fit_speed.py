"""Fit the seconds of each kind of operation to measured times. No mlx here.

A time is a sum: amount x seconds of one operation, over the kinds of operations. So the fit is a
linear least squares of relative errors whose solution has no negative numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from your_ai.memory.speed import KINDS
from your_ai.memory.step_time import Work

ROUNDS = 3000
CLOSE_ENOUGH = 1e-12  # smaller changes of the squared error in a round end the fit
USUAL_ERROR = 0.05  # a relative error above this counts less than its square
REWEIGHTED = 6  # how often the weights are computed again
RIDGE = 1e-5  # on each kind's share, so that kinds that always come together share their time


@dataclass(frozen=True)
class TimedWork:
    """Work whose seconds were measured."""

    name: str
    work: Work
    seconds: float


def fitted_seconds(measured: Sequence[TimedWork]) -> dict[str, float]:
    """The seconds of one operation of each kind; 0 for kinds that were not measured.

    A time that is far off, because something else ran meanwhile, counts less: its weight falls
    with its error (Huber's loss, by least squares that are repeated with new weights).
    """
    kinds = list(KINDS)
    amounts = np.array([[t.work.get(kind, 0.0) / t.seconds for kind in kinds] for t in measured])
    scale = np.maximum(amounts.max(axis=0), 1e-300)
    columns, weights = amounts / scale, np.ones(len(measured))
    for _ in range(REWEIGHTED):
        shares = not_negative(columns, weights)
        weights = np.minimum(1.0, USUAL_ERROR / np.maximum(1e-9, np.abs(columns @ shares - 1)))
    return {
        kind: float(share / size) if is_used else 0.0
        for kind, share, size, is_used in zip(
            kinds, shares, scale, columns.any(axis=0), strict=True
        )
    }


def not_negative(columns: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """(k,) shares of which none is negative, for which columns @ shares is near 1.

    columns: (n, k); weights: (n,) of the squared errors. By coordinate descent: each share in turn
    gets the best value that is not negative.
    """
    weighed = columns * weights[:, None]
    count = columns.shape[1]
    normal, right = columns.T @ weighed + RIDGE * np.eye(count), weighed.sum(axis=0)
    shares, before = np.zeros(count), np.inf
    for _ in range(ROUNDS):
        for k in range(count):
            shares[k] = max(0.0, shares[k] + (right[k] - normal[k] @ shares) / normal[k, k])
        error = float(shares @ normal @ shares - 2 * right @ shares)
        if before - error < CLOSE_ENOUGH:
            break
        before = error
    return shares


def errors(measured: Sequence[TimedWork], seconds: dict[str, float]) -> np.ndarray:
    """(n,) predicted over measured seconds, minus 1."""
    return np.array(
        [sum(a * seconds[kind] for kind, a in t.work.items()) / t.seconds - 1 for t in measured]
    )
