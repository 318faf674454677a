from __future__ import annotations

from your_ai.dashboard.page import drawn_together, placed


def test_points_have_their_places_from_the_top_left():
    ends, bounds, size = (0, 10), (1.0, 3.0), (11, 5)
    assert placed((0, 3.0), ends, bounds, size) == (0, 0)
    assert placed((10, 1.0), ends, bounds, size) == (10, 4)
    assert placed((5, 2.0), ends, bounds, size) == (5, 2)
    assert placed((5, 9.0), ends, bounds, size) == (5, 0)  # outside: at the edge
    assert placed((5, 2.0), (5, 5), (2.0, 2.0), size) == (0, 2)


def test_curves_of_several_runs_are_joined_and_marked_where_they_meet():
    curves = {"1": [(0, 2.0), (4, 0.0)], "2": [(0, 0.0), (4, 2.0)]}
    assert drawn_together(curves, (0, 4), (0.0, 2.0), 5, 3) == ["11 22", "  *  ", "22 11"]
