"""The memory of a run, drawn like a fuel gauge. Sizes are in bytes, or None if unknown."""

from __future__ import annotations

from dataclasses import dataclass

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
StackPart = tuple[int, str, str, str]  # bytes, glyph, style and name of a part of the process


@dataclass(frozen=True)
class MemorySizes:
    process: int | None
    highest: int | None
    """The peak of the process since the run was started or resumed last."""
    active: int | None
    cache: int | None
    limit: int | None
    planned: int | None
    """What the plan needs, or its estimate."""
    what: str
    """What `planned` is: NEEDS or ESTIMATE."""

    @property
    def measured(self) -> list[int]:
        sizes = (self.process, self.highest, self.active, self.cache)
        return [size for size in sizes if size is not None]

    @property
    def scale(self) -> int:
        """Return what the whole width of the gauge stands for."""
        most = max((*self.measured, self.planned or 0), default=0)
        if self.limit is None:
            return max(1, most)
        is_near = not most or self.limit <= FAR * most
        return max(1, self.limit if is_near else most + most // 4)


def memory_sizes(state: ViewState) -> MemorySizes:
    gauges, plan = state.gauges or events.Gauges(), state.planned
    return MemorySizes(
        process=clamped(gauges.process_bytes),
        highest=clamped(state.now_highest_bytes),
        active=clamped(gauges.active_bytes),
        cache=clamped(gauges.cache_bytes),
        limit=clamped(state.limit.limit_bytes) if state.limit else None,
        planned=clamped(plan.needed_bytes or plan.estimate_bytes) or None if plan else None,
        what=ESTIMATE if plan and not plan.needed_bytes else NEEDS,
    )


def memory_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    sizes = memory_sizes(state)
    if sizes.limit is None and not sizes.measured:
        return [ScreenRow("process", line(page, "memory", [("not measured yet", DIM)]))]
    stack = stack_of(page, sizes)
    held = sum(size for size, *_ in stack)
    figures = process_line(page, sizes)
    rows = [ScreenRow("process", figures)]
    gauge = gauge_bar(page, stack, max(held, sizes.process or 0), sizes)
    rows += [ScreenRow("gauge", gauge)] * (2 if page.height >= HIGH_SCREEN else 1)
    if stack:
        if sizes.limit is not None:
            stack.append((max(0, sizes.limit - held), page.glyphs.free, DIM, "free"))
        shows_plan = any(sizes.what in text for text, _ in figures)
        planned = None if shows_plan else sizes.planned
        rows.append(ScreenRow("legend", gauge_legend(page, stack, planned, sizes.what)))
    if not state.memory.values:
        return rows
    curve = resampled(state.memory.values, curve_width(page), highest=True)
    ends = "0", size_text(sizes.scale)
    return rows + curve_rows(page, "memory curve", curve, (0, sizes.scale), ends)


def stack_of(page: Page, sizes: MemorySizes) -> list[StackPart]:
    """The known parts of the process, of which MLX's are the first."""
    glyphs, rest = page.glyphs, None
    if sizes.process is not None:
        rest = max(0, sizes.process - (sizes.active or 0) - (sizes.cache or 0))
    other = "rest" if page.narrow else "Python and other"
    if sizes.active is None and sizes.cache is None:
        other = "process"
    parts = (
        (sizes.active, glyphs.active, "cyan", "active"),
        (sizes.cache, glyphs.cache, "blue", "cache"),
        (rest, glyphs.rest, "magenta", other),
    )
    return [(size, glyph, style, name) for size, glyph, style, name in parts if size is not None]


def process_line(page: Page, sizes: MemorySizes) -> list[TextPart]:
    """The memory of the process, of its limit, and of the plan."""
    process, limit = sizes.process, sizes.limit
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
    if sizes.planned is not None:
        plan = [(f"{page.glyphs.planned}{sizes.what}", DIM), (size_text(sizes.planned), "")]
    most: list[TextPart] = []
    if sizes.highest is not None:
        mark = "peak " if page.narrow else f"{page.glyphs.highest} peak "
        most = [(mark, DIM), (size_text(sizes.highest), "")]
    both: list[TextPart] = [*plan, ("   ", ""), *most] if plan and most else []
    room = page.room - cells_of(left) - 2
    fitting = [right for right in (both, most, plan) if right and cells_of(right) <= room]
    right = [*fitting, [] if page.narrow else most][0]
    return line(page, "memory", at_ends(page, left, right, page.room), inline=False)


def level_color(share: float) -> str:
    return "green" if share < NEAR else "yellow" if share < DANGER else "red"


def gauge_bar(page: Page, stack: list[StackPart], held: int, sizes: MemorySizes) -> list[TextPart]:
    """Draw the parts of the process one after the other, and ticks at the plan and the peak."""
    width, scale, total, end = page.room, sizes.scale, 0, 0
    parts: list[TextPart] = []
    for size, glyph, style, _ in stack:
        total += size
        begin, end = end, min(width, round(width * total / scale))
        parts.append((glyph * (end - begin), style))
    parts.append((page.glyphs.free * (width - end), DIM))
    is_beside = sizes.planned is not None and sizes.planned >= scale
    for place, glyph, style in (
        (None if is_beside else sizes.planned, page.glyphs.planned, ""),
        (sizes.highest, page.glyphs.highest, "bold"),
    ):
        if place is not None:
            tick = min(width - 1, round(width * place / scale))
            parts = with_mark(parts, tick, (glyph, style))
    if held > scale:
        parts = with_mark(parts, width - 1, (page.glyphs.over, WARN))
    return line(page, "", parts, inline=False)


def with_mark(parts: list[TextPart], at: int, mark: TextPart) -> list[TextPart]:
    """Replace the glyph in cell `at`; every glyph takes one cell."""
    found, begin = [], 0
    for text, style in parts:
        i = at - begin
        inside = 0 <= i < len(text)
        found += [(text[:i], style), mark, (text[i + 1 :], style)] if inside else [(text, style)]
        begin += len(text)
    return found


def gauge_legend(
    page: Page, stack: list[StackPart], planned: int | None, what: str
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


def drawn_size(size_bytes: float) -> str:
    return size_text(clamped(size_bytes) or 0)


def clamped(size_bytes: float | None) -> int | None:
    """Clamp a size to what can be drawn."""
    if size_bytes is None or size_bytes != size_bytes:
        return None
    return int(min(max(size_bytes, 0), MOST))
