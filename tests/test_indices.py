"""The checker of indices: it notices what is out of range, and changes nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests import indices, kernels
from tests.conftest import QUICK_START

ROWS, COLUMNS = 4, 32
OUTSIDE = (-1, 4, 1 << 20)  # of an axis of ROWS
Call = Callable[[mx.array, mx.array], mx.array]  # of a table (ROWS, COLUMNS), and an index (2,)


@pytest.fixture(autouse=True)
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Check indices in these tests, without notes about the faults that they make."""
    before = indices.is_checking()
    monkeypatch.delenv(indices.NOTES, raising=False)
    indices.check(True)
    yield
    indices.check(before)
    indices.take_faults()


def changed(table: mx.array, index: Any, value: Any = 7.0) -> mx.array:
    table = mx.array(table)
    table[index] = value
    return table


def update_of(name: str) -> Call:
    return lambda table, index: getattr(table.at[index], name)(2.0)


def along(index: mx.array) -> mx.array:
    """The index (2,) for each column."""
    return mx.broadcast_to(index[:, None], (2, COLUMNS))


def embedded(table: mx.array, index: mx.array) -> mx.array:
    layer = nn.Embedding(ROWS, COLUMNS)
    layer.weight = table
    return layer(index)


def embedded_in_4_bits(table: mx.array, index: mx.array) -> mx.array:
    layer = nn.Embedding(ROWS, COLUMNS)
    layer.weight = table
    return layer.to_quantized(group_size=32, bits=4)(index)


def matrices(table: mx.array) -> mx.array:
    """A matrix (COLUMNS, COLUMNS) of each row."""
    return mx.broadcast_to(table[:, None], (ROWS, COLUMNS, COLUMNS))


def product_of_right(table: mx.array, index: mx.array) -> mx.array:
    return mx.gather_mm(mx.ones((1, COLUMNS)), matrices(table), rhs_indices=index)


def product_of_left(table: mx.array, index: mx.array) -> mx.array:
    return mx.gather_mm(matrices(table), table.T, lhs_indices=index)


def product_in_4_bits(table: mx.array, index: mx.array) -> mx.array:
    packed = mx.quantize(matrices(table), group_size=32, bits=4)
    ones = mx.ones((1, COLUMNS))
    return mx.gather_qmm(ones, *packed, rhs_indices=index, group_size=32, bits=4)


def losses(table: mx.array, index: mx.array) -> mx.array:
    return nn.losses.cross_entropy(table.T[:2], index)


CALLS: dict[str, Call] = {
    "get": lambda table, index: table[index],
    "get number": lambda table, index: table[index[0]],
    "get in tuple": lambda table, index: table[None, index, ..., 2:9],
    "get after ellipsis": lambda table, index: table.T[..., None, index],
    "get two": lambda table, index: table[index, mx.array([0, 5])],
    "get beside integer": lambda table, index: table.T[5, index],
    "get in list": lambda table, index: table[index.tolist()],
    "set": lambda table, index: changed(table, index),
    "set in tuple": lambda table, index: changed(table, (index, slice(3, 5))),
    "set in list": lambda table, index: changed(table, index.tolist()),
    "take": lambda table, index: mx.take(table, index, axis=0),
    "take of all": lambda table, index: mx.take(table[:, 0], index),
    "take_along_axis": lambda table, index: mx.take_along_axis(table, along(index), axis=0),
    "put_along_axis": lambda table, index: mx.put_along_axis(
        table, along(index), mx.array(3.0), axis=0
    ),
    "gather_mm right": product_of_right,
    "gather_mm left": product_of_left,
    "gather_qmm": product_in_4_bits,
    "segmented_mm": lambda table, index: mx.segmented_mm(
        table.T, table, mx.stack([mx.zeros_like(index), index], axis=-1)
    ),
    "slice": lambda table, index: mx.slice(table, index[:1], (0,), (1, COLUMNS)),
    "slice_update": lambda table, index: mx.slice_update(
        table, mx.ones((1, COLUMNS)), index[:1], (0,)
    ),
    "cross_entropy": losses,
    "Embedding": embedded,
    "QuantizedEmbedding": embedded_in_4_bits,
    **{
        f"at {name}": update_of(name)
        for name in ("add", "subtract", "multiply", "divide", "minimum", "maximum")
    },
}
if hasattr(mx.fast, "cross_entropy"):
    CALLS["fast.cross_entropy"] = lambda table, index: mx.fast.cross_entropy(table.T[:2], index)

NUMBERS = {
    "get": lambda table, number: table[number],
    "get in tuple": lambda table, number: table[:, number],
    "set": lambda table, number: changed(table, number),
    "at": lambda table, number: table.at[number].add(1.0),
}


def table() -> mx.array:
    return mx.random.normal((ROWS, COLUMNS), key=mx.random.key(1))


@pytest.mark.parametrize("name", CALLS)
def test_an_index_in_range_gives_the_same(name):
    found = CALLS[name](table(), mx.array([3, 0]))
    indices.check(False)
    expected = CALLS[name](table(), mx.array([3, 0]))
    assert found.shape == expected.shape
    assert mx.array_equal(found, expected)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("outside", OUTSIDE)
def test_an_index_out_of_range_is_noticed(name, outside):
    """The end of a segment may be the length of the axis."""
    outside += name == "segmented_mm" and outside > 0
    for index in ([outside, 0], [outside, outside]):
        with pytest.raises(indices.OutOfRange, match=r"\d"):
            CALLS[name](table(), mx.array(index))


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_out_of_range_is_noticed(name):
    shape = table().shape
    size = shape[name == "get in tuple"]
    for inside in (0, size - 1, -1, -size):
        NUMBERS[name](table(), inside)
    for outside in (size, -size - 1):
        with pytest.raises(indices.OutOfRange, match=f"index {outside} for an axis of {size}"):
            NUMBERS[name](table(), outside)


@pytest.mark.parametrize(
    ("shape", "strides", "offset"), [((3, 2), (32, 1), 0), ((4,), (-1,), 3), ((0,), (1,), 0)]
)
def test_a_view_is_inside_the_array(shape, strides, offset):
    mx.eval(mx.as_strided(table(), shape, strides, offset))
    mx.eval(mx.as_strided(table(), shape))
    if 0 not in shape:
        for outside in (ROWS * COLUMNS, -ROWS):
            with pytest.raises(indices.OutOfRange, match="as_strided"):
                mx.as_strided(table(), shape, strides, outside)


@pytest.mark.parametrize("empty", [mx.array([], mx.int32), mx.zeros((2, 0), mx.uint32)])
def test_an_empty_index_selects_nothing(empty):
    assert table()[empty].shape == (*empty.shape, COLUMNS)
    assert mx.zeros((0, 3))[empty].shape == (*empty.shape, 3)


def test_an_index_into_an_empty_axis_is_out_of_range():
    with pytest.raises(indices.OutOfRange, match="axis of 0"):
        mx.zeros((0, 3))[mx.array([0])]


def test_masks_and_slices_are_as_before():
    mask = mx.array([True, False, False, True])
    found = changed(mx.zeros(ROWS), mask, mx.array(1.0))
    assert found.tolist() == [1, 0, 0, 1]
    assert table()[1:99, :-3].shape == (3, COLUMNS - 3)
    assert mx.array(5.0)[None, ...].shape == (1,)
    with pytest.raises(ValueError, match="Too many indices"):
        table()[0, 0, 0]


@pytest.mark.parametrize("outside", [None, *OUTSIDE])
def test_indices_inside_of_gradients_have_values(outside):
    """The index is computed from an argument of what is differentiated."""

    def loss(rows: mx.array, at: mx.array) -> mx.array:
        return (rows[mx.stop_gradient(mx.minimum(at, at * 1))] ** 2).sum()

    at = mx.array([0, 2 if outside is None else outside])
    gradients = mx.grad(mx.checkpoint(loss))
    if outside is None:
        found = gradients(table(), at)
        indices.check(False)
        assert mx.array_equal(found, gradients(table(), at))
        return
    with pytest.raises(indices.OutOfRange):
        gradients(table(), at)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_indices_inside_of_custom_functions_have_values(where):
    @mx.custom_function
    def rows_at(rows: mx.array, at: mx.array) -> mx.array:
        return rows[at + (ROWS if where == "forward" else 0)]

    @rows_at.vjp
    def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
        rows, at = primals
        return mx.zeros_like(rows).at[at + ROWS].add(cotangent), mx.zeros_like(at)

    def loss(rows: mx.array) -> mx.array:
        return rows_at(rows, mx.array([1, 2])).sum()

    with pytest.raises(indices.OutOfRange, match="at...." if where == "backward" else "[...]"):
        mx.grad(loss)(table())


def loss_of(rows: mx.array, at: mx.array) -> mx.array:
    at = mx.stop_gradient(at)  # mx.checkpoint would differentiate it
    return (rows[at] ** 2).sum() + mx.take(rows, at, axis=0).sum()


@mx.custom_function
def gathered(rows: mx.array, at: mx.array) -> mx.array:
    return rows[mx.zeros_like(at)]


@gathered.vjp
def scattered(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
    rows, at = primals
    return mx.zeros_like(rows).at[at].add(cotangent), mx.zeros_like(at)


COMPILED: dict[str, Callable[[], Call]] = {
    "plain": lambda: mx.compile(loss_of),
    "gradient": lambda: mx.compile(mx.grad(loss_of)),
    "inside of a gradient": lambda: mx.grad(mx.compile(loss_of)),
    "checkpoint": lambda: mx.compile(mx.grad(mx.checkpoint(loss_of))),
    "custom rule": lambda: mx.compile(mx.grad(lambda rows, at: gathered(rows, at).sum())),
    "nested": lambda: mx.compile(twice(mx.compile(loss_of))),
}


def twice(function: Call) -> Call:
    return lambda table, at: function(table, at[::-1]) + function(table, mx.zeros_like(at))


@pytest.fixture
def compiling() -> Iterator[None]:
    """Let MLX trace, also where all tests run under the checker without compilation."""
    mode = kernels.MODE
    kernels.set_mode(kernels.NO_FUSE)
    yield
    kernels.set_mode(kernels.FUSE if mode is None else mode)


@pytest.mark.parametrize("name", COMPILED)
def test_indices_of_compiled_functions_are_checked_at_each_call(compiling, name):
    function = COMPILED[name]()
    inside, other = mx.array([3, 0]), mx.array([1, 1])
    found = [function(table(), at) for at in (inside, other)]
    for outside in OUTSIDE:
        with pytest.raises(indices.OutOfRange, match=f"{Path(__file__).name}.*axis of {ROWS}"):
            function(table(), mx.array([0, outside]))
    indices.check(False)
    plain = COMPILED[name]()
    for at, result in zip((inside, other), found, strict=True):
        assert mx.allclose(result, plain(table(), at))


def test_compiled_functions_change_their_state(compiling):
    state = {"rows": table(), "count": mx.array(0)}

    def step(at: mx.array) -> mx.array:
        state["rows"] = state["rows"].at[at].add(1.0)
        state["count"] = state["count"] + 1
        return state["rows"][at].sum()

    compiled = mx.compile(step, inputs=state, outputs=state)
    compiled(mx.array([1, 2]))
    assert compiled(mx.array([2, 2])).shape == ()
    assert state["count"].item() == 2
    assert mx.allclose(state["rows"] - table(), mx.array([0.0, 1.0, 3.0, 0.0])[:, None], atol=1e-6)
    with pytest.raises(indices.OutOfRange):
        compiled(mx.array([0, ROWS]))


def test_what_cannot_be_evaluated_is_noted(tmp_path, monkeypatch):
    monkeypatch.setenv(indices.NOTES, str(tmp_path))
    mx.vmap(lambda row, at: row[at])(table(), mx.array([0, 1, 2, 3]))
    table()[mx.array([1])]
    notes = indices.expressions(tmp_path)
    assert len(notes[indices.UNSEEN]) == len(notes[indices.FOUND]) == 1
    for found in notes.values():
        assert all(place.startswith(f"{__file__}:") for place in found)


def test_a_fault_that_was_caught_is_still_known(tmp_path, monkeypatch):
    """Of this process, and of one that it started."""
    monkeypatch.setenv(indices.NOTES, str(tmp_path))
    code = (
        "import mlx.core as mx\ntry: mx.zeros(3)[mx.array([3])]\nexcept Exception: print('caught')"
    )
    environment = {
        **os.environ,
        indices.VARIABLE: "1",
        "YOUR_AI_TESTS_CACHE": str(tmp_path),
        "PYTHONPATH": str(QUICK_START.parent),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "caught\n"
    with pytest.raises(indices.OutOfRange):
        mx.zeros(3)[mx.array([5])]
    faults = indices.take_faults()
    assert ["3 ... 3 for an axis of 3" in faults[0], "5 ... 5" in faults[1]] == [True, True]
    assert len(faults) == 2
    assert indices.take_faults() == []


def test_the_summary_counts_expressions_of_each_package(tmp_path):
    here = indices.PACKAGES["your_ai"]
    lines = [f"found\t{here}a.py:1:2-3\ttake", f"found\t{here}a.py:2:2-3\ttake"]
    lines += [f"unseen\t{here}a.py:1:2-3\ttake", f"unseen\t{here}b.py:1:2-3\ttake"]
    lines += [f"found\t{Path(nn.__file__).parent}/layers/x.py:4:1-2\t[...]"]
    (tmp_path / "gw0").mkdir()
    (tmp_path / "gw0" / "1.txt").write_text("\n".join(lines) + "\n")
    assert list(indices.summary(tmp_path)) == [
        "indices of your_ai: 2 expressions checked, 1 not",
        f"  not: {here}b.py:1:2-3",
        "indices of mlx_lm: 0 expressions checked, 0 not",
        "indices of mlx.nn: 1 expressions checked, 0 not",
    ]


def test_nothing_is_left_in_place():
    indices.check(False)
    assert {getattr(place, name) for place, name in indices.CHECKED} == set(indices.OWN.values())
    assert not indices.is_checking()
    assert np.array_equal(table()[mx.array([1])], mx.take(table(), mx.array([1]), axis=0))
