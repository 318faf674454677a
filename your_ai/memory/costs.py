"""What the work of a model costs, by kind of block and phase, as curves: bytes, and seconds.

A step runs one block at a time, or as one graph of alike blocks and a head. So its peak and its
time are composed of those of single blocks and of the head, which `engine/measure_costs.py`
measures on this machine. `guess.py` only guesses bytes, from sizes. All have the same type. No mlx
here.

Shapes: B rows, T tokens per row, N = B x T.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from your_ai.files import read_text, replace_text

STRAIGHT = 0.01  # a curve without its last term may be off by this share of the largest value
MOST_BYTES = 1 << 20  # a larger file was not written by this module
MOST_BLOCKS = 100_000
LARGEST = 1e15  # bytes or seconds


class Shape(NamedTuple):
    """The shape of a micro-batch: B rows of T tokens."""

    rows: int
    tokens: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens


USUAL = Shape(1, 512)  # at which curves are compared


@dataclass(frozen=True)
class CostCurve:
    """Bytes or seconds of a phase: fixed + of_token N + of_pair N T."""

    fixed: float = 0.0
    of_token: float = 0.0
    of_pair: float = 0.0

    def at(self, rows: int, tokens: int) -> float:
        size = rows * tokens
        return self.fixed + self.of_token * size + self.of_pair * size * tokens

    @staticmethod
    def through(costs: Mapping[Shape, float], scale: float = 0.0) -> CostCurve:
        """The curve with terms >= 0 that fits measured bytes best, by least squares.

        The last term is left out where a line is as good: a little noise in it would become much
        for rows that are longer than those measured. From one shape, bytes are proportional to N.

        scale: bytes to which noise is relative, if more than the largest: of a difference, those
        that it is of.
        """
        if len(costs) == 1:
            ((shape, size),) = costs.items()
            return CostCurve(of_token=size / shape.size)
        line = not_negative(costs, terms=2)
        off = max(abs(line.at(*shape) - size) for shape, size in costs.items())
        noise = STRAIGHT * max(scale, *costs.values())
        return line if off <= noise else not_negative(costs, terms=3)


def not_negative(costs: Mapping[Shape, float], terms: int) -> CostCurve:
    """The best curve with the first `terms` terms, none negative: all subsets are tried."""
    rows = [[1.0, float(s.size), float(s.size * s.tokens)][:terms] for s in costs]
    values, best, least = list(costs.values()), CostCurve(), math.inf
    for count in range(1, terms + 1):
        for use in combinations(range(terms), count):
            found = least_squares([[row[i] for i in use] for row in rows], values)
            if found is None or min(found) < 0:
                continue
            curve = CostCurve(**dict(zip((TERMS[i] for i in use), found, strict=True)))
            error = sum((curve.at(*shape) - size) ** 2 for shape, size in costs.items())
            if error < least * (1 - 1e-9):
                best, least = curve, error
    return best


TERMS = tuple(each.name for each in fields(CostCurve))


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float] | None:
    """The x of minimal |A x - y|, by the normal equations; None if A does not decide it."""
    n = len(rows[0])
    scale = [max(abs(row[i]) for row in rows) for i in range(n)]
    scaled = [[row[i] / scale[i] for i in range(n)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in scaled) for j in range(n)]
        + [sum(row[i] * value for row, value in zip(scaled, values, strict=True))]
        for i in range(n)
    ]
    for at in range(n):
        pivot = max(range(at, n), key=lambda i: abs(matrix[i][at]))
        if abs(matrix[pivot][at]) < 1e-9:
            return None
        matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for i in range(n):
            if i != at:
                factor = matrix[i][at] / matrix[at][at]
                matrix[i] = [a - factor * b for a, b in zip(matrix[i], matrix[at], strict=True)]
    return [matrix[i][n] / matrix[i][i] / scale[i] for i in range(n)]


@dataclass(frozen=True, kw_only=True)
class BlockCosts:
    """The bytes that a block of one kind needs in each phase, beside its weights, its adapters, and
    the hidden states between blocks; or its seconds. None: not measured."""

    forward: CostCurve | None = None
    """Its forward pass, with its output."""
    backward: CostCurve | None = None
    """Its backward pass from its input, with its gradients and the cotangent of its input."""
    storing: CostCurve | None = None
    """Adding its gradients to those on disk."""
    kept_forward: CostCurve | None = None
    """Its forward pass if it keeps everything that it can, with that."""
    kept_backward: CostCurve | None = None
    """Its backward pass from what it kept, beside that."""
    tiled_forward: CostCurve | None = None
    """Its forward pass on tiles of one long row."""
    tiled_backward: CostCurve | None = None
    """Its backward pass on tiles of one long row."""
    rows_tiled_forward: CostCurve | None = None
    """Its forward pass on tiles of two long rows or more, which have fewer tokens of each row."""
    rows_tiled_backward: CostCurve | None = None
    """Its backward pass on such tiles."""
    saved: CostCurve | None = None
    """What one more such block adds to a fused graph until the backward pass; or its seconds."""
    working: CostCurve | None = None
    """The work of a fused graph beside what its blocks save."""
    joined: CostCurve | None = None
    """The work of a fused graph at the head beside that and the head alone."""
    evaluated: CostCurve | None = None
    """Its part of a graph of all blocks without gradients."""
    tiles: bool = True
    """Whether it runs on tiles of a long row."""

    def completed(self, guess: BlockCosts) -> BlockCosts:
        """With the phases of `guess` where this has none."""
        missing = [name for name in PHASES if getattr(self, name) is None]
        return replace(self, **{name: getattr(guess, name) for name in missing})


PHASES = tuple(each.name for each in fields(BlockCosts) if each.name != "tiles")


@dataclass(frozen=True)
class HeadCosts:
    """Bytes at the head, beside its hidden states, at some N: lines between them and beyond; or
    seconds."""

    sizes: tuple[int, ...]
    """N, at least two of them, in increasing order."""
    costs: tuple[float, ...]

    def at(self, size: int) -> float:
        pairs = list(pairwise(zip(self.sizes, self.costs, strict=True)))
        (n, cost), (next_n, next_cost) = next((p for p in pairs if size <= p[1][0]), pairs[-1])
        slope = (next_cost - cost) / (next_n - n)
        if size > next_n:
            return next_cost + max(0.0, slope) * (size - next_n)
        return max(0.0, next_cost - slope * (next_n - size))


@dataclass(frozen=True)
class Costs:
    """The costs of a model on one machine, with one kind of adapters."""

    kinds: tuple[BlockCosts, ...]
    order: tuple[int, ...]
    """For each block from the first to the last, the index of its kind in `kinds`."""
    heads: dict[str, HeadCosts]
    """By name in HEADS: losses with gradients under a staged and a fused engine, and scores,
    without gradients, under both."""

    @property
    def is_tiled(self) -> bool:
        """True if every kind of block runs on tiles of long rows."""
        return all(kind.tiles for kind in self.kinds)

    def completed(self, guess: Costs) -> Costs:
        """With the phases of `guess` where nothing was measured, of the largest kind among those
        that it tells apart."""
        kinds = []
        for index, kind in enumerate(self.kinds):
            alike = {guess.order[at] for at, own in enumerate(self.order) if own == index}
            found = [guess.kinds[each] for each in alike]
            kinds.append(kind.completed(largest_of(found)) if found else kind)
        return replace(self, kinds=tuple(kinds), heads=guess.heads | self.heads)

    def last(self, count: int) -> list[BlockCosts]:
        """The kinds of the last `count` blocks, each once."""
        return [self.kinds[kind] for kind in sorted(set(self.order[len(self.order) - count :]))]

    def largest(self, phase: str, rows: int, tokens: int, count: int | None = None) -> float:
        """The most bytes of a phase, over the last `count` blocks, or over all of them."""
        count = len(self.order) if count is None else count
        return max((bytes_of(kind, phase, rows, tokens) for kind in self.last(count)), default=0.0)

    def sum(self, phase: str, rows: int, tokens: int, count: int) -> float:
        """The bytes of a phase of the last `count` blocks together."""
        of_kinds = [bytes_of(kind, phase, rows, tokens) for kind in self.kinds]
        return sum(of_kinds[kind] for kind in self.order[len(self.order) - count :])


def largest_of(kinds: Sequence[BlockCosts]) -> BlockCosts:
    """In each phase the largest of some costs, which are all known."""
    largest = {
        name: max((getattr(kind, name) for kind in kinds), key=lambda curve: curve.at(*USUAL))
        for name in PHASES
        if all(getattr(kind, name) is not None for kind in kinds)
    }
    return BlockCosts(**largest) if len(kinds) > 1 else kinds[0]


@dataclass(frozen=True)
class MeasuredCosts:
    """The costs of a model's work as they were measured on this machine."""

    memory: Costs
    """In bytes."""
    time: Costs
    """In seconds."""
    read_s: float = 0.0
    """Of a byte read from the model's files."""
    is_complete: bool = True
    """Whether nothing was left out because it might not have fitted into memory."""


def on_tiles(phase: str, rows: int) -> str:
    """The phase "forward" or "backward" on tiles of so many rows."""
    return f"rows_tiled_{phase}" if rows > 1 else f"tiled_{phase}"


def bytes_of(kind: BlockCosts, phase: str, rows: int, tokens: int) -> float:
    """Bytes of a phase of a block for micro-batches of (B, T); 0 where nothing is known of it."""
    curve: CostCurve | None = getattr(kind, phase)
    return 0.0 if curve is None else curve.at(rows, tokens)


STAGED, FUSED, STAGED_SCORES, FUSED_SCORES = "staged", "fused", "staged scores", "fused scores"
HEADS = (STAGED, FUSED, STAGED_SCORES, FUSED_SCORES)


# Measured costs in a file


def key_digest(key: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(key).encode()).hexdigest()


def costs_file(folder: Path, key: Iterable[str]) -> Path:
    """The file of the costs for `key`: everything that they depend on."""
    return folder / f"{key_digest(key)[:32]}.json"


def read_costs(path: Path, key: Iterable[str], blocks: int) -> MeasuredCosts | None:
    """The costs in a file, of a model with so many blocks; None if it is missing or damaged, or for
    another key."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
        if content.pop("key") != key_digest(key):
            return None
        found = measured_in(content)
        return found if len(found.memory.order) == blocks else None
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None


def keep_costs(path: Path, key: Iterable[str], costs: MeasuredCosts) -> None:
    """Replace the file. If that fails, the next run measures again."""
    text = json.dumps(asdict(costs) | {"key": key_digest(key)}, indent=1)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_text(path, text + "\n")


def measured_in(content: dict[str, Any]) -> MeasuredCosts:
    """Costs from a file. Raises ValueError, TypeError or KeyError if they are not valid."""
    if type(content["is_complete"]) is not bool:
        raise ValueError("not measured costs")
    memory, time = costs_in(content["memory"]), costs_in(content["time"])
    if memory.order != time.order:
        raise ValueError("not the costs of one model")
    (read_s,) = numbers({"read_s": content["read_s"]}).values()
    return MeasuredCosts(memory, time, read_s, content["is_complete"])


def costs_in(content: dict[str, Any]) -> Costs:
    """Costs of one unit from a file; raises as `measured_in` does."""
    kinds = tuple(block_costs_in(kind) for kind in content["kinds"])
    order, heads = tuple(content["order"]), content["heads"]
    places = all(type(kind) is int and 0 <= kind < len(kinds) for kind in order)
    if not (places and kinds and 0 < len(order) <= MOST_BLOCKS and heads.keys() <= set(HEADS)):
        raise ValueError("not the costs of a model")
    found = {name: head_costs_in(head) for name, head in heads.items()}
    return Costs(kinds, order, found)


def block_costs_in(content: dict[str, Any]) -> BlockCosts:
    tiles = content["tiles"]
    if content.keys() != {*PHASES, "tiles"} or type(tiles) is not bool:
        raise ValueError("not the costs of a block")
    curves = {n: curve_in(c) for n in PHASES if (c := content[n]) is not None}
    return BlockCosts(**curves, tiles=tiles)


def curve_in(content: dict[str, Any]) -> CostCurve:
    if content.keys() != set(TERMS):
        raise ValueError("not a curve")
    return CostCurve(**numbers(content))


def head_costs_in(content: dict[str, Any]) -> HeadCosts:
    sizes, costs = content["sizes"], content["costs"]
    if len(sizes) != len(costs) or len(sizes) < 2 or not all(type(n) is int for n in sizes):
        raise ValueError("not the costs of a head")
    if not all(0 < a < b for a, b in pairwise(sizes)):
        raise ValueError("not the costs of a head")
    numbers(dict(enumerate(costs)))
    return HeadCosts(tuple(sizes), tuple(costs))


def numbers(content: dict[Any, Any]) -> dict[Any, float]:
    """The dict. Raises ValueError unless its values are finite and not negative."""
    for value in content.values():
        if type(value) not in (int, float) or not 0 <= value <= LARGEST:
            raise ValueError("not a number of bytes or seconds")
    return content
