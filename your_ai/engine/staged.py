"""Block by block: the gradients of the fused engine, in a fraction of its memory.

Only the input of each trained block is kept; its backward pass computes the block again.

Shapes: B rows, T tokens of a row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from your_ai.blocks import Arrays, Parts
from your_ai.data.batches import Batch
from your_ai.dora import dora_layers, norms_of
from your_ai.engine.compiled import Compiled
from your_ai.engine.fused import Engine, row_keys
from your_ai.engine.prefix import Span, Store, assemble, keep, spans_of
from your_ai.engine.programs import Extras, Programs, frozen_arrays, trained_arrays
from your_ai.engine.weights import reads_its_vocabulary
from your_ai.head import LinearHead
from your_ai.losses import Head
from your_ai.model import DropoutKeys, KeyedDropout
from your_ai.objectives import sft

FEWEST_BYTES = 16 << 20  # of hidden states for which the frozen blocks are read once


class Inputs(Protocol):
    """A stack of block inputs: a list, or one on disk."""

    def append(self, array: mx.array) -> None: ...

    def pop(self) -> mx.array: ...

    def clear(self) -> None: ...


class Weights(Protocol):
    """Where the frozen arrays of a block come from.

    streamed: from files.
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


class Staged:
    """Holds one block's working set at a time.

    store: keeps what the blocks below the first trained one give of each text, so that
    they run once for it. inputs: where those of the trained blocks are kept. lean: memory
    is dearer than time.
    """

    def __init__(
        self,
        model: nn.Module,
        parts: Parts,
        dropout_keys: DropoutKeys,
        head: Head,
        weights: Weights | None = None,
        store: Store | None = None,
        inputs: Inputs | None = None,
        lean: bool = True,
    ) -> None:
        self.blocks, self.store = parts.blocks, store
        self.weights = weights or Resident(self.blocks)
        self.inputs = [] if inputs is None else inputs
        self.programs = Programs(parts, dropout_keys, lean)
        names = {id(module): name for name, module in model.named_modules()}
        self.names = [names[id(block)] for block in model.layers]
        self.dora = [dora_layers(block) for block in self.blocks]
        self.first = next(i for i, block in enumerate(self.blocks) if trained_arrays(block))
        self.frozen, self.trained = range(self.first), range(self.first, len(self.blocks))
        self.reads_files = reads_its_vocabulary(model)
        self.has_dropout = any(isinstance(module, KeyedDropout) for module in model.modules())
        sample = parts.embed(mx.zeros((1, 1), mx.int32))  # for its shape
        self.hidden_size, self.dtype = sample.shape[-1], sample.dtype
        self.head, self.state = finished(parts, head), [parts.outside]
        self._functions: list[Compiled] = []
        self._embed = self._compiled(parts.embed)
        self._head_gradient = self._compiled(partial(sft.loss_and_gradient, head=self.head))
        self._head_loss = self._compiled(partial(sft.loss_sum, head=self.head))
        self._likeliest = self._compiled(partial(sft.predictions, head=self.head))
        self._losses_and_likeliest = self._compiled(partial(sft.score, head=self.head))

    def engine(self) -> Engine:
        ahead = self.weights.streamed and self.store is not None and self.first > 0
        fill = self.fill if ahead else None
        return Engine(self.gradients, self.loss, self.predictions, self.score, self.drop, fill)

    def drop(self) -> None:
        self.programs.made.clear()
        for function in self._functions:
            function.drop()

    def gradients(self, batch: Batch, scale: float, step_seed: int) -> tuple[mx.array, Any]:
        extras = self._extras(batch, step_seed)
        hidden = [self._below(batch, extras)]
        self.inputs.clear()
        self._run(hidden, [(batch, extras)], self.trained, self.inputs)
        scale = mx.array(scale, mx.float32)
        loss, cotangent = self._head_gradient(hidden.pop(), *targets_of(batch), scale)
        mx.eval(loss, cotangent)
        found: dict[int, Arrays] = {}
        for index in reversed(self.trained):
            arrays = self._arrays(index)
            if index > self.first:
                self.weights.ahead(index - 1)
            program = self.programs.of(index, batch.tokens.shape[1], batch.reach)
            given = (trained_arrays(self.blocks[index]), self.inputs.pop(), extras, cotangent)
            if index > self.first:
                found[index], cotangent = program.backward(arrays, *given)
            else:
                found[index] = program.lowest(arrays, *given)
            del arrays, given
            mx.eval(found[index], cotangent)
        return loss, self._tree(found)

    def loss(self, batch: Batch) -> mx.array:
        return self._head_loss(self._forward(batch), *targets_of(batch))

    def predictions(self, batch: Batch) -> mx.array:
        return self._likeliest(self._forward(batch), mx.array(batch.positions))

    def score(self, batch: Batch) -> tuple[mx.array, mx.array]:
        positions, targets, _ = targets_of(batch)
        return self._losses_and_likeliest(self._forward(batch), positions, targets)

    def fill(self, batches: Iterable[Batch]) -> None:
        """Keep what the first trained block is given for each text, group by group.

        The frozen blocks' weights are read once for a group, whose hidden states take about
        as much memory as the weights of a block.
        """
        block = sum(array.nbytes for array in self.weights.read(0).values())
        tokens = max(block, FEWEST_BYTES) // (self.hidden_size * self.dtype.size)
        has = self.store.has
        missing = (b for b in batches if not all(has(span.tokens) for span in texts_of(b)))
        for group in groups(missing, tokens):
            hidden = self._from_tokens([(batch, self._extras(batch)) for batch in group])
            for batch in group:
                keep(self.store, texts_of(batch), hidden.pop(0))

    def _forward(self, batch: Batch) -> mx.array:
        """(B, T, D) after the last block."""
        extras = self._extras(batch)
        hidden = [self._below(batch, extras)]
        self._run(hidden, [(batch, extras)], self.trained)
        return hidden[0]

    def _below(self, batch: Batch, extras: Extras) -> mx.array:
        """(B, T, D) what the first trained block is given, from the store where it is held."""
        if self.store is None:
            return self._from_tokens([(batch, extras)])[0]
        spans = texts_of(batch)
        shape = (*batch.tokens.shape, self.hidden_size)
        hidden = assemble(self.store, spans, shape, self.dtype)
        if hidden is None:
            (hidden,) = self._from_tokens([(batch, extras)])
            keep(self.store, spans, hidden)
        mx.eval(hidden)
        return hidden

    def _from_tokens(self, batches: list[tuple[Batch, Extras]]) -> list[mx.array]:
        """What the first trained block is given for each batch."""
        hidden = [self._embed(mx.array(batch.tokens)) for batch, _ in batches]
        mx.eval(hidden)
        self._run(hidden, batches, self.frozen)
        return hidden

    def _run(
        self,
        hidden: list[mx.array],
        batches: list[tuple[Batch, Extras]],
        which: range,
        saved: Inputs | None = None,
    ) -> None:
        """Replace the (B, T, D) of each batch by what the blocks `which` give of them.

        A block's weights are read once for all. The input of each is added to `saved`.
        """
        if which:
            self.weights.ahead(which[0])
        for index in which:
            arrays = self._arrays(index)
            if index + 1 in which:
                self.weights.ahead(index + 1)
            trained = trained_arrays(self.blocks[index])
            for place, (batch, extras) in enumerate(batches):
                if saved is not None:
                    saved.append(hidden[place])
                program = self.programs.of(index, batch.tokens.shape[1], batch.reach)
                hidden[place] = program.forward(arrays, trained, hidden[place], extras)
                mx.eval(hidden[place])
            del arrays

    def _arrays(self, index: int) -> Arrays:
        """What block `index` is given beside its adapters: its weights, and DoRA's norms."""
        arrays = self.weights.read(index)
        return arrays | norms_of(self.dora[index], arrays)

    def _extras(self, batch: Batch, step_seed: int | None = None) -> Extras:
        """step_seed: draws dropout; None outside training."""
        found: Extras = {}
        if batch.segments is not None:
            found["segments"] = mx.array(batch.segments)
        if step_seed is not None and self.has_dropout:
            found["keys"] = mx.array(row_keys(step_seed, batch.rows))
            found["places"] = mx.array(batch.places)
        return found

    def _tree(self, found: dict[int, Arrays]) -> Any:
        """The gradients of blocks, as a tree of the model's parameters."""
        return tree_unflatten(
            [
                (f"{self.names[index]}.{path}", grad)
                for index, arrays in found.items()
                for path, grad in arrays.items()
            ]
        )

    def _compiled(self, function: Callable) -> Callable:
        """What reads a file must run every time, not be traced once."""
        if self.reads_files:
            return function
        self._functions.append(Compiled(function, self.state))
        return self._functions[-1]


class Joined(Staged):
    """Above a prefix cache, the trained blocks and the head as one graph.

    No block is computed twice; for where memory is plenty.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, lean=False, **kwargs)
        self._joined = self._compiled(self._trained_gradients)

    def gradients(self, batch: Batch, scale: float, step_seed: int) -> tuple[mx.array, Any]:
        extras = self._extras(batch, step_seed)
        hidden = self._below(batch, extras)
        trained = [trained_arrays(self.blocks[index]) for index in self.trained]
        frozen = [self._arrays(index) for index in self.trained]
        scale = mx.array(scale, mx.float32)
        given = (hidden, extras, batch.reach, *targets_of(batch), scale)
        loss, grads = self._joined(trained, frozen, *given)
        return loss, self._tree(dict(zip(self.trained, grads, strict=True)))

    def _trained_gradients(
        self, trained, frozen, hidden, extras, reach, positions, targets, weights, scale
    ):
        """The loss sum, and the gradients of the trained blocks, from their input."""

        def scaled(trained: list[Arrays]) -> mx.array:
            h = hidden
            for index, block_frozen, block_trained in zip(
                self.trained, frozen, trained, strict=True
            ):
                program = self.programs.of(index, hidden.shape[1], reach)
                h = program.run(block_frozen, block_trained, h, extras)
            return sft.trainable_loss_sum(h, positions, targets, weights, scale, self.head)

        return mx.value_and_grad(scaled)(trained)


def finished(parts: Parts, head: Head) -> Head:
    """`head`, of finished hidden states, as a head of what the last block gives."""
    if not isinstance(head, LinearHead):
        return parts.finished_head
    return replace(head, before=lambda rows: head.inputs(parts.finish(rows[None])[0]))


def targets_of(batch: Batch) -> tuple[mx.array, mx.array, mx.array]:
    return mx.array(batch.positions), mx.array(batch.targets), mx.array(batch.weights)


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
