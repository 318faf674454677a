"""Which micro-batches to measure before training, and what they say of the plan. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from your_ai.memory.calibration import (
    FAR,
    LEAST_RATIO,
    MOST_RATIO,
    SLACK,
    Measurement,
    Shape,
    extrapolated,
    family,
    next_shape,
)
from your_ai.memory.estimate import Estimate, Plan
from your_ai.memory.plan import (
    MEASURED_MARGIN,
    Choice,
    Demand,
    Option,
    choose,
    estimate_of,
    expected_bytes,
    held_bytes,
    largest_shape,
    with_margin,
)

HALVINGS = 24
Measure = Callable[[Plan, Shape], int]  # the peak of MLX's buffers, in bytes
Note = Callable[[Measurement], None]


def settle(
    demand: Demand,
    choice: Choice,
    limit_bytes: int,
    level: int,
    measure: Measure,
    note: Note = lambda _: None,
) -> tuple[Demand, Choice]:
    """Measure under the engine of `choice` until it is known to hold, or another one is better.

    The demand with what was measured, and the choice by that: of another engine where that is
    the fastest that fits, and nothing of it was measured here. level: as in `choose`; note: is
    told of each measurement as soon as it is taken. Raises UserError where nothing fits.
    """
    plan = choice.option.plan
    while not is_certain(demand, choice.option, limit_bytes):
        shape = shape_to_measure(demand, plan, limit_bytes)
        if shape is not None:
            found = measured(demand, plan, shape, measure(plan, shape))
            note(found)
            demand = replace(demand, calibration=demand.calibration.with_one(found))
            if shape.size < max(demand.lengths):  # too little to judge a plan by
                continue
        choice = choose(demand, limit_bytes, level)
        before, plan = plan, choice.option.plan
        if shape is None or (plan.engine, plan.spill) != (before.engine, before.spill):
            break
    return demand, choice


def measured(demand: Demand, plan: Plan, shape: Shape, peak_bytes: int) -> Measurement:
    """What a micro-batch whose gradients took `peak_bytes` of MLX's buffers tells.

    Its ratio is the largest one with which the estimate is no more than that peak; 1 where even
    the least is more, since the peak is then of what is held besides.
    """

    def estimated(ratio: float) -> Estimate:
        return estimate_of(demand, plan, *shape, work_ratio=ratio, gradients_only=True)

    low, high = LEAST_RATIO, MOST_RATIO
    for _ in range(HALVINGS):  # the estimate grows with the ratio
        middle = math.sqrt(low * high)
        low, high = (middle, high) if estimated(middle).mlx_bytes <= peak_bytes else (low, middle)
    return Measurement(
        engine=family(plan.engine),
        rows=shape.rows,
        tokens=shape.tokens,
        work_bytes=max(1, peak_bytes - held_bytes(estimated(low))),
        ratio=low if low > LEAST_RATIO else 1.0,
    )


def is_certain(demand: Demand, option: Option, limit_bytes: int) -> bool:
    """Whether a plan can be used at once.

    It can where its largest micro-batch was measured, where the longest row was and growth from
    there leaves room, and where the limit is far away.
    """
    wanted, engine = largest_shape(demand, option.plan), option.plan.engine
    largest = demand.calibration.largest(engine)
    if largest >= wanted.size:
        return True
    if largest >= wanted.tokens:
        expected = expected_bytes(demand, option.plan, wanted)
        carried = extrapolated(demand.calibration.of(engine), wanted.size, expected, SLACK)
        room = room_bytes(demand, option.plan, wanted, limit_bytes) - demand.prefix_bytes
        return carried <= room
    far = estimate_of(demand, option.plan, *wanted, work_ratio=FAR)
    return with_margin(far, MEASURED_MARGIN) <= limit_bytes


def room_bytes(demand: Demand, plan: Plan, shape: Shape, limit_bytes: int) -> int:
    """What the limit leaves for the work of a micro-batch."""
    found = estimate_of(demand, plan, *shape, gradients_only=True)
    return limit_bytes - held_bytes(found) - (found.process_bytes - found.mlx_bytes)


def shape_to_measure(demand: Demand, plan: Plan, limit_bytes: int) -> Shape | None:
    """The next micro-batch to measure under `plan`; None where there is none, or no room."""

    def room(shape: Shape) -> int:
        return room_bytes(demand, plan, shape, limit_bytes)

    def expected(shape: Shape) -> int:
        return expected_bytes(demand, plan, shape)

    return next_shape(demand.calibration, plan.engine, largest_shape(demand, plan), room, expected)
