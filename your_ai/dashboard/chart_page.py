"""Charts as HTML: curves in an SVG element that stretches, labels as text beside it.

So labels keep their size on every screen, and a chart fits the width it is given. The colors are
variables of the page's style sheet, which has a light and a dark theme.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from your_ai.dashboard.charts import Axis, Chart, Curve, Panel, x_axis, y_axis

SIZE = 10_000  # of the SVG's coordinates in both directions; they are integers
NARROW = 32  # characters of labels that fit below a chart on a phone
LONGEST_LABEL = 13  # characters of a y axis before its label wraps


def chart_html(chart: Chart) -> str:
    """The chart as HTML elements, for a page with the style sheet style.html.j2."""
    across = x_axis(chart)
    downs = [y_axis(panel) for panel in chart.panels]
    labels = [text for axis in downs for _, text in axis.ticks]
    width = min(LONGEST_LABEL, max((len(text) for text in labels), default=1)) + 1
    drawn = "".join(
        panel_html(chart, panel, across, down)
        for panel, down in zip(chart.panels, downs, strict=True)
    )
    is_crowded = sum(len(text) + 2 for _, text in across.ticks) > NARROW
    ticks = "".join(
        x_label(across, *tick, is_odd=is_crowded and number % 2 == 1)
        for number, tick in enumerate(across.ticks)
    )
    return (
        f'<div class="chart" style="--labels: {width}ch">{legend_html(chart)}{drawn}'
        f'<div class="x" aria-hidden="true">{ticks}</div>'
        f'<div class="x-name" aria-hidden="true">{escape(chart.x_name)}</div></div>'
    )


def panel_html(chart: Chart, panel: Panel, across: Axis, down: Axis) -> str:
    labels = "".join(
        f'<span style="bottom: {100 * (down.place(y) or 0):.2f}%">{escape(text)}</span>'
        for y, text in down.ticks
    )
    about = f"{chart.title}: {panel.name} by {chart.x_name}. {chart.caption}"
    parts = [grid(across, down)]
    parts += [shape(curve, across, down) for curve in panel.curves]
    parts += [upright(curve, across) for curve in chart.breaks]
    return (
        f'<div class="y-name" aria-hidden="true">{escape(panel.name)}'
        f"{' (log scale)' if down.is_log else ''}</div>"
        f'<div class="panel" style="height: {panel.height_px}px">'
        f'<div class="y" aria-hidden="true">{labels}</div>'
        f'<svg viewBox="0 0 {SIZE} {SIZE}" preserveAspectRatio="none" role="img" '
        f'aria-label="{escape(about)}"><title>{escape(about)}</title>{"".join(parts)}</svg></div>'
    )


def x_label(axis: Axis, value: float, text: str, is_odd: bool) -> str:
    """A label of the x axis. is_odd: whether it is left out where the chart is narrow."""
    kind = ' class="odd"' if is_odd else ""
    return f'<span{kind} style="left: {100 * (axis.place(value) or 0):.2f}%">{escape(text)}</span>'


def legend_html(chart: Chart) -> str:
    """The labels of all curves with a look of each, once; nothing for a single label."""
    curves = [curve for panel in chart.panels for curve in panel.curves] + list(chart.breaks)
    labeled = {curve.label: curve for curve in reversed(curves) if curve.label and curve.points}
    if not labeled:
        return ""
    items = "".join(
        f'<li><i class="{curve.look}{" dashed" if curve.dashes else ""}" '
        f'style="color: var(--{curve.color}); opacity: {curve.opacity}; '
        f'--width: {curve.width}px"></i>{escape(label)}</li>'
        for label, curve in reversed(labeled.items())
    )
    return f'<ul class="legend">{items}</ul>'


def grid(across: Axis, down: Axis) -> str:
    rows = [f"M0 {row(down, y)}h{SIZE}" for y, _ in down.ticks]
    columns = [f"M{column(across, x)} 0v{SIZE}" for x, _ in across.ticks]
    return f'<path class="grid" d="{"".join((*rows, *columns))}"/>'


def shape(curve: Curve, across: Axis, down: Axis) -> str:
    """A curve of a panel as SVG; nothing without points."""
    if curve.in_shares:
        down = Axis(0.0, 1.0, ())
    parts = list(unbroken(curve, across, down))
    if curve.look == "area":
        path = "".join(f"M{path_of(p[:2] for p in part)}L{edge(part)}z" for part in parts)
        return f'<path d="{path}" style="fill: var(--{curve.color})"/>' if path else ""
    dots = {"dots": "round", "squares": "square"}.get(curve.look)
    if dots is None:
        path = "".join(
            f"M{path_of(corners(part) if curve.look == 'steps' else part)}" for part in parts
        )
    else:  # lines without a length, which keep their shape when the SVG stretches
        path = "".join(f"M{point[0]} {point[1]}h0" for part in parts for point in part)
    look = f"stroke: var(--{curve.color}); stroke-width: {curve.width}px"
    if curve.opacity < 1:
        look += f"; opacity: {curve.opacity}"
    if curve.dashes:
        look += f"; stroke-dasharray: {' '.join(map(str, curve.dashes))}"
    if dots:
        look += f"; stroke-linecap: {dots}"
    return f'<path class="line" d="{path}" style="{look}"/>' if path else ""


def upright(curve: Curve, across: Axis) -> str:
    """A vertical line at each point of a curve."""
    places = (column(across, point[0]) for point in curve.points)
    path = "".join(f"M{x} 0v{SIZE}" for x in places if x is not None)
    dashes = f"; stroke-dasharray: {' '.join(map(str, curve.dashes))}" if curve.dashes else ""
    look = f"stroke: var(--{curve.color}); stroke-width: 1px{dashes}"
    return f'<path class="line" d="{path}" style="{look}"/>' if path else ""


Spot = tuple[int, ...]  # x, then one or two y, in the SVG's coordinates


def unbroken(curve: Curve, across: Axis, down: Axis) -> Iterator[list[Spot]]:
    """The parts of a curve between its gaps; a single point of a line gets a length of one."""
    part: list[Spot] = []
    for point in (*curve.points, ()):
        found = [column(across, point[0]), *(row(down, y) for y in point[1:])] if point else [None]
        spot = tuple(place for place in found if place is not None)
        if len(spot) == len(found):
            part.append(spot)
        elif part:
            single = len(part) == 1 and curve.look in ("line", "steps")
            yield [*part, (part[0][0] + 1, *part[0][1:])] if single else part
            part = []


def path_of(spots: Iterable[Spot]) -> str:
    """The path through some places: the first, then the distances from one to the next."""
    (x, y), *rest = ((spot[0], spot[1]) for spot in spots)
    path = [f"{x} {y}"]
    if rest:
        path.append("l")
    for to_x, to_y in rest:
        path.append(f"{to_x - x} {to_y - y} ")
        x, y = to_x, to_y
    return "".join(path).rstrip()


def edge(part: Sequence[Spot]) -> str:
    """The upper edge of an area, from its end to its start."""
    return " ".join(f"{spot[0]} {spot[2]}" for spot in reversed(part))


def corners(part: Sequence[Spot]) -> Iterator[Spot]:
    """The places of a curve that goes on flat until its next point."""
    yield part[0]
    for before, after in itertools.pairwise(part):
        yield after[0], before[1]
        yield after


def column(axis: Axis, value: float) -> int | None:
    place = axis.place(value)
    return None if place is None else round(SIZE * place)


def row(axis: Axis, value: float) -> int | None:
    place = axis.place(value)
    return None if place is None else round(SIZE * (1 - place))
