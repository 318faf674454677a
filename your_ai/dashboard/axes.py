"""The axes of charts: ranges, positions and ticks. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from your_ai.dashboard.charts import Chart, Curve, Panel
from your_ai.dashboard.running_mean import LARGEST

MARGIN = 0.05  # of the range, above and below the values
TICKS, FEW_TICKS = 8, 4  # about as many on an x axis and on a y axis
LEAST = 1e-12  # a logarithmic axis begins here at the lowest


@dataclass(frozen=True)
class Axis:
    """A range of values, low < high, and its ticks: values and their texts."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float) -> float | None:
        """The place of a value on the axis, from 0 to 1; None for a value that is not on it."""
        if not is_drawable(value):
            return None
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, LEAST))
        place = (value - low) / (high - low)
        return place if -1e-6 <= place <= 1 + 1e-6 else None


def is_drawable(value: float) -> bool:
    """Whether a value is finite, and not so large that arithmetic with it fails."""
    return abs(value) < LARGEST


def x_axis(chart: Chart) -> Axis:
    xs = [point[0] for panel in chart.panels for curve in panel.curves for point in curve.points]
    low, high = spread(xs) if chart.x_range is None else chart.x_range
    if chart.x_is_log:
        return log_axis(low, high, chart.x_ticks)
    if chart.x_range is None:
        low, high = widened(low, high)
        room = 0.01 * (high - low)
        low, high = low - room, high + room
    ticks = chart.x_ticks or plain_ticks(low, high, TICKS, chart.x_is_integer)
    return Axis(low, high, [(x, text) for x, text in ticks if low <= x <= high])


def y_axis(panel: Panel) -> Axis:
    low, high = spread(heights(panel.curves))
    if panel.is_log and low > 0:
        return log_axis(low, high, panel.ticks, panel)
    low, high = widened(low, high)
    room = MARGIN * (high - low)
    low = low - room if panel.bottom is None else panel.bottom
    high = high + room if panel.top is None else panel.top
    if low >= high:
        high = low + 1
    ticks = panel.ticks or plain_ticks(low, high, FEW_TICKS, False, panel)
    return Axis(low, high, [(y, text) for y, text in ticks if low <= y <= high])


def heights(curves: Sequence[Curve]) -> Iterable[float]:
    """The values that decide about the range of a y axis."""
    return (y for curve in curves if not curve.in_shares for p in curve.points for y in p[1:])


def spread(values: Iterable[float]) -> tuple[float, float]:
    """The lowest and the highest value that can be drawn; 0 and 1 without values."""
    found = [float(value) for value in values if is_drawable(value)]
    return (min(found), max(found)) if found else (0.0, 1.0)


def widened(low: float, high: float) -> tuple[float, float]:
    """The range, made wider if it has no room for ticks."""
    size = max(abs(low), abs(high))
    if high - low > max(1e-9 * size, 1e-250):
        return low, high
    room = size / 10 or 0.5
    return low - room, high + room


def log_axis(
    low: float, high: float, given: Sequence[tuple[float, str]], panel: Panel | None = None
) -> Axis:
    """A logarithmic axis with ticks at 1, 2 and 5 times powers of ten, or only at powers."""
    low, high = max(low, LEAST) / 1.15, max(high, LEAST) * 1.15
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for factors, every in (((1, 2, 5), 1), ((1,), 1), ((1,), 1 + (last - first) // TICKS)):
        values = [f * 10.0**power for power in range(first, last + 1, every) for f in factors]
        values = [value for value in values if low <= value <= high]
        if len(values) <= TICKS:
            break
    ticks = given or [(value, text_of(value, panel)) for value in values]
    return Axis(low, high, [tick for tick in ticks if low <= tick[0] <= high], is_log=True)


def plain_ticks(
    low: float, high: float, most: int, is_integer: bool, panel: Panel | None = None
) -> list[tuple[float, str]]:
    """About `most` ticks at multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    every = next(f * power for f in (1, 2, 5, 10) if f * power >= least * (1 - 1e-9))
    every = max(1.0, every) if is_integer else every
    first = math.ceil(low / every - 1e-9)
    values = [n * every for n in range(first, first + 2 * most + 2) if n * every <= high]
    return [(value, text_of(round(value, 15 - exponent(value)), panel)) for value in values]


def exponent(value: float) -> int:
    return 0 if value == 0 else min(300, max(-300, math.floor(math.log10(abs(value)))))


def text_of(value: float, panel: Panel | None = None) -> str:
    """A number of an axis: `2,000`, `0.35`, `1e-05`."""
    if panel is not None and panel.text is not None:
        return panel.text(value)
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.6g}"
