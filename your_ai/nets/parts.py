"""Split a model into embed, blocks, finish and head; use one block as a function of its arrays.

This works without knowing the architecture. The model's own trunk runs with stand-ins for its
blocks; see `block_calls`. So scaled embeddings, masks, keys that blocks share and final norms work
as the architecture defines them. `parts_of` checks the result against the whole model.

Shapes: B rows, T tokens per row, D hidden size, F features of the state between two blocks,
V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import dis
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config.rounding import Rounding
from your_ai.errors import Unsplittable, is_of_model_code, suppress_model_errors
from your_ai.nets.adapter_kinds import normed_layers, use_any_norms
from your_ai.nets.block_calls import (
    ArraySource,
    Call,
    Mask,
    TextMask,
    Trunk,
    Wiring,
    describe,
    find_wiring,
    given_name,
    leaves,
    mapped,
)
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.split import Head, Path, Split, blocks_path, module_at, replaced

# Which names the code of a class of modules reads, from its bytecode


ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")


@cache
def names_read(kind: type) -> frozenset[str]:
    """All names and string constants in the code of the modules that define a class and its bases.

    `__init__` is left out.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        for value in vars(sys.modules[base.__module__]).values():
            own = vars(value).items() if isinstance(value, type) else [("", value)]
            for name, member in own:
                for function in _functions_of(member) if name != "__init__" else ():
                    found |= _names_in(function.__code__)
    return frozenset(found)


def _functions_of(member: Any) -> Iterator[FunctionType]:
    """Yield a function and the functions that it wraps."""
    while member is not None:
        if isinstance(member, FunctionType):
            yield member
        if isinstance(member, property):
            member = member.fget
        elif isinstance(member, staticmethod | classmethod):
            member = member.__func__
        else:
            member = getattr(member, "__dict__", {}).get("__wrapped__")


def _names_in(code: CodeType) -> set[str]:
    found = {*code.co_names}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names_in(constant)
        elif isinstance(constant, str):
            found.add(constant)
    return found


@cache
def weights_read(kind: type) -> frozenset[str]:
    """The attributes whose `weight` the code of a class reads itself, as in `self.gate.weight`.

    Such a layer must remain what it is: another layer in its place may have no such array.
    """
    found: set[str] = set()
    for base in kind.__mro__:
        for name, member in vars(base).items():
            for function in _functions_of(member) if name != "__init__" else ():
                found |= _owners_of_weights(function.__code__)
    return frozenset(found)


def _owners_of_weights(code: CodeType) -> set[str]:
    found = {
        first.argval
        for first, second in pairwise(dis.get_instructions(code))
        if first.opname in ATTRIBUTES and second.opname in ATTRIBUTES and second.argval == "weight"
    }
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _owners_of_weights(constant)
    return found


SHOWN_TOKENS = 1024  # of a row whose masks are computed: their square, some times over
REACHES = ("window", "chunk")  # parts of the names of settings that limit attention
TRIED_TOKENS = 4  # length of the row that tests what a block does with its mask
PASSING = ("_training", "_kept", "first_m")  # attributes that do not change what a layer computes


@dataclass(frozen=True)
class Parts:
    """A model in parts. `finish` and `head` accept any number of hidden states.

    embed: (B, T) tokens -> (B, T, F)
    blocks: (B, T, F) -> (B, T, F) each; F is D, but where more than hidden states is passed on
    finish: (B, T, F) -> (B, T, D), usually a norm
    head: (B, T, D) -> (B, T, V) logits
    """

    trunk: Trunk
    blocks: list[nn.Module]
    head: Head
    wiring: Wiring
    path: Path
    """Of the list of blocks in the model."""
    finishes: bool = True
    """False if `head` takes the output of the last block, and `finish` changes nothing."""
    settings: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """Of the model, which may limit attention."""
    _calls: dict[int, list[Call]] = field(default_factory=dict, repr=False)

    @property
    def outside(self) -> list[Any]:
        """The modules outside the blocks, used by `embed`, `finish` and `head`."""
        return [replaced(self.head, self.path, [])]

    @property
    def is_plain(self) -> bool:
        """True if each block gets hidden states and masks only."""
        states = (self.wiring.state(index) for index in range(len(self.blocks) + 1))
        return all(s.is_plain for s in states) and self.finishes and not self.has_context

    @property
    def has_context(self) -> bool:
        """True if blocks get arrays that depend on the tokens."""
        return any(self.wiring.context)

    def features(self, index: int) -> int:
        """F, of the state before block `index`."""
        return self.wiring.state(index).features

    def embed(self, tokens: mx.array) -> mx.array:
        found: list[mx.array] = []
        zeros = self.wiring.answer(*tokens.shape)
        (at,) = self.wiring.sources[0]

        def answer(index: int, args: Any, kwargs: Any) -> Any:
            if index == 0:
                found.append(leaves((args, kwargs))[at])
            return zeros(index, args, kwargs)

        self.trunk.run(tokens, answer)
        return self.wiring.state(0).pack(found)

    def context(self, tokens: mx.array) -> list[Arrays]:
        """The arrays of each block that depend on the tokens, (B, T)."""
        if not self.has_context:
            return [{} for _ in self.blocks]
        recorded = self.trunk.record(tokens, self.wiring.answer(*tokens.shape))
        given = map(leaves, recorded.args)
        return [
            {given_name(at): arrays[at] for at in sorted(wanted)}
            for arrays, wanted in zip(given, self.wiring.context, strict=True)
        ]

    def calls(self, tokens: int) -> list[Call]:
        """The arguments of each block for rows of `tokens` tokens."""
        if tokens not in self._calls:
            if tokens == 1:
                raise ValueError("rows of one token do not show which mask the blocks get")
            shown = showing(self.settings, tokens)
            shorter = self.calls(shown) if shown < tokens else []
            self._calls[tokens] = describe(self.trunk, self.wiring, tokens, shorter)
        return self._calls[tokens]

    def depends_on_place(self, tokens: int) -> bool:
        """Return whether blocks get factors or masks that differ by a token's place in its row.

        Causal masks, with or without a window, do not count; those with chunks do.
        """
        if any(
            call.mask is not None and call.mask.chunk is not None for call in self.calls(tokens)
        ):
            return True
        constants = (array for call in self.calls(tokens) for array in call.constants.values())
        return any((array != array.flatten()[0]).any().item() for array in constants)

    def has_windows(self, tokens: int) -> bool:
        """Return whether some blocks' attention reaches less far than rows of `tokens` tokens."""
        if tokens == 1:
            return False
        masks = (call.mask for call in self.calls(tokens))
        return any(mask is not None and mask.reach is not None for mask in masks)

    def passes_text(self, index: int, block: nn.Module) -> bool:
        """Return whether a block passes a TextMask on to its attention. Nothing is evaluated.

        block: a replacement for the block at `index`.
        """
        made: list[TextMask] = []

        def noted(mask: Mask) -> TextMask:
            made.append(TextMask.of(mask))
            return made[-1]

        call, tokens = self.calls(TRIED_TOKENS)[index], mx.zeros((1, TRIED_TOKENS), mx.int32)
        state = mx.zeros((*tokens.shape, call.state.features))
        # Errors are of code that wants an array.
        with suppress_model_errors(), use_any_norms(normed_layers(block)):
            given = call.constants | self.context(tokens)[index]
            call.run(block, state, tokens, None, given, noted)
            return bool(made) and all(mask.received for mask in made)
        return False

    def finish(self, hidden: mx.array) -> mx.array:
        return run_after_blocks(self.trunk, self.wiring, hidden) if self.finishes else hidden

    def run_blocks(
        self,
        tokens: mx.array,
        segments: mx.array | None = None,
        max_segment_tokens: int | None = None,
    ) -> mx.array:
        """(B, T, F) output of the last block, before `finish`; tokens: (B, T)."""
        state, context = self.embed(tokens), self.context(tokens)
        calls = self.calls(tokens.shape[1])
        texts = segments is not None or self.has_windows(tokens.shape[1])
        for index, (block, call, given) in enumerate(zip(self.blocks, calls, context, strict=True)):
            given = call.constants | given
            as_text = TextMask.of if texts and self.passes_text(index, block) else None
            state = call.run(block, state, segments, max_segment_tokens, given, as_text)
        return state

    def finished_head(self, hidden: mx.array) -> mx.array:
        """Output of the last block, (..., F) -> logits, (..., V)."""
        return self.head(self.finish(hidden))


def showing(settings: Mapping[str, Any], tokens: int) -> int:
    """The fewest tokens of a row in which every limit of attention below `tokens` shows: one more
    than a query sees, which is itself in addition to the window in some architectures."""
    wanted = [SHOWN_TOKENS, *(n + 2 for n in reaches(settings) if n < tokens)]
    return min(tokens, max(wanted))


def reaches(settings: Mapping[str, Any]) -> Iterator[int]:
    for name, value in settings.items():
        if dataclasses.is_dataclass(value):
            yield from reaches(vars(value))
        elif isinstance(value, Mapping):
            yield from reaches(value)
        elif any(part in name for part in REACHES):
            of_blocks = value if isinstance(value, (list, tuple)) else [value]
            yield from (each for each in of_blocks if isinstance(each, int))


def settings_of(model: nn.Module) -> Mapping[str, Any]:
    """The settings of a model of mlx-lm, by name; empty if it has none."""
    args = vars(model).get("args", vars(model).get("config"))
    return vars(args) if dataclasses.is_dataclass(args) else {}


def run_after_blocks(
    trunk: Trunk, wiring: Wiring, state: mx.array, module: nn.Module | None = None
) -> mx.array:
    """The output of a trunk whose last block returns `state`, (B, T, F).

    module: a copy of the trunk to run in its place.
    """
    last = len(wiring.templates) - 1
    arrays = dict(zip(wiring.states[-1], wiring.state(last + 1).unpack(state), strict=True))
    zeros = wiring.answer(1, 1)

    def answer(index: int, args: Any, kwargs: Any) -> Any:
        result = zeros(index, args, kwargs)
        positions = iter(range(len(leaves(result))))
        return mapped(lambda leaf: arrays.get(ArraySource(index, next(positions)), leaf), result)

    return trunk.run(mx.zeros((1, 1), mx.int32), answer, module)


def parts_of(
    model: nn.Module, halves: Split, blocks: list[nn.Module] | None = None, *, checks: bool = True
) -> Parts:
    """Split a model into parts. Raises Unsplittable if they do not compute the model's logits.

    halves: the model, from `split`. If it could not be split, the head of the parts takes the
        output of the last block.
    blocks: modules to use as the blocks, if `model.layers` contains stand-ins.
    checks: whether the logits are compared, which evaluates the model.
    """
    path = blocks_path(model)
    if not path:
        raise Unsplittable("its blocks are not one list")
    trunk = Trunk(module_at(model, halves.path), path[len(halves.path) :])
    settings = settings_of(model)
    try:
        own = list(model.layers)
        wiring = find_wiring(trunk, own if blocks is None else blocks)
        if isinstance(halves.head, Head):
            parts = Parts(trunk, own, halves.head, wiring, path, settings=settings)
        else:
            head = Head(model, lambda twin, state: run_after_blocks(trunk, wiring, state, twin))
            parts = Parts(trunk, own, head, wiring, path, finishes=False, settings=settings)
        if not checks:
            return parts if blocks is None else replace(parts, blocks=blocks)
        tokens = mx.array([[3, 1, 2, 0, 1, 3]])
        wanted = model(tokens)
        rows = parts.run_blocks(tokens)[0]
        ours = parts.finished_head(rows[None, 1:])
    except Exception as error:  # the code of an architecture may raise any type
        if not is_of_model_code(error):
            raise
        raise Unsplittable(f"{type(error).__name__}: {error}".splitlines()[0]) from error
    if not mx.allclose(ours, wanted[:, 1:], rtol=1e-3, atol=1e-3).item():
        raise Unsplittable("its blocks, run one by one, compute something else")
    return parts if blocks is None else replace(parts, blocks=blocks)


# -- one block as a function of its arrays ------------------------------------------------


def arrays_of(module: nn.Module) -> Arrays:
    """All arrays of a module by path, including private ones that are not parameters."""
    return {path: leaf for path, leaf in tree_flatten(module) if isinstance(leaf, mx.array)}


def skeleton(module: Any) -> Any:
    """A copy of a module's structure that refers to the same arrays."""
    if isinstance(module, nn.Module):
        twin = copy.copy(module)
        dict.update(twin, {name: skeleton(value) for name, value in module.items()})
        return twin
    if isinstance(module, dict):
        return {name: skeleton(value) for name, value in module.items()}
    if isinstance(module, (list, tuple)):
        return type(module)(skeleton(value) for value in module)
    return module


def empty(template: nn.Module) -> None:
    """Let a skeleton keep no arrays alive, before it is `filled` each time that it is used.

    Else old adapters would stay in memory beside those that replaced them.
    """
    put(template, stand_ins(arrays_of(template)))


@contextlib.contextmanager
def filled(template: nn.Module, *given: Arrays) -> Iterator[None]:
    """A template with arrays by path, until the block ends."""
    before = arrays_of(template)
    for arrays in given:
        put(template, arrays)
    try:
        yield
    finally:
        put(template, before)
        for path in {path for arrays in given for path in arrays} - set(before):
            parent, _, leaf = path.rpartition(".")
            del node_at(template, parent)[leaf]


def stand_ins(arrays: Arrays) -> Arrays:
    """Arrays of the same shapes and dtypes that take no memory, because nothing computes them."""
    return {path: mx.zeros(array.shape, array.dtype) for path, array in arrays.items()}


def put(module: nn.Module, arrays: Arrays) -> None:
    """Set arrays by path, as returned by `arrays_of`."""
    for path, array in arrays.items():
        parent, _, leaf = path.rpartition(".")
        node = node_at(module, parent)
        node[int(leaf) if isinstance(node, list) else leaf] = array


def node_at(module: nn.Module, path: str) -> Any:
    """A module, or another container of arrays, by its path; the module itself if it is empty."""
    node: Any = module
    for name in filter(None, path.split(".")):
        node = node[int(name)] if isinstance(node, (list, tuple)) else node[name]
    return node


def structure(module: nn.Module) -> Hashable:
    """A key that is equal for modules that compute the same function of their arrays.

    Integers that no code reads after the module is created are ignored; usually that is the
    index of a block.
    """
    found: list[Hashable] = []
    for path, leaf in tree_flatten(module):
        kind = (tuple(leaf.shape), str(leaf.dtype)) if isinstance(leaf, mx.array) else repr(leaf)
        found.append((path, kind))
    layers = list(module.named_modules())
    read = frozenset().union(*(names_read(type(layer)) for _, layer in layers))
    for path, layer in layers:
        plain = [
            (name, _same(value))
            for name, value in vars(layer).items()
            if name not in PASSING and (name in read or type(value) is not int)
        ]
        found.append((path, type(layer), tuple(sorted(plain, key=lambda pair: pair[0]))))
    return tuple(found)


def _same(value: Any) -> Hashable:
    """A value that is equal for equal settings; objects without equality compare by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None), Rounding)):
        return value
    if isinstance(value, (frozenset, set)):
        return frozenset(value)
    return id(value)
