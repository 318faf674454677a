"""Keep the outputs of a block's linear layers, so that its backward pass has them.

A staged backward pass recomputes its block from the input of the block. Most of that work is the
products of its linear layers, and their outputs take little memory compared with what one graph
of forward and backward keeps. So the forward pass of such a block also returns these outputs,
and its backward pass puts them in place: only norms, activation functions and attention are
computed again.

The same code is traced for both, so the calls of layers come in the same order, and an output is
found by its place in that order.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from your_ai.engine.dequantized import DequantizedLinear
from your_ai.nets.dora import DoRA
from your_ai.nets.model import DropoutKeys
from your_ai.nets.parts import put, skeleton

LAYERS = (nn.Linear, nn.QuantizedLinear, DequantizedLinear, LoRALinear, DoRA)


class Outputs:
    """The outputs of the linear layers of a block, in the order of their calls."""

    def __init__(self, dropout_keys: DropoutKeys) -> None:
        self.dropout_keys = dropout_keys
        self._found: list[mx.array] | None = None
        self._given: Iterator[mx.array] = iter(())

    def record(self) -> None:
        """From now on, note outputs."""
        self._found = []

    def recorded(self) -> list[mx.array]:
        """Those noted since `record`, but the last, which blocks add to their input, so that no
        gradient depends on it. From now on, nothing is noted."""
        found, self._found = self._found or [], None
        return found[:-1]

    def use(self, outputs: Sequence[mx.array]) -> None:
        """The next calls of layers have these outputs; those after them compute their own."""
        self._given = iter(outputs)

    def of(self, layer: nn.Module, base: type, x: mx.array) -> mx.array:
        """The output of `layer`, whose class was `base`, for x."""
        output = next(self._given, None)
        if output is not None:
            return self._known(layer, base, x, output)
        output = base.__call__(layer, x)
        if self._found is not None:
            self._found.append(output)
        return output

    def _known(self, layer: nn.Module, base: type, x: mx.array, output: mx.array) -> mx.array:
        """The output, which was computed before; differentiable in x and the layer's parameters."""
        trained = dict(tree_flatten(layer.trainable_parameters()))

        def forward(x: mx.array, *values: mx.array) -> mx.array:
            twin = skeleton(layer)
            put(twin, dict(zip(trained, values, strict=True)))
            return base.__call__(twin, x)

        forward = self.dropout_keys.kept(forward)

        @mx.custom_function
        def known(output: mx.array, x: mx.array, *values: mx.array) -> mx.array:
            return output

        @known.vjp
        def known_vjp(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, ...]:
            output, *inputs = primals
            _, grads = mx.vjp(forward, inputs, [cotangent])  # its output is never computed
            return mx.zeros_like(output), *grads

        return known(output, x, *trained.values())


def keep_outputs(module: nn.Module, dropout_keys: DropoutKeys) -> Outputs:
    """Make the linear layers in `module`, in place, keep their outputs."""
    outputs = Outputs(dropout_keys)
    found = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, LAYERS)
        for name, child in parent.items()
        if isinstance(child, LAYERS)
    ]
    for parent, name, child in found:
        twin = copy.copy(child)
        twin.__class__ = keeping(type(child))
        twin.outputs_of_block = (outputs,)  # in a tuple: a module's attributes are its parameters
        parent[name] = twin
    return outputs


@lru_cache
def keeping(base: type) -> type:
    """A subclass of a class of layers whose calls go through `Outputs.of`."""

    def call(self: Any, x: mx.array) -> mx.array:
        (outputs,) = self.outputs_of_block
        return outputs.of(self, base, x)

    return type(f"Kept{base.__name__}", (base,), {"__call__": call})
