"""Line charts in characters: of one run, and of several over each other. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from your_ai.dashboard.page import DIM, Page, ScreenRow, TextPart, line

BRAILLE = 0x2800
# The bits of a Braille character: DOTS[row][column].
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
Point = tuple[float, float]
MEETING = "*"  # where curves of several runs meet


@dataclass(frozen=True)
class LineChart:
    """What a chart shows. Points are in the order of their x, and finite."""

    curve: Sequence[Point]
    marked: Sequence[Point]
    """Points that are drawn one by one, over the curve."""
    bounds: Point
    """The lowest and the highest y."""
    texts: tuple[str, str]
    """The bounds in words."""

    @property
    def ends(self) -> Point:
        """The first and the last x."""
        xs = [x for x, _ in (*self.curve, *self.marked)]
        return min(xs), max(xs)


def chart_rows(page: Page, kind: str, label: str, chart: LineChart, rows: int) -> list[ScreenRow]:
    """Draw a chart on `rows` lines, the last of which has the ends of the x axis."""
    margin = max(map(len, chart.texts)) + 1
    columns, high = max(2, page.room - margin), max(2, rows - 1)
    cells = drawn(page, chart, columns, high)
    found = []
    for row, text in enumerate(cells):
        bound = {0: chart.texts[1], high - 1: chart.texts[0]}.get(row, "")
        parts: list[TextPart] = [(bound.rjust(margin - 1) + " ", DIM)]
        mark = page.glyphs.busy
        for is_mark, group in itertools.groupby(text, key=lambda cell: cell == mark):
            parts.append(("".join(group), "bold yellow" if is_mark else "cyan"))
        found.append(ScreenRow(kind, line(page, label if row == 0 else "", parts, inline=False)))
    first, last = (f"{x:.0f}" for x in chart.ends)
    axis = f"{'':{margin}}{first}{f'step {last}':>{max(0, columns - len(first))}}"
    return [*found, ScreenRow(kind, line(page, "", [(axis, DIM)], inline=False))]


def drawn(page: Page, chart: LineChart, columns: int, rows: int) -> list[list[str]]:
    """The characters of the plot: (rows, columns)."""
    wide, tall = (2, 4) if page.glyphs.is_unicode else (1, 1)

    def dot(point: Point) -> tuple[int, int]:
        return placed(point, chart.ends, chart.bounds, (wide * columns, tall * rows))

    bits = [[0] * columns for _ in range(rows)]
    for x, y in joined_dots([dot(point) for point in chart.curve]):
        bits[y // tall][x // wide] |= DOTS[y % tall][x % wide]
    cells = [
        [" " if not bit else chr(BRAILLE + bit) if tall > 1 else page.glyphs.point for bit in row]
        for row in bits
    ]
    for x, y in map(dot, chart.marked):
        cells[y // tall][x // wide] = page.glyphs.busy
    return cells


def drawn_together(
    curves: Mapping[str, Sequence[Point]], ends: Point, bounds: Point, columns: int, rows: int
) -> list[str]:
    """The lines of a plot of several curves, each drawn with its own character."""
    grid = [[" "] * columns for _ in range(rows)]
    for mark, curve in curves.items():
        dots = [placed(point, ends, bounds, (columns, rows)) for point in curve]
        for x, y in dict.fromkeys(joined_dots(dots)):
            grid[y][x] = mark if grid[y][x] in (" ", mark) else MEETING
    return ["".join(cells) for cells in grid]


def placed(point: Point, ends: Point, bounds: Point, size: tuple[int, int]) -> tuple[int, int]:
    """The column and the row of a point, among `size` of them, from the top left."""
    (x, y), (left, right), (low, high) = point, ends, bounds
    across = (x - left) / (right - left) if right > left else 0.0
    down = (high / 2 - y / 2) / (high / 2 - low / 2) if high > low else 0.5
    down = min(max(down, 0.0), 1.0) if math.isfinite(down) else 0.5
    return round(across * (size[0] - 1)), round(down * (size[1] - 1))


def joined_dots(dots: Sequence[tuple[int, int]]) -> Iterable[tuple[int, int]]:
    """The dots, and those of the lines between one and the next."""
    yield from dots[:1]
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        count = max(abs(x1 - x0), abs(y1 - y0), 1)
        for i in range(1, count + 1):
            yield x0 + round(i * (x1 - x0) / count), y0 + round(i * (y1 - y0) / count)
