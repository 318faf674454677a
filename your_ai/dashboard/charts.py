"""The charts of a report, drawn by matplotlib.

They are drawn in the colors of the light theme. In the HTML page, CSS variables replace the
colors, so that the page also has a dark theme.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from html import escape
from typing import IO, TYPE_CHECKING, Any

from your_ai.dashboard.history import (
    LARGEST,
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
from your_ai.dashboard.metric_table import REWARD, is_charted
from your_ai.dashboard.view import duration
from your_ai.gates.text import size_text
from your_ai.run import events
from your_ai.run.events import Action, Died, Skipped, Started

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = "paper ink muted rule grid blue orange green red active cache rest".split()
LIGHT = dict(zip(COLORS, (
    "#ffffff #1f2328 #57606a #d9dde2 #e9ecef #1f5fbf #b3540a #1a7a48 #c0273a "
    "#5b8bd6 #a3c9ea #d0d6dd").split(), strict=True))  # fmt: skip
DARK = dict(zip(COLORS, (
    "#14171b #e3e6ea #9ea7b3 #30363d #23282e #74aaff #f2a65a #5fc98f #ff7f88 "
    "#3c6cb8 #6ba3cf #4a525c").split(), strict=True))  # fmt: skip
STYLE = {
    "svg.fonttype": "none",
    "axes.linewidth": 0.7,
    "text.color": LIGHT["ink"],
    "grid.color": LIGHT["grid"],
    **{f"{part}color": LIGHT["muted"] for part in ("axes.edge", "axes.label", "xtick.", "ytick.")},
    **{f"{part}size": 8.5 for part in ("axes.label", "xtick.label", "ytick.label", "legend.font")},
    **dict.fromkeys(("axes.grid", "axes.axisbelow"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "legend.handlelength": 1.4,
    "legend.borderaxespad": 0,
    "text.parse_math": False,
}
MARKS = 100  # maximum marks for a kind of event
MARKERS = "|vx^sDo"  # one for each kind of action
TICKS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800)
FAR = 4  # a limit above this multiple of the peak would flatten the chart, so it is not drawn


def draw_loss(canvas: Figure, past: RunHistory) -> str:
    axes, points = canvas.add_subplot(xlabel="step", ylabel="loss"), losses(past)
    axes.locator_params("x", integer=True)
    draw_means(axes, points, "blue")
    validations = [value for value in finite(past.validations) if value.reward is None]
    checked = [(value.step, value.loss) for value in validations]
    draw(axes, thinned(checked), "orange", 1.2, marker="o", markersize=4, label="validation")
    bad = [step.step for step in past.steps if not abs(step.loss) < LARGEST]
    bad += [skipped.step for _, skipped in past.of(Skipped)]
    few = [(x, 0.02) for x in bad[:: 1 + max(0, len(bad) - 1) // MARKS]]
    look = {"marker": "x", "transform": axes.get_xaxis_transform()}
    draw(axes, few, "red", 0, label="skipped or not finite", **look)
    if points and 0 < 100 * min(y for _, y in points) < max(y for _, y in points):
        axes.set(yscale="log", ylabel="loss (log scale)")
        axes.yaxis.set_major_formatter("{x:g}")
    add_legend(axes)
    text = f"Loss of each step (thin line) and running mean (bold). Steps: {len(past.steps):,}."
    return text if past.steps else ""


def draw_reward(canvas: Figure, past: RunHistory) -> str:
    axes = canvas.add_subplot(xlabel="step", ylabel="reward")
    points = metric_points(past, REWARD)
    axes.locator_params("x", integer=True)
    draw_means(axes, points, "green")
    checked = [(value.step, value.reward) for value in finite(past.validations)]
    checked = [(x, y) for x, y in checked if y is not None]
    draw(axes, thinned(checked), "orange", 1.2, marker="o", markersize=4, label="validation")
    add_legend(axes)
    text = "Mean reward of each step (thin line) and running mean (bold)."
    return text if points or checked else ""


def draw_memory(canvas: Figure, past: RunHistory) -> str:
    points, actions = thinned(over_time(past, held)), past.of(Action)
    kinds = list(dict.fromkeys(action.kind for _, action in actions))
    canvas.set_size_inches(9, 3.3 + 0.23 * len(kinds))
    heights = {"height_ratios": [14, len(kinds)][: 1 + bool(kinds)]}
    rows = canvas.subplots(1 + bool(kinds), sharex=True, squeeze=False, gridspec_kw=heights)[:, 0]
    axes, most = rows[0], thinned(over_time(past, highest), max)
    if len(points) == 1:  # an area needs two points
        points = [(0.0, *points[0][1:]), points[0]]
    seconds, *edges = zip(*points, strict=True) if points else [(), ()]
    for name, low, high in zip(("active", "cache", "rest"), [0, *edges], edges, strict=False):
        axes.fill_between(seconds, low, high, color=LIGHT[name], linewidth=0, label=name)
    draw(axes, most, "ink", 0.7, label="peak between steps")
    limits = [(seconds, limit.limit_bytes) for seconds, limit in past.of(events.Limit)]
    limits += [(past.timeline[-1][0], limit_bytes) for _, limit_bytes in limits[-1:]]
    top = max((point[-1] for point in (*points, *most) if point[-1] > 0), default=0.0)
    far = limits and limits[-1][1] > FAR * top > 0
    label = f"limit, {size_text(limits[-1][1])}: far above" if far else "limit"
    draw(axes, limits, "red", 1.2, drawstyle="steps-post", linestyle="--", label=label)
    mark_lives(axes, past)
    axes.set_ylim(0, 1.25 * top if far else None)
    axes.yaxis.set_major_formatter(lambda size_bytes, _: size_text(size_bytes))
    add_legend(axes)
    for lane, kind in enumerate(kinds):
        at = [(seconds, lane) for seconds, action in actions if action.kind == kind]
        look = {"marker": MARKERS[lane % len(MARKERS)], "markersize": 4, "clip_on": False}
        draw(rows[-1], at[:: 1 + (len(at) - 1) // MARKS], "muted", 0, **look)
    if kinds:
        rows[-1].set_yticks(range(len(kinds)), [kind.replace("_", " ") for kind in kinds])
        rows[-1].set_ylim(len(kinds) - 0.4, -0.6)
    set_time_axis(rows[-1], past)
    text = "Memory of the process: active in MLX, MLX's cache, and the rest."
    some = f" At most {MARKS} actions of each kind are marked." if len(actions) > MARKS else ""
    return text + some if top else ""


def draw_speed(canvas: Figure, past: RunHistory) -> str:
    axes, points = canvas.add_subplot(ylabel="tokens/s"), over_time(past, speed)
    draw_means(axes, points, "green")
    mark_lives(axes, past)
    axes.set_ylim(bottom=0)
    set_time_axis(axes, past)
    text = "Tokens per second of each step (thin line) and running mean (bold)."
    return text if past.steps else ""


def draw_rate(canvas: Figure, past: RunHistory) -> str:
    axes = canvas.add_subplot(xlabel="step", ylabel="learning rate")
    draw(axes, thinned([(s.step, s.learning_rate) for s in past.steps]), "orange", 1.6)
    axes.ticklabel_format(axis="y", scilimits=(-2, 3))
    axes.locator_params("x", integer=True)
    axes.set_ylim(bottom=0)
    return "Learning rate of each step." if past.steps else ""


def draw_metrics(canvas: Figure, past: RunHistory) -> str:
    names = list(dict.fromkeys(name for step in past.steps for name in step.metrics))
    names = [name for name in names if is_charted(name)]
    if not names:
        return ""
    canvas.set_size_inches(9, 0.6 + 1.5 * len(names))
    rows = canvas.subplots(len(names), sharex=True, squeeze=False)[:, 0]
    for name, axes in zip(names, rows, strict=True):
        draw_means(axes, metric_points(past, name), "blue")
        axes.set_ylabel(name)
        axes.locator_params("x", integer=True)
    rows[-1].set_xlabel("step")
    return "Metrics of the objective at each step (thin lines) and running means (bold)."


def metric_points(past: RunHistory, name: str) -> Points:
    """The values of a metric by step, where they can be drawn."""
    values = ((step.step, step.metrics.get(name, math.nan)) for step in past.steps)
    return [(x, y) for x, y in values if abs(y) < LARGEST]


def draw(axes: Axes, points: Points, color: str, width: float, **options: Any) -> None:
    if points:
        options = {"marker": "." if len(points) == 1 else "", "color": LIGHT[color], **options}
        axes.plot(*zip(*(point[:2] for point in points), strict=True), linewidth=width, **options)


def draw_means(axes: Axes, points: Points, color: str) -> None:
    draw(axes, thinned(points), color, 0.8, alpha=0.5, label="each step")
    draw(axes, thinned(smoothed(points)), color, 1.8, label="running mean")


def mark_lives(axes: Axes, past: RunHistory) -> None:
    whole, looks = axes.get_xaxis_transform(), (("red", "-", "died"), ("muted", ":", "restarted"))
    for marked, look in zip((past.of(Died), past.of(Started)[1:]), looks, strict=True):
        if marked:
            times, (color, line, text) = [seconds for seconds, _ in marked], look
            axes.vlines(times, 0, 1, LIGHT[color], line, label=text, lw=1, transform=whole)


def add_legend(axes: Axes) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=9, columnspacing=1.4)


def set_time_axis(axes: Axes, past: RunHistory) -> None:
    end_s = past.timeline[-1][0] if past.timeline else 0.0
    days = 86400 * math.ceil(end_s / 86400 / 9)
    every = next((tick for tick in TICKS_S if end_s <= 9 * tick), days)
    ticks = range(0, int(end_s) + 1, every)
    axes.set_xticks(ticks, [duration(tick) for tick in ticks])
    axes.set(xlim=(0, 1.01 * max(end_s, 1)), xlabel="running time")


def render(key: str, past: RunHistory, file: IO, **options: Any) -> str:
    """Draw a chart into a file and return its caption; without data, write nothing, return ""."""
    _, size, draw_chart = CHARTS[key]
    return render_figure(key, size, lambda canvas: draw_chart(canvas, past), file, **options)


def render_figure(
    key: str, size: tuple[float, float], draw_on: Callable[[Figure], str], file: IO, **options: Any
) -> str:
    """Call `draw_on`, which returns a caption, for a figure of `size` inches; save the figure.

    Without a caption, write nothing. Return the caption.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE | {"svg.hashsalt": key}]):
        canvas = Figure(figsize=size, layout="constrained")
        caption = draw_on(canvas)
        if caption:
            canvas.savefig(file, **options)
    return caption


def svg(key: str, past: RunHistory) -> tuple[str, str]:
    """Return a chart as an SVG element for the page, and its caption; "" without data."""
    _, size, draw_chart = CHARTS[key]
    return svg_figure(key, size, lambda canvas: draw_chart(canvas, past))


def svg_figure(
    key: str, size: tuple[float, float], draw_on: Callable[[Figure], str]
) -> tuple[str, str]:
    """Return a figure as an SVG element whose ids begin with `key`, and its caption."""
    file = io.StringIO()
    options = {"format": "svg", "transparent": True, "metadata": {"Date": None}}
    caption = render_figure(key, size, draw_on, file, **options)
    head = rf'<svg viewBox="\1" role="img" aria-label="{escape(caption)}">'
    text = re.sub(r'\A.*?<svg [^>]*viewBox="([^"]*)"[^>]*>', head, file.getvalue(), flags=re.S)
    text = re.sub(r"<(metadata|style).*?</\1>|font-family:[^;\"]*", "", text, flags=re.S)
    text = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{key}-", text)  # makes ids unique in the page
    text = re.sub(r' d="[^"]*', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for name, color in LIGHT.items():
        text = text.replace(f": {color}", f": var(--{name})")
    return text, caption


CHARTS: dict[str, tuple[str, tuple[float, float], Callable[[Figure, RunHistory], str]]] = {
    "loss": ("Loss", (9, 3.3), draw_loss),
    "reward": ("Reward", (9, 3.3), draw_reward),
    "memory": ("Memory", (9, 3.3), draw_memory),
    "speed": ("Speed", (4.6, 2.6), draw_speed),
    "learning-rate": ("Learning rate", (4.6, 2.6), draw_rate),
    "metrics": ("Metrics", (9, 3.3), draw_metrics),
}
