"""Split a model into its trunk and its head, without knowing its architecture.

The trunk embeds tokens, runs the blocks and usually ends with a norm; the head turns hidden states
into logits. Both are the model's own code: the head is the whole model with a stand-in for its
trunk. So tied embeddings, logit scales and soft caps work as the architecture defines them.

Shapes: B rows, T tokens per row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import suppress_model_errors

Path = tuple[str, ...]  # names of nested modules, from the model
TRIED_TOKENS = 4  # length of the row on which splits are checked


class StandIn(nn.Module):
    """Replaces a module, with the same attributes, and calls `forward`.

    It is also an instance of the module's class, which some trunks ask for.
    """

    def __new__(
        cls, module: nn.Module | None = None, forward: Callable[..., Any] | None = None
    ) -> StandIn:
        return super().__new__(cls if module is None else _also(cls, type(module)))

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        vars(self).update(vars(module))
        dict.update(self, module)
        vars(self)["_forward"] = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


@cache
def _also(stand_in: type, kind: type) -> type:
    """A class of stand-ins for modules of a class."""
    return kind if issubclass(kind, stand_in) else type(kind.__name__, (stand_in, kind), {})


class Head(nn.Module):
    """Hidden states -> logits, by the code of a model. Has the children of the model.

    run: (model, hidden states) -> logits.
    """

    _run: Callable[[nn.Module, mx.array], mx.array]

    def __init__(self, model: nn.Module, run: Callable[[nn.Module, mx.array], mx.array]) -> None:
        super().__init__()
        # Arrays of the model itself are looked up at each use, because compiling replaces them.
        children = {n: c for n, c in model.items() if not isinstance(c, mx.array)}
        dict.update(self, children)
        vars(self)["_model"], vars(self)["_run"] = model, run

    def __call__(self, hidden: mx.array) -> mx.array:
        twin = copy.copy(self._model)
        dict.update(twin, self)  # these may be replacements
        return self._run(twin, hidden)


@dataclass(frozen=True)
class Split:
    """A model split in two: `head(trunk(tokens))` are its logits."""

    trunk: Callable[..., mx.array]
    """(B, T) tokens -> (B, T, D) hidden states; takes the keyword arguments of the trunk."""
    head: Callable[[mx.array], mx.array]
    """(..., D) -> (..., V) logits."""
    hidden: bool = True
    """If False, the trunk returns logits, and the head returns them unchanged."""
    path: Path = ()
    """Of the trunk; () if that is the model itself."""


def split(model: nn.Module) -> Split:
    """Split a model before its head, checked against the whole model on a short input.

    The trunk is the module that owns the list of blocks, or one above it. If none computes the
    model's logits with the rest of the model as its head, the whole model is the trunk.
    """
    tokens = mx.arange(TRIED_TOKENS)[None]
    whole = model(tokens)
    for found, logits in _candidates(model, tokens, whole.shape):
        with suppress_model_errors():  # an architecture with another layout
            if mx.allclose(logits, whole, rtol=1e-3, atol=1e-3).item():
                return found
    return unsplit(model)


def unsplit(model: nn.Module) -> Split:
    """A whole model as the trunk, with a head that changes nothing."""
    return Split(trunk=model, head=lambda logits: logits, hidden=False)


def trunk_path(model: nn.Module) -> Path:
    """The path of the trunk, judged by the shapes of logits alone: nothing is evaluated. Empty if
    the whole model is the trunk."""
    tokens = mx.arange(TRIED_TOKENS)[None]
    found = _candidates(model, tokens, model(tokens).shape)
    return next((halves.path for halves, _ in found), ())


def _candidates(
    model: nn.Module, tokens: mx.array, shape: tuple[int, ...]
) -> Iterator[tuple[Split, mx.array]]:
    """The ways to split a model whose logits have this shape, each with its logits."""
    owner = blocks_path(model)[:-1]
    for depth in range(len(owner), 0, -1):
        with suppress_model_errors():  # an architecture with another layout
            found = split_at(model, owner[:depth])
            hidden = found.trunk(tokens)
            logits = found.head(hidden)
            if logits is hidden or logits.shape != shape:
                continue
            yield found, logits


def split_at(model: nn.Module, path: Path) -> Split:
    """Split a model whose trunk is at `path`, or is the model itself if that is empty. Nothing is
    checked."""
    if not path:
        return unsplit(model)
    trunk = module_at(model, path)

    def run(model: nn.Module, hidden: mx.array) -> mx.array:
        stand_in = StandIn(module_at(model, path), lambda *_, **__: hidden)
        twin: nn.Module = replaced(model, path, stand_in)
        return twin(mx.zeros((1, 1), mx.int32))

    return Split(partial(call_trunk, trunk), Head(model, run), path=path)


def call_trunk(trunk: nn.Module, tokens: mx.array, **options: Any) -> mx.array:
    """Run a trunk; without a cache by default, though some require that argument."""
    parameters = list(inspect.signature(type(trunk).__call__).parameters.values())[2:]
    required = (
        p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD
    )
    return trunk(tokens, **dict.fromkeys(required) | options)


def blocks_path(model: nn.Module) -> Path:
    """The path of the list of `model.layers`; () if no single list has them all."""
    wanted = [id(block) for block in getattr(model, "layers", ())]
    for name, module in model.named_modules():
        for key, child in module.items():
            if isinstance(child, list) and [id(block) for block in child] == wanted:
                return (*name.split("."), key) if name else (key,)
    return ()


def module_at(model: nn.Module, path: Path) -> Any:
    node: Any = model
    for name in path:
        node = node[int(name)] if isinstance(node, list) else node[name]
    return node


def replaced(model: Any, path: Path, value: Any) -> Any:
    """A model with `value` at `path`. Copies only the modules along the path."""
    if not path:
        return value
    twin = copy.copy(model)
    key = int(path[0]) if isinstance(model, list) else path[0]
    twin[key] = replaced(twin[key], path[1:], value)
    return twin
