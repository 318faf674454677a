"""The longest row that fits into a memory limit, by the planner alone. Pure."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

from your_ai.memory.plan import Choice, Demand, choose, options

BUDGETS_GB = (8, 16, 24, 32, 64)  # that are shown if no limit is given
STEP = 256  # tokens; lengths are multiples of it
MOST = 1 << 20  # tokens that are tried


@dataclass(frozen=True)
class LongestRow:
    """The longest row that fits into a limit."""

    limit_bytes: int
    tokens: int
    """A multiple of STEP; 0 if not even one STEP fits."""
    choice: Choice | None
    """The plan for rows of this length; None if none fits."""

    @property
    def is_most(self) -> bool:
        """Whether longer rows, which were not tried, may fit as well."""
        return self.tokens == MOST


def longest_rows(demand: Demand, limits_bytes: Iterable[int]) -> Iterator[LongestRow]:
    """The longest row with which a run fits into each limit; one row, or one group, at a time.

    demand: of the run, whose lengths do not matter.
    """

    def with_rows_of(tokens: int) -> Demand:
        return replace(demand, lengths=(tokens,), batch_size=demand.rows_together)

    @cache
    def least_bytes(tokens: int) -> int:
        found = options(with_rows_of(tokens))  # none if the row needs too many buffers
        return min((option.needed_bytes for option in found), default=sys.maxsize)

    def fits(limit_bytes: int, tokens: int) -> bool:
        return least_bytes(tokens) <= limit_bytes

    for limit_bytes in limits_bytes:
        tokens = longest_of(partial(fits, limit_bytes))
        choice = choose(with_rows_of(tokens), limit_bytes) if tokens else None
        yield LongestRow(limit_bytes, tokens, choice)


def longest_of(fits: Callable[[int], bool]) -> int:
    """The largest multiple of STEP up to MOST that fits, 0 if none does.

    Memory falls at the length from which rows are tiled, so every doubling is tried.
    """
    doubled = [STEP << i for i in range((MOST // STEP).bit_length())]
    best = max(filter(fits, doubled), default=0)
    above = min(2 * best, MOST + STEP)
    while above - best > STEP:
        middle = (best + above) // (2 * STEP) * STEP
        best, above = (middle, above) if fits(middle) else (best, middle)
    return best
