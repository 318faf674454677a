"""Measure what blocks need while texts are generated: reading the end of a prompt into their
caches, and sampling tokens for several rows.

mlx-lm's own code runs, of which only one block computes something: everything before it stays
lazy, and its input and its cache are made when they are there.

Shapes: B rows, T tokens of a row.
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import make_prompt_cache

from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.peaks import REPEATS, Room, cost_of, in_order
from your_ai.engine.skeleton import make_weights, random_like
from your_ai.errors import is_memory_error
from your_ai.memory.costs import BlockCosts, CostCurve, Shape
from your_ai.memory.estimate_generation import guessed_reading, guessed_sampling, largest_cached
from your_ai.memory.sizes import BATCH_STEP, PREFILL_TOKENS
from your_ai.memory.workload import Workload
from your_ai.nets.parts import skeleton
from your_ai.nets.row_batches import can_merge, groups_heads, grow_by, merged
from your_ai.nets.split import StandIn, blocks_path, module_at, replaced

READ_TOKENS = 128, 1024, 2048  # of prompts: the first only shows how wrong the guess is
SAMPLED_ROWS = 1, 4, 16  # of waves
PAIRS = 5  # of runs, of whose difference the median is taken: it counts for all blocks
PAIRS_S = 1.0  # after so long, no more of them


class Needs(NamedTuple):
    """Bytes while tokens are read, beside weights, inputs and caches as they are at the end."""

    first: float
    """Of one block."""
    more: float
    """That one more such block adds: MLX computes the new states of recurrences late, so that what
    they need of every block exists together."""

    @property
    def of_three(self) -> float:
        """The bytes of three blocks, of which most are measured together."""
        return self.first + 2 * self.more


def generation_costs(network: nn.Module, index: int, workload: Workload, room: Room) -> BlockCosts:
    """The bytes of block `index` while texts are read and completions are sampled, if any are; of
    none if the code of the model fails. network: as in `reading_of`."""
    facts, sizes = workload.facts, workload.rollouts
    weights = facts.kinds[facts.order[index]].weights_bytes
    read: dict[Shape, Needs] = {}
    sampled: dict[Shape, Needs] = {}
    try:
        for tokens in sorted({min(workload.read_tokens, size) for size in READ_TOKENS} - {0}):
            expected = weights + 2 * guessed_reading(facts, tokens)
            if room.has(expected, "reading"):
                found = read[Shape(1, tokens)] = reading_of(network, index, tokens)
                room.learn("reading", weights + found.of_three, expected)
        if sizes is not None:
            for rows in sorted({min(sizes.rows, size) for size in SAMPLED_ROWS}):
                held = weights + 3 * rows * largest_cached(facts, sizes.most_tokens)
                expected = held + guessed_sampling(facts, rows, sizes.most_tokens)
                was_enough = room.was_enough
                if room.has(expected, "sampling"):
                    found = sampling_of(network, index, rows, sizes.most_tokens)
                    sampled[Shape(rows, 1)] = found
                    room.learn("sampling", held + found.of_three, expected)
                elif sampled:  # the smaller waves do
                    room.was_enough = was_enough
                    break
    except Exception as error:  # its code may raise any type
        room.was_enough = room.was_enough and not is_memory_error(error)
    if len(read) > 1:
        read.pop(Shape(1, READ_TOKENS[0]), None)

    def curve(needs: dict[Shape, Needs], which: int) -> CostCurve | None:
        sizes = {shape: own[which] for shape, own in needs.items()}
        return CostCurve.through(sizes) if sizes else None

    return BlockCosts(
        reading=curve(read, 0),
        read_more=curve(read, 1),
        sampling=curve(sampled, 0),
        sample_more=curve(sampled, 1),
    )


def reading_of(network: nn.Module, index: int, tokens: int) -> Needs:
    """The needs of block `index` while it reads the last PREFILL_TOKENS of a text.

    network: with lazy weights; it is not changed. tokens: of the text.

    Raises whatever the code of the model raises.
    """
    network = for_generation(network)
    last = min(tokens, PREFILL_TOKENS)
    caches = make_prompt_cache(network)
    if tokens > last:
        network(mx.zeros((1, tokens - last), mx.int32), cache=caches)
    return call_of(network, index, (1, last), caches, tokens > last).needs(with_caches=True)


def sampling_of(network: nn.Module, index: int, rows: int, tokens: int) -> Needs:
    """The needs of block `index` while it reads the next token of each of so many texts of
    `tokens`; of one text, where the caches of texts cannot be merged.

    The other arguments and errors are as of `reading_of`.
    """
    network = for_generation(network)
    caches = make_prompt_cache(network)
    grow_by(1, caches)
    network(mx.zeros((1, tokens), mx.int32), cache=caches)
    if can_merge(network):
        caches = [merged([cache] * rows, groups_heads(network)) for cache in caches]
    else:
        rows = 1
    grow_by(BATCH_STEP, caches)
    return call_of(network, index, (rows, 1), caches, True).needs(with_caches=False)


def for_generation(network: nn.Module) -> nn.Module:
    """A copy as `weights.prepare_for_generation` makes it of a model, with lazy weights."""
    network = skeleton(network)
    network.eval()
    dequantize_on_the_cpu(network)
    return network


class Noted(Exception):
    """Ends the pass of a model at a block whose arguments were noted."""


def call_of(
    network: nn.Module, index: int, shape: tuple[int, int], caches: Sequence[Any], begun: bool
) -> BlockCall:
    """The call of block `index`, whose weights are made, for (B, T) tokens and caches of the model.

    begun: as in `BlockCall`. The block is called outside of the model, which is not changed.
    """
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def note(*args: Any, **kwargs: Any) -> None:
        given.append((args, kwargs))
        raise Noted

    path = blocks_path(network)
    block = module_at(network, path)[index]
    trunk = replaced(network, (*path, str(index)), StandIn(block, note))
    with contextlib.suppress(Noted):
        trunk(mx.zeros(shape, mx.int32), cache=caches)
    make_weights(block)
    args, kwargs = given[0]
    args = tuple(random_like(each) if isinstance(each, mx.array) else each for each in args)
    kwargs = {name: random_like(each) if isinstance(each, mx.array) else each
              for name, each in kwargs.items()}  # fmt: skip
    return BlockCall(block, args, kwargs, caches, begun)


@dataclass(frozen=True)
class BlockCall:
    """A block with the arguments that its model gives it, of which arrays are made."""

    block: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    caches: Sequence[Any]
    """Of the model."""
    begun: bool
    """Whether something was read into them."""

    def needs(self, *, with_caches: bool) -> Needs:
        """with_caches: whether the new states of caches are computed, too, if nothing needs them
        yet."""
        first, more = self.needed_by(1, with_caches, REPEATS), list[float]()
        began = time.perf_counter()
        with in_order():  # one block keeps no output
            while not more or (len(more) < PAIRS and time.perf_counter() - began <= PAIRS_S):
                two, three = (self.needed_by(count, with_caches, 1) for count in (2, 3))
                more.append(three - two)
        return Needs(first, max(0.0, median(more)))

    def needed_by(self, count: int, with_caches: bool, repeats: int) -> float:
        """The peak of so many such blocks, one after the other, as `Needs` counts it."""
        grown: list[int] = []

        def run(given: list[Any]) -> Any:
            states, copies = given
            given.clear()
            held = [cache for each in copies for cache in each.values()]
            size = sum(cache.nbytes for cache in held)
            for each in copies:
                states = self.output(states, each)
            grown.append(sum(cache.nbytes for cache in held) - size)
            if not (with_caches or grown[-1]):
                # Recurrences compute some states, and free what these need, with the next token.
                mx.async_eval(states)
                for each in copies:
                    states = self.output(states, each)
            return [cache.state for cache in held if with_caches], states

        cost = cost_of(lambda: self.made(count), run, varies=True, repeats=repeats)
        return cost.bytes - grown[-1]

    @property
    def place(self) -> int:
        """That of the hidden states in the arguments."""
        return next(at for at, each in enumerate(self.args) if isinstance(each, mx.array))

    def made(self, count: int) -> list[Any]:
        """Hidden states, and for each of so many blocks copies of the caches that it gets, by the
        ids of these, with zeros in the place of what is lazy."""
        every = (*self.args, *self.kwargs.values())
        own = [cache for cache in self.caches if any(each is cache for each in every)]
        copies = [{id(cache): copy.deepcopy(cache) for cache in own} for _ in range(count)]
        for cache in (cache for each in copies if self.begun for cache in each.values()):
            cache.state = tree_map(zeros_like, cache.state)
            mx.eval(cache.state)
        states = self.args[self.place]
        mx.eval([each for each in every if isinstance(each, mx.array) and each is not states])
        return [random_like(states), copies]

    def output(self, states: mx.array, caches: Mapping[int, Any]) -> mx.array:
        """The hidden states after the block. states: those before it. caches: that stand in for
        others, by their ids."""
        args = [caches.get(id(each), each) for each in self.args]
        args[self.place] = states
        kwargs = {name: caches.get(id(each), each) for name, each in self.kwargs.items()}
        found = self.block(*args, **kwargs)
        output: mx.array = found[0] if isinstance(found, tuple) else found
        return output


def zeros_like(array: Any) -> Any:
    return mx.zeros(array.shape, array.dtype) if isinstance(array, mx.array) else array
