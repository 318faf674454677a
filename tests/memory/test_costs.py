"""Costs of blocks and heads: curves through measured bytes, and files, which may be hostile."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from your_ai.memory.costs import (
    FUSED_SCORES,
    HEADS,
    LARGEST,
    MOST_BLOCKS,
    MOST_BYTES,
    PHASES,
    STRAIGHT,
    TRAINED,
    BlockCosts,
    CostCurve,
    Costs,
    HeadCosts,
    MeasuredCosts,
    Shape,
    costs_file,
    keep_costs,
    read_costs,
)

MB = 10**6
SHAPES = (Shape(1, 128), Shape(2, 128), Shape(1, 384), Shape(1, 1024))  # as they are measured
KEY = ("machine", "model")

sizes = st.floats(0, 1e9, allow_nan=False)
shapes = st.builds(Shape, st.integers(1, 8), st.integers(1, 4096))
curves = st.builds(CostCurve, st.integers(0, 10**9), st.integers(0, 10**6), st.integers(0, 10**3))
blocks = st.builds(
    BlockCosts,
    **{name: st.none() | curves for name in PHASES},
    tile_tokens=st.sampled_from((0, 384, 512)),
)


@st.composite
def any_head(draw) -> HeadCosts:
    found = sorted(draw(st.sets(st.integers(1, 4096), min_size=2, max_size=6)))
    costs = draw(st.lists(sizes, min_size=len(found), max_size=len(found)))
    return HeadCosts(tuple(found), tuple(costs))


@st.composite
def any_costs(draw) -> Costs:
    kinds = tuple(draw(st.lists(blocks, min_size=1, max_size=3)))
    order = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=8))
    heads = draw(st.dictionaries(st.sampled_from(HEADS), any_head()))
    return Costs(kinds, tuple(order), heads)


@st.composite
def any_measured(draw) -> MeasuredCosts:
    memory, time = draw(any_costs()), draw(any_costs())
    time = replace(time, kinds=(time.kinds[0],) * len(memory.kinds), order=memory.order)
    return MeasuredCosts(memory, time, draw(sizes), draw(st.booleans()))


# Curves


@given(curves)
def test_a_curve_meets_the_points_of_another_within_what_counts_as_noise(curve):
    points = {shape: curve.at(*shape) for shape in SHAPES}
    found, noise = CostCurve.through(points), 1.001 * STRAIGHT * max(points.values())
    assert all(abs(found.at(*shape) - size) <= noise for shape, size in points.items())


@given(st.floats(0, 100), st.floats(1, 1e6), st.floats(1, 10))
def test_a_curve_with_a_large_pair_term_is_given_back(tokens, of_token, share):
    """tokens: those whose bytes are as many as the fixed ones. share: of the bytes of pairs of
    tokens, to those of tokens, in a row of 1024."""
    curve = CostCurve(tokens * of_token, of_token, share * of_token / 1024)
    found = CostCurve.through({shape: curve.at(*shape) for shape in SHAPES})
    assert found.of_pair == pytest.approx(curve.of_pair, rel=1e-4)
    assert found.of_token == pytest.approx(curve.of_token, rel=1e-4)
    assert found.fixed == pytest.approx(curve.fixed, rel=1e-4, abs=1e-3 * of_token)


@given(sizes, st.floats(1, 1e6))
def test_a_straight_line_is_given_back_exactly(fixed, of_token):
    curve = CostCurve(min(fixed, 1e4 * of_token), of_token)
    found = CostCurve.through({shape: curve.at(*shape) for shape in SHAPES})
    assert found.of_pair == 0
    assert found.of_token == pytest.approx(of_token, rel=1e-6)
    assert found.fixed == pytest.approx(curve.fixed, rel=1e-6, abs=1e-4 * of_token)


@given(st.data())
def test_noise_on_a_straight_line_is_no_pair_term(data):
    """Which would become much in a row that is longer than those measured."""
    of_token = data.draw(st.floats(1, 1e6))
    noise = [data.draw(st.floats(-STRAIGHT / 3, STRAIGHT / 3)) for _ in SHAPES]
    most = of_token * max(shape.size for shape in SHAPES)
    points = {s: s.size * of_token + n * most for s, n in zip(SHAPES, noise, strict=True)}
    found = CostCurve.through(points)
    assert found.of_pair == 0
    assert found.at(1, 8192) <= 1.1 * 8192 * of_token


@given(st.dictionaries(shapes, sizes, min_size=1, max_size=6))
def test_no_term_of_a_curve_is_negative(points):
    found = CostCurve.through(points)
    assert min(found.fixed, found.of_token, found.of_pair) >= 0


@given(st.dictionaries(shapes, sizes, min_size=1, max_size=6))
def test_the_largest_shape_needs_no_more_than_its_curve_says(points):
    """Two shapes that grow faster than their tokens, for one: no term may be negative."""
    largest = max(points, key=lambda shape: (shape.size, shape.tokens))
    assert CostCurve.through(points).at(*largest) >= points[largest] * (1 - 1e-9) - 1e-9


@given(shapes, sizes)
def test_bytes_of_one_shape_are_proportional(shape, size):
    found = CostCurve.through({shape: size})
    assert found == CostCurve(of_token=found.of_token)
    assert found.at(*shape) == pytest.approx(size)
    assert found.at(2 * shape.rows, shape.tokens) == pytest.approx(2 * size)


def test_shapes_of_the_same_size_leave_their_terms_undecided_and_give_their_mean():
    found = CostCurve.through({Shape(1, 128): 1000.0, Shape(2, 64): 1200.0})
    assert found.at(1, 128) == pytest.approx(1100)


@example(10304.0, 1.0, 1.0)
@given(st.floats(1, 1e6), st.floats(1, 1e6), st.floats(0.1, 1))
def test_the_largest_of_two_lines_is_continued_by_the_steeper_one(fixed, of_token, share):
    """As the peak of two moments is. Two rows of 512 tokens tell that from pairs of tokens."""
    bend = 384 * share  # where the second line begins to be larger
    points = {s: of_token * max(s.size, bend) + fixed for s in (*SHAPES, Shape(2, 512))}
    found = CostCurve.through(points)
    assert found.of_pair == 0
    assert found.at(1, 8192) == pytest.approx(of_token * 8192 + fixed, rel=0.02)


def test_points_that_decrease_give_a_constant():
    points = dict(zip(SHAPES, (900.0, 700.0, 500.0, 300.0), strict=True))
    assert CostCurve.through(points) == CostCurve(fixed=600.0)


@pytest.mark.parametrize(("scale", "has_pairs"), [(0.0, True), (1e6, False)])
def test_noise_of_a_difference_is_relative_to_what_it_is_of(scale, has_pairs):
    points = {shape: 0.01 * shape.size * shape.tokens for shape in SHAPES}
    assert (CostCurve.through(points, scale).of_pair > 0) == has_pairs


# Heads


@given(any_head(), st.integers(1, 10_000))
def test_bytes_at_the_head_are_between_those_of_its_neighbours(head, size):
    found = head.at(size)
    for (n, cost), (more, next_cost) in itertools.pairwise(
        zip(head.sizes, head.costs, strict=True)
    ):
        if n <= size <= more:
            least, most = sorted((cost, next_cost))
            slack = 1e-6 * most
            assert least - slack <= found <= most + slack


@given(any_head())
def test_bytes_at_the_head_are_the_given_ones_at_the_given_sizes(head):
    for size, cost in zip(head.sizes, head.costs, strict=True):
        assert head.at(size) == pytest.approx(cost, rel=1e-6, abs=1e-6 * max(head.costs))


@given(any_head(), st.integers(0, 10_000), st.integers(0, 10_000))
def test_bytes_at_the_head_never_fall_beyond_the_last_size(head, more, still_more):
    last = head.sizes[-1]
    assert head.costs[-1] <= head.at(last + more) <= head.at(last + more + still_more) + 1e-3


@given(any_head(), st.integers(0, 4096))
def test_bytes_at_the_head_are_never_negative(head, size):
    assert head.at(size) >= 0


def test_below_the_least_size_the_head_costs_no_less_than_its_share():
    """The line through two noisy times may be below 0 there."""
    assert HeadCosts((100, 200), (10.0, 50.0)).at(50) == 5


def test_bytes_at_the_head_go_on_in_a_line_beyond_the_last_size():
    assert HeadCosts((1, 100, 200), (0.0, 500.0, 1000.0)).at(400) == 2000


# Costs of several kinds of blocks

SMALL, WIDE = (
    BlockCosts(forward=CostCurve(fixed), backward=CostCurve(of_token=1.0)) for fixed in (10, 30)
)
COSTS = Costs((SMALL, WIDE), (1, 0, 0), {TRAINED: HeadCosts((1, 2), (5.0, 6.0))})


@pytest.mark.parametrize(("count", "largest", "summed"), [(0, 0, 0), (2, 10, 20), (3, 30, 50)])
def test_the_last_blocks_are_counted(count, largest, summed):
    assert COSTS.largest("forward", 1, 1, count) == largest
    assert COSTS.sum("forward", 1, 1, count, is_long=False) == summed


def test_the_kinds_of_the_last_blocks_are_given_once():
    assert COSTS.last(2) == [SMALL]
    assert COSTS.last(3) == [SMALL, WIDE]


def test_phases_that_are_not_known_have_no_bytes():
    assert COSTS.largest("saved", 4, 512, 3) == COSTS.sum("saved", 4, 512, 3, is_long=False) == 0


def test_blocks_are_tiled_if_every_kind_is():
    whole = BlockCosts(tile_tokens=0)
    assert Costs((SMALL, WIDE), (0, 1), {}).is_tiled
    assert not Costs((SMALL, whole), (0, 1), {}).is_tiled


@given(any_costs())
def test_only_phases_that_were_not_measured_are_completed(costs):
    full = BlockCosts(**dict.fromkeys(PHASES, CostCurve(7.0)))
    guess = Costs((full,), (0,) * len(costs.order), {n: HeadCosts((1, 2), (1, 2)) for n in HEADS})
    found = costs.completed(guess)
    assert found.order == costs.order
    for place in set(costs.order):
        before, after = costs.kinds[place], found.kinds[place]
        assert after.tile_tokens == before.tile_tokens
        for name in PHASES:
            measured = getattr(before, name)
            assert getattr(after, name) == (CostCurve(7.0) if measured is None else measured)
    assert found.heads == guess.heads | costs.heads


def test_a_kind_is_completed_from_the_guess_of_the_same_blocks():
    """Measured and guessed costs may number their kinds differently."""
    measured = Costs((BlockCosts(), BlockCosts()), (0, 1, 1), {})
    guess = Costs((SMALL, WIDE), (1, 0, 0), {})
    assert measured.completed(guess).kinds == (WIDE, SMALL)


def test_a_kind_that_a_guess_divides_is_completed_with_the_largest():
    """In each phase, so that no block needs more."""
    guesses = (BlockCosts(forward=CostCurve(10)), BlockCosts(forward=CostCurve(30)))
    for kinds in (guesses, guesses[::-1]):
        found = Costs((BlockCosts(),), (0, 0), {}).completed(Costs(kinds, (0, 1), {}))
        assert found.kinds[0].forward == CostCurve(30)


# Files


MEASURED = MeasuredCosts(COSTS, COSTS, 1e-9)


def read(path: Path, key: Sequence[str] = KEY) -> MeasuredCosts | None:
    return read_costs(path, key, len(COSTS.order))


@given(any_measured())
def test_costs_are_read_as_they_were_kept(tmp_path_factory, costs):
    path = costs_file(tmp_path_factory.getbasetemp() / "costs", KEY)
    keep_costs(path, KEY, costs)
    assert read_costs(path, KEY, len(costs.memory.order)) == costs


def test_costs_of_another_key_or_of_a_model_with_more_blocks_are_not_read(tmp_path):
    keep_costs(tmp_path / "c.json", KEY, MEASURED)
    assert read(tmp_path / "c.json", (*KEY, "adapters")) is None
    assert read_costs(tmp_path / "c.json", KEY, 4) is None


def test_files_of_different_keys_have_different_names(tmp_path):
    names = {costs_file(tmp_path, key).name for key in (KEY, KEY[::-1], ("machine",))}
    assert len(names) == 3


def test_costs_that_cannot_be_kept_are_measured_again(tmp_path):
    (tmp_path / "file").write_text("")
    keep_costs(tmp_path / "file" / "c.json", KEY, MEASURED)
    assert read(tmp_path / "file" / "c.json") is None


ABSENT = object()
CURVE = ("kinds", 0, "forward")
HEAD = ("heads", TRAINED)
# Places in a file, and what is there.
HOSTILE: list[tuple[tuple[Any, ...], Any]] = [
    *(((n,), value) for n in ("kinds", "order", "heads") for value in (ABSENT, None, "a", 1)),
    *((("kinds",), value) for value in ([], {})),
    *((("kinds", 0), value) for value in ([], None)),
    *((("kinds", 0, name), ABSENT) for name in ("forward", "saved", "tile_tokens")),
    (("kinds", 0, "more"), None),
    *((("kinds", 0, "tile_tokens"), value) for value in (-1, None)),
    *((CURVE, value) for value in ({}, [], 5.0, "fixed")),
    *(((*CURVE, name), ABSENT) for name in ("fixed", "of_token", "of_pair")),
    *(((*CURVE, "fixed"), value) for value in (-1, -1e-9, True, None, "1", [], {}, 1e300, 10**30)),
    *(((*CURVE, "fixed"), float(value)) for value in ("nan", "inf", "-inf")),
    ((*CURVE, "more"), 1.0),
    *((("order",), order) for order in ([], [0, 1, 2], [0] * (MOST_BLOCKS + 1), "000")),
    *((("order",), [first, 0, 1]) for first in (-1, True, 0.0, "0", [0])),
    (("heads",), []),
    (("heads", "another"), {"sizes": [1, 2], "costs": [1, 2]}),
    *((HEAD, value) for value in (None, [])),
    *(((*HEAD, name), ABSENT) for name in ("sizes", "costs")),
    *(((*HEAD, "sizes"), sizes) for sizes in ([2, 1], [1, 1], [0, 1], [-1, 1], [1], [1, 2, 3])),
    *(((*HEAD, "sizes"), sizes) for sizes in ([True, 2], [1.0, 2], ["1", 2], [[1], 2], None, 5)),
    *(((*HEAD, "costs"), costs) for costs in ([1, -1], [1, True], [1, None], [1, "2"], [1, [2]])),
    *(((*HEAD, "costs"), [1, value]) for value in (float("nan"), float("inf"), 2 * LARGEST)),
    *(((*HEAD, "costs"), costs) for costs in ([1], [1, 2, 3], {"a": 1, "b": 2}, "ab", None)),
]


HOSTILE = [((unit, *place), value) for unit in ("memory", "time") for place, value in HOSTILE]
HOSTILE += [
    ((name,), value)
    for name in ("key", "memory", "time", "read_s", "is_complete")
    for value in (ABSENT, None, "a", [], -1)
]
HOSTILE += [(("time", "order"), [0, 0, 0]), (("read_s",), float("nan"))]


def damaged(place: tuple[Any, ...], value: Any, content: Any) -> Any:
    """The content of a file with another value at a place."""
    content = copy.deepcopy(content)
    node = content
    for name in place[:-1]:
        node = node[name]
    if value is ABSENT:
        del node[place[-1]]
    else:
        node[place[-1]] = value
    return content


@pytest.mark.parametrize(("place", "value"), HOSTILE)
def test_a_damaged_file_is_as_none(tmp_path, place, value):
    path = tmp_path / "c.json"
    keep_costs(path, KEY, MEASURED)
    path.write_text(json.dumps(damaged(place, value, json.loads(path.read_text()))))
    assert read(path) is None


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"3",
        b'"key"',
        b"{}",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"key": ' * 50_000,
        b'{"key": ' + b"9" * 5000 + b"}",
        b" " * (MOST_BYTES + 1),
    ],
)
def test_a_file_that_holds_something_else_is_as_none(tmp_path, content):
    (tmp_path / "c.json").write_bytes(content)
    assert read(tmp_path / "c.json") is None


def test_a_folder_or_nothing_in_place_of_a_file_is_as_none(tmp_path):
    assert read(tmp_path) is None
    assert read(tmp_path / "c.json") is None


@given(st.data())
def test_any_json_in_any_place_is_as_none_or_as_costs(tmp_path_factory, data):
    """Costs that are read can be used, and no file gives a traceback."""
    content: Any = json.loads(json.dumps(asdict(MEASURED)))
    node, place = content, []
    while isinstance(node, dict | list) and node and (not place or data.draw(st.booleans())):
        name = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else [0]))
        place.append(name)
        node = node[name]
    anything = st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=5,
    )
    path = tmp_path_factory.getbasetemp() / "any.json"
    keep_costs(path, KEY, MEASURED)
    whole = json.loads(path.read_text()) | damaged(tuple(place), data.draw(anything), content)
    path.write_text(json.dumps(whole))
    found = read(path)
    if found is not None:
        assert found.memory.largest("forward", 8, 4096, 1) >= 0
        heads = found.memory.heads.values()
        assert all(head.at(size) >= 0 for head in heads for size in (1, 8192))


def test_a_whole_file_is_read(tmp_path):
    """Else the tests above would hold of any file."""
    keep_costs(tmp_path / "c.json", KEY, MEASURED)
    assert read(tmp_path / "c.json") == MEASURED
    assert FUSED_SCORES not in COSTS.heads
