"""Measured memory of micro-batches -> corrections of the estimate, and what to measure next.

The coefficients of `memory.estimate` were fitted on one kind of machine. On any other machine
they are a guess. So a run with a tight limit measures before it trains: first one short row, then
longer rows, then more rows. Each shape is only as large as earlier measurements allow. No mlx here.

There are three families of plans (`Plan.family`): fused; staged with streamed, which use the same
memory for activations; and those of the two where blocks keep outputs. N is the number of tokens
of a micro-batch: rows x tokens per row.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from your_ai.files import read_text, replace_text

FAR = 10.0  # measure nothing if this multiple of the estimated activations fits
FIRST, SECOND = 32, 64  # tokens of the first shapes: small, but enough to show the growth
SLACK = 1.5  # growth beyond the measurements may be this much steeper (attention)
# After ENOUGH measurements, give up on a shape that would not fit even if memory grew only
# SURELY times as fast.
ENOUGH, SURELY = 8, 0.9
STEP = 32  # measured sequence lengths are a multiple of it, as those of batches are
GROWTHS = (2.25, 1.5, 1.25)  # factors of N from one shape to the next, the largest first
SPARE_BYTES = 10_000_000  # safety in the estimates of memory outside MLX's buffers
LEAST_RATIO, MOST_RATIO = 0.1, 100.0  # ratios outside this range are not plausible


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured memory of one micro-batch on this machine."""

    engine: str
    """The family of the plan that computed it."""
    rows: int
    tokens: int
    """Tokens per row, padding included."""
    work_bytes: int
    """Peak memory without weights, adapters and optimizer state."""
    ratio: float
    """The factor on the coefficients that makes the estimate equal to the measurement."""
    excess_bytes: int | None = None
    """Memory of the process outside MLX's buffers, less the estimate of it; None if unknown."""

    @property
    def size(self) -> int:
        """N, the total number of tokens."""
        return self.rows * self.tokens


class Shape(NamedTuple):
    """The shape of a micro-batch: B rows of T tokens."""

    rows: int
    tokens: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens


@dataclass(frozen=True)
class Calibration:
    """The measurements on this machine, which correct its estimates."""

    measurements: tuple[Measurement, ...] = ()

    def of(self, family: str) -> list[Measurement]:
        """Measurements of a family, by size; the one of most work for each size."""
        ours = [m for m in self.measurements if m.engine == family]
        found = {m.size: m for m in sorted(ours, key=lambda m: m.work_bytes)}
        return [found[size] for size in sorted(found)]

    def excess_bytes(self, family: str) -> int | None:
        """The memory outside MLX's buffers beyond its estimate, of the family's largest
        measurement that knows it; None if none does."""
        known = [m for m in self.measurements if m.engine == family and m.excess_bytes is not None]
        return max(known, key=lambda m: (m.size, m.excess_bytes)).excess_bytes if known else None

    def spare_bytes(self, family: str) -> int:
        """The bytes that estimates of memory outside MLX's buffers exceed: measured, or a guess."""
        excess = self.excess_bytes(family)
        return SPARE_BYTES if excess is None else min(SPARE_BYTES, max(0, -excess))

    def largest(self, family: str) -> int:
        """The largest measured N; 0 if there is none."""
        return max((m.size for m in self.of(family)), default=0)

    def with_one(self, measured: Measurement) -> Calibration:
        return Calibration((*self.measurements, measured))

    def ratio(self, family: str, size: int, expected_bytes: float) -> float:
        """The factor on the coefficients for a micro-batch with N = `size`.

        expected_bytes: its estimated work, corrected by the ratio of the largest measurement.

        Between two measurements it is the larger of their ratios. Beyond all measurements it is
        the last ratio, increased if the last two measurements grew more than their estimates, and
        reduced if they grew less.
        A family without measurements uses the last ratio of the others.
        """
        found = self.of(family)
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
        return max(LEAST_RATIO, found[-1].ratio * carried)


def extrapolated(
    found: Sequence[Measurement], size: int, expected_bytes: float, slack: float = 1.0
) -> float:
    """Extrapolate bytes of work to N = `size`, beyond all measurements.

    Work grows as the estimate does, plus, per token, the growth of the last two measurements
    beyond their estimates. So memory that levels off is not extrapolated in a straight line. If
    the ratio falls, what the estimate missed does not depend on N, such as gradients of a high
    rank: then work grows as measured, and at least as estimated without a correction. With only
    one measurement, work is proportional to N.

    expected_bytes: as in `Calibration.ratio`.
    slack: factor on the growth.
    """
    *before, last = found
    if not before:
        return last.work_bytes * max(1.0, size / last.size)
    expected_before = before[-1].work_bytes * last.ratio / before[-1].ratio  # at the last ratio
    missed = max(0.0, expected_before - before[-1].work_bytes) / (last.size - before[-1].size)
    growth = expected_bytes - last.work_bytes + missed * (size - last.size)
    if 1 < last.ratio < before[-1].ratio:
        estimated = [m.work_bytes / m.ratio for m in (before[-1], last)]
        seen = (last.work_bytes - before[-1].work_bytes) / max(1.0, estimated[1] - estimated[0])
        growth *= min(1.0, max(1.0, seen) / last.ratio)
    return last.work_bytes + slack * max(0.0, growth)


def next_shape(
    calibration: Calibration,
    family: str,
    wanted: Shape,
    room_bytes: Callable[[Shape], int],
    expected_bytes: Callable[[Shape], int],
) -> Shape | None:
    """The next micro-batch to measure on the way to `wanted`; None if there is none.

    room_bytes: bytes that the limit leaves for the work of a shape.
    expected_bytes: its estimated work, corrected by the last measurement.

    First the length of one row grows, then the number of rows. No shape is measured that might
    not fit, judged by its expected work and by SLACK times the measured growth.
    """
    found = calibration.of(family)
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
        carried = extrapolated(found, shape.size, expected_bytes(shape), slack)
        return carried <= room_bytes(shape)

    enough = len(found) >= ENOUGH
    if enough and extrapolated(found, goal.size, expected_bytes(goal), SURELY) > room_bytes(goal):
        return None
    larger = [shape for shape in shapes if shape.size > last.size]
    by_slack = (shape for shape in larger if fits(shape, SLACK))
    return next(by_slack, larger[-1] if fits(larger[-1], 1.0) else None)


# Measurements of a model on this machine, kept in a file for the next run. No mlx here


MOST_BYTES = 1 << 20  # a larger file was not written by this module


def file_of(folder: Path, key: Iterable[str]) -> Path:
    """The file of the measurements for `key`."""
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read(path: Path) -> Calibration:
    """Read a file of measurements; empty if it is missing or damaged."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return Calibration()
    return Calibration(tuple(valid_measurements(content if isinstance(content, list) else [])))


def valid_measurements(entries: Iterable[Any]) -> Iterator[Measurement]:
    """The valid measurements among `entries`."""
    for entry in entries:
        with contextlib.suppress(ValueError, TypeError):
            yield measurement_of(entry)


def measurement_of(entry: Any) -> Measurement:
    """A measurement from a file. Raises ValueError or TypeError if it is not valid."""
    found = Measurement(**entry)
    counts = (found.rows, found.tokens, found.work_bytes)
    whole = all(type(count) is int and 0 < count < 1 << 50 for count in counts)
    excess = found.excess_bytes
    whole &= excess is None or (type(excess) is int and abs(excess) < 1 << 50)
    if not (whole and type(found.ratio) is float and math.isfinite(found.ratio)):
        raise ValueError("not a measurement")
    if (
        found.engine not in ("fused", "staged", "kept")
        or not LEAST_RATIO <= found.ratio <= MOST_RATIO
    ):
        raise ValueError("not a measurement")
    return found


def keep(path: Path, calibration: Calibration) -> None:
    """Replace the file. If that fails, the next run measures again."""
    text = json.dumps([asdict(measured) for measured in calibration.measurements], indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text + "\n")
