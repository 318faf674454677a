"""A gated MLP that runs in slices of its inner features.

down(act(gate(x)) * up(x)) is a sum over inner features, so each slice of features can be
computed alone. Only the activations of one slice (about ten arrays in the backward pass) are in
memory at a time, and its weights are dequantized once for all tokens. When the backward pass
recomputes a block, the output of the MLP is usually not needed, so nothing is computed twice and
slicing costs no extra arithmetic. The forward pass needs only three such arrays, so its slices
are larger; without quantization it is whole, because a slice of a weight is a copy.

Shapes: B rows, T tokens per row, D hidden size, F inner features, n features per slice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from your_ai.config.adapter_facts import VECTORS
from your_ai.engine.dequantized import DequantizedLinear
from your_ai.memory.facts import backward_features, forward_features, slice_width
from your_ai.nets.adapter_kinds import ADAPTED, NORMED, NORMS
from your_ai.nets.mlx_types import Arrays, custom_function
from your_ai.nets.model import DropoutKeys, KeyedDropout
from your_ai.nets.numerics import device
from your_ai.nets.parts import arrays_of, put, skeleton

INWARD = ("gate_proj", "up_proj")
OUTWARD = "down_proj"
ROWWISE = ("weight", "scales", "biases", "bias")
LINEAR = (nn.Linear, nn.QuantizedLinear, DequantizedLinear)


class SlicedMLP(nn.Module):
    """An MLP of gate_proj, up_proj and down_proj, with the same children as the original."""

    _base: type[nn.Module]
    _dropout_keys: DropoutKeys

    @staticmethod
    def from_base(base: nn.Module, dropout_keys: DropoutKeys) -> SlicedMLP:
        """base: an MLP for which `can_be_sliced` is true."""
        twin = SlicedMLP()
        vars(twin).update({n: v for n, v in vars(base).items() if n != "_no_grad"})
        dict.update(twin, base)
        # Keep the class, not `base`: a later skeleton has other children than `base`.
        twin._base, twin._dropout_keys = type(base), dropout_keys
        return twin

    def __call__(self, x: mx.array) -> mx.array:
        """x: (B, T, D) -> (B, T, D)"""
        inner, hidden = inner_features(self), x.shape[-1]
        slices = slices_of(inner, backward_features(hidden))
        if len(slices) == 1 or not knows_its_norms(self):
            return self._base.__call__(self, x)
        arrays = arrays_of(self)
        names = [name for name, _ in tree_flatten(self.trainable_parameters())]
        every = ["", *names]  # the input has no name
        inside, kept = skeleton(self), self._dropout_keys.kept

        def function_of(part: slice) -> Callable[..., mx.array]:
            """Make f(x, *trained) -> (B, T, D), the share of the features `part` in the output.

            trained: the trained arrays of these features only.
            """

            def run(x: mx.array, *trained: mx.array) -> mx.array:
                # A new skeleton per call: arrays left in a shared one would keep the graph alive.
                own = skeleton(inside)
                put(own, cut(arrays, part, inner) | dict(zip(names, trained, strict=True)))
                put(own, features_of_dropout(own, part))
                compute_in_turn(own)
                return self._base.__call__(own, x)

            return kept(run)

        functions = [function_of(part) for part in slices]
        ahead = slices_of(inner, forward_features(hidden) if is_quantized(self) else inner)
        shares = [function_of(part) for part in ahead]

        def of(part: slice, trained: list[mx.array]) -> list[mx.array]:
            return list(cut(dict(zip(names, trained, strict=True)), part, inner).values())

        def output(x: mx.array, *trained: mx.array) -> mx.array:
            first = total = shares[0](x, *of(ahead[0], list(trained)))
            for part, function in zip(ahead[1:], shares[1:], strict=True):
                given = mx.depends([x], [total])[0]
                share = function(given, *of(part, list(trained)))
                total = total.astype(mx.float32) + share.astype(mx.float32)
            return total.astype(first.dtype)

        forward = custom_function(output)

        @forward.vjp
        def backward(primals: Any, cotangent: mx.array, output: mx.array) -> tuple[mx.array, ...]:
            # MLX gives a lone argument itself, not a list of one.
            x, *trained = primals = list(primals) if names else [primals]
            done = [cotangent]  # prevents mx.compile from reusing arrays of the forward pass
            grads: list[mx.array | None] = [
                gradient_to_fill(name, primal) for name, primal in zip(every, primals, strict=True)
            ]
            for part, function in zip(slices, functions, strict=True):
                given = [x, *of(part, trained), cotangent]
                *given, now = mx.depends(given, done)
                _, more = mx.vjp(function, given, [now])
                found = [
                    gathered(name, grad, new, part, inner)
                    for name, grad, new in zip(every, grads, more, strict=True)
                ]
                grads = [*found]
                # An array for which other operations wait would be copied when it is filled.
                done = [g for name, g in zip(every, found, strict=True) if not is_weight(name)]
            return tuple(g.astype(primal.dtype) for g, primal in zip(found, primals, strict=True))

        return forward(x, *(arrays[name] for name in names))


def compute_in_turn(mlp: nn.Module) -> None:
    """Change `mlp`, in place, to begin each projection when the one before it is computed.

    MLX would compute both inward projections side by side and keep the arrays of both.
    """
    done: list[mx.array] = []

    def in_turn(layer: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        def run(x: mx.array) -> mx.array:
            done[:] = [layer(mx.depends([x], done)[0] if done else x)]
            return done[0]

        return run

    dict.update(mlp, {name: in_turn(mlp[name]) for name in INWARD})


def slices_of(inner: int, about: int) -> list[slice]:
    """Cut F = `inner` features into slices of about equal size, near `about` features each."""
    step = slice_width(inner, about)
    return [slice(i, min(i + step, inner)) for i in range(0, inner, step)]


def can_be_sliced(module: Any) -> bool:
    """Return whether `module` is a gated MLP of plain linear layers, with or without adapters, that
    computes each inner feature independently of the others."""
    if not isinstance(module, nn.Module) or set(module.children()) != {*INWARD, OUTWARD}:
        return False
    layers = map(base_of, module.children().values())
    plain = all(isinstance(layer, LINEAR) and set(layer) <= set(ROWWISE) for layer in layers)
    return plain and is_separable(module)


def knows_its_norms(mlp: nn.Module) -> bool:
    """Return whether the layers were given their norms, which need the whole weight, no slice."""
    return all(NORMS in layer for layer in mlp.children().values() if isinstance(layer, NORMED))


def is_separable(mlp: nn.Module) -> bool:
    """Return whether each inner feature depends only on its own gate and up projection.

    Tested on random projections; the weights are not needed.
    """
    inner = inner_features(mlp)
    twin: nn.Module = skeleton(mlp)
    gate, up = 3 * mx.random.normal((2, 1, 1, inner), key=mx.random.key(0))

    def product(part: slice) -> mx.array:
        stand_ins = (lambda _: gate[..., part], lambda _: up[..., part], lambda product: product)
        dict.update(twin, zip((*INWARD, OUTWARD), stand_ins, strict=True))
        return twin(gate)

    try:
        halves = [product(slice(inner // 2)), product(slice(inner // 2, inner))]
        whole = product(slice(inner))
        return bool(mx.allclose(mx.concatenate(halves, -1), whole, rtol=1e-5, atol=1e-6))
    except (AttributeError, TypeError, ValueError):  # the MLP uses its layers in another way
        return False


def inner_features(mlp: nn.Module) -> int:
    return int(base_of(mlp[INWARD[0]]).weight.shape[0])


def is_quantized(mlp: nn.Module) -> bool:
    """Return whether a layer is quantized; others may be dense."""
    return any("scales" in base_of(layer) for layer in mlp.children().values())


def base_of(layer: nn.Module) -> nn.Module:
    """A linear layer of the model itself, with or without an adapter."""
    return layer.linear if type(layer) in ADAPTED else layer


def axis_of(path: str) -> int | None:
    """The axis of an MLP's array that runs over inner features; None if it has no such axis."""
    layer, leaf = path.split(".")[0], path.split(".")[-1]
    if layer in INWARD:
        return {**dict.fromkeys((*ROWWISE, *VECTORS, NORMS), 0), "lora_b": 1}.get(leaf)
    return {"weight": 1, "scales": 1, "biases": 1, "lora_a": 0}.get(leaf)


def cut(arrays: Arrays, part: slice, inner: int) -> Arrays:
    """Cut the arrays of an MLP to the inner features `part` of F = `inner`.

    Arrays without inner features stay whole. The bias of down_proj goes to the first slice; it
    is zero in the others.
    """
    found: Arrays = {}
    for path, array in arrays.items():
        axis = axis_of(path)
        if axis is None:
            later = is_bias_of_sum(path) and part.start > 0
            found[path] = mx.zeros_like(array) if later else array
            continue
        here = of_features(array.shape[axis], part, inner)
        cut_out = array[(slice(None),) * axis + (here,)]
        # CUDA's products with quantized weights take no columns of a larger array. Elsewhere MLX
        # would copy those of all slices at once.
        is_packed = f"{path.rpartition('.')[0]}.scales" in arrays
        found[path] = mx.contiguous(cut_out) if is_packed and device() == "cuda" else cut_out
    return found


def is_weight(path: str) -> bool:
    """Return whether an array of an MLP is a whole weight."""
    return path.endswith(".weight")


def is_bias_of_sum(path: str) -> bool:
    """Return whether an array of an MLP is the bias that is added to the sum over its slices."""
    return path.startswith(OUTWARD) and path.endswith(".bias")


def of_features(width: int, part: slice, inner: int) -> slice:
    """The places of the features `part` of F = `inner` along an axis of `width` entries, which
    are fewer than F where features are packed or share scales."""
    return slice(part.start * width // inner, part.stop * width // inner)


def gradient_to_fill(path: str, primal: mx.array) -> mx.array | None:
    """An array for the gradient of `primal`, to be filled slice by slice; None if its slices are
    added up.

    path: of a trained array; empty for the input.
    """
    return None if axis_of(path) is None else mx.zeros_like(primal)


def gathered(
    path: str, before: mx.array | None, grad: mx.array, part: slice, inner: int
) -> mx.array:
    """Add the gradient of the features `part` of F = `inner` to the gradient so far.

    It is written into the whole array in place: parts that are joined at the end exist twice.
    Sums over slices are in float32, except for the input, whose path is empty.
    """
    axis = axis_of(path)
    if axis is None:
        grad = grad.astype(mx.float32) if path else grad
        if before is None or is_bias_of_sum(path):  # which is added once, with the first slice
            return grad if before is None else before
        return before + grad
    assert before is not None
    before[(slice(None),) * axis + (of_features(before.shape[axis], part, inner),)] = grad
    return before


def features_of_dropout(mlp: nn.Module, part: slice) -> Arrays:
    """The feature indices for the dropout before the adapter of down_proj."""
    layer = mlp[OUTWARD].get("dropout")
    if not isinstance(layer, KeyedDropout):
        return {}
    return {f"{OUTWARD}.dropout._features": mx.arange(part.start, part.stop, dtype=mx.uint32)}


def replace_mlps(block: nn.Module, dropout_keys: DropoutKeys) -> None:
    """Replace the MLPs of a block with SlicedMLPs, where possible."""
    for name in ("mlp", "feed_forward"):
        child = block.get(name)
        if child is not None and can_be_sliced(child):
            block[name] = SlicedMLP.from_base(child, dropout_keys)
