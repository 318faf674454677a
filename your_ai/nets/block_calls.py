"""What a model gives each of its blocks, and what it takes from them, found by running it.

The trunk of a model runs on a few tokens, with blocks that record their arguments and results.
An array among the arguments of a block is one of three:

- part of the state: an array that an earlier block returned (hidden states, or keys and values
  that several blocks share), or the embeddings, for the first block;
- context: it depends on the tokens only, e.g. an input of its own for each block;
- a constant of the row length: a mask, positions or factors of each token.

A block is then a function of its state, which is kept as one array of (B, T, F) features.

Shapes: B rows, T tokens per row, F features of the state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import Unsplittable
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.split import Path, StandIn, call_trunk, module_at, replaced

SHAPES = ((3, 7), (2, 5))  # rows and tokens of the two runs that are compared


@dataclass(frozen=True)
class Mask:
    """A causal attention mask, optionally limited to the last `window` keys and to segments.

    chunk: each row is cut into chunks of so many tokens, from its start; a query sees only keys of
    its own chunk.

    segments: (B, T) int32, or None if each row is one text; a query sees only keys of its own
    segment.

    Blocks whose attention accepts a Mask (nets.attention) receive it; the others get `array`.
    """

    window: int | None = None
    segments: mx.array | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """The maximum number of keys that a query sees within its text; None for all."""
        return min((n for n in (self.window, self.chunk) if n is not None), default=None)

    def array(self, tokens: int) -> mx.array:
        """(T, T) bool, or (B, 1, T, T) with segments: True where a query sees a key."""
        queries, keys = mx.arange(tokens)[:, None], mx.arange(tokens)[None]
        seen = seen_keys(queries, keys, self.window, self.chunk)
        if self.segments is not None:
            seen = seen & (self.segments[:, None, :, None] == self.segments[:, None, None, :])
        return seen


def seen_keys(queries: mx.array, keys: mx.array, window: int | None, chunk: int | None) -> mx.array:
    """The keys that each query sees, by their positions in a row, without regard to segments.

    queries, keys: positions, whose shapes broadcast. window, chunk: as in Mask.
    """
    seen = queries >= keys
    if window is not None:
        seen = seen & (queries < keys + window)
    if chunk is not None:
        seen = seen & (queries // chunk == keys // chunk)
    return seen


class TextMask(str):
    """A `Mask` that is also the text "causal", for code that passes it on to its attention.

    received: notes, for each time that it was passed on, that it was.
    """

    mask: Mask
    received: list[bool]

    @staticmethod
    def of(mask: Mask) -> TextMask:
        text = TextMask("causal")
        text.mask, text.received = mask, []
        return text


@dataclass(frozen=True)
class StateSlot:
    """In the arguments of a block: the array at `index` of its state."""

    index: int


@dataclass(frozen=True)
class Given:
    """In the arguments of a block: a constant or an array of its context."""

    name: str


@dataclass(frozen=True)
class StateArray:
    """An array of the state, and how its axes are arranged."""

    rows: int
    """Axis of the rows."""
    tokens: int
    """Axis of the tokens."""
    others: tuple[int, ...]
    """The sizes of the other axes."""
    dtype: mx.Dtype

    @property
    def features(self) -> int:
        return math.prod(self.others)

    @property
    def order(self) -> tuple[int, ...]:
        """The axes with rows and tokens first."""
        axes = range(len(self.others) + 2)
        return (self.rows, self.tokens, *(a for a in axes if a not in (self.rows, self.tokens)))

    def shape(self, rows: int, tokens: int) -> tuple[int, ...]:
        found = list(self.others)
        for axis, size in sorted(((self.rows, rows), (self.tokens, tokens))):
            found.insert(axis, size)
        return tuple(found)


@dataclass(frozen=True)
class State:
    """The arrays that one block passes to later ones, together (B, T, F)."""

    arrays: tuple[StateArray, ...]

    @property
    def is_plain(self) -> bool:
        """True if it is one array that is (B, T, F) already."""
        return len(self.arrays) == 1 and self.arrays[0].order == (0, 1, 2)

    @property
    def features(self) -> int:
        return sum(array.features for array in self.arrays)

    def pack(self, arrays: list[mx.array]) -> mx.array:
        if self.is_plain:
            return arrays[0]
        ordered = (a.transpose(k.order) for a, k in zip(arrays, self.arrays, strict=True))
        flat = [array.reshape(*array.shape[:2], -1) for array in ordered]
        return flat[0] if len(flat) == 1 else mx.concatenate(flat, axis=-1)

    def unpack(self, state: mx.array) -> list[mx.array]:
        if self.is_plain:
            return [state]
        found, start = [], 0
        for kind in self.arrays:
            part = state[..., start : start + kind.features].astype(kind.dtype)
            start += kind.features
            shape = tuple(kind.shape(*state.shape[:2])[axis] for axis in kind.order)
            inverse = sorted(range(len(kind.order)), key=lambda axis: kind.order[axis])
            found.append(part.reshape(shape).transpose(inverse))
        return found


@dataclass(frozen=True, eq=False)
class Call:
    """The call of a block by the trunk, for rows of one length."""

    args: tuple[Any, ...]
    """Positional arguments, with StateSlot, Given and Mask in place of arrays."""
    keywords: tuple[tuple[str, Any], ...]
    as_array: bool
    """Whether the block gets its mask as an array even if it is simply causal."""
    state: State
    after: State
    passed: tuple[tuple[bool, int], ...]
    """The source of each array of `after`: (True, index in the leaves of the block's result), or
    (False, index in `state`)."""
    constants: Arrays = field(default_factory=dict, repr=False)
    """By the names in `Given`."""

    @cached_property
    def key(self) -> Hashable:
        """Equal for calls that pass the same, but for the constants."""
        return repr(self)

    @property
    def slots(self) -> list[Any]:
        """The leaves of the arguments, in the order in which `Given` names them."""
        return leaves((self.args, [value for _, value in self.keywords]))

    @property
    def array_masks(self) -> dict[int, Mask]:
        """The masks that the block gets as arrays, by their places in `slots`."""
        masks = {at: slot for at, slot in enumerate(self.slots) if isinstance(slot, Mask)}
        return masks if self.as_array else {}

    @property
    def mask(self) -> Mask | None:
        return next((slot for slot in self.slots if isinstance(slot, Mask)), None)

    def run(
        self,
        block: nn.Module,
        state: mx.array,
        segments: mx.array | None,
        max_segment_tokens: int | None = None,
        given: Arrays | None = None,
        as_text: Callable[[Mask], TextMask] | None = None,
    ) -> mx.array:
        """Call `block` on `state`, (B, T, F), as the trunk would, and return its next state.

        max_segment_tokens: the maximum length of a text in a packed row; no key is farther away.
        given: the arrays of `Given`; by default the constants.
        as_text: makes a TextMask of a mask that is not simply causal, for blocks that can pass it
            on; the others get an array.
        """
        arrays, given = self.state.unpack(state), self.constants if given is None else given

        def filled(value: Any) -> Any:
            if isinstance(value, StateSlot):
                return arrays[value.index]
            if isinstance(value, Given):
                return given[value.name]
            return masked(value) if isinstance(value, Mask) else value

        def masked(mask: Mask) -> Any:
            reaches = [n for n in (mask.window, max_segment_tokens) if n is not None]
            mask = Mask(min(reaches, default=None), segments, mask.chunk)
            if not (mask.reach is None and segments is None) and understands_segments(block):
                return mask
            if segments is None and mask.reach is None and not self.as_array:
                return "causal"
            return mask.array(state.shape[1]) if as_text is None else as_text(mask)

        keywords = {name: mapped(filled, value) for name, value in self.keywords}
        result = leaves(block(*mapped(filled, self.args), **keywords))
        return self.after.pack([result[i] if made else arrays[i] for made, i in self.passed])


def understands_segments(block: nn.Module) -> bool:
    return any(getattr(module, "takes_segments", False) for module in block.modules())


def mapped(function: Callable[[Any], Any], tree: Any) -> Any:
    """A tree of tuples, lists and dicts with `function` of each leaf."""
    if isinstance(tree, dict):
        return {name: mapped(function, value) for name, value in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(mapped(function, value) for value in tree)
    return function(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree of tuples, lists and dicts, in the order of `mapped`."""
    found: list[Any] = []
    mapped(found.append, tree)
    return found


# -- finding out how a model calls its blocks ---------------------------------------------


class Recorded(NamedTuple):
    """The arguments of each block, and what it returned, in one run of the trunk."""

    args: list[tuple[Any, dict[str, Any]]]
    results: list[Any]


@dataclass(frozen=True)
class Trunk:
    """A trunk, or a whole model, whose blocks can be replaced."""

    module: nn.Module
    path: Path
    """Of the list of blocks, in `module`."""

    def run(self, tokens: mx.array, answer: Callable[..., Any], module: Any = None) -> mx.array:
        """Run the trunk on (B, T) tokens; answer: f(index, args, kwargs) -> result of a block."""
        blocks = self.blocks

        def forward(index: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: answer(index, args, kwargs)

        stand_ins = [StandIn(block, forward(i)) for i, block in enumerate(blocks)]
        module = self.module if module is None else module
        return call_trunk(replaced(module, self.path, stand_ins), tokens)

    @property
    def blocks(self) -> list[nn.Module]:
        found: list[nn.Module] = module_at(self.module, self.path)
        return found

    def record(self, tokens: mx.array, answer: Callable[..., Any]) -> Recorded:
        """The arguments of each block. Raises Unsplittable unless each is called once, in order."""
        found = Recorded([], [])

        def recording(index: int, args: Any, kwargs: Any) -> Any:
            if index != len(found.args):
                raise Unsplittable("its trunk does not call every block once")
            found.args.append((args, kwargs))
            found.results.append(answer(index, args, kwargs))
            return found.results[-1]

        self.run(tokens, recording)
        if len(found.args) != len(self.blocks):
            raise Unsplittable("its trunk does not call every block once")
        return found


class ArraySource(NamedTuple):
    """An array that a block returned; the embeddings are of block -1."""

    block: int
    leaf: int


EMBEDDINGS = ArraySource(-1, 0)


@dataclass(frozen=True)
class Wiring:
    """The connections between the blocks of a trunk."""

    templates: list[Any]
    """The result of each block, with a StateArray for each array of each token."""
    sources: list[dict[int, ArraySource]]
    """For each block, the source of each leaf of its arguments that is part of the state."""
    context: list[set[int]]
    """For each block, the leaves of its arguments that depend on the tokens."""
    states: list[list[ArraySource]]
    """The state before each block, and after the last one."""
    kinds: dict[ArraySource, StateArray]

    def state(self, index: int) -> State:
        return State(tuple(self.kinds[source] for source in self.states[index]))

    def answer(self, rows: int, tokens: int) -> Callable[..., Any]:
        """A function for `Trunk.run`: results of the right shapes, made of zeros."""

        def zeros(value: Any) -> Any:
            if not isinstance(value, StateArray):
                return value
            return mx.zeros(value.shape(rows, tokens), value.dtype)

        return lambda index, args, kwargs: mapped(zeros, self.templates[index])

    def passed(self, index: int) -> tuple[tuple[bool, int], ...]:
        """`Call.passed` of a block."""
        before = self.states[index]
        return tuple(
            (True, source.leaf) if source.block == index else (False, before.index(source))
            for source in self.states[index + 1]
        )


def find_wiring(trunk: Trunk, blocks: list[nn.Module]) -> Wiring:
    """Find out how the blocks of a trunk are connected. No block is evaluated.

    blocks: the modules that compute, which the list in the trunk may only stand for.
    Raises Unsplittable if the trunk does more than passing arrays from block to block.
    """

    def really(index: int, args: Any, kwargs: Any) -> Any:
        args, kwargs = mapped(_alias, args), mapped(_alias, kwargs)
        result = blocks[index](*args, **kwargs)
        # Of the results, only the forms count. Their graphs would take hundreds of MB, and a head
        # that evaluates what it is given must not evaluate the blocks.
        return mapped(_zeros, result)

    tokens = [mx.arange(math.prod(shape)).reshape(shape) % 5 for shape in SHAPES]
    first, second = (trunk.record(each, really) for each in tokens)
    kinds: dict[ArraySource, StateArray] = {}
    templates: list[Any] = []
    made: dict[int, ArraySource] = {}
    for index, (one, other) in enumerate(zip(first.results, second.results, strict=True)):
        templates.append(_template(index, leaves(one), leaves(other), kinds, made, one))
    embeddings = _array_position(first.args[0])
    kind = _kind(*(leaves(run.args[0])[embeddings] for run in (first, second)))
    if kind is not None:
        kinds[EMBEDDINGS] = kind
    sources = [
        {at: made[id(leaf)] for at, leaf in enumerate(leaves(given)) if id(leaf) in made}
        for given in first.args
    ]
    sources[0] = {embeddings: EMBEDDINGS}
    wiring = Wiring(templates, sources, [], [], kinds)
    wiring.context.extend(_context(trunk, first, wiring, tokens[0]))
    wiring.states.extend(_states(sources, _finally(trunk, wiring)))
    return wiring


def _alias(value: Any) -> Any:
    """Another object for the same array, since blocks may change their arguments in place."""
    return value.astype(value.dtype) if isinstance(value, mx.array) else value


def _zeros(value: Any) -> Any:
    return mx.zeros(value.shape, value.dtype) if isinstance(value, mx.array) else value


def _array_position(args: Any) -> int:
    positions = [at for at, leaf in enumerate(leaves(args)) if isinstance(leaf, mx.array)]
    if not positions:
        raise Unsplittable("its blocks receive no array")
    return positions[0]


def _template(
    index: int,
    first: list[Any],
    second: list[Any],
    kinds: dict[ArraySource, StateArray],
    made: dict[int, ArraySource],
    result: Any,
) -> Any:
    """The result of a block with a StateArray for each array; notes these in `kinds` and `made`."""
    found: list[Any] = []
    for at, leaf in enumerate(first):
        if isinstance(leaf, mx.array) and (kind := _kind(leaf, second[at])) is not None:
            source = ArraySource(index, at)
            kinds[source], made[id(leaf)] = kind, source
            found.append(kind)
        else:
            found.append(leaf)
    filled = iter(found)
    return mapped(lambda _: next(filled), result)


def _kind(first: mx.array, second: mx.array) -> StateArray | None:
    """The axes of an array, from its shapes in the runs; None if it has no rows and tokens."""
    if first.ndim != second.ndim:
        return None
    axes: list[int] = []
    for size, other in zip(*SHAPES, strict=True):
        varies = [
            axis
            for axis, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
            if (a, b) == (size, other)
        ]
        if len(varies) != 1:
            return None
        axes += varies
    others = tuple(size for axis, size in enumerate(first.shape) if axis not in axes)
    rows, tokens = axes
    return StateArray(rows, tokens, others, first.dtype)


def _context(trunk: Trunk, first: Recorded, wiring: Wiring, tokens: mx.array) -> Iterator[set[int]]:
    """`Wiring.context`. Raises Unsplittable if an argument is computed from results of blocks."""
    random = wiring.answer(*tokens.shape)

    def noisy(index: int, args: Any, kwargs: Any) -> Any:
        return mapped(_disturbed, random(index, args, kwargs))

    same = trunk.record(tokens, noisy)
    other = trunk.record((tokens + 1) % 5, noisy)
    runs = zip(first.args, same.args, other.args, wiring.sources, strict=True)
    for *given, sources in runs:
        found: set[int] = set()
        for at, values in enumerate(zip(*map(leaves, given), strict=True)):
            if at in sources or not isinstance(values[0], mx.array):
                _check_constant(values[0], at in sources)
            elif not _equal(values[0], values[1]):
                raise Unsplittable("its trunk computes something between its blocks")
            elif not _equal(values[0], values[2]):
                found.add(at)
        yield found


def _disturbed(value: Any) -> Any:
    if isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
        return mx.random.normal(value.shape, key=mx.random.key(1)).astype(value.dtype)
    return value


def _equal(first: mx.array, second: mx.array) -> bool:
    return first.shape == second.shape and bool(mx.array_equal(first, second, equal_nan=True))


def _check_constant(value: Any, of_state: bool) -> None:
    if not of_state and not isinstance(value, (bool, int, float, str, type(None), mx.Dtype)):
        raise Unsplittable(f"its blocks receive a {type(value).__name__}")


def _finally(trunk: Trunk, wiring: Wiring) -> list[ArraySource]:
    """The arrays that the trunk uses after its last block. Those of earlier blocks are refused."""
    count = len(wiring.templates)
    of_last = [source for source in wiring.kinds if source.block == count - 1]
    earlier = [source for source in wiring.kinds if 0 <= source.block < count - 1]
    if not of_last:
        raise Unsplittable("its last block returns no hidden states")
    if earlier and _depends(trunk, wiring, set(earlier)):
        raise Unsplittable("it combines the outputs of several blocks at its end")
    if len(of_last) == 1:
        return of_last
    return [source for source in of_last if _depends(trunk, wiring, {source})]


def _depends(trunk: Trunk, wiring: Wiring, sources: set[ArraySource]) -> bool:
    """Return whether the output of the trunk becomes NaN if these arrays are NaN."""
    zeros = wiring.answer(*SHAPES[1])

    def poisoned(index: int, args: Any, kwargs: Any) -> Any:
        result = mapped(_disturbed, zeros(index, args, kwargs))
        positions = iter(range(len(leaves(result))))

        def value(leaf: Any) -> Any:
            is_nan = ArraySource(index, next(positions)) in sources
            return mx.full(leaf.shape, mx.nan, leaf.dtype) if is_nan else leaf

        return mapped(value, result)

    output = trunk.run(mx.zeros(SHAPES[1], mx.int32), poisoned)
    return bool(mx.isnan(output).any())


def _states(
    sources: list[dict[int, ArraySource]], last: list[ArraySource]
) -> list[list[ArraySource]]:
    """`Wiring.states`: what is needed after each block."""
    states = [list(last)]
    for index in reversed(range(len(sources))):
        needed = list(dict.fromkeys(sources[index].values()))
        later = [source for source in states[0] if source.block != index]
        states.insert(0, list(dict.fromkeys([*needed, *later])))
    if states[0] != [EMBEDDINGS]:
        raise Unsplittable("its first block does not get the embeddings alone")
    return states


def describe(trunk: Trunk, wiring: Wiring, tokens: int, shorter: Sequence[Call] = ()) -> list[Call]:
    """The call of each block for rows of `tokens` tokens.

    shorter: for rows that are shorter, but show all windows. Masks that are arrays there are not
        computed for `tokens`, the square of which they have.
    """
    recorded = trunk.record(mx.zeros((1, tokens), mx.int32), wiring.answer(1, tokens))
    calls = []
    for index, (args, kwargs) in enumerate(recorded.args):
        constants: Arrays = {}
        known = shorter[index].array_masks if shorter else {}
        args, kwargs, as_array = _described(wiring, index, args, kwargs, tokens, constants, known)
        calls.append(
            Call(
                args, tuple(kwargs.items()), as_array, wiring.state(index), wiring.state(index + 1),
                wiring.passed(index), constants,
            )
        )  # fmt: skip
    return calls


def _described(
    wiring: Wiring, index: int, args: Any, kwargs: Any, tokens: int, constants: Arrays,
    masks: Mapping[int, Mask],
) -> tuple[Any, dict[str, Any], bool]:  # fmt: skip
    """masks: those that are known, by the place of the argument among the leaves."""
    state, sources = wiring.states[index], wiring.sources[index]
    positions = iter(range(len(leaves((args, kwargs)))))
    as_array = False

    def known(value: Any) -> Any:
        nonlocal as_array
        at = next(positions)
        if at in sources:
            return StateSlot(state.index(sources[at]))
        if isinstance(value, mx.array):
            if at not in wiring.context[index]:
                mask = masks.get(at) or mask_of(value, tokens)
                if mask is not None:
                    as_array = True
                    return mask
                constants[given_name(at)] = value
            return Given(given_name(at))
        return Mask() if isinstance(value, str) and value == "causal" else value

    return *mapped(known, (args, kwargs)), as_array


def given_name(at: int) -> str:
    """The name in `Given` of the leaf at `at` of the arguments of a block."""
    return f"given.{at}"


def mask_of(value: mx.array, tokens: int) -> Mask | None:
    """An array as a causal mask, (T, T), with a window, chunks or neither; None if it is none."""
    if value.shape == (tokens, tokens) and value.dtype == mx.bool_:
        seen = int(value[:, 0].sum())  # queries that see the first key
        for mask in [Mask()] if seen == tokens else [Mask(window=seen), Mask(chunk=seen)]:
            if seen and mx.array_equal(value, mask.array(tokens)).item():
                return mask
    return None
