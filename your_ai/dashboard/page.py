"""The elements of a screen's lines: parts, glyphs, labels, fields and curves.

A line is a list of parts, each a text with a style. Lines are never wrapped. Glyphs and words
carry all the information; color only repeats it.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
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
