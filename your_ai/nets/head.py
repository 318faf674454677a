"""A model's head as before -> linear -> after, and its weight in slices of the vocabulary.

The weight has one row a token. Whoever walks it in slices reads, and dequantizes, each row
once, however many hidden states there are; `losses` does.

Shapes: S hidden states, D hidden size, V vocabulary, n tokens of a slice.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import forgiving
from your_ai.memory.sizes import HEAD_SLICE_BYTES

DENSE = (nn.Linear, nn.Embedding)
Function = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class HeadSlice:
    """Consecutive rows of a head's weight, at hand.

    forward: (S, D) -> (S, n) their products with hidden states, and the bias;
    backward: (S, n) -> (S, D) the weighted sums of the rows.
    """

    count: int
    forward: Function
    backward: Function


class HeadRows(Protocol):
    """Where the rows of a head's weight come from: a layer, or a file."""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        """The rows from `start` to `stop`, not before the arrays `after` are computed."""

    def gather(self, tokens: mx.array) -> mx.array:
        """(S, D) the rows of `tokens`, (S,)."""


def part_of(arrays: dict[str, mx.array], quantization: dict[str, Any]) -> HeadSlice:
    """The part with these arrays, some rows of each that a layer has, by their names there.

    quantization: the arguments of mx.dequantize, or {} where there are no scales. On the
    CPU the rows are dequantized once, for both directions.
    """
    count, bias = arrays["weight"].shape[0], arrays.get("bias")
    if quantization and mx.default_device().type != mx.cpu:
        packed = _packed(arrays)

        def forward(hidden: mx.array) -> mx.array:
            return mx.quantized_matmul(hidden, *packed, transpose=True, **quantization)

        def backward(shares: mx.array) -> mx.array:
            return mx.quantized_matmul(shares, *packed, transpose=False, **quantization)

    else:
        weight = dense(arrays, quantization)

        def forward(hidden: mx.array) -> mx.array:
            return hidden @ weight.T

        def backward(shares: mx.array) -> mx.array:
            return shares @ weight

    if bias is None:
        return HeadSlice(count, forward, backward)
    return HeadSlice(count, lambda hidden: forward(hidden) + bias, backward)


def dense(arrays: dict[str, mx.array], quantization: dict[str, Any]) -> mx.array:
    """The rows themselves."""
    return mx.dequantize(*_packed(arrays), **quantization) if quantization else arrays["weight"]


def rows_at_once(slice_bytes: int, inputs: int, bits: int = 32) -> int:
    """How many rows of a weight take `slice_bytes` in float32, or while they are dequantized.

    Bits that do not divide 32 MLX unpacks one by one on the CPU: an array for each.
    """
    return max(1, slice_bytes // (4 * inputs * (1 if 32 % bits == 0 else bits)))


def _packed(arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array, mx.array | None]:
    return arrays["weight"], arrays["scales"], arrays.get("biases")


@dataclass(frozen=True)
class LayerRows:
    """The rows of a linear or embedding layer, quantized or not.

    Its arrays are looked up when they are used: a compiled function wants its own.
    """

    layer: nn.Module

    @property
    def shape(self) -> tuple[int, int]:
        if "scales" in self.layer:
            count, groups = self.layer.scales.shape
            return count, groups * self.layer.group_size
        return self.layer.weight.shape

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        return part_of(self._slice(start, stop, after), self._quantization())

    def weight(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """(n, D) the rows themselves, not before the arrays `after` are computed."""
        return dense(self._slice(start, stop, after), self._quantization())

    def gather(self, tokens: mx.array) -> mx.array:
        arrays = {name: array[tokens] for name, array in self._arrays().items()}
        return dense(arrays, self._quantization())

    def _slice(self, start: int, stop: int, after: Sequence[mx.array]) -> dict[str, mx.array]:
        arrays = {name: array[start:stop] for name, array in self._arrays().items()}
        if not after:
            return arrays
        return dict(zip(arrays, mx.depends(list(arrays.values()), list(after)), strict=True))

    def _arrays(self) -> dict[str, mx.array]:
        names = ("weight", "scales", "biases", "bias")
        return {name: self.layer[name] for name in names if self.layer.get(name) is not None}

    def _quantization(self) -> dict[str, Any]:
        if "scales" not in self.layer:
            return {}
        mode = getattr(self.layer, "mode", "affine")
        return {"group_size": self.layer.group_size, "bits": self.layer.bits, "mode": mode}


@dataclass(frozen=True)
class LinearHead:
    """logits = after(linear(before(hidden))).

    before: (S, D) -> (S, D); after: elementwise on (S, n); None where nothing is done.
    slice_bytes: of a slice's weights or logits in float32; the pass holds up to ten times
    that, and slices much smaller than the default take longer.
    """

    rows: HeadRows
    before: Function | None = None
    after: Function | None = None
    slice_bytes: int = HEAD_SLICE_BYTES

    def inputs(self, hidden: mx.array) -> mx.array:
        """(S, D) what the linear layer is given."""
        return hidden if self.before is None else self.before(hidden)

    def logits(self, products: mx.array) -> mx.array:
        """The logits from what the linear layer gives."""
        return products if self.after is None else self.after(products)

    def logits_and_slopes(self, products: mx.array) -> tuple[mx.array, mx.array | None]:
        """The logits and their derivatives in `products`; None where those are 1."""
        if self.after is None:
            return products, None
        (logits,), (slopes,) = mx.vjp(self.after, [products], [mx.ones_like(products)])
        return logits, slopes

    def slices(self, count: int) -> Iterator[tuple[int, int]]:
        """(start, stop) of slices that suit `count` hidden states."""
        vocabulary, width = self.rows.shape
        step = max(1, self.slice_bytes // (4 * max(count, width)))
        for start in range(0, vocabulary, step):
            yield start, min(start + step, vocabulary)


# -- finding it in a model ----------------------------------------------------------------


def linear_head(head: nn.Module, hidden_size: int, dtype: mx.Dtype) -> LinearHead | None:
    """`head`, from `model.split`, taken apart; None where it is not before -> linear -> after.

    The layers of the head are tried in turn: with a stand-in for the right one, what the
    head gives the stand-in is `before`, and what it makes of the answer is `after`. So
    tied embeddings, logit scales and soft caps are as the architecture has them. Checked
    against the head itself on random hidden states.
    """
    hidden = mx.random.normal((5, hidden_size), key=mx.random.key(0)).astype(dtype)
    for path in _candidates(head):
        with forgiving():  # an architecture laid out in another way
            found = _taken_apart(head, path, hidden)
            if _agrees(found, head, hidden):
                return found
    return None


def _candidates(head: nn.Module) -> list[tuple[str, ...]]:
    """Paths of layers that may be the last one: the head's own, then its trunk's."""
    children = [((name,), child) for name, child in _modules(head)]
    below = [
        ((*path, name), child)
        for path, parent in children
        if "lora_a" not in parent
        for name, child in _modules(parent)
    ]
    return [path for path, layer in children + below if _is_known(layer)]


def _modules(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in parent.items() if isinstance(child, nn.Module)]


def _is_known(layer: nn.Module) -> bool:
    if hasattr(layer, "rows"):  # in a file
        return True
    quantized = "scales" in layer and layer.weight.ndim == 2 and "lora_a" not in layer
    return quantized or type(layer) in DENSE


class _StandIn(nn.Module):
    """Stands where a head has its linear layer, with its attributes; records what it is given."""

    def __init__(self, layer: nn.Module, answer: mx.array) -> None:
        vars(self).update(vars(layer))
        dict.update(self, layer)
        vars(self)["given"], vars(self)["answer"] = [], answer

    def __call__(self, x: mx.array) -> mx.array:
        self.given.append(x)
        return self.answer

    def as_linear(self, x: mx.array) -> mx.array:
        return self(x)


def _run(
    head: nn.Module, path: tuple[str, ...], hidden: mx.array, answer: mx.array
) -> tuple[mx.array, mx.array]:
    """What the layer at `path` is given for `hidden`, and what the head makes of `answer`.

    On a copy of the modules along the path, made anew each time: arrays of the head itself
    are then those of the call.
    """
    node = shell = copy.copy(head)
    for name in path[:-1]:
        node[name] = copy.copy(node[name])
        node = node[name]
    stand_in = node[path[-1]] = _StandIn(node[path[-1]], answer)
    result = shell(hidden)
    (given,) = stand_in.given
    return given, result


def _taken_apart(head: nn.Module, path: tuple[str, ...], hidden: mx.array) -> LinearHead:
    layer = head
    for name in path:
        layer = layer[name]
    width = hidden.shape[-1]

    def before(hidden: mx.array) -> mx.array:
        return _run(head, path, hidden[None], mx.zeros((1, len(hidden), 1)))[0][0]

    def after(products: mx.array) -> mx.array:
        unused = mx.zeros((1, len(products), width), hidden.dtype)
        return _run(head, path, unused, products[None])[1][0]

    states, products = hidden[None], mx.zeros((1, len(hidden), 1))
    given, result = _run(head, path, states, products)
    return LinearHead(
        getattr(layer, "rows", None) or LayerRows(layer),
        before=None if given is states else before,
        after=None if result is products else after,
    )


def _agrees(found: LinearHead, head: nn.Module, hidden: mx.array) -> bool:
    """Whether slices give the head's own logits, and `after` is elementwise."""
    whole = head(hidden[None])[0].astype(mx.float32)
    if whole.shape != (len(hidden), found.rows.shape[0]):
        return False
    inputs = found.inputs(hidden)
    distance = mx.array(0.0)
    for start, stop in found.slices(len(hidden)):
        products = found.rows.part(start, stop, [distance]).forward(inputs)
        logits = found.logits(products).astype(mx.float32)
        middle = logits[1:4, 1::2] - found.logits(products[1:4, 1::2]).astype(mx.float32)
        distance += mx.square(logits - whole[:, start:stop]).sum() + mx.square(middle).sum()
        mx.eval(distance)
    tolerance = 1e-3 if hidden.dtype == mx.float32 else 2e-2
    return (distance <= tolerance**2 * mx.square(whole).sum()).item()
