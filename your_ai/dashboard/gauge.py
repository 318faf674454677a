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
from your_ai.gates.text import size_text
from your_ai.run import events

NEAR, DANGER = 0.7, 0.9  # fractions of the limit
FAR = 2  # a limit above this multiple of the planned and the highest memory is not drawn
NEEDS, ESTIMATE = " at least ", " estimated peak "  # the second for plans without a margin
MOST = 10**18  # bytes; larger sizes are shown as this


def memory_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    gauges = state.gauges or events.Gauges()
    limit = known(state.limit.limit_bytes) if state.limit else None
    planned, what = None, NEEDS
    if (plan := state.planned) is not None:
        planned = known(plan.needed_bytes or plan.estimate_bytes) or None
        what = NEEDS if plan.needed_bytes else ESTIMATE
    process, highest = known(gauges.process_bytes), known(state.now_highest_bytes)
    active, cache = known(gauges.active_bytes), known(gauges.cache_bytes)
    shown = [size for size in (process, highest, active, cache) if size is not None]
    if limit is None and not shown:
        return [ScreenRow("process", line(page, "memory", [("not measured yet", DIM)]))]
    most = max((*shown, planned or 0), default=0)
    near = limit is not None and (not most or limit <= FAR * most)
    scale = max(1, limit if limit is not None and near else most + most // 4 * (limit is not None))
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
    drawn = [part[:3] for part in stack]
    tick = planned if planned is not None and planned < scale else None
    gauge = bar(page, drawn, max(held, process or 0), highest, scale, tick)
    if limit is not None:
        stack.append((max(0, limit - held), glyphs.free, DIM, "free"))
    figures = process_line(page, process, highest, limit, planned, what)
    shows_plan = any(what in text for text, _ in figures)
    rows = [ScreenRow("process", figures)]
    rows += [ScreenRow("gauge", gauge)] * (2 if page.height >= HIGH_SCREEN else 1)
    if any(size is not None for size in (process, active, cache)):
        rows.append(ScreenRow("legend", legend(page, stack, None if shows_plan else planned, what)))
    if not state.memory.values:
        return rows
    curve = resampled(state.memory.values, curve_width(page), highest=True)
    return rows + curve_rows(page, "memory curve", curve, (0, scale), ("0", size_text(scale)))


def process_line(
    page: Page,
    process: int | None,
    highest: int | None,
    limit: int | None,
    planned: int | None,
    what: str,
) -> list[TextPart]:
    """The memory of the process, of its limit, and of the plan; what: NEEDS or ESTIMATE."""
    left: list[TextPart] = []
    if process is not None:
        color = "" if not limit else level_color(process / limit)
        left = [("process ", DIM), (size_text(process), f"bold {color}".rstrip())]
        if limit:
            share = 100 * process / limit
            text = f"{share:.0f}%" if share >= 1 or not process else "<1%"
            left += [(f" of {size_text(limit)}", ""), (f"  {text}", color)]
            left += [("  over the limit", WARN)] if process > limit else []
    elif limit is not None:
        left = [("limit ", DIM), (size_text(limit), ""), ("  not measured yet", DIM)]
    plan: list[TextPart] = []
    if planned is not None:
        plan = [(f"{page.glyphs.planned}{what}", DIM), (size_text(planned), "")]
    most: list[TextPart] = []
    if highest is not None:
        mark = "peak " if page.narrow else f"{page.glyphs.highest} peak "
        most = [(mark, DIM), (size_text(highest), "")]
    gap: list[TextPart] = [("   ", "")]
    for right in ([*plan, *gap, *most] if plan and most else [], most, plan):
        if right and cells_of([*left, *right]) + 2 <= page.room:
            break
    else:
        right = [] if page.narrow else most
    return line(page, "memory", at_ends(page, left, right, page.room), inline=False)


def level_color(share: float) -> str:
    return "green" if share < NEAR else "yellow" if share < DANGER else "red"


def bar(
    page: Page,
    stack: list[tuple[int, str, str]],
    held: int,
    highest: int | None,
    scale: int,
    planned: int | None = None,
) -> list[TextPart]:
    """Draw the parts of the process one after the other, and ticks at the plan and the peak."""
    width, parts, total, end = page.room, [], 0, 0
    for size, glyph, style in stack:
        total += size
        begin, end = end, min(width, round(width * total / scale))
        parts.append((glyph * (end - begin), style))
    parts.append((page.glyphs.free * (width - end), DIM))
    for place, glyph, style in (
        (planned, page.glyphs.planned, ""),
        (highest, page.glyphs.highest, "bold"),
    ):
        if place is not None:
            tick = min(width - 1, round(width * place / scale))
            parts = marked(parts, tick, (glyph, style))
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


def legend(
    page: Page, stack: list[tuple[int, str, str, str]], planned: int | None, what: str
) -> list[TextPart]:
    """Explain the glyphs; planned: what the plan needs, if it is not shown elsewhere."""
    fields = [
        Field(2 * rank, size_text(size), f" {word} ", style="", mark=(glyph, style))
        for rank, (size, glyph, style, word) in enumerate(stack)
    ]
    if planned is not None:
        mark = (page.glyphs.planned, "")
        fields.insert(1, Field(1, size_text(planned), what, style="", mark=mark))
    return line(page, "", in_fields(page, fields, page.room), inline=False)


def known(size_bytes: float | None) -> int | None:
    """Clamp a size to what can be drawn."""
    if size_bytes is None or size_bytes != size_bytes:
        return None
    return int(min(max(size_bytes, 0), MOST))
