"""DoRA without a dense weight.

    y = m / |W + s B A| * (W x + s B A x) + bias

The norm is taken per row, and the gradient treats it as a constant, as in mlx-lm's DoRA layer,
which has the same parameters. The norm changes only when the adapter changes, so it is computed
once per adapter, slice by slice over the rows of the weight, and cached. The product with W
calls the wrapped layer, so a quantized weight is never dequantized as a whole.

Norms are evaluated at once, layer by layer, and never part of a larger graph: MLX needs about a
kilobyte for each operation of a graph, outside its own count of memory, so the slices of all
layers together took 120 MB for a model of 16 blocks. Code that compiles a layer passes the norms
in (`adapter_kinds.norms_of`, `use_norms`). A layer without given norms computes its own.

Shapes: N tokens, D inputs, O outputs, r rank.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.utils import linear_to_lora_layers

from your_ai.nets import lora
from your_ai.nets.head import LayerRows, rows_at_once
from your_ai.nets.mlx_types import custom_function

SLICE_BYTES = 1 << 20  # of float32 rows; MLX runs about ten operations ahead, one slice each
TINY = 1e-30  # replaces 0 in a denominator
NORMS = "_norms"  # the attribute for given norms; not a parameter


class NormCache:
    """A cache of the norms for the latest adapter of a layer.

    It holds only weak references to the adapter. They identify it, because optimizers replace
    the arrays of an adapter and never change them in place.
    """

    def __init__(self) -> None:
        self._norms: mx.array | None = None
        self._of: tuple[weakref.ref[mx.array], ...] = ()

    def of(self, *adapter: mx.array) -> mx.array | None:
        same = [ref() is array for ref, array in zip(self._of, adapter, strict=False)]
        return self._norms if same and all(same) else None

    def keep(self, norms: mx.array, *adapter: mx.array) -> mx.array:
        self._norms, self._of = norms, tuple(map(weakref.ref, adapter))
        return norms


class DoRA(nn.Module):
    """A linear layer, quantized or not, with DoRA as in mlx-lm.

    linear: the wrapped layer; lora_a: (D, r), lora_b: (r, O), m: (O,) float32.
    """

    m: mx.array

    def __init__(self) -> None:
        super().__init__()
        self._kept = NormCache()
        self.first_m: Callable[[], mx.array | None] = lambda: None

    @staticmethod
    def from_base(base: DoRALinear) -> DoRA:
        """base: a new layer from `linear_to_lora_layers`, whose arrays are not evaluated yet."""
        layer = DoRA()
        layer.linear, layer.dropout, layer.scale = base.linear, base.dropout, base.scale
        inputs = LayerRows(base.linear).shape[1]
        layer.lora_a, layer.lora_b = base.lora_a, base.lora_b
        if base.lora_a.shape[0] != inputs:  # mlx-lm is wrong for bits that do not divide 32
            bound = 1 / math.sqrt(inputs)
            shape = (inputs, base.lora_a.shape[1])
            layer.lora_a = mx.random.uniform(low=-bound, high=bound, shape=shape)
        # A few operations that would compute the norms of the whole weight together: right if they
        # are evaluated, but `compute_magnitudes` needs the memory of a slice.
        layer.m = row_norms(base.linear, whole=True)
        layer.first_m = weakref.ref(layer.m)
        return layer

    def compute_magnitudes(self) -> None:
        """Evaluate `m`, slice by slice if it is still the one of a new layer."""
        if self.m is self.first_m():
            self.m = row_norms(self.linear)
        mx.eval(self.m)

    def __call__(self, x: mx.array) -> mx.array:
        """x: (..., D) -> (..., O)"""
        low_rank = (self.dropout(x) @ self.lora_a) @ self.lora_b
        y = without_bias(self.linear)(x) + (self.scale * low_rank).astype(x.dtype)
        y = magnified(y, self.m, self.norms())
        return y + self.linear.bias if "bias" in self.linear else y

    def norms(self, linear: nn.Module | None = None) -> mx.array:
        """(O,) float32 norms: the given ones, otherwise those of the current adapter, evaluated.

        linear: the wrapped layer with its weight, if this layer does not have the weight.
        """
        if NORMS in self:
            given: mx.array = self[NORMS]
            return given
        adapter = self.lora_a, self.lora_b
        kept = self._kept.of(*adapter)
        if kept is not None:
            return kept
        norms = mx.stop_gradient(row_norms(linear or self.linear, *adapter, self.scale))
        try:
            mx.eval(norms)
        except ValueError:  # while a function is compiled, arrays have no values
            return norms
        return self._kept.keep(norms, *adapter)


def without_bias(linear: nn.Module) -> nn.Module:
    """A copy of the layer, with the same arrays, that does not add the bias."""
    twin = copy.copy(linear)
    twin.pop("bias", None)
    return twin


def row_norms(
    linear: nn.Module,
    lora_a: mx.array | None = None,
    lora_b: mx.array | None = None,
    scale: float = 0.0,
    whole: bool = False,
) -> mx.array:
    """(O,) float32: the norm of each row of W + scale * B A, or of W, computed slice by slice.

    whole: compute all rows together instead.
    """
    rows = LayerRows(linear)
    outputs, inputs = rows.shape
    step = outputs if whole else rows_at_once(SLICE_BYTES, inputs, getattr(linear, "bits", 32))
    found: list[mx.array] = []
    for start in range(0, outputs, step):
        stop = min(start + step, outputs)
        weight = rows.weight(start, stop, found[-1:]).astype(mx.float32)
        if lora_a is not None and lora_b is not None:
            b = lora_b[:, start:stop].T.astype(mx.float32)
            weight = weight + (scale * b) @ lora_a.T.astype(mx.float32)
        found.append(mx.linalg.norm(weight, axis=1))
    return found[0] if len(found) == 1 else mx.concatenate(found)


@custom_function
def magnified(y: mx.array, m: mx.array, norms: mx.array) -> mx.array:
    """m / norms * y; y: (..., O), m and norms: (O,).

    The backward pass needs the result, which the next operation often keeps anyway, and not y.
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


def put(model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
    """Add layers to the last `count` blocks; parameters: of mlx-lm's adapter_config.json."""
    linear_to_lora_layers(model, count, parameters, use_dora=True)
    put_dora(model)


def put_dora(model: nn.Module) -> None:
    """Replace the DoRA layers that mlx-lm has just added to a model with ours."""
    replaced = [
        (name, DoRA.from_base(layer))
        for name, layer in model.named_modules()
        if type(layer) is DoRALinear
    ]
    model.update_modules(tree_unflatten(replaced))


def fused_rows(
    weight: mx.array, parts: Mapping[str, mx.array], scale: float, rows: slice
) -> mx.array:
    """Rows of m * (W + scale * B A) / |W + scale * B A|, with the norm of each row; m: (O,)."""
    weight = lora.fused_rows(weight, parts, scale, rows)
    magnitudes = parts["m"][rows].astype(mx.float32)
    return (magnitudes / mx.linalg.norm(weight, axis=1))[:, None] * weight


def limits(model: nn.Module) -> str:
    """A sentence for the user if mlx-lm cannot load the adapter of this model; or ""."""
    layers = (module for module in model.modules() if isinstance(module, DoRA))
    bits = {getattr(layer.linear, "bits", 32) for layer in layers}
    odd = ", ".join(str(each) for each in sorted(bits) if 32 % each)
    if not odd:
        return ""
    return (
        f"--use-dora: mlx-lm cannot load this adapter, since it has layers of {odd} bits; use it "
        "with your_ai, or fuse it"
    )


Layer = DoRA
