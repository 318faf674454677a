"""A line for each process of a run on several."""

from __future__ import annotations

import dataclasses

from your_ai.dashboard.page import ASCII, Page
from your_ai.dashboard.screen import rank_rows, screen
from your_ai.dashboard.state import ViewState
from your_ai.run import events

EVENT = events.Ranks(
    step=3, hosts=["mac1", "mac2"], tokens=[300, 100], seconds=[0.9, 0.5], waited=[0.1, 0.5],
    process_bytes=[8e9, 3e9], limit_bytes=[16e9, 4e9], sent_bytes=2e6,
)  # fmt: skip
PAGE = Page(100, 40, False, ASCII)


def texts(state: ViewState) -> list[str]:
    return ["".join(part for part, _ in row.parts) for row in rank_rows(PAGE, state)]


def test_each_rank_has_its_memory_throughput_and_wait():
    first, second = texts(ViewState(ranks=EVENT))
    assert "rank 0" in first
    assert "mac1" in first
    assert "8.00 GB of 16.00 GB" in first
    assert "300 tokens/s" in first
    assert "waited 0.1 s (10%)" in first
    assert "100 tokens/s" in second
    assert "waited 0.5 s (50%)" in second


def test_a_run_on_one_process_has_no_such_lines():
    assert texts(ViewState()) == []


def test_a_damaged_event_is_drawn_without_what_it_lacks():
    odd = events.Ranks(
        step=1, hosts=["a", "b\x1b[2J"], tokens=["x"], seconds=[float("nan")], waited=[],
        process_bytes=[-1], limit_bytes=[None], sent_bytes=0,
    )  # fmt: skip
    lines = texts(ViewState(ranks=odd))
    assert len(lines) == 2
    assert not any("tokens/s" in text or "GB" in text or "waited" in text for text in lines)
    unlimited = dataclasses.replace(EVENT, limit_bytes=[0, None], seconds=[0.0, 0.5], waited=[])
    first, second = texts(ViewState(ranks=unlimited))
    assert "8.00 GB" in first
    assert "3.00 GB" in second
    assert " of " not in first + second
    assert "tokens/s" not in first  # no time passed
    assert "200 tokens/s" in second
    assert "waited 0 s (0%)" in second
    assert "\x1b" not in screen(ViewState(ranks=odd), "r", 80, 30, 0.0).plain
