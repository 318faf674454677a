"""The memory of a run, drawn like a fuel gauge. Sizes are in bytes, or None if unknown."""

from __future__ import annotations

from your_ai.dashboard.page import (
    DIM,
    HIGH_SCREEN,
    WARN,
    Field,
    Page,
    ScreenRow,
    TextPart,
    at_ends,
    cells_of,
    curve_rows,
    curve_width,
    in_fields,
    line,
    resampled,
)
from your_ai.dashboard.state import ViewState
from your_ai.run import events

NEAR, DANGER = 0.7, 0.9  # fractions of the limit
MOST = 10**18  # bytes; larger sizes are shown as this


def memory_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    gauges = state.gauges or events.Gauges()
    limit = known(state.limit.limit_bytes) if state.limit else None
    process, highest = known(gauges.process_bytes), known(state.highest_bytes)
    active, cache = known(gauges.active_bytes), known(gauges.cache_bytes)
    shown = [size for size in (process, highest, active, cache) if size is not None]
    if limit is None and not shown:
        return [ScreenRow("process", line(page, "memory", [("not measured yet", DIM)]))]
    scale = max(1, max(shown) if limit is None else limit)
    rest = None if process is None else max(0, process - (active or 0) - (cache or 0))
    alone = active is None and cache is None
    other = "rest" if page.narrow else "Python and other"
    glyphs = page.glyphs
    stack = [
        (size, glyph, style, word)
        for size, glyph, style, word in (
            (active, glyphs.active, "cyan", "active"),
            (cache, glyphs.cache, "blue", "cache"),
            (rest, glyphs.rest, "magenta", "process" if alone else other),
        )
        if size is not None
    ]
    held = sum(size for size, *_ in stack)
    gauge = bar(page, [part[:3] for part in stack], max(held, process or 0), highest, scale)
    if limit is not None:
        stack.append((max(0, limit - held), glyphs.free, DIM, "free"))
    figures = process_line(page, process, highest, limit, scale)
    rows = [ScreenRow("process", figures)]
    rows += [ScreenRow("gauge", gauge)] * (2 if page.height >= HIGH_SCREEN else 1)
    rows.append(ScreenRow("legend", legend(page, stack, scale)))
    if not state.memory.values:
        return rows
    curve = resampled(state.memory.values, curve_width(page), highest=True)
    texts = "0", sized(scale, scale)
    return rows + curve_rows(page, "memory curve", curve, (0, scale), texts)


def process_line(
    page: Page, process: int | None, highest: int | None, limit: int | None, scale: int
) -> list[TextPart]:
    left: list[TextPart] = []
    if process is not None:
        share = process / scale
        color = "" if limit is None else level_color(share)
        left = [("process ", DIM), (figure(process, scale), f"bold {color}".rstrip())]
        left.append(
            (f" {unit_of(scale)[0]}" if limit is None else f" of {sized(limit, scale)}", "")
        )
        if limit is not None:
            left.append((f"  {100 * share:.0f}%", color))
            left += [("  over the limit", WARN)] if process > limit else []
    elif limit is not None:
        left = [("limit ", DIM), (sized(limit, scale), "")]
    if highest is None:
        right = []
    elif not page.narrow:
        most = f"{page.glyphs.highest} peak "
        right = [(most, DIM), (sized(highest, scale), "")]
    else:
        right = [("peak ", DIM), (figure(highest, scale), "")]
        right = right if cells_of([*left, *right]) + 2 <= page.room else []
    return line(page, "memory", at_ends(page, left, right, page.room), inline=False)


def level_color(share: float) -> str:
    return "green" if share < NEAR else "yellow" if share < DANGER else "red"


def bar(
    page: Page, stack: list[tuple[int, str, str]], held: int, highest: int | None, scale: int
) -> list[TextPart]:
    """Draw the parts of the process one after the other, and a tick at the peak."""
    width, parts, total, end = page.room, [], 0, 0
    for size, glyph, style in stack:
        total += size
        begin, end = end, min(width, round(width * total / scale))
        parts.append((glyph * (end - begin), style))
    parts.append((page.glyphs.free * (width - end), DIM))
    if highest is not None:
        tick = min(width - 1, round(width * highest / scale))
        parts = marked(parts, tick, (page.glyphs.highest, "bold"))
    if held > scale:
        parts = marked(parts, width - 1, (page.glyphs.over, WARN))
    return line(page, "", parts, inline=False)


def marked(parts: list[TextPart], at: int, mark: TextPart) -> list[TextPart]:
    """Replace the glyph in cell `at`; every glyph takes one cell."""
    found, begin = [], 0
    for text, style in parts:
        i = at - begin
        inside = 0 <= i < len(text)
        found += [(text[:i], style), mark, (text[i + 1 :], style)] if inside else [(text, style)]
        begin += len(text)
    return found


def legend(page: Page, stack: list[tuple[int, str, str, str]], scale: int) -> list[TextPart]:
    """Explain the glyphs; the unit stands only after the first figure."""
    fields = []
    for rank, (size, glyph, style, word) in enumerate(stack):
        text = figure(size, scale) if fields or page.narrow else sized(size, scale)
        fields.append(Field(rank, text, f" {word} ", style="", mark=(glyph, style)))
    return line(page, "", in_fields(page, fields, page.room), inline=False)


def known(size_bytes: float | None) -> int | None:
    """Clamp a size to what can be drawn."""
    if size_bytes is None or size_bytes != size_bytes:
        return None
    return int(min(max(size_bytes, 0), MOST))


def unit_of(scale_bytes: int) -> tuple[str, float]:
    return ("GB", 1e9) if scale_bytes >= 1e9 else ("MB", 1e6)


def figure(size_bytes: int, scale_bytes: int) -> str:
    """Format a size in the unit of the scale, e.g. 5.31, so that figures can be compared."""
    unit, size = unit_of(scale_bytes)
    return f"{size_bytes / size:.2f}" if unit == "GB" else f"{size_bytes / size:.0f}"


def sized(size_bytes: int, scale_bytes: int) -> str:
    return f"{figure(size_bytes, scale_bytes)} {unit_of(scale_bytes)[0]}"
