"""DoRA without a dense weight.

    y = m / |W + s B A| * (W x + s B A x) + bias

The norm is of each row, and a constant to the gradient, as in mlx-lm's layer, whose parameters
these are. It changes with the adapter alone: so it is computed once for an adapter, from some
rows of the weight after the other, and kept. The product with W is that of the layer inside,
however that is computed, and not one with a weight that is dequantized as a whole.

Who traces a layer gives it the norms (`norms_of`, `given`), so that no graph computes them; a
layer that is given none looks after its own.

Shapes: N tokens, D inputs, O outputs, r rank.
"""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRALinear

from your_ai.nets.head import LayerRows, rows_at_once
from your_ai.nets.parts import Arrays

SLICE_BYTES = 1 << 20  # of rows in float32; MLX runs some ten operations ahead, and holds as many
TINY = 1e-30  # in place of 0, which nothing can be divided by
NORMS = "_norms"  # a layer's, by this name, where they are given; no parameter


class Kept:
    """The norms of the last adapter that a layer had, and which that was.

    It is not kept alive: optimizers replace adapters, and never change one in place.
    """

    def __init__(self) -> None:
        self._norms: mx.array | None = None
        self._of: tuple[weakref.ref, ...] = ()

    def of(self, *adapter: mx.array) -> mx.array | None:
        same = [ref() is array for ref, array in zip(self._of, adapter, strict=False)]
        return self._norms if same and all(same) else None

    def keep(self, norms: mx.array, *adapter: mx.array) -> mx.array:
        self._norms, self._of = norms, tuple(map(weakref.ref, adapter))
        return norms


class DoRA(nn.Module):
    """A linear layer, quantized or not, with mlx-lm's DoRA on it.

    linear: the layer; lora_a: (D, r), lora_b: (r, O), m: (O,) float32.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept = Kept()

    @staticmethod
    def from_base(base: DoRALinear) -> DoRA:
        """base: as `linear_to_lora_layers` has just put it, its arrays not computed yet."""
        layer = DoRA()
        layer.linear, layer.dropout, layer.scale = base.linear, base.dropout, base.scale
        inputs = LayerRows(base.linear).shape[1]
        layer.lora_a, layer.lora_b = base.lora_a, base.lora_b
        if base.lora_a.shape[0] != inputs:  # with bits that do not divide 32
            bound = 1 / math.sqrt(inputs)
            shape = (inputs, base.lora_a.shape[1])
            layer.lora_a = mx.random.uniform(low=-bound, high=bound, shape=shape)
        layer.m = row_norms(base.linear)
        return layer

    def __call__(self, x: mx.array) -> mx.array:
        """x: (..., D) -> (..., O)"""
        low_rank = (self.dropout(x) @ self.lora_a) @ self.lora_b
        y = without_bias(self.linear)(x) + (self.scale * low_rank).astype(x.dtype)
        y = magnified(y, self.m, self.norms(after=[x]))
        return y + self.linear.bias if "bias" in self.linear else y

    def norms(self, linear: nn.Module | None = None, after: Sequence[mx.array] = ()) -> mx.array:
        """(O,) float32, those that are given, or else of the adapter as it is.

        linear: the layer inside, where its weight is elsewhere; after: what comes first.
        """
        if NORMS in self:
            return self[NORMS]
        adapter = self.lora_a, self.lora_b
        kept = self._kept.of(*adapter)
        if kept is not None:
            return kept
        norms = row_norms(linear or self.linear, *adapter, self.scale, after)
        return self._kept.keep(mx.stop_gradient(norms), *adapter)


def without_bias(linear: nn.Module) -> nn.Module:
    """A layer that computes the product alone, of the same arrays."""
    twin = copy.copy(linear)
    twin.pop("bias", None)
    return twin


def row_norms(
    linear: nn.Module,
    lora_a: mx.array | None = None,
    lora_b: mx.array | None = None,
    scale: float = 0.0,
    after: Sequence[mx.array] = (),
) -> mx.array:
    """(O,) float32: the norm of each row of W + scale * B A, or of W, one slice after the other.

    after: arrays that are computed before the first slice.
    """
    rows = LayerRows(linear)
    outputs, inputs = rows.shape
    step = rows_at_once(SLICE_BYTES, inputs, getattr(linear, "bits", 32))
    found: list[mx.array] = []
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        weight = rows.weight(start, stop, found[-1:] or after).astype(mx.float32)
        if lora_a is not None:
            weight = weight + (scale * lora_b[:, start:stop].T) @ lora_a.T
        found.append(mx.linalg.norm(weight, axis=1))
    return found[0] if len(found) == 1 else mx.concatenate(found)


@mx.custom_function
def magnified(y: mx.array, m: mx.array, norms: mx.array) -> mx.array:
    """m / norms * y; y: (..., O), m and norms: (O,).

    Its backward pass needs the result, which what comes next often holds too, and not y.
    """
    return factors(m, norms).astype(y.dtype) * y


@magnified.vjp
def magnified_vjp(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
    y, m, norms = primals
    total = (cotangent * output).astype(mx.float32).reshape(-1, len(m)).sum(axis=0)
    grad = (total / nonzero(m)).astype(m.dtype)
    return factors(m, norms).astype(y.dtype) * cotangent, grad, mx.zeros_like(norms)


def factors(m: mx.array, norms: mx.array) -> mx.array:
    """m / norms, but 1 for a row of zeros."""
    return nonzero(m) / nonzero(norms)


def nonzero(values: mx.array) -> mx.array:
    return mx.where(values == 0, TINY, values)


def put_dora(model: nn.Module) -> None:
    """Put these layers in place of mlx-lm's, which were just put on a model."""
    replaced = [
        (name, DoRA.from_base(layer))
        for name, layer in model.named_modules()
        if type(layer) is DoRALinear
    ]
    model.update_modules(tree_unflatten(replaced))


Layers = list[tuple[str, DoRA]]


def dora_layers(module: nn.Module) -> Layers:
    """Those of a module, by path."""
    return [(path, child) for path, child in module.named_modules() if isinstance(child, DoRA)]


def draw(module: nn.Module) -> None:
    """Compute the first magnitudes, which are the norms of the weights, layer by layer."""
    for _, layer in dora_layers(module):
        mx.eval(layer.m)


def norms_of(layers: Layers, frozen: Arrays | None = None) -> Arrays:
    """The norms of each, computed where the adapter is another than it was, by their path.

    frozen: the weights by their path, where the layers do not have them.
    """
    found: Arrays = {}
    for path, layer in layers:
        linear = layer.linear
        if frozen is not None:
            linear = copy.copy(linear)
            dict.update(linear, {leaf: frozen[f"{path}.linear.{leaf}"] for leaf in linear})
        found[f"{path}.{NORMS}"] = layer.norms(linear)
        mx.eval(found)  # one layer at a time
    return found


@contextlib.contextmanager
def given(layers: Layers, norms: Arrays) -> Iterator[None]:
    """The layers use these norms until the block ends; `norms` as `norms_of` has them."""
    for path, layer in layers:
        layer[NORMS] = norms[f"{path}.{NORMS}"]
    try:
        yield
    finally:
        for _, layer in layers:
            del layer[NORMS]
