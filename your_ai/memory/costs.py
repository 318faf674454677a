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
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from your_ai.files import read_text, replace_text
from your_ai.memory.sizes import TILE_TOKENS

STRAIGHT = 0.01  # a line may be off by this share of what varies, pairs of tokens of all bytes
ROUNDING = 1e-9
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

    def times(self, factor: float) -> CostCurve:
        return CostCurve(factor * self.fixed, factor * self.of_token, factor * self.of_pair)

    @staticmethod
    def through(costs: Mapping[Shape, float], scale: float = 0.0) -> CostCurve:
        """The curve with terms >= 0 that fits measured bytes.

        From one shape, bytes are proportional to N. Through more, it is a line, if one is as good.
        If not, the largest shapes of the same N decide what pairs of tokens need, and the two
        largest N the line beside that: a peak of several moments has bends, which are no pairs, and
        it is longer rows that matter. Without such shapes, all are fitted by least squares. None is
        below what the largest shape needs: a line through two of them may have no term < 0, either.

        scale: bytes to which noise is relative, if more: of a difference, those that it is of.
        """
        if len(costs) == 1:
            ((shape, size),) = costs.items()
            return CostCurve(of_token=size / shape.size)
        curve = CostCurve.fitted(costs, scale)
        last = max(costs, key=lambda shape: (shape.size, shape.tokens))
        return curve.times(max(1.0, costs[last] / curve.at(*last))) if costs[last] else curve

    @staticmethod
    def fitted(costs: Mapping[Shape, float], scale: float) -> CostCurve:
        """The curve of `through`, also below some of what is measured."""
        line = not_negative(costs, TERMS[:2])
        off = max(abs(line.at(*shape) - size) for shape, size in costs.items())
        largest = max(costs.values())
        noise = max(STRAIGHT * max(scale, largest - min(costs.values())), ROUNDING * largest)
        if off <= noise or len({shape.size for shape in costs}) == 1:
            return line
        by_size: dict[int, list[Shape]] = {}
        for shape in sorted(costs, key=lambda shape: shape.tokens):
            by_size.setdefault(shape.size, []).append(shape)
        alike = [by_size[size] for size in sorted(by_size) if len(by_size[size]) > 1]
        if not alike:
            return not_negative(costs, TERMS)
        few, *_, many = alike[-1]
        more, pairs = costs[many] - costs[few], many.size * (many.tokens - few.tokens)
        of_pair = more / pairs if more > STRAIGHT * max(scale, largest) else 0.0
        rest = CostCurve(of_pair=of_pair)
        less, last = (by_size[size][-1] for size in sorted(by_size)[-2:])
        low, high = (costs[shape] - rest.at(*shape) for shape in (less, last))
        of_token = max(0.0, high - low) / (last.size - less.size)
        return CostCurve(max(0.0, high - of_token * last.size), of_token, of_pair)


def not_negative(costs: Mapping[Shape, float], terms: Sequence[str]) -> CostCurve:
    """The best curve of these terms, none negative: all subsets are tried."""
    rows = [dict(zip(TERMS, (1.0, s.size, s.size * s.tokens), strict=True)) for s in costs]
    values, best, least = list(costs.values()), CostCurve(), math.inf
    for count in range(1, len(terms) + 1):
        for use in combinations(terms, count):
            found = least_squares([[row[name] for name in use] for row in rows], values)
            if found is None or min(found) < 0:
                continue
            curve = CostCurve(**dict(zip(use, found, strict=True)))
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
    """Its forward pass on tiles of `tile_tokens`; `fixed` and `of_pair` are of a tile."""
    tiled_backward: CostCurve | None = None
    """Its backward pass on such tiles."""
    saved: CostCurve | None = None
    """What one more such block adds to a fused graph until the backward pass; or its seconds."""
    working: CostCurve | None = None
    """The work of a fused graph, beside its head and what its blocks save, or their gradients: the
    more of both, as one takes the place of the other."""
    norms: CostCurve | None = None
    """Computing the norms of its adapted weights, before its forward pass."""
    evaluated: CostCurve | None = None
    """Its part of a graph of all blocks without gradients."""
    reading: CostCurve | None = None
    """Reading the end of a prompt of T tokens, beside its cache as it is then."""
    read_more: CostCurve | None = None
    """What one more such block adds to that."""
    sampling: CostCurve | None = None
    """Reading a token of each of B rows of the most tokens that the run's completions have, at
    (B, 1)."""
    sample_more: CostCurve | None = None
    """What one more such block adds to that."""
    tile_tokens: int = TILE_TOKENS
    """Tokens of a tile, of all its rows, as it was measured; 0 if it runs on none."""

    def completed(self, guess: BlockCosts) -> BlockCosts:
        """With the phases of `guess` where this has none."""
        missing = [name for name in PHASES if getattr(self, name) is None]
        return replace(self, **{name: getattr(guess, name) for name in missing})


PHASES = tuple(each.name for each in fields(BlockCosts) if each.name != "tile_tokens")


@dataclass(frozen=True)
class HeadCosts:
    """Bytes at the head, beside its hidden states, at some N: lines between them and beyond, but
    below the least N at least proportional to it; or seconds."""

    sizes: tuple[int, ...]
    """N, at least two of them, in increasing order."""
    costs: tuple[float, ...]

    def at(self, size: int) -> float:
        pairs = list(pairwise(zip(self.sizes, self.costs, strict=True)))
        (n, cost), (next_n, next_cost) = next((p for p in pairs if size <= p[1][0]), pairs[-1])
        slope = (next_cost - cost) / (next_n - n)
        if size > next_n:
            return next_cost + max(0.0, slope) * (size - next_n)
        found = next_cost - slope * (next_n - size)
        return max(found, cost * size / n) if size < n else found


@dataclass(frozen=True)
class Costs:
    """The costs of a model on one machine, with one kind of adapters."""

    kinds: tuple[BlockCosts, ...]
    order: tuple[int, ...]
    """For each block from the first to the last, the index of its kind in `kinds`."""
    heads: dict[str, HeadCosts]
    """By name in HEADS: losses with gradients, under a staged and under a fused engine, and scores,
    without gradients, under both."""

    @property
    def is_tiled(self) -> bool:
        """True if every kind of block runs on tiles of long rows."""
        return all(kind.tile_tokens for kind in self.kinds)

    def has(self, phase: str) -> bool:
        """Return whether the phase of every kind of block is known."""
        return all(getattr(kind, phase) is not None for kind in self.kinds)

    def completed(self, guess: Costs) -> Costs:
        """With the phases of `guess` where nothing was measured, of the largest kind among those
        that it tells apart."""
        kinds = []
        for index, kind in enumerate(self.kinds):
            alike = {guess.order[at] for at, own in enumerate(self.order) if own == index}
            found = [guess.kinds[each] for each in alike]
            kinds.append(kind.completed(largest_of(found)) if found else kind)
        return replace(self, kinds=tuple(kinds), heads=guess.heads | self.heads)

    def with_graphs(self, whole: Costs) -> Costs:
        """With the fused graphs of a whole model, as if all were the work of each kind of block."""
        (own,) = whole.kinds
        graphs = {name: getattr(own, name) for name in ("saved", "working", "evaluated")}
        kinds = tuple(replace(kind, **graphs) for kind in self.kinds)
        return replace(self, kinds=kinds, heads=self.heads | whole.heads)

    def last(self, count: int) -> list[BlockCosts]:
        """The kinds of the last `count` blocks, each once."""
        return [self.kinds[kind] for kind in sorted(set(self.order[len(self.order) - count :]))]

    def largest(self, phase: str, rows: int, tokens: int, count: int) -> float:
        """The most bytes of a phase, over the last `count` blocks."""
        return max((bytes_of(kind, phase, rows, tokens) for kind in self.last(count)), default=0.0)

    def together(self, phase: str, more: str, rows: int, tokens: int) -> float:
        """The bytes of a phase, of which each block adds its part, named `more`, to all others."""
        rest = (bytes_of(k, phase, rows, tokens) - bytes_of(k, more, rows, tokens)
                for k in self.kinds)  # fmt: skip
        return max(rest) + self.sum(more, rows, tokens, len(self.order), is_long=False)

    def sum(self, phase: str, rows: int, tokens: int, count: int, *, is_long: bool) -> float:
        """The bytes of a phase of the last `count` blocks together. is_long: as in `on_tiles`."""
        sizes = [bytes_of(k, on_tiles(k, phase, is_long), rows, tokens) for k in self.kinds]
        return sum(sizes[kind] for kind in self.order[len(self.order) - count :])


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
    is_whole: bool = False
    """Whether the model cannot be taken apart, so that only fused graphs were measured."""

    def with_graphs(self, whole: MeasuredCosts) -> MeasuredCosts:
        """With the fused graphs of a whole model."""
        memory, time = self.memory.with_graphs(whole.memory), self.time.with_graphs(whole.time)
        return replace(self, memory=memory, time=time)


def on_tiles(kind: BlockCosts, phase: str, is_long: bool) -> str:
    """The phase "forward" or "backward", on tiles if a block runs on them.

    is_long: whether rows are that long.
    """
    return f"tiled_{phase}" if is_long and kind.tile_tokens else phase


def graph_bytes(kind: BlockCosts, blocks: int, gradients: int, rows: int, tokens: int) -> float:
    """Bytes of a fused graph of so many blocks of a kind, without the head. gradients: of one."""
    held = max(gradients, bytes_of(kind, "saved", rows, tokens))
    return blocks * held + bytes_of(kind, "working", rows, tokens)


def bytes_of(kind: BlockCosts, phase: str, rows: int, tokens: int) -> float:
    """Bytes of a phase of a block for micro-batches of (B, T); 0 where nothing is known of it."""
    curve: CostCurve | None = getattr(kind, phase)
    return 0.0 if curve is None else curve.at(rows, tokens)


HEADS = "trained", "fused trained", "staged scores", "fused scores"
TRAINED, FUSED_TRAINED, STAGED_SCORES, FUSED_SCORES = HEADS


# Measured costs in a file


def key_digest(key: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(key).encode()).hexdigest()


def costs_file(folder: Path, key: Iterable[str]) -> Path:
    """The file of the costs for `key`: everything that they depend on."""
    return folder / f"{key_digest(key)[:32]}.json"


def read_costs(path: Path, key: Iterable[str] | None, blocks: int) -> MeasuredCosts | None:
    """The costs in a file, of a model with so many blocks; None if it is missing or damaged, or for
    another key. key: None for any."""
    try:
        content = json.loads(read_text(path, MOST_BYTES))
        digest = content.pop("key")
        if key is not None and digest != key_digest(key):
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
    found: MeasuredCosts = built(MeasuredCosts, content)
    for costs in (found.memory, found.time):
        known = all(0 <= kind < len(costs.kinds) for kind in costs.order)
        known = known and costs.heads.keys() <= set(HEADS)
        known = known and all(0 <= kind.tile_tokens <= LARGEST for kind in costs.kinds)
        if not (known and 0 < len(costs.order) <= MOST_BLOCKS):
            raise ValueError("not the costs of a model")
        for head in costs.heads.values():
            increase = all(0 < a < b <= LARGEST for a, b in pairwise(head.sizes))
            if not (increase and len(head.sizes) == len(head.costs) >= 2):
                raise ValueError("not the costs of a head")
    if found.memory.order != found.time.order:
        raise ValueError("not the costs of one model")
    return found


def built(kind: Any, content: Any) -> Any:
    """Build what a type hint names from parsed JSON, where numbers are bytes or seconds.

    Raises ValueError or TypeError if the content is not that.
    """
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if content is None else built(args[0], content)
    if origin is tuple and type(content) is list:
        return tuple(built(args[0], each) for each in content)
    if origin is dict and type(content) is dict:
        return {name: built(args[1], each) for name, each in content.items()}
    if isinstance(kind, type) and is_dataclass(kind) and type(content) is dict:
        hints = get_type_hints(kind)
        if content.keys() != hints.keys():
            raise ValueError(f"not {kind}")
        return kind(**{name: built(hint, content[name]) for name, hint in hints.items()})
    if kind is float and type(content) in (int, float) and 0 <= content <= LARGEST:
        return content
    if kind in (bool, int) and type(content) is kind:
        return content
    raise ValueError(f"not {kind}")
