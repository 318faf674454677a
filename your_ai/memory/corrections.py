"""Corrections of the estimates by the first steps of a run: how many rows fit, and what is kept.

Pure. A plan says both for the longest rows; each bucket of shorter ones has its own answer. Before
anything was measured, the first step takes fewer rows and keeps less, so that it fits even if its
costs are twice their estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from your_ai.memory.estimate import Estimate
from your_ai.memory.estimate_kept import at_rung, highest, rung_of
from your_ai.memory.limit import headroom_bytes, with_headroom
from your_ai.memory.plan import estimate_rows, largest, margin_of, may_keep, rows_of, with_margin
from your_ai.memory.workload import NOTHING, Kept, Plan, Workload

UNTRIED = 2.0  # measured work over estimated work that the first step has room for, if possible
# The ratio of shorter rows may be this many times that of longer ones, after these bytes: more or
# fewer operations begin together.
DOUBT, DOUBT_BYTES = 1.25, 10_000_000


@dataclass
class Corrections:
    """Measured work over estimated work, by bucket: the maximum over the steps so far.

    A bucket without a measurement uses the largest ratio of all others, at least 1. Before the
    first measurement, all use UNTRIED as far as the estimates themselves allow.
    """

    workload: Workload
    plan: Plan
    limit_bytes: int
    ratios: dict[int, float] = field(default_factory=dict)
    room_bytes: int | None = None
    """What shorter rows may need so that more is kept of them; None for what `plan` needs."""
    least_ratio: float = 0.0
    """What longer rows, of which none was measured, are expected to have at least."""
    _kept: dict[tuple[int, int, float], Kept] = field(default_factory=dict)
    """What `kept` found, by its arguments and the ratio."""

    def __post_init__(self) -> None:
        if self.room_bytes is None:
            self.room_bytes = with_margin(largest(self.workload, self.plan))

    @property
    def most_bytes(self) -> int:
        """The most memory that the process may use before the guard ends it."""
        return self.limit_bytes - headroom_bytes(self.limit_bytes)

    def learn(self, rows: int, tokens: int, measured_mlx_bytes: int) -> bool:
        """Record a measured peak; return whether it raised the ratio of this bucket.

        Where another phase needs most, such as the update, the peak says nothing about the work.
        """
        found = self._estimate(rows, tokens, self.kept(rows, tokens))
        if not found.work_bytes:
            return False
        work_bytes = measured_mlx_bytes - (found.mlx_bytes - found.work_bytes)
        ratio = work_bytes / found.work_bytes
        least_ratio = (work_bytes - DOUBT_BYTES) / found.work_bytes / DOUBT
        self.least_ratio = max(self.least_ratio, least_ratio)
        more = ratio > self.ratios.get(tokens, -math.inf)
        if more:
            self.ratios[tokens] = ratio
        return more

    def ratio(self, tokens: int) -> float:
        if not self.ratios:
            return UNTRIED
        return self.ratios.get(tokens, max([1.0, *self.ratios.values()]))

    def rows(self, tokens: int) -> int:
        """The maximum number of rows of `tokens` tokens that fit; if none do, the number that needs
        least: several micro-batches also need the sum of their gradients.

        Whole groups, or less than a group if not even that fits.
        """
        most_rows, together = rows_of(self.workload, self.plan, tokens), self.workload.rows_together
        counts = list(range(most_rows, together, -together))
        tried: dict[int, int] = {}
        for rows in counts + list(range(min(most_rows, together), 0, -1)):
            tried[rows] = self.expected_bytes(rows, tokens)
            if tried[rows] <= self.most_bytes:
                return rows
        likely = [rows for rows in tried if self._is_likely(rows, tokens, self.kept(rows, tokens))]
        return min(likely or list(tried), key=lambda rows: tried[rows])

    def kept(self, rows: int, tokens: int) -> Kept:
        """The arrays that blocks keep of such a micro-batch: as the plan says, or more if rows are
        shorter than the longest, or less if it would exceed the limit."""
        plan = self.plan
        if not may_keep(self.workload, plan):
            return NOTHING
        key = (rows, tokens, self.ratio(tokens))
        if key not in self._kept:
            self._kept[key] = self._most_kept(rows, tokens)
        return self._kept[key]

    def _most_kept(self, rows: int, tokens: int) -> Kept:
        blocks = self.workload.training.reach(self.workload.facts)
        planned = self.plan.kept

        def at(rung: int) -> Kept:
            return planned if rung == rung_of(planned) else at_rung(blocks, rung)

        def fits(rung: int) -> bool:
            expected = self._expected(rows, tokens, at(rung))
            if rung <= rung_of(planned) or expected > self.most_bytes:
                return expected <= self.most_bytes
            # Both sides count this process without a model, so that it may differ after a resume.
            work = self._estimate(rows, tokens, at(rung)).work_bytes
            margin = margin_of(self.workload, self.plan) * work
            return max(expected + margin, with_headroom(expected)) <= (self.room_bytes or 0)

        # A little more kept may need more memory than much more, whose backward pass needs less.
        rung = rung_of(planned)
        low, high = (rung, highest(blocks)) if fits(rung) else (0, max(0, rung - 1))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        likely = [kept for kept in (at(low), planned) if self._is_likely(rows, tokens, kept)]
        return likely[0] if likely else at(low)

    def expected_bytes(self, rows: int, tokens: int) -> int:
        """The estimated peak of the process, corrected by the measured ratios."""
        return self._expected(rows, tokens, self.kept(rows, tokens))

    def foreseen_bytes(self) -> int:
        """The peak that the longest rows are expected to have at least, by those of shorter rows; 0
        if theirs was measured, or none of any length."""
        tokens = max(self.workload.lengths)
        if not self.ratios or tokens in self.ratios:
            return 0
        rows = self.rows(tokens)
        return self._with_ratio(rows, tokens, self.kept(rows, tokens), self.least_ratio)

    def _expected(self, rows: int, tokens: int, kept: Kept) -> int:
        return self._with_ratio(rows, tokens, kept, self.ratio(tokens))

    def _with_ratio(self, rows: int, tokens: int, kept: Kept, ratio: float) -> int:
        found = self._estimate(rows, tokens, kept)
        return int(found.process_bytes + max(0.0, ratio - 1) * found.work_bytes)

    def _is_likely(self, rows: int, tokens: int, kept: Kept) -> bool:
        """Return whether it fits if the estimates are right, unless something was measured: room
        for wrong ones must not make a step larger than that of the plan."""
        most = self.most_bytes
        return bool(self.ratios) or self._estimate(rows, tokens, kept).process_bytes <= most

    def _estimate(self, rows: int, tokens: int, kept: Kept) -> Estimate:
        return estimate_rows(self.workload, replace(self.plan, kept=kept), rows, tokens)
