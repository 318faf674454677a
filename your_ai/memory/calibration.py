"""What micro-batches were measured to hold -> how far an estimate is off, and what to measure next.

The coefficients of `memory.estimate` were fitted on one kind of machine. On any other they are
a guess, so a run whose limit is near measures before it trains: one short row, then longer
ones, then more rows, each no larger than what was measured so far allows. No mlx here.

Engines are of two families, fused, and the staged and streamed ones, whose activations are the
same. N: tokens of a micro-batch, rows x tokens of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

FAR = 10.0  # nothing is measured where so many times the estimated activations fit as well
FIRST, SECOND = 32, 64  # tokens: too few to hold much, and enough to show how it grows
SLACK = 1.5  # growth beyond what was measured may be so much steeper, as attention's may
ENOUGH, SURELY = 8, 0.9  # after so many, what would not fit were growth so much slower is left
STEP = 32  # tokens of a row that is measured are a multiple of it, as those of a batch are
GROWTHS = (2.25, 1.5, 1.25)  # in N, the largest first
LEAST_RATIO, MOST_RATIO = 0.1, 100.0  # beyond which nothing is believed


def family(engine: str) -> str:
    """fused, or staged for the engines that compute block by block."""
    return "fused" if engine == "fused" else "staged"


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What one micro-batch held on this machine.

    engine: the family of engines that computed it.
    rows, tokens: its shape, padding included.
    work_bytes: the peak without weights, adapters and the optimizer's state.
    ratio: what the coefficients are multiplied with so that the estimate is what was measured.
    """

    engine: str
    rows: int
    tokens: int
    work_bytes: int
    ratio: float

    @property
    def size(self) -> int:
        """N, tokens in all."""
        return self.rows * self.tokens


class Shape(NamedTuple):
    """Of a micro-batch: B rows of T tokens."""

    rows: int
    tokens: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Calibration:
    """The measurements that estimates on this machine are corrected by."""

    measurements: tuple[Measurement, ...] = ()

    def of(self, engine: str) -> list[Measurement]:
        """Those of an engine's family, the smallest first; of each size the one of most work."""
        ours = [m for m in self.measurements if m.engine == family(engine)]
        found = {m.size: m for m in sorted(ours, key=lambda m: m.work_bytes)}
        return [found[size] for size in sorted(found)]

    def largest(self, engine: str) -> int:
        """The largest N that was measured; 0 where nothing was."""
        return max((m.size for m in self.of(engine)), default=0)

    def with_one(self, measured: Measurement) -> Calibration:
        return Calibration((*self.measurements, measured))

    def ratio(self, engine: str, size: int, expected_bytes: float) -> float:
        """What the coefficients are multiplied with for a micro-batch of N `size`.

        expected_bytes: its work, with the ratio of the largest measurement. Between two
        measurements the larger ratio of the two. Beyond all of them the last ratio, and more
        where the last two grew by more than their estimates. Of a family of which nothing was
        measured the last ratio of the other one.
        """
        found = self.of(engine)
        if not found:
            others = sorted(self.measurements, key=lambda m: m.size)
            return others[-1].ratio if others else 1.0
        above = [m for m in found if m.size >= size]
        below = [m for m in found if m.size < size]
        if above and above[0].size == size:
            return max(LEAST_RATIO, above[0].ratio)
        if above:
            return max(LEAST_RATIO, *(m.ratio for m in (*below[-1:], above[0])))
        if not found[1:]:
            return max(LEAST_RATIO, found[-1].ratio)
        carried = extrapolated(found, size, expected_bytes) / max(1.0, expected_bytes)
        return max(LEAST_RATIO, found[-1].ratio * max(1.0, carried))


def extrapolated(
    found: Sequence[Measurement], size: int, expected_bytes: float, slack: float = 1.0
) -> float:
    """Bytes of work at N `size`, beyond all measurements.

    It grows as the estimate does, and by what the last two grew beyond their estimates, a
    token. So what levels off is not carried on in a straight line. expected_bytes: as in
    `Calibration.ratio`; slack: how many times more it may grow. With one measurement in
    proportion to N.
    """
    *before, last = found
    if not before:
        return last.work_bytes * max(1.0, size / last.size)
    expected_before = before[-1].work_bytes * last.ratio / before[-1].ratio  # with the last ratio
    missed = max(0.0, expected_before - before[-1].work_bytes) / (last.size - before[-1].size)
    growth = expected_bytes - last.work_bytes + missed * (size - last.size)
    return last.work_bytes + slack * max(0.0, growth)


def next_shape(
    calibration: Calibration,
    engine: str,
    wanted: Shape,
    room_bytes: Callable[[Shape], int],
    expected_bytes: Callable[[Shape], int],
) -> Shape | None:
    """The next micro-batch to measure on the way to `wanted`; None where there is none.

    room_bytes: what the limit leaves for a shape's work; expected_bytes: what it is by the
    estimate, corrected by the last measurement. First the tokens of one row grow,
    then rows. Nothing is measured that could need more than there is room for: by what is
    expected, and by SLACK times the growth that was measured.
    """
    found = calibration.of(engine)
    if not found:
        return Shape(1, min(FIRST, wanted.tokens))
    if found[-1].size < min(SECOND, wanted.tokens):
        shape = Shape(1, min(SECOND, wanted.tokens))
        return shape if expected_bytes(shape) <= room_bytes(shape) else None
    last = found[-1]
    if last.size >= wanted.size:
        return None
    one_row = last.size < wanted.tokens
    goal = Shape(1, wanted.tokens) if one_row else wanted
    sizes = [int(last.size * growth) // STEP * STEP for growth in GROWTHS]
    sizes.append(last.size + (STEP if one_row else wanted.tokens))
    sizes = [min(goal.size, size) for size in sizes]
    shapes = [Shape(1, s) if one_row else Shape(s // goal.tokens, goal.tokens) for s in sizes]

    def fits(shape: Shape, slack: float) -> bool:
        expected = expected_bytes(shape)
        return max(extrapolated(found, shape.size, expected, slack), expected) <= room_bytes(shape)

    enough = len(found) >= ENOUGH
    if enough and extrapolated(found, goal.size, expected_bytes(goal), SURELY) > room_bytes(goal):
        return None
    larger = [shape for shape in shapes if shape.size > last.size]
    by_slack = (shape for shape in larger if fits(shape, SLACK))
    return next(by_slack, larger[-1] if fits(larger[-1], 1.0) else None)
