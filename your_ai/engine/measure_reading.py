"""Measure what blocks need while the end of a prompt is read into their caches.

mlx-lm's own code runs, of which only one block computes something: everything before it stays
lazy, and its input and its cache are made when they are there.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from your_ai.engine.skeleton import make_weights, random_like
from your_ai.memory.sizes import PREFILL_TOKENS
from your_ai.nets.parts import skeleton
from your_ai.nets.split import StandIn, blocks_path, module_at, replaced

TRIES = 3  # for what one more block adds, of which the median is taken: it counts for all


class Reading(NamedTuple):
    """Bytes while a text is read, beside weights, inputs and caches as they are at the end."""

    first: int
    """Of one block."""
    more: int
    """That one more such block adds: MLX computes the new states of recurrences last, so that what
    they need of every block exists together."""


def reading_of(network: nn.Module, index: int, tokens: int) -> Reading:
    """The needs of block `index` while it reads the last PREFILL_TOKENS of a text.

    network: with lazy weights; it is not changed. tokens: of the text.

    Raises whatever the code of the model raises.
    """
    network = skeleton(network)
    path = blocks_path(network)
    block = module_at(network, path)[index]
    make_weights(block)
    last = min(tokens, PREFILL_TOKENS)
    caches = make_prompt_cache(network)
    if tokens > last:
        network(mx.zeros((1, tokens - last), mx.int32), cache=caches)

    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))
        raise Noted

    trunk = replaced(network, (*path, str(index)), StandIn(block, note))
    with contextlib.suppress(Noted):
        trunk(mx.zeros((1, last), mx.int32), cache=caches)
    call = BlockCall(block, *given[0], caches, tokens > last)
    first, more = call.peak_of(1)[0], []
    with in_order():
        for _ in range(TRIES):
            (two, grown), (three, both) = call.peak_of(2), call.peak_of(3)  # one keeps no output
            more.append(max(0, three - two - (both - grown)))
    return Reading(first, sorted(more)[TRIES // 2])


class Noted(Exception):
    """Ends the pass of a model at a block whose arguments were noted."""


@dataclass(frozen=True)
class BlockCall:
    """A block with the arguments that its model gives it, of which arrays may be lazy."""

    block: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    caches: Sequence[Any]
    """Of the model."""
    begun: bool
    """Whether something was read into them."""

    def peak_of(self, count: int) -> tuple[int, int]:
        """The peak of so many such blocks, one after the other, and what their caches grew by."""
        every = (*self.args, *self.kwargs.values())
        own = [cache for cache in self.caches if any(each is cache for each in every)]
        copies = [{id(cache): self.made(cache) for cache in own} for _ in range(count)]
        held = [cache for each in copies for cache in each.values()]
        place = next(at for at, each in enumerate(self.args) if isinstance(each, mx.array))
        states = random_like(self.args[place])
        mx.eval(states, [each for each in every if isinstance(each, mx.array)])
        mx.eval([cache.state for cache in held if self.begun])
        size = sum(cache.nbytes for cache in held)
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        for each in copies:
            states = self.output(place, states, each)
        mx.eval([cache.state for cache in held], states)
        mx.synchronize()
        return mx.get_peak_memory() - before, sum(cache.nbytes for cache in held) - size

    def output(self, place: int, states: mx.array, caches: Mapping[int, Any]) -> mx.array:
        """The hidden states after the block. place: of those before it, in its arguments. caches:
        that stand in for others, by their ids."""
        args = [caches.get(id(each), each) for each in self.args]
        args[place] = states
        kwargs = {name: caches.get(id(each), each) for name, each in self.kwargs.items()}
        found = self.block(*args, **kwargs)
        output: mx.array = found[0] if isinstance(found, tuple) else found
        return output

    def made(self, cache: Any) -> Any:
        """A copy of a cache, with zeros in the place of what is lazy."""
        found = copy.deepcopy(cache)
        if self.begun:
            found.state = tree_map(zeros_like, found.state)
        return found


@contextlib.contextmanager
def in_order() -> Iterator[None]:
    """Until the `with` block ends, MLX computes nothing ahead, as above its limit, so that peaks
    hardly depend on threads."""
    limit = mx.set_memory_limit(1)
    try:
        yield
    finally:
        mx.set_memory_limit(limit)


def zeros_like(array: Any) -> Any:
    return mx.zeros(array.shape, array.dtype) if isinstance(array, mx.array) else array
