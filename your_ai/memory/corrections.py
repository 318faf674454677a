"""Corrections of the estimates by the first steps of a run: how many rows fit, and what is kept.

Pure. A plan says both for the longest rows; each bucket of shorter ones has its own answer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from your_ai.memory.estimate import Estimate
from your_ai.memory.estimate_kept import at_rung, highest, rung_of
from your_ai.memory.limit import headroom_bytes, with_headroom
from your_ai.memory.plan import estimate_rows, largest, margin_of, may_keep, rows_of, with_margin
from your_ai.memory.workload import NOTHING, Kept, Plan, Workload


@dataclass
class Corrections:
    """Measured work over estimated work, by bucket: the maximum over the steps so far.

    A bucket without a measurement uses the largest ratio of all others, at least 1.
    """

    workload: Workload
    plan: Plan
    limit_bytes: int
    ratios: dict[int, float] = field(default_factory=dict)
    room_bytes: int = 0
    """What shorter rows may need so that more is kept of them; by default what `plan` needs."""
    _kept: dict[tuple[int, int, float], Kept] = field(default_factory=dict)
    """What `kept` found, by its arguments and the ratio."""

    def __post_init__(self) -> None:
        self.room_bytes = self.room_bytes or with_margin(largest(self.workload, self.plan))

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
        held = found.mlx_bytes - found.work_bytes
        ratio = (measured_mlx_bytes - held) / found.work_bytes
        more = ratio > self.ratios.get(tokens, -math.inf)
        if more:
            self.ratios[tokens] = ratio
        return more

    def ratio(self, tokens: int) -> float:
        return self.ratios.get(tokens, max([1.0, *self.ratios.values()]))

    def rows(self, tokens: int) -> int:
        """The maximum number of rows of `tokens` tokens that fit; if none do, the number that needs
        least: several micro-batches also need the sum of their gradients.

        Whole groups, or less than a group if not even that fits.
        """
        rows, together = rows_of(self.workload, self.plan, tokens), self.workload.rows_together
        tried: dict[int, int] = {}
        while rows >= 1:
            tried[rows] = self.expected_bytes(rows, tokens)
            if tried[rows] <= self.most_bytes:
                return rows
            rows -= together if rows > together else 1
        return min(tried, key=tried.__getitem__)

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
            return max(expected + margin, with_headroom(expected)) <= self.room_bytes

        # A little more kept may need more memory than much more, whose backward pass needs less.
        rung = rung_of(planned)
        low, high = (rung, highest(blocks)) if fits(rung) else (0, max(0, rung - 1))
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if fits(middle) else (low, middle - 1)
        return at(low)

    def expected_bytes(self, rows: int, tokens: int) -> int:
        """The estimated peak of the process, corrected by the measured ratios."""
        return self._expected(rows, tokens, self.kept(rows, tokens))

    def _expected(self, rows: int, tokens: int, kept: Kept) -> int:
        found = self._estimate(rows, tokens, kept)
        excess = max(0.0, self.ratio(tokens) - 1) * found.work_bytes
        return int(found.process_bytes + excess)

    def _estimate(self, rows: int, tokens: int, kept: Kept) -> Estimate:
        return estimate_rows(self.workload, replace(self.plan, kept=kept), rows, tokens)
