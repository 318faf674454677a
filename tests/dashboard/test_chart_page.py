from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.test_report import NASTY, Parsed
from your_ai.dashboard.chart_page import SIZE, chart_html
from your_ai.dashboard.charts import (
    Axis,
    Chart,
    Curve,
    Panel,
    log_axis,
    plain_ticks,
    x_axis,
    y_axis,
)


def chart(*curves: Curve, **changes) -> Chart:
    panel = {name: changes.pop(name) for name in ("is_log", "bottom", "top") if name in changes}
    panels = [Panel(name="loss", curves=curves, **panel)]
    return Chart(**{"title": "T", "caption": "C.", "panels": panels, "x_name": "step", **changes})


def curve(*points, **changes) -> Curve:
    return Curve(**{"points": list(points), "color": "blue", **changes})


def paths(html: str) -> list[str]:
    """The paths of curves, without the grid."""
    return re.findall(r'<path (?:class="line" )?d="([^"]+)" style', html)


def texts(axis: Axis) -> list[str]:
    return [text for _, text in axis.ticks]


HALF = SIZE // 2


@pytest.mark.parametrize(
    ("drawn", "end", "path"),
    [
        (curve((0, 0), (1, 1), (2, 0)), 2, f"M0 {SIZE}l{HALF} -{SIZE} {HALF} {SIZE}"),
        # A gap breaks a line, and a single point is seen.
        (curve((0, 0), (1, 1), (2, math.nan), (3, 1)), 4, f"M0 {SIZE}l2500 -{SIZE}M7500 0l1 0"),
        # A step is flat until the next point.
        (curve((0, 0), (1, 1), look="steps"), 1, f"M0 {SIZE}l{SIZE} 0 0 -{SIZE}"),
        (curve((0, 0, 1), (1, 0, 1), look="area"), 1, f"M0 {SIZE}l{SIZE} 0L{SIZE} 0 0 0z"),
    ],
)
def test_a_curve_is_one_path(drawn, end, path):
    assert paths(chart_html(chart(drawn, x_range=(0, end), bottom=0, top=1))) == [path]


def test_marks_keep_their_shape_when_the_chart_stretches():
    html = chart_html(chart(curve((0, 0), (1, 1), look="dots"), curve((0, 0), look="squares")))
    assert [path.count("h0") for path in paths(html)] == [2, 1]
    assert html.count("stroke-linecap: round") == html.count("stroke-linecap: square") == 1


def test_points_outside_of_the_axes_are_left_out():
    [path] = paths(chart_html(chart(curve((0, 1), (1, 1), (2, 9), (3, 1)), bottom=0, top=2)))
    assert path.count("M") == 2


def test_text_is_escaped():
    panel = Panel(name=NASTY, curves=[curve((0, 0), label=NASTY)], ticks=[(0, NASTY)])
    x = {"x_name": NASTY, "x_ticks": [(0, NASTY)], "x_range": (0, 1)}
    html = chart_html(Chart(title=NASTY, caption=NASTY, panels=[panel], **x))
    parsed = Parsed(html)
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    assert parsed.text.count(" ".join(NASTY.split())) >= 5


def test_curves_with_the_same_label_are_once_in_the_legend():
    html = chart_html(chart(curve((0, 0), label="a"), curve((1, 1), label="a"), curve(label="b")))
    assert re.findall(r"</i>([^<]*)</li>", html) == ["a"]


def test_labels_are_left_out_on_a_narrow_chart_only_if_there_are_many():
    few = chart(curve((0, 0)), x_ticks=[(0, "4"), (1, "8"), (2, "16")], x_range=(0, 2))
    many = chart(curve((0, 0), (100_000, 0)))
    assert ('class="odd"' in chart_html(few), 'class="odd"' in chart_html(many)) == (False, True)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 100, ["0", "20", "40", "60", "80", "100"]),
        (0.11, 0.32, ["0.15", "0.2", "0.25", "0.3"]),
        (0, 50_000, ["0", "10,000", "20,000", "30,000", "40,000", "50,000"]),
        (-1e-5, 1e-5, ["-1e-05", "-5e-06", "0", "5e-06", "1e-05"]),
    ],
)
def test_ticks_are_round_numbers(low, high, expected):
    assert [text for _, text in plain_ticks(low, high, 5, False)] == expected


def test_steps_have_no_fractions():
    assert texts(x_axis(chart(curve((1, 0), (2, 0))))) == ["1", "2"]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (1e-5, 9e-4, ["1e-05", "2e-05", "5e-05", "0.0001", "0.0002", "0.0005", "0.001"]),
        (1e-3, 1e3, ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
    ],
)
def test_logarithmic_ticks(low, high, expected):
    assert texts(log_axis(low, high, [])) == expected


numbers = st.floats(allow_nan=True, allow_infinity=True) | st.integers()


@given(st.lists(st.tuples(numbers, numbers), max_size=8), st.booleans(), st.booleans())
def test_any_values_are_drawn(points, is_log, is_integer):
    drawn = chart(curve(*points), is_log=is_log, x_is_integer=is_integer)
    html = chart_html(drawn)
    assert "nan" not in html
    assert "inf" not in html
    for axis in (x_axis(drawn), y_axis(drawn.panels[0])):
        assert len(axis.ticks) <= 20
        assert axis.low < axis.high
