"""Block by block: the gradients of the fused engine, in a fraction of its memory.

Only the input of each trained block is kept; its backward pass computes the block again.
Blocks of one structure share a compiled forward and a compiled backward, which take the
weights as arguments: so a block's weights need only be there while it runs.

Shapes: B rows, T tokens of a row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from your_ai.blocks import Arrays, Call, Parts, arrays_of, put, skeleton, structure
from your_ai.data.batches import Batch
from your_ai.engine.attention import put_blockwise
from your_ai.engine.fused import Engine, row_keys
from your_ai.engine.mlp import put_sliced
from your_ai.engine.prefix import Span, Store, assemble, keep, spans_of
from your_ai.engine.recompute import put_recomputed
from your_ai.head import LinearHead
from your_ai.losses import Head
from your_ai.model import DropoutKeys, KeyedDropout, TokenKeys
from your_ai.objectives import sft

FEWEST_BYTES = 16 << 20  # of hidden states for which the frozen blocks are read once
Extras = dict[str, mx.array]  # what blocks are given beside hidden states, by name


class Inputs(Protocol):
    """A stack of block inputs: a list, or one on disk."""

    def append(self, array: mx.array) -> None: ...

    def pop(self) -> mx.array: ...

    def clear(self) -> None: ...


class Weights(Protocol):
    """Where the frozen arrays of a block come from.

    streamed: from files, and so do the rows of the embedding and the head.
    """

    @property
    def streamed(self) -> bool: ...

    def read(self, index: int) -> Arrays: ...

    def ahead(self, index: int) -> None:
        """Block `index` is wanted next."""


@dataclass(frozen=True)
class Resident:
    """Weights that stay in memory."""

    blocks: list[nn.Module]
    streamed: bool = False

    def read(self, index: int) -> Arrays:
        return frozen_arrays(self.blocks[index])

    def ahead(self, index: int) -> None:
        pass


def trained_arrays(block: nn.Module) -> Arrays:
    return dict(tree_flatten(block.trainable_parameters()))


def frozen_arrays(block: nn.Module) -> Arrays:
    trained = trained_arrays(block)
    return {path: array for path, array in arrays_of(block).items() if path not in trained}


@dataclass(frozen=True)
class Program:
    """What blocks of one structure, called in one way, compute of their arrays.

    forward(frozen, trained, hidden, extras) -> hidden
    backward(frozen, trained, hidden, extras, cotangent) -> (gradients, hidden's cotangent)
    lowest: the same without the cotangent, for the first trained block.
    """

    run: Callable[..., mx.array]  # not compiled
    forward: Callable[..., mx.array]
    backward: Callable[..., tuple[Arrays, mx.array]]
    lowest: Callable[..., Arrays]


def program(
    block: nn.Module, call: Call, reach: int | None, dropout_keys: DropoutKeys, lean: bool
) -> Program:
    """lean: memory is dearer than time."""
    template = skeleton(block)
    put_blockwise(template, lean)
    if lean:
        put_sliced(template, dropout_keys)
        put_recomputed(template, dropout_keys)

    def run(frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Extras) -> mx.array:
        put(template, frozen)
        put(template, trained)
        dropout_keys.set(TokenKeys(extras["keys"], extras["places"]) if "keys" in extras else None)
        try:
            return call.run(template, hidden, extras.get("segments"), reach)
        finally:
            dropout_keys.set(None)

    def backward(frozen, trained, hidden, extras, cotangent):
        names = list(trained)

        def of(hidden: mx.array, *values: mx.array) -> mx.array:
            return run(frozen, dict(zip(names, values, strict=True)), hidden, extras)

        _, (grad, *grads) = mx.vjp(of, [hidden, *trained.values()], [cotangent])
        return dict(zip(names, grads, strict=True)), grad

    def lowest(frozen, trained, hidden, extras, cotangent):
        names = list(trained)

        def of(*values: mx.array) -> mx.array:
            return run(frozen, dict(zip(names, values, strict=True)), hidden, extras)

        _, grads = mx.vjp(of, list(trained.values()), [cotangent])
        return dict(zip(names, grads, strict=True))

    return Program(run, mx.compile(run), mx.compile(backward), mx.compile(lowest))


class Programs:
    """The program of each block for rows of a length: one for all blocks that are alike."""

    def __init__(self, parts: Parts, dropout_keys: DropoutKeys, lean: bool) -> None:
        self.parts, self.dropout_keys, self.lean = parts, dropout_keys, lean
        self.kinds = [structure(block) for block in parts.blocks]
        self.made: dict[Any, Program] = {}

    def of(self, index: int, tokens: int, reach: int | None) -> Program:
        call = self.parts.calls(tokens)[index]
        kind = (self.kinds[index], call, reach)
        if kind not in self.made:
            block = self.parts.blocks[index]
            self.made[kind] = program(block, call, reach, self.dropout_keys, self.lean)
        return self.made[kind]


def staged_engine(
    model: nn.Module,
    parts: Parts,
    dropout_keys: DropoutKeys,
    head: Head,
    weights: Weights | None = None,
    store: Store | None = None,
    inputs: Inputs | None = None,
    joined: bool = False,
) -> Engine:
    """An engine that holds one block's working set at a time.

    store: keeps what the blocks below the first trained one give of each text, so that
    they run once for it. inputs: where those of the blocks are kept. joined: the trained
    blocks and the head run as one graph, with no block computed twice, where memory is plenty.
    """
    blocks = parts.blocks
    weights = weights or Resident(blocks)
    inputs = [] if inputs is None else inputs
    programs = Programs(parts, dropout_keys, lean=not joined)
    names = {id(module): name for name, module in model.named_modules()}
    prefixes = [names[id(block)] for block in model.layers]
    first = next(i for i, block in enumerate(blocks) if trained_arrays(block))
    has_dropout = any(isinstance(module, KeyedDropout) for module in model.modules())
    head, state = finished(parts, head), [parts.outside]
    sample = parts.embed(mx.zeros((1, 1), mx.int32))  # for its shape
    hidden_size, dtype = sample.shape[-1], sample.dtype

    def loss_and_gradient(hidden, positions, targets, weights, scale):
        return sft.loss_and_gradient(hidden, positions, targets, weights, scale, head)

    def loss_alone(hidden, positions, targets, weights):
        return sft.loss_sum(hidden, positions, targets, weights, head)

    def likeliest(hidden, positions):
        return sft.predictions(hidden, positions, head)

    def compiled(function: Callable) -> Callable:
        """What reads a file must run every time, not be traced once."""
        return function if weights.streamed else mx.compile(function, inputs=state)

    embed = compiled(parts.embed)
    head_gradient = compiled(loss_and_gradient)
    head_alone, head_likeliest = compiled(loss_alone), compiled(likeliest)

    @partial(mx.compile, inputs=state)
    def joined_gradient(trained, frozen, hidden, extras, reach, scale, positions, targets, weights):
        """The loss sum, and the gradients of the trained blocks, from their input."""

        def scaled(trained: list[Arrays]) -> mx.array:
            h = hidden
            for index in range(first, len(blocks)):
                run = programs.of(index, hidden.shape[1], reach).run
                h = run(frozen[index - first], trained[index - first], h, extras)
            return sft.trainable_loss_sum(h, positions, targets, weights, scale, head)

        return mx.value_and_grad(scaled)(trained)

    def run_blocks(
        hidden: list[mx.array],
        batches: list[tuple[Batch, Extras]],
        which: range,
        saved: Inputs | None = None,
    ) -> None:
        """Replace the (B, T, D) of each batch by what the blocks `which` give of them.

        A block's weights are read once for all. The input of each is added to `saved`.
        """
        if which:
            weights.ahead(which[0])
        for index in which:
            arrays = weights.read(index)
            if index + 1 in which:
                weights.ahead(index + 1)
            for place, (batch, extras) in enumerate(batches):
                if saved is not None:
                    saved.append(hidden[place])
                run = programs.of(index, batch.tokens.shape[1], batch.reach).forward
                hidden[place] = run(arrays, trained_arrays(blocks[index]), hidden[place], extras)
                mx.eval(hidden[place])
            del arrays

    def from_tokens(batches: list[tuple[Batch, Extras]]) -> list[mx.array]:
        """What the first trained block is given for each batch."""
        hidden = [embed(mx.array(batch.tokens)) for batch, _ in batches]
        mx.eval(hidden)
        run_blocks(hidden, batches, range(first))
        return hidden

    def below(batch: Batch, extras: Extras) -> mx.array:
        """(B, T, D) what the first trained block is given; read from the store where it can be."""
        if not store:
            return from_tokens([(batch, extras)])[0]
        spans = texts_of(batch)
        held = assemble(store, spans, (*batch.tokens.shape, hidden_size), dtype)
        if held is None:
            (held,) = from_tokens([(batch, extras)])
            keep(store, spans, held)
        else:
            mx.eval(held)
        return held

    def fill(batches: Iterable[Batch]) -> None:
        """Keep what the first trained block is given for each text, group by group.

        The frozen blocks' weights are read once for a group, whose hidden states take about
        as much memory as the weights of a block.
        """
        block = sum(array.nbytes for array in weights.read(0).values())
        missing = (b for b in batches if not all(store.has(s.tokens) for s in texts_of(b)))
        for group in groups(missing, max(block, FEWEST_BYTES) // (hidden_size * dtype.size)):
            hidden = from_tokens([(batch, extras_of(batch)) for batch in group])
            for batch in group:
                keep(store, texts_of(batch), hidden.pop(0))

    def forward(batch: Batch) -> mx.array:
        extras = extras_of(batch)
        hidden = [below(batch, extras)]
        run_blocks(hidden, [(batch, extras)], range(first, len(blocks)))
        return hidden[0]

    def extras_of(batch: Batch) -> Extras:
        segments = batch.segments
        return {} if segments is None else {"segments": mx.array(segments)}

    def gradients(batch: Batch, scale: float, step_seed: int) -> tuple[mx.array, Any]:
        tokens = batch.tokens.shape[1]
        extras = extras_of(batch)
        if has_dropout:
            keys = row_keys(step_seed, batch.rows)
            extras |= {"keys": mx.array(keys), "places": mx.array(batch.places)}
        hidden = below(batch, extras)
        if joined:
            trained = [trained_arrays(block) for block in blocks[first:]]
            frozen = [weights.read(index) for index in range(first, len(blocks))]
            scale = mx.array(scale, mx.float32)
            loss, grads = joined_gradient(
                trained, frozen, hidden, extras, batch.reach, scale, *at(batch)
            )
            return loss, tree_unflatten(
                [
                    (f"{prefix}.{path}", grad)
                    for prefix, arrays in zip(prefixes[first:], grads, strict=True)
                    for path, grad in arrays.items()
                ]
            )
        inputs.clear()
        trunk = [hidden]
        del hidden
        run_blocks(trunk, [(batch, extras)], range(first, len(blocks)), inputs)
        loss, cotangent = head_gradient(trunk.pop(), *at(batch), mx.array(scale, mx.float32))
        mx.eval(loss, cotangent)
        found: list[tuple[str, mx.array]] = []
        for index in reversed(range(first, len(blocks))):
            arrays = weights.read(index)
            if index > first:
                weights.ahead(index - 1)
            of, trained = programs.of(index, tokens, batch.reach), trained_arrays(blocks[index])
            if index > first:
                grads, cotangent = of.backward(arrays, trained, inputs.pop(), extras, cotangent)
                mx.eval(grads, cotangent)
            else:
                grads = of.lowest(arrays, trained, inputs.pop(), extras, cotangent)
                mx.eval(grads)
            del arrays
            found += [(f"{prefixes[index]}.{path}", grad) for path, grad in grads.items()]
        return loss, tree_unflatten(found)

    def loss(batch: Batch) -> mx.array:
        return head_alone(forward(batch), *at(batch))

    def predictions(batch: Batch) -> mx.array:
        return head_likeliest(forward(batch), mx.array(batch.positions))

    ahead = weights.streamed and store is not None and first > 0
    return Engine(gradients, loss, predictions, fill if ahead else None)


def texts_of(batch: Batch) -> list[Span]:
    return spans_of(batch.tokens, batch.rows, batch.lengths)


def groups(batches: Iterable[Batch], tokens: int) -> Iterator[list[Batch]]:
    """Runs of batches that have at least so many tokens together, but the last."""
    group: list[Batch] = []
    for batch in batches:
        group.append(batch)
        if sum(b.tokens.size for b in group) >= tokens:
            yield group
            group = []
    if group:
        yield group


def finished(parts: Parts, head: Head) -> Head:
    """`head`, of finished hidden states, as a head of what the last block gives."""
    if not isinstance(head, LinearHead):
        return parts.finished_head
    return replace(head, before=lambda rows: head.inputs(parts.finish(rows[None])[0]))


def at(batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
    return mx.array(batch.positions), mx.array(batch.targets), mx.array(batch.weights)
