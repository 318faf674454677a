"""Charts as PNG files, drawn by matplotlib in the colors of the light theme."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from your_ai.dashboard.axes import Axis, x_axis, y_axis
from your_ai.dashboard.charts import LIGHT, Chart, Curve, Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INCH_PX, DPI = 96, 200
STYLE = {
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
MARKERS = {"dots": "o", "squares": "s"}


def png(chart: Chart) -> bytes:
    """Draw a chart. Needs matplotlib, whose settings stay as they are."""
    from matplotlib import style
    from matplotlib.figure import Figure

    heights = [panel.height_px for panel in chart.panels]
    size = (9.0 if chart.is_wide else 4.6, 1.0 + sum(heights) / INCH_PX)
    file = io.BytesIO()
    with style.context(["default", STYLE]):
        canvas = Figure(figsize=size, layout="constrained")
        grid = {"height_ratios": heights}
        rows = canvas.subplots(len(heights), sharex=True, squeeze=False, gridspec_kw=grid)[:, 0]
        across = x_axis(chart)
        for panel, axes in zip(chart.panels, rows, strict=True):
            draw_panel(axes, chart, panel, across)
        rows[-1].set_xlabel(chart.x_name)
        canvas.savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def draw_panel(axes: Axes, chart: Chart, panel: Panel, across: Axis) -> None:
    down = y_axis(panel)
    for curve in panel.curves:
        if curve.points:
            draw_curve(axes, curve)
    for curve in chart.breaks:
        look = {"colors": LIGHT[curve.color], "lw": 1, "label": curve.label}
        line = ":" if curve.dashes else "-"
        xs = [point[0] for point in curve.points]
        axes.vlines(xs, 0, 1, linestyles=line, transform=axes.get_xaxis_transform(), **look)
    set_axis(axes, "x", across)
    set_axis(axes, "y", down)
    axes.set_ylabel(panel.name + (" (log scale)" if down.is_log else ""))
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once and panel is chart.panels[0]:
        look = {"loc": "lower left", "bbox_to_anchor": (0, 1.01), "columnspacing": 1.4}
        axes.legend(once.values(), once.keys(), ncols=4 if chart.is_wide else 2, **look)


def set_axis(axes: Axes, which: str, axis: Axis) -> None:
    if axis.is_log:
        axes.set(**{f"{which}scale": "log"})
    axes.set(**{f"{which}lim": (axis.low, axis.high)})
    drawn = axes.xaxis if which == "x" else axes.yaxis
    drawn.set_ticks([value for value, _ in axis.ticks], [text for _, text in axis.ticks])
    drawn.set_ticks([], minor=True)


def draw_curve(axes: Axes, curve: Curve) -> None:
    """Draw a curve with points; those that are not on the axes are cut off."""
    color, label = LIGHT[curve.color], curve.label or None
    if curve.look == "area":
        xs, lows, highs = zip(*curve.points, strict=True)
        axes.fill_between(xs, lows, highs, color=color, linewidth=0, label=label)
        return
    xs, ys = zip(*(point[:2] for point in curve.points), strict=True)
    marker = MARKERS.get(curve.look, "." if len(xs) == 1 else "")
    transform = axes.get_xaxis_transform() if curve.in_shares else axes.transData
    axes.plot(
        xs,
        ys,
        color=color,
        label=label,
        alpha=curve.opacity,
        transform=transform,
        marker=marker,
        markersize=curve.width * 0.75,
        linewidth=0 if curve.look in MARKERS else curve.width * 0.75,
        linestyle=(0, curve.dashes) if curve.dashes else "-",
        drawstyle="steps-post" if curve.look == "steps" else "default",
    )
