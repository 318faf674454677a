"""Split a model into embed, blocks, finish and head; use one block as a function of its arrays.

This works without knowing the architecture. The model's own trunk runs with stand-ins for its
blocks, which record the inputs of each block. So scaled embeddings, masks and final norms work
as the architecture defines them. `parts_of` checks the result against the whole model.

Shapes: B rows, T tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.errors import suppress_model_errors

Arrays = dict[str, mx.array]  # by path in a block, e.g. `self_attn.q_proj.weight`
PASSING = ("_training", "_kept")  # attributes of layers that do not change what they compute


@dataclass(frozen=True)
class Mask:
    """A causal attention mask, optionally limited to the last `window` keys and to segments.

    segments: (B, T) int32, or None if each row is one text; a query sees only keys of its own
    segment.

    Blocks whose attention accepts a Mask (engine.attention) receive it; the others get `array`.
    """

    window: int | None = None
    segments: mx.array | None = None

    def array(self, tokens: int) -> mx.array:
        """(T, T) bool, or (B, 1, T, T) with segments: True where a query sees a key."""
        queries, keys = mx.arange(tokens)[:, None], mx.arange(tokens)[None]
        seen = queries >= keys
        if self.window is not None:
            seen = seen & (queries < keys + self.window)
        if self.segments is not None:
            seen = seen & (self.segments[:, None, :, None] == self.segments[:, None, None, :])
        return seen


@dataclass(frozen=True)
class Call:
    """The arguments that the trunk passes to a block after the hidden states, for one length."""

    args: tuple[Any, ...]
    """Positional arguments, with a `Mask` in place of the mask."""
    keywords: tuple[tuple[str, Any], ...]
    """Keyword arguments: (name, value)."""
    as_array: bool
    """Whether the block gets its mask as an array even if it is simply causal."""

    @property
    def mask(self) -> Mask | None:
        return next((a for a in (*self.args, *dict(self.keywords).values()) if _is_mask(a)), None)

    def run(
        self,
        block: nn.Module,
        hidden: mx.array,
        segments: mx.array | None,
        max_segment_tokens: int | None = None,
    ) -> mx.array:
        """Call `block` on `hidden`, (B, T, D), as the trunk would.

        max_segment_tokens: the maximum length of a text in a packed row; no key is farther away.
        """

        def given(value: Any) -> Any:
            if not _is_mask(value):
                return value
            reaches = [n for n in (value.window, max_segment_tokens) if n is not None]
            mask = Mask(min(reaches, default=None), segments)
            if not (mask.window is None and segments is None) and understands_segments(block):
                return mask
            if segments is None and mask.window is None and not self.as_array:
                return "causal"
            return mask.array(hidden.shape[1])

        keywords = {name: given(value) for name, value in self.keywords}
        return block(hidden, *map(given, self.args), **keywords)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Mask)


def understands_segments(block: nn.Module) -> bool:
    return any(getattr(module, "takes_segments", False) for module in block.modules())


class StandIn(nn.Module):
    """Replaces a block of a model, with the same attributes, and calls `forward`."""

    def __init__(self, block: nn.Module, forward: Callable) -> None:
        vars(self).update(vars(block))
        dict.update(self, block)
        vars(self)["_forward"] = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


class Unsplittable(Exception):
    """The trunk of the model is not a sequence of embed, each block once, finish."""


@dataclass(frozen=True)
class Parts:
    """A model in parts. `finish` and `head` accept any number of hidden states.

    embed: (B, T) tokens -> (B, T, D)
    blocks: (B, T, D) -> (B, T, D) each
    finish: (B, T, D) -> (B, T, D), usually a norm
    head: (B, T, D) -> (B, T, V) logits
    """

    trunk: nn.Module
    blocks: list[nn.Module]
    head: nn.Module
    _calls: dict[int, list[Call]] = field(default_factory=dict, repr=False)

    @property
    def outside(self) -> list[dict[str, Any]]:
        """The modules outside the blocks, used by `embed`, `finish` and `head`."""
        above = {n: child for n, child in self.head.items() if n != "model"}
        return [{n: child for n, child in self.trunk.items() if n != "layers"}, above]

    def embed(self, tokens: mx.array) -> mx.array:
        return _record(self.trunk, self.blocks, tokens)[0]

    def calls(self, tokens: int) -> list[Call]:
        """The arguments of each block for rows of `tokens` tokens."""
        if tokens not in self._calls:
            if tokens == 1:
                raise ValueError("rows of one token do not show which mask the blocks get")
            _, calls = _record(self.trunk, self.blocks, mx.zeros((1, tokens), mx.int32))
            self._calls[tokens] = calls
        return self._calls[tokens]

    def finish(self, hidden: mx.array) -> mx.array:
        def replace(h: mx.array, *_: Any, **__: Any) -> mx.array:
            return hidden

        shell = _with_blocks(self.trunk, [StandIn(block, replace) for block in self.blocks])
        return shell(mx.zeros((1, 1), mx.int32))

    def run_blocks(
        self,
        tokens: mx.array,
        segments: mx.array | None = None,
        max_segment_tokens: int | None = None,
    ) -> mx.array:
        """(B, T, D) output of the last block, before `finish`; tokens: (B, T)."""
        hidden = self.embed(tokens)
        for block, call in zip(self.blocks, self.calls(tokens.shape[1]), strict=True):
            hidden = call.run(block, hidden, segments, max_segment_tokens)
        return hidden

    def finished_head(self, hidden: mx.array) -> mx.array:
        """Output of the last block, (..., D) -> logits, (..., V)."""
        return self.head(self.finish(hidden))


def _with_blocks(trunk: nn.Module, blocks: list[nn.Module]) -> nn.Module:
    shell = copy.copy(trunk)
    shell["layers"] = blocks
    return shell


def _record(
    trunk: nn.Module, blocks: list[nn.Module], tokens: mx.array
) -> tuple[mx.array, list[Call]]:
    """The input of the first block, and the arguments of each block."""
    inputs: list[mx.array] = []
    calls: list[Call] = []

    def record(h: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        inputs.append(h)
        calls.append(_describe(args, kwargs, tokens.shape[1]))
        return h

    _with_blocks(trunk, [StandIn(block, record) for block in blocks])(tokens)
    if len(calls) != len(blocks):
        raise Unsplittable("its trunk does not call every block once")
    return inputs[0], calls


def _describe(args: tuple[Any, ...], kwargs: dict[str, Any], tokens: int) -> Call:
    as_array = False

    def known(value: Any) -> Any:
        nonlocal as_array
        if isinstance(value, mx.array):
            as_array = True
            return Mask(_window(value, tokens))
        if value == "causal":
            return Mask()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise Unsplittable(f"its blocks receive a {type(value).__name__}")

    positional = tuple(map(known, args))
    keywords = tuple((name, known(value)) for name, value in kwargs.items())
    return Call(positional, keywords, as_array)


def _window(mask: mx.array, tokens: int) -> int | None:
    """The window of a causal mask given as an array, (T, T); None if it has no window."""
    if mask.shape == (tokens, tokens) and mask.dtype == mx.bool_:
        seen = int(mask[-1].sum().item())
        window = None if seen == tokens else seen
        if mx.array_equal(mask, Mask(window).array(tokens)).item():
            return window
    raise Unsplittable("its blocks receive an array that is not a causal mask")


def parts_of(
    model: nn.Module, head: nn.Module, blocks: list[nn.Module] | None = None
) -> Parts | None:
    """Split a model into parts; None if they do not compute the model's logits.

    head: (B, T, D) finished hidden states -> logits, from `model.split`.
    blocks: modules to use as the blocks, if `model.layers` contains stand-ins.
    """
    with suppress_model_errors():  # an architecture with another layout
        inner = model.language_model if "language_model" in model else model
        parts = Parts(trunk=inner.model, blocks=list(inner.model.layers), head=head)
        tokens = mx.array([[3, 1, 2, 0, 1, 3]])
        whole = model(tokens)
        rows = parts.run_blocks(tokens)[0]
        ours = parts.finished_head(rows[None, 1:])
        if mx.allclose(ours, whole[:, 1:], rtol=1e-3, atol=1e-3).item():
            return parts if blocks is None else replace(parts, blocks=blocks)
    return None


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


def put(module: nn.Module, arrays: Arrays) -> None:
    """Set arrays by path, as returned by `arrays_of`."""
    for path, array in arrays.items():
        node: Any = module
        *parents, leaf = path.split(".")
        for name in parents:
            node = node[int(name)] if isinstance(node, (list, tuple)) else node[name]
        node[leaf] = array


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


def _same(value: Any) -> Hashable:
    """A value that is equal for equal settings; objects without equality compare by identity."""
    if isinstance(value, (bool, int, float, str, bytes, type(None))):
        return value
    if isinstance(value, (frozenset, set)):
        return frozenset(value)
    return id(value)
