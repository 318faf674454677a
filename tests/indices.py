"""Assert that each index is in range: MLX checks none, and reads or writes other memory instead.

`check(True)` replaces what takes an index in MLX, for the package, mlx-lm and mlx.nn alike:
`array[...]`, `array[...] = `, `array.at[...]` and the functions of CHECKED. An index array has to
be evaluated for that. MLX can do so inside `mx.grad` and the rules of custom functions, but not
while it traces. For `mx.compile`, the graph gives the range of each index array beside its results.
Inside `mx.vmap`, the checker notes that it could not look.

A negative number in an index array is out of range, too. MLX counts it from the end, but a
computed position that is negative is a mistake.

Some folders of the suite run under the checker, see conftest.py. With YOUR_AI_CHECK_INDICES=1 the
whole suite does, as do the processes that tests start, see quick_start/sitecustomize.py. This
module runs there by its path, so it imports nothing of the suite.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

VARIABLE = "YOUR_AI_CHECK_INDICES"  # 1, or the file for a list of all expressions
NOTES = "YOUR_AI_TESTS_INDICES"  # the folder where each process notes expressions and faults
FOUND, UNSEEN, FAULT = "found", "unseen", "fault"  # kinds of notes
INTEGERS = {*(mx.int8, mx.int16, mx.int32, mx.int64), *(mx.uint8, mx.uint16, mx.uint32, mx.uint64)}

FAULTS_FILE = "faults.txt"  # in that folder
PACKAGES = {
    "your_ai": str(Path(__file__).parents[1] / "your_ai") + os.sep,
    "mlx_lm": f"{os.sep}mlx_lm{os.sep}",
    "mlx.nn": f"{os.sep}mlx{os.sep}nn{os.sep}",
}

FAULTS: list[str] = []  # of this process
# Of each function that is being traced: the least and the largest index of each array, by the text
# of its `Traced`.
TRACED: list[dict[str, mx.array]] = []
NOTED: set[tuple[str | CodeType | int, ...]] = set()  # kinds and expressions that are already noted


class OutOfRange(AssertionError):
    """An index is outside the axis that it selects from."""


class Traced(NamedTuple):
    """An index array of a compiled function."""

    place: str
    call: str
    size: int
    """Of the axis."""
    number: int
    """In the function."""


def check_array(index: mx.array, size: int, call: str) -> None:
    """Assert that an index array is within 0 ... size - 1, if MLX can evaluate it here.

    Masks are left to MLX, which compares their shape with the array's.
    """
    if index.dtype not in INTEGERS:
        return
    try:
        mx.eval(index)
    except ValueError as error:
        if "transformations like compile or vmap" not in str(error):
            raise
        if not TRACED:
            note(UNSEEN, call)
        elif index.size:
            key = Traced(place_of(caller()), call, size, len(TRACED[-1]))
            TRACED[-1]["\t".join(map(str, key))] = mx.stack([index.min(), index.max()])
        return
    note(FOUND, call)
    if index.size:
        values = np.asarray(index)
        check_range(int(values.min()), int(values.max()), size, call)


def check_range(low: int, high: int, size: int, call: str, place: str | None = None) -> None:
    if low < 0 or high >= size:
        refuse(f"{call}: index array of {low} ... {high} for an axis of {size}", place)


def check_integer(index: int, size: int, call: str) -> None:
    if not -size <= index < size:
        refuse(f"{call}: index {index} for an axis of {size}")


def check_index(array: mx.array, index: Any, call: str) -> None:
    """Assert that what stands between brackets is in range; slices are, as MLX cuts them."""
    if index is None or index is Ellipsis or isinstance(index, slice):
        return
    if isinstance(index, int):
        return check_integer(index, array.shape[0] if array.ndim else sys.maxsize, call)
    parts = index if isinstance(index, tuple) else (index,)
    shape = array.shape
    missing = len(shape) - sum(part is not None and part is not Ellipsis for part in parts)
    axis = 0
    for part in parts:
        if part is None:
            continue
        if part is Ellipsis:
            axis += missing
            continue
        if axis >= len(shape):
            return  # MLX refuses too many
        check_part(part, shape[axis], call)
        axis += 1


def check_part(part: Any, size: int, call: str) -> None:
    if isinstance(part, mx.array):
        check_array(part, size, call)
    elif isinstance(part, list):
        check_array(mx.array(part), size, call)
    elif hasattr(part, "__index__"):
        check_integer(part.__index__(), size, call)


def check_product(
    call: str, x: mx.array, w: mx.array, left: mx.array | None, right: mx.array | None
) -> None:
    """Assert the indices of a product of chosen matrices; they count along all leading axes."""
    for side, matrices, index in (("lhs_indices", x, left), ("rhs_indices", w, right)):
        if index is not None:
            check_array(index, math.prod(matrices.shape[:-2]), f"{call}, {side}")


def check_starts(
    call: str, array: mx.array, starts: mx.array, axes: Iterable[int], sizes: Iterable[int]
) -> None:
    """Assert that a part of `sizes` along `axes` is inside the array."""
    for i, (axis, size) in enumerate(zip(axes, sizes, strict=True)):
        start = GETITEM(starts.reshape(-1), i)
        check_array(start, array.shape[axis] - size + 1, f"{call}, axis {axis}")


# What replaces MLX's own. Arguments are those of MLX.


def take(a, indices, /, axis=None, *, stream=None):
    size = a.size if axis is None else a.shape[axis]
    if isinstance(indices, mx.array):  # MLX checks an integer
        check_array(indices, size, "take")
    return MLX["take"](a, indices, axis, stream=stream)


def take_along_axis(a, indices, /, axis=-1, *, stream=None):
    check_array(indices, a.size if axis is None else a.shape[axis], "take_along_axis")
    return MLX["take_along_axis"](a, indices, axis, stream=stream)


def put_along_axis(a, indices, /, values, axis=None, *, stream=None):
    check_array(indices, a.size if axis is None else a.shape[axis], "put_along_axis")
    return MLX["put_along_axis"](a, indices, values, axis, stream=stream)


def gather_mm(a, b, /, lhs_indices=None, rhs_indices=None, *more, **named):
    check_product("gather_mm", a, b, lhs_indices, rhs_indices)
    return MLX["gather_mm"](a, b, lhs_indices, rhs_indices, *more, **named)


def gather_qmm(x, w, /, scales, biases=None, lhs_indices=None, rhs_indices=None, *more, **named):
    check_product("gather_qmm", x, w, lhs_indices, rhs_indices)
    return MLX["gather_qmm"](x, w, scales, biases, lhs_indices, rhs_indices, *more, **named)


def gather_qqmm(x, w, /, scales=None, lhs_indices=None, rhs_indices=None, *more, **named):
    check_product("gather_qqmm", x, w, lhs_indices, rhs_indices)
    return MLX["gather_qqmm"](x, w, scales, lhs_indices, rhs_indices, *more, **named)


def segmented_mm(a, b, /, segments, *, stream=None):
    check_array(segments, a.shape[-1] + 1, "segmented_mm")
    return MLX["segmented_mm"](a, b, segments, stream=stream)


def slice_of(a, start_indices, axes, slice_size, *, stream=None):
    sizes = [slice_size[axis] for axis in axes]
    check_starts("slice", a, start_indices, axes, sizes)
    return MLX["slice"](a, start_indices, axes, slice_size, stream=stream)


def slice_update(a, update, start_indices, axes, *, stream=None):
    sizes = [update.shape[axis] for axis in axes]
    check_starts("slice_update", a, start_indices, axes, sizes)
    return MLX["slice_update"](a, update, start_indices, axes, stream=stream)


def as_strided(a, /, shape=None, strides=None, offset=0, *, stream=None):
    sizes = a.shape if shape is None else shape
    steps = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))] if strides is None else strides
    if 0 not in sizes:
        reach = [(n - 1) * step for n, step in zip(sizes, steps, strict=True)]
        low = offset + sum(min(step, 0) for step in reach)
        high = offset + sum(max(step, 0) for step in reach)
        if low < 0 or high >= a.size:
            refuse(f"as_strided: elements {low} ... {high} of {a.size}")
    return MLX["as_strided"](a, shape, strides, offset, stream=stream)


def cross_entropy(logits, targets, *, stream=None):
    check_array(targets, logits.shape[-1], "cross_entropy")
    return MLX["cross_entropy"](logits, targets, stream=stream)


def get(self, index):
    check_index(self, index, "[...]")
    return GETITEM(self, index)


def put(self, index, value):
    check_index(self, index, "[...] =")
    return SETITEM(self, index, value)


def compiled(fun, inputs=None, outputs=None, shapeless=False):
    """`mx.compile`, with a graph that also computes the range of each index array."""

    def traced(*arguments, **named):
        TRACED.append({})
        try:
            return fun(*arguments, **named), TRACED[-1]
        finally:
            TRACED.pop()

    own = MLX["compile"](traced, inputs, outputs, shapeless)

    def call(*arguments, **named):
        result, ranges = own(*arguments, **named)
        check_traced(ranges)
        return result

    return call


def check_traced(ranges: dict[str, mx.array]) -> None:
    """Assert the ranges of a compiled function, or hand them on to one that is traced around it."""
    for key, found in ranges.items():
        if TRACED:
            TRACED[-1][f"{key}\t{len(TRACED[-1])}"] = found
            continue
        place, call, size, *_ = key.split("\t")
        note(FOUND, call, place)
        low, high = found.tolist()
        check_range(low, high, int(size), call, place)


class At:
    """`array.at`, and `array.at[...]` once it has an index."""

    __slots__ = ("array", "index")

    def __init__(self, array: mx.array, index: Any = None) -> None:
        self.array, self.index = array, index

    def __getitem__(self, index: Any) -> At:
        return At(self.array, index)


def updating(name: str) -> Callable[[At, Any], mx.array]:
    def update(self: At, value: Any) -> mx.array:
        check_index(self.array, self.index, f"at[...].{name}")
        return getattr(AT.fget(self.array)[self.index], name)(value)

    return update


for name in ("add", "subtract", "multiply", "divide", "minimum", "maximum"):
    setattr(At, name, updating(name))

CHECKED = {
    **{
        (mx, function.__name__): function
        for function in (
            *(take, take_along_axis, put_along_axis, gather_mm, gather_qmm, gather_qqmm),
            *(segmented_mm, slice_update, as_strided),
        )
    },
    (mx, "slice"): slice_of,
    (mx, "compile"): compiled,
    (mx.fast, "cross_entropy"): cross_entropy,
    (mx.array, "__getitem__"): get,
    (mx.array, "__setitem__"): put,
    (mx.array, "at"): property(At),
}
# A later version of MLX brings some of them.
CHECKED = {place: ours for place, ours in CHECKED.items() if hasattr(*place)}
OWN = {(place, name): getattr(place, name) for place, name in CHECKED}
MLX = {name: function for (_, name), function in OWN.items()}
GETITEM, SETITEM, AT = MLX["__getitem__"], MLX["__setitem__"], MLX["at"]


def check(on: bool) -> None:
    """Put the checks in place, or take them away."""
    for (place, name), function in (CHECKED if on else OWN).items():
        setattr(place, name, function)


def is_checking() -> bool:
    return mx.take is take


def refuse(text: str, place: str | None = None) -> None:
    """Note a fault, in case that the package catches the error, and raise it.

    place: of the expression, if it is not evaluated now.
    """
    note(FAULT, text, place)
    FAULTS.append(f"{place or place_of(caller())}: {text}")
    raise OutOfRange(FAULTS[-1])


def caller() -> FrameType:
    """The frame that called MLX, if it were not for this module."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


def place_of(frame: FrameType) -> str:
    """The file, line and columns of the expression that a frame evaluates."""
    code, at = frame.f_code, frame.f_lasti // 2
    if not hasattr(code, "co_positions"):  # before Python 3.11
        return f"{code.co_filename}:{frame.f_lineno}"
    _, _, first, last = next(itertools.islice(code.co_positions(), at, None))
    return f"{code.co_filename}:{frame.f_lineno}:{first}-{last}"


def note(kind: str, text: str, place: str | None = None) -> None:
    """Write down an expression once, and each fault, at once: the process may be killed.

    place: of the expression, if it is not evaluated now.
    """
    folder = os.environ.get(NOTES)
    if folder is None:
        return
    frame = caller()
    key = (kind, place) if place else (kind, frame.f_code, frame.f_lasti)
    if key in NOTED and kind != FAULT:
        return
    NOTED.add(key)
    name = FAULTS_FILE if kind == FAULT else f"{os.getpid()}.txt"
    with open(Path(folder, name), "a", encoding="utf-8") as file:
        file.write(f"{kind}\t{place or place_of(frame)}\t{text}\n")


def take_faults() -> list[str]:
    """The faults since the last call, in this process and in those that it started."""
    found = FAULTS.copy()
    FAULTS.clear()
    folder = os.environ.get(NOTES)
    if folder and (file := Path(folder, FAULTS_FILE)).exists():
        found = file.read_text(encoding="utf-8").splitlines()
        file.unlink()
    return found


def expressions(folder: Path) -> dict[str, dict[str, str]]:
    """Of each kind of note, the expressions in the notes below a folder, with what they call."""
    found: dict[str, dict[str, str]] = {FOUND: {}, UNSEEN: {}}
    for file in sorted(folder.rglob("*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            kind, place, call = line.split("\t")
            found.setdefault(kind, {})[place] = call
    return found


def summary(folder: Path) -> Iterator[str]:
    """Lines that say how many expressions of each package were checked, and which were not."""
    notes = expressions(folder)
    for name, part in PACKAGES.items():
        checked = [place for place in notes[FOUND] if part in place]
        unseen = sorted(place for place in notes[UNSEEN].keys() - checked if part in place)
        yield f"indices of {name}: {len(checked)} expressions checked, {len(unseen)} not"
        yield from (f"  not: {place}" for place in unseen)
