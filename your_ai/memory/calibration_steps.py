"""Choose micro-batches to measure before training, and choose the plan again. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from your_ai.memory.calibration import (
    FAR,
    LEAST_RATIO,
    MOST_RATIO,
    SLACK,
    Measurement,
    Shape,
    extrapolated,
    next_shape,
)
from your_ai.memory.estimate import Estimate
from your_ai.memory.plan import (
    MEASURED_MARGIN,
    Choice,
    Option,
    choose,
    estimate_of,
    expected_bytes,
    held_bytes,
    largest_shape,
    with_margin,
)
from your_ai.memory.workload import Plan, Workload, with_calibration

HALVINGS = 24


class MicroBatchPeak(NamedTuple):
    """The measured memory of a micro-batch, in bytes."""

    mlx_bytes: int
    """Peak of MLX's buffers."""
    beside_bytes: int | None = None
    """Memory of the process outside MLX's buffers, with the graphs; None if unknown."""


Measure = Callable[[Plan, Shape], MicroBatchPeak]
Note = Callable[[Measurement], None]


def measure_and_choose(
    workload: Workload,
    choice: Choice,
    limit_bytes: int,
    level: int,
    measure: Measure,
    note: Note = lambda _: None,
) -> tuple[Workload, Choice]:
    """Measure under the engine of `choice` until its plan is known to fit or another is better.

    level: as in `choose`.
    measure: computes a micro-batch and returns its memory.
    note: is called with each measurement as soon as it is taken.

    Returns the workload with the measurements, and the choice based on them. If that choice is of
    another engine, that engine was not measured here. Raises UserError if nothing fits.
    """
    plan = choice.option.plan
    while not is_certain(workload, choice.option, limit_bytes):
        shape = shape_to_measure(workload, plan, limit_bytes)
        if shape is not None:
            found = measured(workload, plan, shape, measure(plan, shape))
            note(found)
            calibration = workload.process.calibration.with_one(found)
            workload = with_calibration(workload, calibration)
            if shape.size < max(workload.lengths):  # too small to judge a plan
                continue
        choice = choose(workload, limit_bytes, level)
        before, plan = plan, choice.option.plan
        if shape is None or (plan.engine, plan.spill) != (before.engine, before.spill):
            break
    return workload, choice


def measured(workload: Workload, plan: Plan, shape: Shape, peak: MicroBatchPeak) -> Measurement:
    """The measurement of a micro-batch whose gradients needed `peak`.

    Its ratio is the largest one whose estimate is at most that peak. If even the smallest ratio
    gives more, the ratio is 1: the peak then comes from other memory than activations.
    """

    def estimated(ratio: float) -> Estimate:
        return estimate_of(workload, plan, *shape, work_ratio=ratio, gradients_only=True)

    low, high = LEAST_RATIO, MOST_RATIO
    for _ in range(HALVINGS):  # the estimate grows with the ratio
        middle = math.sqrt(low * high)
        fits = estimated(middle).mlx_bytes <= peak.mlx_bytes
        low, high = (middle, high) if fits else (low, middle)
    excess = None
    if peak.beside_bytes is not None:  # beyond the estimate without earlier measurements
        known = workload.process.calibration.excess_bytes(plan.family) or 0
        excess = peak.beside_bytes - (estimated(low).beside_bytes - known)
    return Measurement(
        engine=plan.family,
        rows=shape.rows,
        tokens=shape.tokens,
        work_bytes=max(1, peak.mlx_bytes - held_bytes(estimated(low))),
        ratio=low if low > LEAST_RATIO else 1.0,
        excess_bytes=excess,
    )


def is_certain(workload: Workload, option: Option, limit_bytes: int) -> bool:
    """Return whether a plan can be used without further measurements.

    It can if its largest micro-batch was measured, if the longest row was measured and growth
    from there leaves room, or if the limit is far away.
    """
    wanted, family = largest_shape(workload, option.plan), option.plan.family
    calibration = workload.process.calibration
    largest = calibration.largest(family)
    if largest >= wanted.size:
        return True
    if largest >= wanted.tokens:
        expected = expected_bytes(workload, option.plan, wanted)
        carried = extrapolated(calibration.of(family), wanted.size, expected, SLACK)
        room = room_bytes(workload, option.plan, wanted, limit_bytes) - workload.prefix_bytes
        return carried <= room
    far = estimate_of(workload, option.plan, *wanted, work_ratio=FAR)
    return with_margin(far, MEASURED_MARGIN) <= limit_bytes


def room_bytes(workload: Workload, plan: Plan, shape: Shape, limit_bytes: int) -> int:
    """Bytes that the limit leaves for the work of a micro-batch."""
    found = estimate_of(workload, plan, *shape, gradients_only=True)
    return limit_bytes - held_bytes(found) - (found.process_bytes - found.mlx_bytes)


def shape_to_measure(workload: Workload, plan: Plan, limit_bytes: int) -> Shape | None:
    """The next micro-batch to measure under `plan`; None if there is none, or no room for it."""

    def room(shape: Shape) -> int:
        return room_bytes(workload, plan, shape, limit_bytes)

    def expected(shape: Shape) -> int:
        return expected_bytes(workload, plan, shape)

    calibration, wanted = workload.process.calibration, largest_shape(workload, plan)
    return next_shape(calibration, plan.family, wanted, room, expected)
