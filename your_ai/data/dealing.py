"""Deal the rows of a step to ranks, so that all take about the same time. Pure, and the same on
every rank."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from your_ai.data.batches import members


def costs_of(lengths: np.ndarray, hidden: int, rows_together: int = 1) -> np.ndarray:
    """(g,) the cost of each group of consecutive rows, in tokens.

    A row of T tokens costs T, and T^2 / (6 hidden) for its attention: with the hidden size D, a
    block does about 24 T D^2 operations in its linear layers and 4 T^2 D in its attention.

    lengths: (n,) tokens of each row.
    """
    tokens = np.maximum(lengths, 1).astype(np.float64)
    costs = tokens + tokens**2 / (6 * max(1, hidden))
    return np.asarray(costs.reshape(-1, rows_together).sum(axis=1))


def dealt(costs: Sequence[float], shares: Sequence[float]) -> list[list[int]]:
    """The items of each rank, in ascending order: the dearest first, to who would end earliest.

    shares: the relative speed of each rank. Some ranks get none if there are few items.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    loads = [0.0] * len(shares)
    found: list[list[int]] = [[] for _ in shares]
    for item in order:
        ends = [(load + costs[item]) / share for load, share in zip(loads, shares, strict=True)]
        rank = ends.index(min(ends))
        loads[rank] += costs[item]
        found[rank].append(item)
    return [sorted(items) for items in found]


def rows_of_rank(
    lengths: np.ndarray, hidden: int, shares: Sequence[float], rank: int, rows_together: int = 1
) -> np.ndarray:
    """The places, in the step, of the rows that a rank trains: whole groups, in their order.

    lengths: (n,) tokens of each row of the step.
    """
    mine = dealt(costs_of(lengths, hidden, rows_together).tolist(), shares)[rank]
    return members(np.array(mine, np.int64), rows_together)
