"""The charts of a run, as data: pure functions of its history. `chart_page` draws them as HTML."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from your_ai.dashboard.history import (
    Points,
    RunHistory,
    finite,
    held,
    highest,
    losses,
    over_time,
    smoothed,
    speed,
    thinned,
)
from your_ai.dashboard.measures import LARGEST
from your_ai.dashboard.metric_table import REWARD, is_charted
from your_ai.dashboard.view import duration
from your_ai.gates.text import size_text
from your_ai.run import events
from your_ai.run.events import Action, Died, Planned, Skipped, Started

COLORS = "paper ink muted rule grid blue orange green red active cache rest".split()
LIGHT = dict(zip(COLORS, (
    "#ffffff #1f2328 #57606a #d9dde2 #e9ecef #1f5fbf #b3540a #1a7a48 #c0273a "
    "#5b8bd6 #a3c9ea #d0d6dd").split(), strict=True))  # fmt: skip
DARK = dict(zip(COLORS, (
    "#14171b #e3e6ea #9ea7b3 #30363d #23282e #74aaff #f2a65a #5fc98f #ff7f88 "
    "#3c6cb8 #6ba3cf #4a525c").split(), strict=True))  # fmt: skip
MARKS = 100  # maximum marks for a kind of event
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)
MOST_TICKS = 9
FAR = 4  # a limit above this multiple of the peak would flatten the chart, so it is not drawn
NEAR = 1.5  # a limit above this multiple of the largest plan is not drawn among the plans
LOG_RATIO = 100  # an axis whose values differ by more is logarithmic
PANEL_PX, SMALL_PX, LANE_PX = 230, 120, 19
METRICS = 24  # maximum metrics that are drawn
Look = Literal["line", "steps", "dots", "squares", "area"]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A line, marks or an area in a panel."""

    points: Points
    """x and y; of an area x, its lower and its upper edge. A y that is not finite is a gap."""
    color: str
    """One of COLORS."""
    label: str = ""
    """Its text in the legend; curves without a label are not there."""
    look: Look = "line"
    width: float = 1.6
    """Of a line or a mark, in pixels."""
    opacity: float = 1.0
    dashes: tuple[int, ...] = ()
    """Lengths of dashes and gaps in pixels; empty for a solid line."""
    in_shares: bool = False
    """Whether y is a share of the panel's height, and not a value."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """Curves over one axis of values."""

    name: str
    """What the values are, with their unit."""
    curves: Sequence[Curve]
    text: Callable[[float], str] | None = None
    """Formats a value of the axis; None for plain numbers."""
    ticks: Sequence[tuple[float, str]] = ()
    """The labels of the axis where these are not numbers."""
    bottom: float | None = None
    top: float | None = None
    is_log: bool = False
    height_px: int = PANEL_PX


@dataclass(frozen=True, kw_only=True)
class Chart:
    """Panels, one below the other, over one x axis."""

    title: str
    caption: str
    panels: Sequence[Panel]
    x_name: str
    x_ticks: Sequence[tuple[float, str]] = ()
    """The labels of the x axis where these are not numbers."""
    x_range: tuple[float, float] | None = None
    x_is_log: bool = False
    x_is_integer: bool = True
    breaks: Sequence[Curve] = ()
    """Vertical lines through all panels, at the x of each point."""


def loss_chart(past: RunHistory) -> Chart | None:
    points = losses(past)
    validations = [value for value in finite(past.validations) if value.reward is None]
    checked: Points = [(value.step, value.loss) for value in validations]
    bad = [step.step for step in past.steps if not abs(step.loss) < LARGEST]
    bad += [skipped.step for _, skipped in past.of(Skipped)]
    panel = Panel(
        name="loss",
        curves=[
            *means(points, "blue"),
            *validation_curve(checked),
            *marks([(x, 0.02) for x in bad], "red", "skipped or not finite", in_shares=True),
        ],
        is_log=is_wide_ranged(y for _, y in points),
    )
    text = "Loss of each step (thin line) and running mean (bold). "
    text += "From a part of the steps." if past.is_part else f"Steps: {len(past.steps):,}."
    return by_step("Loss", text, panel) if past.steps else None


def reward_chart(past: RunHistory) -> Chart | None:
    points = metric_points(past, REWARD)
    rewards = ((value.step, value.reward) for value in finite(past.validations))
    checked: Points = [(x, y) for x, y in rewards if y is not None]
    panel = Panel(name="reward", curves=[*means(points, "green"), *validation_curve(checked)])
    text = "Mean reward of each step (thin line) and running mean (bold)."
    return by_step("Reward", text, panel) if points or checked else None


def norm_chart(past: RunHistory) -> Chart | None:
    points = step_points(past, lambda step: step.grad_norm)
    is_log = is_wide_ranged(y for _, y in points)
    panel = Panel(name="gradient norm", curves=means(points, "blue"), is_log=is_log)
    text = "Norm of the gradients of each step, before clipping (thin line), and running mean."
    return by_step("Gradient norm", text, panel) if points else None


def rate_chart(past: RunHistory) -> Chart | None:
    points = step_points(past, lambda step: step.learning_rate)
    curves = [Curve(points=thinned(points), color="orange")]
    panel = Panel(name="learning rate", curves=curves, text="{:.3g}".format, bottom=0)
    return by_step("Learning rate", "Learning rate of each step.", panel) if points else None


def speed_chart(past: RunHistory) -> Chart | None:
    curves = means(over_time(past, speed), "green")
    panel = Panel(name="tokens/s", curves=curves, bottom=0)
    text = "Tokens per second of each step (thin line) and running mean (bold)."
    return by_time("Speed", text, [panel], past) if past.steps else None


def memory_chart(past: RunHistory) -> Chart | None:
    """Memory over time, and under it a lane of marks for each kind of action."""
    points, most = thinned(over_time(past, held)), thinned(over_time(past, highest), max)
    top = max((point[-1] for point in (*points, *most) if 0 < point[-1] < LARGEST), default=0.0)
    if not top:
        return None
    if len(points) == 1:  # an area needs two points
        points = [(0.0, *points[0][1:]), points[0]]
    curves = []
    for number, name in enumerate(("active", "cache", "rest")):
        edges: Points = [(p[0], p[number] if number else 0.0 * p[1], p[number + 1]) for p in points]
        curves.append(Curve(points=edges, color=name, label=name, look="area"))
    curves.append(Curve(points=most, color="ink", label="peak between steps", width=1))
    limits = [(seconds, limit.limit_bytes) for seconds, limit in past.of(events.Limit)]
    limits += [(past.timeline[-1][0], limit_bytes) for _, limit_bytes in limits[-1:]]
    text, highest_shown = "Memory of the process: active in MLX, MLX's cache, and the rest.", None
    if limits and limits[-1][1] > FAR * top:
        text += f" The limit, {size_text(limits[-1][1])}, is far above."
        highest_shown = 1.25 * top
    else:
        curves.append(Curve(points=limits, color="red", label="limit", look="steps", dashes=(6, 4)))
    panel = Panel(name="memory", curves=curves, text=memory_tick, bottom=0, top=highest_shown)
    actions = past.of(Action)
    if len(actions) > MARKS:
        text += f" At most {MARKS} actions of each kind are marked."
    return by_time("Memory", text, [panel, *action_lanes(actions)], past)


def action_lanes(actions: Sequence[tuple[float, Action]]) -> list[Panel]:
    """A panel with a lane for each kind of action; no panel without actions."""
    kinds = list(dict.fromkeys(action.kind for _, action in actions))[:MOST_TICKS]
    curves: list[Curve] = []
    for lane, kind in enumerate(reversed(kinds)):
        at: Points = [(seconds, lane) for seconds, action in actions if action.kind == kind]
        curves += marks(at, "muted", look="squares")
    names = [kind.replace("_", " ") for kind in reversed(kinds)]
    lanes = Panel(
        name="actions",
        curves=curves,
        ticks=list(enumerate(names)),
        bottom=-0.6,
        top=len(kinds) - 0.4,
        height_px=8 + LANE_PX * len(kinds),
    )
    return [lanes] if kinds else []


def metrics_chart(past: RunHistory) -> Chart | None:
    """Each metric of the objective in a panel, whatever metrics these are."""
    names = list(dict.fromkeys(name for step in past.steps for name in step.metrics))
    names = [name for name in names if is_charted(name)]
    if not names:
        return None
    panels = [
        Panel(name=name, curves=means(metric_points(past, name), "blue"), height_px=SMALL_PX)
        for name in names[:METRICS]
    ]
    text = "Metrics of the objective at each step (thin lines) and running means (bold)."
    if len(names) > METRICS:
        text += f" The first {METRICS} of {len(names)}."
    return Chart(title="Metrics", caption=text, panels=panels, x_name="step")


def plans_chart(past: RunHistory) -> Chart | None:
    """The plans that no other beats in memory and time, and the one of the run, as it turned out.

    None without predicted seconds, and in runs of older versions.
    """
    last = next((event for _, event in reversed(past.of(Planned))), None)
    found = [] if last is None else last.front
    front = sorted((x / 1e9, y) for x, y in found if 0 < x < LARGEST and 0 < y < LARGEST)
    if last is None or not front:
        return None
    seconds = [step.seconds for step in past.steps[1:] if 0 < step.seconds < LARGEST]
    curves = [
        Curve(points=front, color="blue", label="predicted", look="line", width=1, dashes=(4, 3)),
        Curve(points=front, color="blue", look="dots", width=6),
        *chosen_plan(last),
        *measured_plan(past, seconds),
    ]
    limits = [limit.limit_bytes / 1e9 for _, limit in past.of(events.Limit)][-1:]
    near: Points = [(gb, 0.0) for gb in limits if gb <= NEAR * front[-1][0]]
    limit = [Curve(points=near, color="red", label="limit", dashes=(6, 4))] if near else []
    values = [y for curve in curves for _, y in curve.points]
    text = (
        "The least memory limit of each plan, with its margin, and its predicted seconds per step; "
        "plans that another beats in both are left out."
    )
    if seconds:
        text += " Measured: the peak and the median step of this run."
    panel = Panel(name="s / step", curves=curves, bottom=0, is_log=is_wide_ranged(iter(values)))
    return Chart(
        title="Plans",
        caption=text,
        panels=[panel],
        x_name="least memory limit, GB",
        x_range=(0.0, 1.05 * max(x for curve in (*curves, *limit) for x, _ in curve.points)),
        x_is_integer=False,
        breaks=limit,
    )


def chosen_plan(plan: Planned) -> list[Curve]:
    """The mark of the run's plan, if its seconds were predicted."""
    if plan.seconds is None or not 0 < plan.seconds < LARGEST:
        return []
    place: Points = [(plan.needed_bytes / 1e9, plan.seconds)]
    return [Curve(points=place, color="orange", label="chosen", look="dots", width=11)]


def measured_plan(past: RunHistory, seconds: Sequence[float]) -> list[Curve]:
    """The mark of what the run measured. seconds: of its steps but the first, which compiles."""
    if not seconds or not past.state.highest_bytes:
        return []
    place: Points = [(past.state.highest_bytes / 1e9, statistics.median(seconds))]
    return [Curve(points=place, color="green", label="measured", look="squares", width=9)]


CHARTS: dict[str, Callable[[RunHistory], Chart | None]] = {
    "loss": loss_chart,
    "reward": reward_chart,
    "gradient-norm": norm_chart,
    "memory": memory_chart,
    "speed": speed_chart,
    "learning-rate": rate_chart,
    "plans": plans_chart,
    "metrics": metrics_chart,
}


def metric_points(past: RunHistory, name: str) -> Points:
    """The values of a metric by step, where they can be drawn."""
    return step_points(past, lambda step: step.metrics.get(name, math.nan))


def step_points(past: RunHistory, value_of: Callable[[events.Step], float]) -> Points:
    """A value of each step, where it can be drawn."""
    values = ((step.step, value_of(step)) for step in past.steps)
    return [(x, y) for x, y in values if is_drawable(y)]


def means(points: Points, color: str) -> list[Curve]:
    """The values of each step, and their running mean."""
    if not points:
        return []
    each, mean = thinned(points), thinned(smoothed(points))
    return [
        Curve(points=each, color=color, label="each step", width=1, opacity=0.5),
        Curve(points=mean, color=color, label="running mean", width=2.2),
    ]


def validation_curve(points: Points) -> list[Curve]:
    if not points:
        return []
    kept = thinned(points)
    dots = Curve(points=kept[:: 1 + len(kept) // MARKS], color="orange", look="dots", width=6)
    return [Curve(points=kept, color="orange", label="validation"), dots]


def marks(
    points: Points, color: str, label: str = "", look: Look = "squares", in_shares: bool = False
) -> list[Curve]:
    """At most MARKS of the points, as marks."""
    few = points[:: 1 + max(0, len(points) - 1) // MARKS]
    curve = Curve(points=few, color=color, label=label, look=look, width=5, in_shares=in_shares)
    return [curve] if few else []


def is_wide_ranged(values: Iterator[float]) -> bool:
    """Return whether values are all above 0, and need a logarithmic axis."""
    found = list(values)
    return bool(found) and 0 < LOG_RATIO * min(found) < max(found)


def memory_tick(size_bytes: float) -> str:
    """A size on an axis: `0`, `500 MB`, `2.5 GB`."""
    return size_text(size_bytes, 1).replace(".0 ", " ") if size_bytes else "0"


def by_step(title: str, caption: str, panel: Panel) -> Chart:
    return Chart(title=title, caption=caption, panels=[panel], x_name="step")


def by_time(title: str, caption: str, panels: Sequence[Panel], past: RunHistory) -> Chart:
    """A chart over the running time, with the deaths and restarts of the process."""
    end_s = past.timeline[-1][0] if past.timeline else 0.0
    days = 86400 * math.ceil(end_s / 86400 / MOST_TICKS)
    every = next((tick for tick in TICKS_S if end_s <= MOST_TICKS * tick), days)
    died: Points = [(seconds, 0.0) for seconds, _ in past.of(Died)]
    again: Points = [(seconds, 0.0) for seconds, _ in past.of(Started)[1:]]
    breaks = [
        *marks(died, "red", "died"),
        *(
            Curve(points=curve.points, color="muted", label="restarted", dashes=(2, 3))
            for curve in marks(again, "muted")
        ),
    ]
    return Chart(
        title=title,
        caption=caption,
        panels=panels,
        x_name="running time",
        x_ticks=[(tick, duration(tick)) for tick in range(0, int(end_s) + 1, every)],
        x_range=(0.0, 1.01 * max(end_s, 1.0)),
        breaks=breaks,
    )


# The axes of charts: ranges, positions and ticks. Pure arithmetic


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
    """Return whether a value is finite, and not so large that arithmetic with it fails."""
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
