"""Compiled forward and backward passes of one block; backward starts from the block's input.

Blocks with the same structure share a program. It takes the weights as arguments, so the
weights of a block need to be in memory only while the block runs.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.engine.compiled import Compile, Graphs, GraphShape
from your_ai.engine.kept import Keeps, keep_results
from your_ai.engine.mlp import replace_mlps
from your_ai.nets.attention import replace_attention
from your_ai.nets.block_calls import Call, Mask, TextMask
from your_ai.nets.mixers.replace import replace_mixers
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys, TokenKeys
from your_ai.nets.parts import Parts, arrays_of, empty, filled, skeleton, structure

Extras = dict[str, mx.array]  # inputs of a block in addition to the hidden states, by name
Run = Callable[..., mx.array]
"""(frozen, trained, hidden, extras) -> hidden"""
T = TypeVar("T")


def trained_arrays(block: nn.Module) -> Arrays:
    return dict(tree_flatten(block.trainable_parameters()))


def frozen_arrays(block: nn.Module) -> Arrays:
    trained = trained_arrays(block)
    return {path: array for path, array in arrays_of(block).items() if path not in trained}


def first_trained(blocks: list[nn.Module]) -> int:
    """The index of the first block with adapters, or of the last block if none has."""
    found = (index for index, block in enumerate(blocks) if trained_arrays(block))
    return next(found, len(blocks) - 1)


@dataclass(frozen=True)
class Program:
    """The functions of blocks that have the same structure and are called in the same way."""

    run: Run
    """`forward`, not compiled."""
    forward: Run
    backward: Callable[..., tuple[Arrays, mx.array]]
    """(frozen, trained, hidden, extras, cotangent) -> (gradients, cotangent of hidden)"""
    lowest: Callable[..., Arrays]
    """Same as `backward`, but returns only the gradients; for the first trained block."""


@dataclass(frozen=True)
class KeepingProgram:
    """The functions of blocks whose backward pass uses results that the forward pass kept."""

    forward: Callable[..., tuple[mx.array, list[mx.array]]]
    """(frozen, trained, hidden, extras) -> hidden, results"""
    backward: Callable[..., tuple[Arrays, mx.array]]
    """(results, frozen, trained, hidden, extras, cotangent) -> (gradients, cotangent of hidden)"""
    lowest: Callable[..., Arrays]
    """Same as `backward`, but returns only the gradients; for the first trained block."""


def program(
    block: nn.Module,
    call: Call,
    max_segment_tokens: int | None,
    dropout_keys: DropoutKeys,
    compiled: Compile,
    takes_text: Callable[[nn.Module], bool],
    lean: bool,
) -> Program:
    """Make the program of a block.

    compiled: compiles a function, if the model can be compiled.
    takes_text: whether a block passes a TextMask on to its attention.
    lean: save memory at the cost of time.
    """
    template = skeleton(block)
    replace_attention(template, lean)
    replace_mixers(template)
    as_text = TextMask.of if takes_text(template) else None
    if lean:
        replace_mlps(template, dropout_keys)
    run = runner(template, call, max_segment_tokens, dropout_keys, as_text)
    backward, lowest = partial(vjp_of, run), partial(lowest_vjp_of, run)
    return Program(run, compiled(run), compiled(backward), compiled(lowest))


def keeping_program(
    block: nn.Module,
    call: Call,
    max_segment_tokens: int | None,
    dropout_keys: DropoutKeys,
    compiled: Compile,
    takes_text: Callable[[nn.Module], bool],
    keeps: Keeps,
) -> KeepingProgram:
    """Make the program of a block that keeps results; as for `program`.

    Where the outputs of linear layers are not kept, they are computed again as in `program`.
    """
    template = skeleton(block)
    replace_attention(template, lean=not keeps.linear)
    replace_mixers(template)
    as_text = TextMask.of if takes_text(template) else None
    if not keeps.linear:
        replace_mlps(template, dropout_keys)
    results = keep_results(template, dropout_keys, keeps)
    run = runner(template, call, max_segment_tokens, dropout_keys, as_text)

    def forward(
        frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Extras
    ) -> tuple[mx.array, list[mx.array]]:
        results.record()
        hidden = run(frozen, trained, hidden, extras)
        return hidden, results.recorded()

    def with_results(given: list[mx.array]) -> Run:
        def known(*args: Any) -> mx.array:
            results.use(given)
            return run(*args)

        return known

    def backward(given: list[mx.array], *args: Any) -> tuple[Arrays, mx.array]:
        return vjp_of(with_results(given), *args)

    def lowest(given: list[mx.array], *args: Any) -> Arrays:
        return lowest_vjp_of(with_results(given), *args)

    return KeepingProgram(compiled(forward), compiled(backward), compiled(lowest))


def runner(
    template: nn.Module,
    call: Call,
    max_segment_tokens: int | None,
    dropout_keys: DropoutKeys,
    as_text: Callable[[Mask], TextMask] | None,
) -> Run:
    """Make f(frozen, trained, hidden, extras) -> hidden, which runs `template` on these arrays."""
    empty(template)

    def run(frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Extras) -> mx.array:
        dropout_keys.set(TokenKeys(extras["keys"], extras["places"]) if "keys" in extras else None)
        given = call.constants | extras
        try:
            segments = extras.get("segments")
            with filled(template, frozen, trained):
                return call.run(template, hidden, segments, max_segment_tokens, given, as_text)
        finally:
            dropout_keys.set(None)

    return run


def vjp_of(
    run: Run, frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Extras, cotangent: Any
) -> tuple[Arrays, mx.array]:
    """The gradients of the trained arrays, and the cotangent of `hidden`."""
    names = list(trained)

    def of(hidden: mx.array, *values: mx.array) -> mx.array:
        return run(frozen, dict(zip(names, values, strict=True)), hidden, extras)

    _, (grad, *grads) = mx.vjp(of, [hidden, *trained.values()], [cotangent])
    return dict(zip(names, grads, strict=True)), grad


def lowest_vjp_of(
    run: Run, frozen: Arrays, trained: Arrays, hidden: mx.array, extras: Extras, cotangent: Any
) -> Arrays:
    """The gradients of the trained arrays."""
    names = list(trained)

    def of(*values: mx.array) -> mx.array:
        return run(frozen, dict(zip(names, values, strict=True)), hidden, extras)

    _, grads = mx.vjp(of, list(trained.values()), [cotangent])
    return dict(zip(names, grads, strict=True))


class Programs:
    """The program of each block for rows of a shape; equal blocks share one."""

    def __init__(self, parts: Parts, dropout_keys: DropoutKeys, lean: bool, graphs: Graphs) -> None:
        self.parts, self.dropout_keys, self.lean = parts, dropout_keys, lean
        self.graphs = graphs
        self.kinds = [structure(block) for block in parts.blocks]

    def of(self, index: int, shape: GraphShape) -> Program:
        return self._of_kind("recomputing", partial(program, lean=self.lean), index, shape)

    def keeping(self, index: int, shape: GraphShape, keeps: Keeps) -> KeepingProgram:
        """The program of a block that keeps results."""
        return self._of_kind(keeps, partial(keeping_program, keeps=keeps), index, shape)

    def _of_kind(self, name: Hashable, make: Callable[..., T], index: int, shape: GraphShape) -> T:
        call = self.parts.calls(shape.tokens)[index]

        def made() -> T:
            return make(
                self.parts.blocks[index],
                call,
                shape.max_segment_tokens,
                self.dropout_keys,
                compiled=self.graphs.compile,
                takes_text=partial(self.parts.passes_text, index),
            )

        return self.graphs.get(shape, (name, self.kinds[index], call.key), made)
