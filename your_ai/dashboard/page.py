"""The elements of a screen's lines: parts, glyphs, labels, fields and curves.

A line is a list of parts, each a text with a style. Lines are never wrapped. Glyphs and words
carry all the information; color only repeats it.
"""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Span, Text

NARROW = 60  # cells; narrower pages have labels inside the lines, and no margin
LABEL = 10  # cells of a label and the gap after it
RANGE = 17  # cells for the bounds of a curve
HIGH_SCREEN, HIGHER_SCREEN = 30, 38  # lines at which the bar and the curves become higher
ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.?)", re.DOTALL)
DIM, WARN = "dim", "bold red"
TextPart = tuple[str, str]


class Glyphs(NamedTuple):
    """The characters of a screen, one cell each except `cut`."""

    active: str
    cache: str
    rest: str
    free: str
    highest: str
    over: str
    """The end of a bar that is cut off at the right."""
    done: str
    todo: str
    bad: str
    busy: str
    waiting: str
    ended: str
    to: str
    spread: str
    """Before a standard deviation."""
    point: str
    """Of a curve that is not drawn in dots."""
    planned: str
    """What the plan needs, in a bar."""
    heights: str
    cut: str

    @property
    def is_unicode(self) -> bool:
        return self.cut == UNICODE.cut


UNICODE = Glyphs(*(*"█▓▒·┃▶━─×●○■–±·┆", "▁▂▃▄▅▆▇█", "…"))
ASCII = Glyphs(*(*"#=-.|>=-x*o#-~.:", ".:-=+*#@", "..."))


class ScreenRow(NamedTuple):
    kind: str  # one of KEPT
    parts: list[TextPart]


class Field(NamedTuple):
    """A figure, and the words before and after it."""

    rank: int
    """If there is too little room, fields with the highest rank are dropped first."""
    value: str
    before: str = ""
    after: str = ""
    style: str = "bold"
    mark: TextPart = ("", "")

    @property
    def cells(self) -> int:
        return cells_of([self.mark]) + cell_len(f"{self.before}{self.value}{self.after}")


@dataclass(frozen=True)
class Page:
    """The area a frame is drawn on."""

    width: int
    """In cells, without the margins."""
    height: int
    """In lines."""
    narrow: bool
    glyphs: Glyphs

    @property
    def room(self) -> int:
        """Cells next to the labels."""
        return self.width if self.narrow else self.width - LABEL

    @property
    def curve_rows(self) -> int:
        return 1 + (self.height >= HIGH_SCREEN) + (self.height >= HIGHER_SCREEN)


def joined(lines: list[list[TextPart]], margin: str) -> Text:
    """Join lines to one Text, which rich draws much faster than many."""
    pieces, spans, at = [], [], 0
    for number, parts in enumerate(lines):
        for text, style in [("\n" if number else "", ""), (margin, ""), *parts]:
            if style and text:
                spans.append(Span(at, at + len(text), style))
            pieces.append(text)
            at += len(text)
    return Text("".join(pieces), no_wrap=True, overflow="crop", spans=spans)


def printable(page: Page, text: object) -> str:
    """Make text from outside safe to draw: no cursor moves, no styles, no hidden characters."""
    text = ESCAPE.sub(" ", str(text))  # text from a file may be anything
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
        text = "".join(c for c in text if not 0xFE00 <= ord(c) <= 0xFE0F)  # variation selectors
        if page.glyphs is ASCII:
            text = text.encode("ascii", "replace").decode()
    return text if text.isprintable() else "".join(c if c.isprintable() else " " for c in text)


def clean(page: Page, text: object) -> str:
    return " ".join(printable(page, text).split())


def cells_of(parts: Iterable[TextPart]) -> int:
    return sum(cell_len(text) for text, _ in parts)


def cut(page: Page, parts: Sequence[TextPart], width: int) -> list[TextPart]:
    """Cut the parts to at most `width` cells."""
    if cells_of(parts) <= width:
        return list(parts)
    mark = page.glyphs.cut[: max(0, width)]
    left = max(0, width) - len(mark)
    kept: list[TextPart] = []
    for text, style in parts:
        if cell_len(text) > left:
            return [*kept, (set_cell_size(text, left).rstrip() + mark, style)]
        kept.append((text, style))
        left -= cell_len(text)
    return kept


def line(
    page: Page, label: str, parts: Sequence[TextPart], *, style: str = DIM, inline: bool = True
) -> list[TextPart]:
    """Put parts after a label. A narrow page has the label only if `inline`."""
    if page.narrow:
        return cut(page, [(f"{label} ", style), *parts] if inline else parts, page.width)
    return [(label.ljust(LABEL), style), *cut(page, parts, page.room)]


def beside(page: Page, label: str) -> int:
    """Number of cells in a line after its label."""
    return page.room - len(label) - 1 if page.narrow else page.room


def in_fields(page: Page, fields: Iterable[Field], width: int) -> list[TextPart]:
    """Return as many fields as fit into `width` cells."""
    kept, gap = list(fields), 2 if page.narrow else 3
    while len(kept) > 1 and sum(f.cells + gap for f in kept) - gap > width:
        if gap > 2:
            gap -= 1
        else:
            kept.remove(max(kept, key=lambda f: f.rank))
    parts: list[TextPart] = []
    for field in kept:
        parts += [(" " * gap, "")] if parts else []
        parts += [field.mark, (field.before, DIM), (field.value, field.style), (field.after, DIM)]
    return parts


def at_ends(
    page: Page, left: Sequence[TextPart], right: Sequence[TextPart], width: int
) -> list[TextPart]:
    """Put parts at both ends of `width` cells; if they do not fit, cut the left ones."""
    right = cut(page, right, width)
    left = cut(page, left, width - cells_of(right) - 2)
    return [*left, (" " * (width - cells_of(left) - cells_of(right)), ""), *right]


def curve_rows(
    page: Page,
    kind: str,
    values: Sequence[float],
    bounds: tuple[float, float],
    texts: tuple[str, str],
) -> list[ScreenRow]:
    """Draw a curve as high as the page allows, with its bounds at the right."""
    (low, high), rows, glyphs = texts, page.curve_rows, page.glyphs
    steps = [step_of(value, bounds, 8 * rows) for value in values]
    found = []
    for row in range(rows):
        base = 8 * (rows - 1 - row)
        drawn = "".join(glyph_of(glyphs, step, base) for step in steps)
        text = low if base == 0 else high if row == 0 else ""
        text = text if rows > 1 else f"{low} {glyphs.to} {high}"
        parts = [(drawn.ljust(curve_width(page)), "cyan"), (f"  {text}", DIM)]
        found.append(ScreenRow(kind, line(page, "", parts, inline=False)))
    return found


def curve_width(page: Page) -> int:
    return max(1, page.room - RANGE - 2)


def resampled(values: Sequence[float], width: int, highest: bool) -> list[float]:
    """Reduce values to at most `width`: the highest, or the mean, of each group."""
    count = len(values)
    if count <= width:
        return list(values)
    groups = [values[i * count // width : (i + 1) * count // width] for i in range(width)]
    return [max(group) if highest else sum(group) / len(group) for group in groups]


def step_of(value: float, bounds: tuple[float, float], steps: int) -> int | None:
    """Return the height of a value, from 1; None if it is not finite."""
    low, high = bounds
    if not math.isfinite(value):
        return None
    extent = high / 2 - low / 2  # halves, since the difference may overflow
    share = (value / 2 - low / 2) / extent if extent > 0 else 0.5
    return 1 + min(steps - 1, int(min(max(share, 0.0), 1.0) * steps))


def glyph_of(glyphs: Glyphs, step: int | None, base: int) -> str:
    """Return the part of a column in the row that begins at height `base`."""
    if step is None:
        return " " if base else glyphs.bad
    return glyphs.heights[min(step - base, 8) - 1] if step > base else " "


# Line charts in characters: of one run, and of several over each other. Pure functions


BRAILLE = 0x2800
# The bits of a Braille character: DOTS[row][column].
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
Point = tuple[float, float]
MEETING = "*"  # where curves of several runs meet


@dataclass(frozen=True)
class LineChart:
    """The content of a chart. Points are in the order of their x, and finite."""

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
