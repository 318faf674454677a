"""The head of a model as before -> linear -> after, and its weight in slices of the vocabulary.

The weight has one row per token of the vocabulary. A pass over its slices, as in `losses`,
reads and dequantizes each row once for all hidden states.

Shapes: S hidden states, D hidden size, V vocabulary, n tokens per slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.errors import suppress_model_errors
from your_ai.memory.sizes import HEAD_SLICE_BYTES
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.rounding import dense, quantization_of, quantized_arrays
from your_ai.nets.split import StandIn, module_at, replaced
from your_ai.rng import derive_seed
from your_ai.run.checkpoint import SCORE_WEIGHT as WEIGHT

# The head of a reward model: one number per text, r = w . h, from a hidden state


NAME = WEIGHT.partition(".")[0]  # of the layer, in the model


@dataclass(frozen=True)
class ScoreHead:
    """r = w . before(hidden), in float32."""

    layer: nn.Linear
    """D -> 1, without a bias. Its weight is looked up at each use, because it is trained."""
    before: Callable[[mx.array], mx.array] | None = None
    """(S, D) -> (S, D); None for the identity."""

    def inputs(self, hidden: mx.array) -> mx.array:
        """(S, D) input of the layer."""
        return hidden if self.before is None else self.before(hidden)

    def scores(self, hidden: mx.array) -> mx.array:
        """(S,) float32."""
        return self.layer(self.inputs(hidden).astype(mx.float32)).squeeze(-1)

    @property
    def trained(self) -> Arrays:
        """The trained arrays, by name in the model."""
        return {WEIGHT: self.layer.weight}

    def put(self, trained: Arrays) -> None:
        """Set what `trained` returns."""
        self.layer.weight = trained[WEIGHT]

    def gradients(
        self, hidden: mx.array, weights: mx.array, scale: mx.array
    ) -> tuple[mx.array, Arrays]:
        """The gradients of -scale * sum(weights * scores), for `hidden`, (S, D), and `trained`."""
        inputs = self.inputs(hidden)
        slopes = (-weights * scale)[:, None]
        grad = (slopes * self.layer.weight).astype(inputs.dtype)
        if self.before is not None:
            _, (grad,) = mx.vjp(self.before, [hidden], [grad])
        return grad, {WEIGHT: slopes.T @ inputs.astype(mx.float32)}


def put_score_head(model: nn.Module, hidden_size: int, seed: int) -> nn.Linear:
    """Add a new score head to a model whose other layers are frozen, and return it.

    Its weight is normal with variance 1 / (D + 1), as in Stiennon et al. (2020), arXiv:2009.01325.
    """
    layer = nn.Linear(hidden_size, 1, bias=False)
    key = mx.random.key(derive_seed(seed, NAME) % 2**64)
    layer.weight = mx.random.normal((1, hidden_size), key=key) / math.sqrt(hidden_size + 1)
    model[NAME] = layer
    return layer


def score_layer(model: nn.Module) -> nn.Linear | None:
    """The score head of a model; None if it is not a reward model."""
    return model.get(NAME)


DENSE = (nn.Linear, nn.Embedding)
Function = Callable[[mx.array], mx.array]


@dataclass(frozen=True)
class HeadSlice:
    """Consecutive rows of a head's weight, in memory."""

    count: int
    """n"""
    forward: Function
    """(S, D) -> (S, n): the products of hidden states with the rows, plus the bias."""
    backward: Function
    """(S, n) -> (S, D): the weighted sums of the rows."""

    def sum_of_rows(
        self, weights: mx.array, dtype: mx.Dtype, size: mx.array | None = None
    ) -> mx.array:
        """(S, D) float32, the weighted sums of the rows, computed in `dtype`.

        weights: (S, n) float32. size: (S, 1), the sum of their absolute values, if it is known.
        """
        if dtype != mx.float16:
            return self.backward(weights.astype(dtype)).astype(mx.float32)
        size = mx.abs(weights).sum(-1, keepdims=True) if size is None else size
        size = mx.maximum(size, 1e-30)  # the plain sum may overflow float16
        return size * self.backward((weights / size).astype(dtype)).astype(mx.float32)


class HeadRows(Protocol):
    """The source of the rows of a head's weight: a layer or a file."""

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        """The rows from `start` to `stop`, computed only after the arrays `after`."""

    def gather(self, tokens: mx.array) -> mx.array:
        """(S, D) the rows of the tokens `tokens`, (S,)."""


@runtime_checkable
class SomeTrained(HeadRows, Protocol):
    """Rows of which some are trained, or all, or low-rank matrices that are added to them."""

    @property
    def trained(self) -> Arrays:
        """The trained arrays, by name in the model; of rows, (K, D) together."""

    @property
    def ids(self) -> np.ndarray:
        """(K,) the tokens whose rows depend on them, ascending."""

    @property
    def pieces(self) -> list[int]:
        """The numbers of successive `ids` whose gradients are computed together."""

    @property
    def axis(self) -> int:
        """The axis of the tokens in the gradients of slices."""

    def put(self, arrays: Arrays) -> None:
        """Set what `trained` returns."""

    def trained_part(self, first: int, last: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        """The trained rows from `first` to `last`, computed only after the arrays `after`."""

    def add_gradients(
        self, found: dict[str, list[mx.array]], first: int, shares: mx.array, inputs: mx.array
    ) -> list[mx.array]:
        """Add the gradients of a slice of trained rows, from `first` on, to `found`; return them.

        found: by name as in `trained`, pieces to be joined along `axis`. shares: (S, n) float32,
        the gradients of the products. inputs: (S, D) float32.
        """


def part_of(arrays: dict[str, mx.array], quantization: dict[str, Any]) -> HeadSlice:
    """Make a HeadSlice of some rows of a layer.

    arrays: these rows of each array of the layer, by name.
    quantization: the arguments of mx.dequantize, or {} if the layer is not quantized.

    On the CPU the rows are dequantized once for both directions.
    """
    count, bias = arrays["weight"].shape[0], arrays.get("bias")
    if quantization and mx.default_device().type != mx.cpu:
        packed = quantized_arrays(arrays)

        def forward(hidden: mx.array) -> mx.array:
            return mx.quantized_matmul(hidden, *packed, transpose=True, **quantization)

        def backward(shares: mx.array) -> mx.array:
            return mx.quantized_matmul(shares, *packed, transpose=False, **quantization)

    else:
        made: dict[mx.Dtype, mx.array] = {}

        def weight(dtype: mx.Dtype) -> mx.array:
            if dtype not in made:
                made[dtype] = dense(arrays, quantization, dtype)
            return made[dtype]

        def forward(hidden: mx.array) -> mx.array:
            return hidden @ weight(hidden.dtype).T

        def backward(shares: mx.array) -> mx.array:
            return shares @ weight(shares.dtype)

    if bias is None:
        return HeadSlice(count, forward, backward)
    return HeadSlice(count, lambda hidden: forward(hidden) + bias, backward)


def rows_at_once(slice_bytes: int, inputs: int, bits: int = 32, mode: str = "affine") -> int:
    """The number of rows of a weight that need `slice_bytes` in float32, or to dequantize.

    On the CPU, MLX unpacks bit widths that do not divide 32 bit by bit, one array per bit, and
    looks up 4-bit floats, which takes twice the arrays of integers.
    """
    arrays = 1 if 32 % bits == 0 else bits
    if mode != "affine" and bits == 4:
        arrays = 2
    return max(1, slice_bytes // (4 * inputs * arrays))


@dataclass(frozen=True)
class LayerRows:
    """The rows of a linear or embedding layer, quantized or not.

    The arrays are looked up at each use, because a compiled function replaces them.
    """

    layer: nn.Module

    @property
    def shape(self) -> tuple[int, int]:
        if "scales" in self.layer:
            count, groups = self.layer.scales.shape
            return count, groups * self.layer.group_size
        shape: tuple[int, int] = self.layer.weight.shape
        return shape

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        return part_of(self._slice(start, stop, after), self._quantization())

    def weight(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> mx.array:
        """(n, D) the dense rows, computed only after the arrays `after`."""
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
        found = quantization_of(self.layer)
        return {} if found is None else found.options


@dataclass(frozen=True)
class ResizedRows:
    """The first `count` rows of an embedding or a head, with zeros where it has fewer; `HeadRows`.

    Models of one family may have more rows than their common tokenizer has tokens.
    """

    rows: HeadRows
    count: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.count, self.rows.shape[1]

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        inside = min(stop, self.rows.shape[0])
        if inside <= start:
            width = self.rows.shape[1]
            return HeadSlice(
                stop - start,
                lambda hidden: mx.zeros((len(hidden), stop - start), hidden.dtype),
                lambda shares: mx.zeros((len(shares), width), shares.dtype),
            )
        part = self.rows.part(start, inside, after)
        if inside == stop:
            return part
        return HeadSlice(
            stop - start,
            lambda hidden: mx.pad(part.forward(hidden), [(0, 0), (0, stop - inside)]),
            lambda shares: part.backward(shares[:, : inside - start]),
        )

    def gather(self, tokens: mx.array) -> mx.array:
        known = tokens < self.rows.shape[0]
        found = self.rows.gather(mx.where(known, tokens, 0))
        return mx.where(known[:, None], found, 0).astype(found.dtype)


@dataclass(frozen=True)
class LinearHead:
    """logits = after(linear(before(hidden)))."""

    rows: HeadRows
    before: Function | None = None
    """(S, D) -> (S, D); None for the identity."""
    after: Function | None = None
    """Elementwise on (S, n); None for the identity."""
    teacher: TargetHead | None = None
    """The head whose predictions those of this one are compared with, in a distillation."""
    slice_bytes: int = HEAD_SLICE_BYTES
    """Bytes of the weights or logits of a slice in float32. A pass over the vocabulary needs up
    to ten times as much; slices much smaller than the default are slower."""

    def inputs(self, hidden: mx.array) -> mx.array:
        """(S, D) input of the linear layer."""
        return hidden if self.before is None else self.before(hidden)

    def logits(self, products: mx.array) -> mx.array:
        """The logits from the output of the linear layer."""
        return products if self.after is None else self.after(products)

    def logits_and_slopes(self, products: mx.array) -> tuple[mx.array, mx.array | None]:
        """The logits and their derivatives with respect to `products`; None if those are 1."""
        if self.after is None:
            return products, None
        (logits,), (slopes,) = mx.vjp(self.after, [products], [mx.ones_like(products)])
        return logits, slopes

    def slices(self, count: int, rows: int | None = None) -> Iterator[tuple[int, int]]:
        """(start, stop) of slices of the vocabulary, sized for `count` hidden states.

        rows: the number of rows, if they are not all of the vocabulary.
        """
        vocabulary, width = self.rows.shape
        step = max(1, self.slice_bytes // (4 * max(count, width)))
        vocabulary = vocabulary if rows is None else rows
        for start in range(0, vocabulary, step):
            yield start, min(start + step, vocabulary)

    @property
    def trained(self) -> Arrays:
        """The trained arrays, by name in the model."""
        return self.rows.trained if isinstance(self.rows, SomeTrained) else {}

    def put(self, trained: Arrays) -> None:
        """Set what `trained` returns."""
        if isinstance(self.rows, SomeTrained):
            self.rows.put(trained)


def teacher_state(head: Head) -> list[Any]:
    """The arrays of a teacher's head that are in memory, as an input of compiled functions."""
    rows = head.teacher.head.rows if isinstance(head, LinearHead) and head.teacher else None
    return [rows.layer.state] if isinstance(rows, LayerRows) else []


@dataclass(frozen=True)
class TargetHead:
    """The head of a teacher. With a hidden state it gives a *target distribution*: a probability
    for each token, where supervised fine-tuning has one target token."""

    head: LinearHead
    """Its `inputs` are not used: the hidden states that are given are those of its linear layer."""
    vocabulary: int
    """Tokens, from the first, that teacher and student both know. The rows of either head beyond
    them are padding."""


# A LinearHead, any function from (1, S, D) hidden states to (1, S, V) logits, or the head of a
# reward model, whose scores take the place of log-probabilities.
TokenHead = LinearHead | Function
Head = TokenHead | ScoreHead


def trained_in(head: Head) -> Arrays:
    """The trained arrays of a head, by name in the model."""
    return head.trained if isinstance(head, LinearHead | ScoreHead) else {}


def put_in(head: Head, trained: Arrays) -> None:
    """Set what `trained_in` returns."""
    if isinstance(head, LinearHead | ScoreHead):
        head.put(trained)


def at_temperature(head: Head, temperature: float) -> Head:
    """The head with logits divided by `temperature`, from which completions are sampled."""
    if temperature == 1 or isinstance(head, ScoreHead):
        return head
    if isinstance(head, LinearHead):
        return replace(head, after=lambda products: head.logits(products) / temperature)
    return lambda hidden: head(hidden) / temperature


# -- finding the linear head of a model ---------------------------------------------------


def linear_head(head: nn.Module, hidden_size: int, dtype: mx.Dtype) -> LinearHead | None:
    """Split `head`, from `split.split`, into before -> linear -> after; None if impossible.

    Each layer of the head is tried in turn: a stand-in replaces it. If it is the linear layer,
    the input of the stand-in gives `before`, and what the head does with its output gives
    `after`. So tied embeddings, logit scales and soft caps work as the architecture defines
    them. The result is checked against the head itself on random hidden states.
    """
    hidden = mx.random.normal((5, hidden_size), key=mx.random.key(0)).astype(dtype)
    for path in _candidates(head):
        with suppress_model_errors():  # an architecture with another layout
            found = _taken_apart(head, path, hidden)
            if _agrees(found, head, hidden):
                return found
    return None


def _candidates(head: nn.Module) -> list[tuple[str, ...]]:
    """Paths of layers that may be the last one: those of the head, then of its trunk, and so on."""
    found: list[tuple[str, ...]] = []
    level: list[tuple[tuple[str, ...], nn.Module]] = [((), head)]
    while level:
        level = [
            ((*path, name), child)
            for path, parent in level
            if "lora_a" not in parent
            for name, child in _modules(parent)
        ]
        found += [path for path, layer in level if _is_known(layer)]
    return found


def _modules(parent: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, child) for name, child in parent.items() if isinstance(child, nn.Module)]


def _is_known(layer: nn.Module) -> bool:
    if hasattr(layer, "rows"):  # its weight is in a file
        return True
    quantized = "scales" in layer and layer.weight.ndim == 2 and "lora_a" not in layer
    return quantized or type(layer) in DENSE


def _run(
    head: nn.Module, path: tuple[str, ...], hidden: mx.array, answer: mx.array
) -> tuple[mx.array, mx.array]:
    """The input of the layer at `path` for `hidden`, and the output of the head if that layer
    returns `answer`.

    Works on a new copy of the modules along the path at each call, so that the arrays of the
    head are the current ones.
    """
    layer, found = module_at(head, path), list[mx.array]()

    def answered(x: mx.array) -> mx.array:
        if not mx.issubdtype(x.dtype, mx.floating):  # the layer may also embed tokens
            embedded: mx.array = layer(x)
            return embedded
        found.append(x)
        return answer

    stand_in = StandIn(layer, answered)
    vars(stand_in)["as_linear"] = answered  # what a tied head calls
    result = replaced(head, path, stand_in)(hidden)
    (given,) = found
    return given, result


def _taken_apart(head: nn.Module, path: tuple[str, ...], hidden: mx.array) -> LinearHead:
    layer = module_at(head, path)
    rows = getattr(layer, "rows", None) or LayerRows(layer)
    vocabulary, width = rows.shape[0], hidden.shape[-1]

    def products_of(count: int) -> mx.array:
        """The result of the layer in a trace. It is never evaluated, but as wide as the vocabulary:
        code that writes to the logits of certain tokens finds them."""
        return mx.zeros((1, count, vocabulary))

    def before(hidden: mx.array) -> mx.array:
        return _run(head, path, hidden[None], products_of(len(hidden)))[0][0]

    def after(products: mx.array) -> mx.array:
        unused = mx.zeros((1, len(products), width), hidden.dtype)
        return _run(head, path, unused, products[None])[1][0]

    states, products = hidden[None], products_of(len(hidden))
    given, result = _run(head, path, states, products)
    return LinearHead(
        rows,
        before=None if given is states else before,
        after=None if result is products else after,
    )


def _agrees(found: LinearHead, head: nn.Module, hidden: mx.array) -> bool:
    """Return whether the slices give the same logits as the head, and `after` is elementwise."""
    whole = head(hidden[None])[0].astype(mx.float32)
    if whole.shape != (len(hidden), found.rows.shape[0]):
        return False
    if not _treats_tokens_alike(found, hidden.dtype):
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
    agrees = distance <= tolerance**2 * mx.square(whole).sum()
    return bool(agrees & mx.isfinite(distance))  # infinite logits would agree with any others


def _treats_tokens_alike(found: LinearHead, dtype: mx.Dtype) -> bool:
    """Return whether `after` does the same to the logits of all tokens, computed with all of them.

    Code that writes to the logits of certain tokens (phi3small) must not run on a slice: MLX does
    not check indices, and writes into other memory.
    """
    if found.after is None:
        return True
    products = mx.random.normal((2, found.rows.shape[0]), key=mx.random.key(1)).astype(dtype)
    logits, reversed_logits = found.logits(products), found.logits(products[:, ::-1])
    return bool(mx.allclose(logits[:, ::-1], reversed_logits, rtol=1e-3, atol=1e-3))
