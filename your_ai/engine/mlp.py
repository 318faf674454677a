"""A gated MLP whose backward pass goes through slices of its inner features.

down(act(gate(x)) * up(x)) is a sum over inner features, so that a slice of them needs no
other: its arrays, some ten of them, exist alone, and its weights are dequantized once
however many tokens there are. In the backward pass of a block that is computed again the
MLP's output is most often not needed, and then nothing is computed twice: slices cost no
arithmetic. The forward pass holds three such arrays, and is not sliced.

Shapes: B rows, T tokens of a row, D hidden size, F inner features, n features of a slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.lora import LoRALinear

from your_ai.engine.dequantized import DequantizedLinear
from your_ai.memory.sizes import FEWEST_FEATURES
from your_ai.nets.dora import NORMS, DoRA
from your_ai.nets.model import DropoutKeys, KeyedDropout
from your_ai.nets.parts import Arrays, arrays_of, put, skeleton

STEP = 128  # features, of which quantized weights have whole groups
INWARD = ("gate_proj", "up_proj")
OUTWARD = "down_proj"
ADAPTED = (LoRALinear, DoRA)
ROWWISE = ("weight", "scales", "biases", "bias")
LINEAR = (nn.Linear, nn.QuantizedLinear, DequantizedLinear)


class SlicedMLP(nn.Module):
    """An MLP of gate_proj, up_proj and down_proj, by the same children."""

    @staticmethod
    def from_base(base: nn.Module, dropout_keys: DropoutKeys) -> SlicedMLP:
        """base: one that `can_be_sliced`."""
        twin = SlicedMLP()
        vars(twin).update({n: v for n, v in vars(base).items() if n != "_no_grad"})
        dict.update(twin, base)
        # Its class and not `base`, whose children are others than those of a later skeleton.
        twin._base, twin._dropout_keys = type(base), dropout_keys
        return twin

    def __call__(self, x: mx.array) -> mx.array:
        """x: (B, T, D) -> (B, T, D)"""
        inner = inner_features(self)
        slices = slices_of(inner, max(FEWEST_FEATURES, x.shape[-1] // 2))
        if len(slices) == 1 or not knows_its_norms(self):
            return self._base.__call__(self, x)
        arrays = arrays_of(self)
        names = [name for name, _ in tree_flatten(self.trainable_parameters())]
        inside, kept = skeleton(self), self._dropout_keys.kept

        def function_of(part: slice) -> Callable[..., mx.array]:
            """f(x, *trained): (B, T, D), what the features `part` add; trained: of them alone."""

            def run(x: mx.array, *trained: mx.array) -> mx.array:
                # One of its own: what is left in it would hold the graph that holds it.
                own = skeleton(inside)
                put(own, cut(arrays, part, inner) | dict(zip(names, trained, strict=True)))
                put(own, features_of_dropout(own, part))
                return self._base.__call__(own, x)

            return kept(run)

        functions = [function_of(part) for part in slices]
        whole = function_of(slice(0, inner))

        def of(part: slice, trained: list[mx.array]) -> list[mx.array]:
            return list(cut(dict(zip(names, trained, strict=True)), part, inner).values())

        forward = mx.custom_function(lambda x, *trained: whole(x, *trained))

        @forward.vjp
        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
            x, *trained = primals
            done = [cotangent]  # nor may compiling share what the forward pass computed
            grads: list[Any] = [None] * len(primals)
            for part, function in zip(slices, functions, strict=True):
                given = [x, *of(part, trained), cotangent]
                *given, now = mx.depends(given, done)
                _, more = mx.vjp(function, given, [now])
                grads = list(map(gathered, ["", *names], grads, more))
                done = [g[-1] if isinstance(g, list) else g for g in grads]
            return tuple(
                mx.concatenate(grad, axis_of(name)) if isinstance(grad, list) else grad
                for name, grad in zip(["", *names], grads, strict=True)
            )

        return forward(x, *(arrays[name] for name in names))


def slices_of(inner: int, about: int) -> list[slice]:
    """Slices of F = `inner` features, of about equal size, `about` at once."""
    count = -(-inner // about)
    step = -(-inner // count // STEP) * STEP
    return [slice(i, min(i + step, inner)) for i in range(0, inner, step)]


def can_be_sliced(module: Any) -> bool:
    """Whether this is a gated MLP of plain linear layers, with LoRA, DoRA or neither, between
    which no feature meets another."""
    if not isinstance(module, nn.Module) or set(module.children()) != {*INWARD, OUTWARD}:
        return False
    layers = [
        layer.linear if type(layer) in ADAPTED else layer for layer in module.children().values()
    ]
    plain = all(
        isinstance(layer, LINEAR) and getattr(layer, "mode", "affine") == "affine"
        for layer in layers
    )
    return plain and is_separable(module)


def knows_its_norms(mlp: nn.Module) -> bool:
    """Whether DoRA layers are given their norms, which a slice of a weight does not tell."""
    return all(NORMS in layer for layer in mlp.children().values() if isinstance(layer, DoRA))


def is_separable(mlp: nn.Module) -> bool:
    """Whether each inner feature is a function of its own gate and up projection alone.

    Tried out on random projections; the weights are not needed.
    """
    inner, twin = inner_features(mlp), skeleton(mlp)
    gate, up = 3 * mx.random.normal((2, 1, 1, inner), key=mx.random.key(0))

    def product(part: slice) -> mx.array:
        stand_ins = (lambda _: gate[..., part], lambda _: up[..., part], lambda product: product)
        dict.update(twin, zip((*INWARD, OUTWARD), stand_ins, strict=True))
        return twin(gate)

    try:
        halves = [product(slice(inner // 2)), product(slice(inner // 2, inner))]
        whole = product(slice(inner))
        return mx.allclose(mx.concatenate(halves, -1), whole, rtol=1e-5, atol=1e-6).item()
    except (AttributeError, TypeError, ValueError):  # it wants more of its layers
        return False


def inner_features(mlp: nn.Module) -> int:
    layer = mlp[INWARD[0]]
    return (layer.linear if "linear" in layer else layer).weight.shape[0]


def axis_of(path: str) -> int | None:
    """The axis of an MLP's array that runs over inner features; None where there is none."""
    layer, leaf = path.split(".")[0], path.split(".")[-1]
    if layer in INWARD:
        return {**dict.fromkeys((*ROWWISE, "m", NORMS), 0), "lora_b": 1}.get(leaf)
    return {"weight": 1, "scales": 1, "biases": 1, "lora_a": 0}.get(leaf)


def cut(arrays: Arrays, part: slice, inner: int) -> Arrays:
    """An MLP's arrays with the inner features `part` alone, of F = `inner`; the rest as it is.

    The bias of down_proj is added with the first slice.
    """
    found: Arrays = {}
    for path, array in arrays.items():
        axis = axis_of(path)
        if axis is None:
            later = path.startswith(OUTWARD) and path.endswith(".bias") and part.start > 0
            found[path] = mx.zeros_like(array) if later else array
            continue
        width = array.shape[axis]  # fewer than F where features are packed, or share scales
        here = slice(part.start * width // inner, part.stop * width // inner)
        found[path] = array[(slice(None),) * axis + (here,)]
    return found


def gathered(path: str, before: Any, grad: mx.array) -> Any:
    """The gradient of an array so far, with another slice's: a sum, or a list of slices."""
    if axis_of(path) is not None:
        return [*(before or ()), grad]
    return grad if before is None else before + grad


def features_of_dropout(mlp: nn.Module, part: slice) -> Arrays:
    """The features that the dropout before down_proj's adapter is drawn for."""
    layer = mlp[OUTWARD].get("dropout")
    if not isinstance(layer, KeyedDropout):
        return {}
    return {f"{OUTWARD}.dropout._features": mx.arange(part.start, part.stop, dtype=mx.uint32)}


def put_sliced(block: nn.Module, dropout_keys: DropoutKeys) -> None:
    """Put these in place of a block's MLPs that are trained, where they can be."""
    for name in ("mlp", "feed_forward"):
        child = block.get(name)
        if can_be_sliced(child) and tree_flatten(child.trainable_parameters()):
            block[name] = SlicedMLP.from_base(child, dropout_keys)
