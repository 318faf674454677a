"""Keep what is dear to compute again from the forward pass of a block to its backward pass.

A staged backward pass recomputes its block from the input of the block. So the forward pass of
such a block also returns some arrays, and its backward pass puts them in place. There are three
kinds (`Keeps`), the dearest for its memory first:

- attention: its output and the log-sum-exp of its scores. Its backward pass needs nothing else of
  the forward pass, which it would otherwise do twice.
- linear: the outputs of the linear layers, most of the work of a block.
- activations: of gated MLPs, f(gate) * up and its derivatives by both, in place of the outputs of
  gate and up, whose only use they are. An exponential costs as much as 50 multiplications.

What is left to compute again are norms, rotations and sums of two arrays.

The same code is traced for both passes, so the calls come in the same order, and what a call
returned is found by its place in that order.

Shapes: B rows, T tokens per row, F inner features of an MLP.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.engine.dequantized import DequantizedLinear
from your_ai.engine.mlp import INWARD, OUTWARD, is_separable
from your_ai.memory.workload import Kept
from your_ai.nets.adapter_kinds import ADAPTED
from your_ai.nets.attention import BlockwiseAttention, attention_results
from your_ai.nets.mlx_types import custom_function
from your_ai.nets.model import DropoutKeys
from your_ai.nets.parts import put, skeleton

LAYERS = (nn.Linear, nn.QuantizedLinear, DequantizedLinear, *ADAPTED)
TRIED = 16  # features that show what an activation function does with its gate


class Keeps(NamedTuple):
    """The kinds of arrays that a block keeps; as in `Kept`."""

    attention: bool = False
    linear: bool = False
    activations: bool = False

    def __bool__(self) -> bool:
        """Return whether it keeps anything."""
        return any(self)

    @staticmethod
    def of(kept: Kept, place: int) -> Keeps:
        """The kinds of arrays that a block keeps. place: its index counted from the last, at 0."""
        linear = place < kept.linear
        return Keeps(place < kept.attention, linear, linear and place < kept.activations)


class Results:
    """The results of the calls in a block, in the order of the calls."""

    def __init__(self, dropout_keys: DropoutKeys) -> None:
        self.dropout_keys = dropout_keys
        self._found: list[mx.array] | None = None
        self._is_output = False  # whether the last of them is the output of a linear layer
        self._given: list[mx.array] = []

    def record(self) -> None:
        """From now on, note results."""
        self._found, self._is_output = [], False

    def recorded(self) -> list[mx.array]:
        """Those noted since `record`. From now on, nothing is noted.

        Without the last one if a linear layer returned it: blocks add it to their input, so that
        no gradient depends on it. Where one does, it is computed again.
        """
        found, self._found = self._found or [], None
        return found[:-1] if self._is_output else found

    def use(self, results: Sequence[mx.array]) -> None:
        """The next calls return these; those after them compute their own."""
        self._given = list(reversed(results))

    def _next(self, count: int) -> list[mx.array]:
        """The results of the next call, `count` arrays; empty if there are no more."""
        return [self._given.pop() for _ in range(count)] if self._given else []

    def _note(self, *results: mx.array, is_output: bool = False) -> None:
        if self._found is not None:
            self._found += results
            self._is_output = is_output

    def of_layer(self, layer: nn.Module, base: type[nn.Module], x: mx.array) -> mx.array:
        """The output of a linear layer, whose class was `base`, for x."""
        found = self._next(1)
        if found:
            return self._known_output(layer, base, x, *found)
        output = base.__call__(layer, x)
        self._note(output, is_output=True)
        return output

    def of_attention(self, *inputs: Any) -> mx.array:
        """The output of attention; inputs: as of `attention`."""
        found = self._next(2)
        if found:
            return attention_results(*inputs, known=(found[0], found[1]))[0]
        results = attention_results(*inputs)
        self._note(*results)
        return results[0]

    def of_mlp(self, mlp: nn.Module, base: type[nn.Module], x: mx.array) -> mx.array:
        """The output of a gated MLP, whose class was `base`, for x; (B, T, D) -> (B, T, D)"""
        inward = [mlp[name] for name in INWARD]
        outward: nn.Module = mlp[OUTWARD]
        found = self._next(3)
        if found:  # what the inward layers returned is not known, and not used
            empty = mx.zeros_like(found[0])
            outputs = [self._known_output(layer, type(layer), x, empty) for layer in inward]
            return outward(known_product(*outputs, *found))
        gate, up = (layer(x) for layer in inward)
        activation, derivative = with_derivative(activation_of(mlp, base), gate)
        product = activation * up
        self._note(activation, derivative * up, product)
        return outward(product)

    def _known_output(
        self, layer: nn.Module, base: type[nn.Module], x: mx.array, output: mx.array
    ) -> mx.array:
        """The output, which was computed before; differentiable in x and the layer's parameters."""
        trained = dict(tree_flatten(layer.trainable_parameters()))
        twin = skeleton(layer)  # with the arrays of now: the backward pass comes later

        def forward(x: mx.array, *values: mx.array) -> mx.array:
            put(twin, dict(zip(trained, values, strict=True)))
            return base.__call__(twin, x)

        forward = self.dropout_keys.kept(forward)

        @custom_function
        def known(output: mx.array, x: mx.array, *values: mx.array) -> mx.array:
            return output

        @known.vjp
        def known_vjp(primals: Any, cotangent: mx.array, _: Any) -> tuple[mx.array, ...]:
            output, *inputs = primals
            _, grads = mx.vjp(forward, inputs, [cotangent])  # its output is never computed
            return mx.zeros_like(output), *grads

        return known(output, x, *trained.values())


@custom_function
def known_product(
    gate: mx.array, up: mx.array, activation: mx.array, slope: mx.array, product: mx.array
) -> mx.array:
    """f(gate) * up, known with f(gate) and f'(gate) * up; (B, T, F) each."""
    return product


@known_product.vjp
def known_product_vjp(primals: Any, cotangent: mx.array, product: Any) -> tuple[mx.array, ...]:
    *_, activation, slope, product = primals
    unused = (mx.zeros_like(array) for array in (activation, slope, product))
    return slope * cotangent, activation * cotangent, *unused


def activation_of(mlp: nn.Module, base: type[nn.Module]) -> Callable[..., mx.array]:
    """Make f(gate): what an MLP of class `base` multiplies with the output of `up_proj`."""
    twin = skeleton(mlp)

    def of(gate: mx.array, up: mx.array | None = None, x: mx.array | None = None) -> mx.array:
        up = mx.ones_like(gate) if up is None else up
        stand_ins = (lambda _: gate, lambda _: up, lambda product: product)
        dict.update(twin, zip((*INWARD, OUTWARD), stand_ins, strict=True))
        return base.__call__(twin, gate if x is None else x)

    return of


def with_derivative(
    function: Callable[[mx.array], mx.array], x: mx.array
) -> tuple[mx.array, mx.array]:
    """f(x) and f'(x) of a function of each number."""
    (value,), (derivative,) = mx.vjp(function, [x], [mx.ones_like(x)])
    return value, derivative


def is_gated(module: Any) -> bool:
    """Return whether `module` is an MLP that computes down_proj(f(gate_proj(x)) * up_proj(x)),
    where f is a function of each number. Tested on random numbers; the weights are not needed."""
    if not isinstance(module, nn.Module) or set(module.children()) != {*INWARD, OUTWARD}:
        return False
    if not all(isinstance(layer, LAYERS) for layer in module.children().values()):
        return False
    if not is_separable(module):
        return False
    function = activation_of(module, type(module))
    shape = (1, 1, TRIED)
    gate, up, x = 3 * mx.random.normal((3, *shape), key=mx.random.key(0))
    product = function(gate) * up
    return bool(mx.allclose(function(gate, up, x), product, rtol=1e-5, atol=1e-6))


def keep_results(module: nn.Module, dropout_keys: DropoutKeys, keeps: Keeps) -> Results:
    """Make the layers in `module`, in place, keep what they return. Layers of unknown code keep
    nothing."""
    results = Results(dropout_keys)
    every = [
        (parent, name, child)
        for parent in module.modules()
        if not isinstance(parent, LAYERS)
        for name, child in parent.items()
    ]
    if keeps.attention:
        for _, _, child in every:
            if isinstance(child, BlockwiseAttention):
                child.attend = results.of_attention
    gated = [item for item in every if keeps.activations and is_gated(item[2])]
    used = {id(child[layer]) for _, _, child in gated for layer in INWARD}  # by those alone
    if keeps.linear:
        for parent, name, child in every:
            if isinstance(child, LAYERS) and id(child) not in used:
                parent[name] = keeping(child, results)
    for parent, name, child in gated:
        parent[name] = keeping(child, results)
    return results


def keeping(module: nn.Module, results: Results) -> nn.Module:
    """A copy of a layer whose calls go through `results`."""
    twin = copy.copy(module)
    twin.__class__ = keeping_class(type(module))
    twin.results_of_block = (results,)  # in a tuple: a module's attributes are its parameters
    return twin


@lru_cache
def keeping_class(base: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a class of layers or of gated MLPs whose calls go through `Results`."""

    def call(self: Any, x: mx.array) -> mx.array:
        results: Results = self.results_of_block[0]
        if isinstance(self, LAYERS):
            return results.of_layer(self, base, x)
        return results.of_mlp(self, base, x)

    return type(f"Kept{base.__name__}", (base,), {"__call__": call})
