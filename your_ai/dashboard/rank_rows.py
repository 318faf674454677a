"""The processes of a run on several, a line each: memory, throughput, and the time they wait."""

from __future__ import annotations

from collections.abc import Sequence

from your_ai.dashboard.gauge import known, level_color
from your_ai.dashboard.page import Field, Page, ScreenRow, TextPart, clean, in_fields, line
from your_ai.dashboard.state import ViewState
from your_ai.gates.text import size_text
from your_ai.run import events

MOST_RANKS = 16  # lines
CELLS = 12  # of a gauge


def rank_rows(page: Page, state: ViewState) -> list[ScreenRow]:
    """A line for each process; none for a run on one."""
    event = state.ranks
    if event is None:
        return []
    ranks = min(len(event.hosts), MOST_RANKS)
    return [ScreenRow("rank", rank_line(page, event, rank)) for rank in range(ranks)]


def rank_line(page: Page, event: events.Ranks, rank: int) -> list[TextPart]:
    held, limit = known(at(event.process_bytes, rank)), known(at(event.limit_bytes, rank))
    computed, waited = at(event.seconds, rank) or 0.0, at(event.waited, rank) or 0.0
    tokens, passed = at(event.tokens, rank), computed + waited
    fields = [Field(5, clean(page, event.hosts[rank]), style="")]
    if held and limit:
        share = held / limit
        filled = min(CELLS, round(CELLS * share))
        gauge = page.glyphs.active * filled + page.glyphs.free * (CELLS - filled)
        color = level_color(share)
        fields.append(Field(6, "", mark=(gauge, color)))
        fields.append(Field(0, size_text(held), after=f" of {size_text(limit)}", style=color))
    elif held:
        fields.append(Field(0, size_text(held), style=""))
    if tokens is not None and passed > 0:
        fields.append(Field(1, f"{tokens / passed:,.0f}", after=" tokens/s", style=""))
        after = f" ({waited / passed:.0%})"
        fields.append(Field(2, f"{waited:.2g} s", "waited ", after, style=""))
    return line(page, f"rank {rank}", in_fields(page, fields, page.room), inline=False)


def at(values: Sequence[float], rank: int) -> float | None:
    """The value of a rank; None if a damaged event has none."""
    value = values[rank] if rank < len(values) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if 0 <= value < 1e18 else None
