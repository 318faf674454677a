"""Trained embeddings and heads: all their rows, or only those of some tokens, such as new ones.

A `TrainedLayer` takes the place of the embedding or of the head. The rows that it trains are
arrays of their own, in float32 or bfloat16; the others stay as they are, in memory or in their
file, quantized or not. A head that is tied to the embedding stays tied: both use the same rows.
The trained rows are cut into arrays of a few MB, so that each is updated by itself.

Shapes: B rows, T tokens per row, D hidden size, V tokens that the base has, W >= V tokens with the
new ones, K trained rows, S hidden states.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.gates.text import shown
from your_ai.gates.token_ids import EMBEDDINGS, HEADS, is_outside_blocks
from your_ai.memory.sizes import UPDATE_BYTES
from your_ai.memory.workload import VocabularyArray
from your_ai.nets.head import HeadRows, HeadSlice, LayerRows
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.rounding import quantization_of

NEW_ROWS, ALL_ROWS = "new_rows", "all_rows"  # the list of a layer's trained arrays
LEAVES = (NEW_ROWS, ALL_ROWS)
EMBEDDINGS_OF, HEAD_OF = "embeddings", "head"  # of a model, as `--train` names them
NEW_TOKENS, TRAINED_MODULES = "new_tokens", "trained_modules"  # in adapter_config.json
MOST_TOKENS = 1 << 24  # of a vocabulary that is extended


class VocabularyLayer(nn.Module, ABC):
    """An embedding or a head of which something is trained.

    path: of the layer in the model.
    """

    path: str
    is_embedding: bool

    @property
    @abstractmethod
    def trained(self) -> Arrays:
        """The trained arrays, by name in the model."""

    @abstractmethod
    def put(self, arrays: Sequence[mx.array]) -> None:
        """Set the trained arrays."""

    @property
    @abstractmethod
    def rows(self) -> HeadRows:
        """The rows of the layer; what heads and soft tokens work with."""

    @abstractmethod
    def cut(self, tokens: int) -> None:
        """Make new trained arrays for at most `tokens` rows of the base, to which it is cut."""

    @abstractmethod
    def as_linear(self, x: mx.array) -> mx.array:
        """(..., D) -> (..., W), what a tied head calls."""

    def __call__(self, x: mx.array) -> mx.array:
        """(B, T) tokens -> (B, T, D), or hidden states (..., D) -> (..., W) logits."""
        if mx.issubdtype(x.dtype, mx.floating):
            return self.as_linear(x)
        return self.rows.gather(x.reshape(-1)).reshape(*x.shape, -1)


class TrainedLayer(VocabularyLayer):
    """An embedding or a head, of which rows are trained.

    linear: the base's layer, frozen; not there if all rows are trained.
    bias: (K,) of the trained rows, frozen, if the base's layer has one.
    """

    base_layer: nn.Module  # until the rows are started

    def __init__(self, base: nn.Module, ids: np.ndarray, count: int, *, whole: bool) -> None:
        """base: the base's layer, with V rows. ids: of the tokens whose rows are trained,
        ascending, with all from V on. count: W. whole: `ids` are all tokens, and the base's layer
        is not kept."""
        super().__init__()
        rows = rows_of_layer(base)
        self.ids, self.count, self.leaf = ids, count, ALL_ROWS if whole else NEW_ROWS
        self.path, self.is_embedding, self.kind = "", False, dtype_of(base)
        self.asked = VocabularyTraining()
        vars(self)["base_layer"] = base  # not a child: it is only read to start the rows
        self.make(rows.shape[1])
        if not whole:
            self.linear = base
        if base.get("bias") is not None:
            known = mx.array(np.minimum(ids, rows.shape[0] - 1))
            self.bias = mx.where(mx.array(ids < rows.shape[0]), base.bias[known], 0)
            self.freeze(keys=["bias"], recurse=False)

    def make(self, width: int, dtype: mx.Dtype = mx.float32) -> None:
        """Make arrays of zeros for the rows of `ids`."""
        self.width, self.step = width, rows_of_piece(width)
        self[self.leaf] = in_pieces(mx.zeros((len(self.ids), width), dtype))

    @property
    def trained(self) -> Arrays:
        return {f"{self.path}.{self.leaf}.{i}": a for i, a in enumerate(self[self.leaf])}

    def put(self, arrays: Sequence[mx.array]) -> None:
        self[self.leaf] = list(arrays)

    def cut(self, tokens: int) -> None:
        """Do as `VocabularyLayer.cut`; as many rows as before are trained, or all."""
        count = min(tokens, rows_of_layer(self.base_layer).shape[0])
        ids = np.arange(count)
        if self.leaf == NEW_ROWS:
            ids = count + np.arange(len(self.ids))
        self.ids, self.count = ids, int(ids[-1]) + 1
        if "bias" in self:
            self.bias = mx.zeros(len(ids))
        self.make(self.width)

    def rows_between(self, first: int, last: int) -> mx.array:
        """The trained rows from `first` to `last`."""
        found = []
        for index in range(first // self.step, -(-last // self.step)):
            start = index * self.step
            found.append(self[self.leaf][index][max(0, first - start) : last - start])
        return found[0] if len(found) == 1 else mx.concatenate(found or [mx.zeros((0, self.width))])

    @property
    def rows(self) -> TrainedRows:
        base = rows_of_layer(self.linear) if "linear" in self else None
        return TrainedRows(self, base)

    def as_linear(self, x: mx.array) -> mx.array:
        if "linear" not in self:
            return self._products(x)
        product: Any = getattr(self.linear, "as_linear", self.linear)
        products: mx.array = product(x)
        new = self._products(x[..., -products.shape[-2] :, :])  # a head in a file may return one
        return mx.concatenate([products, new], -1)[..., mx.array(self.places(0, self.count))]

    def _products(self, x: mx.array) -> mx.array:
        found = [x @ array.T.astype(x.dtype) for array in self[self.leaf]]
        products = mx.concatenate(found, -1)
        return products + self.bias if "bias" in self else products

    def places(self, start: int, stop: int) -> np.ndarray:
        """Places of the products of the tokens from `start` to `stop` in those of the base's rows,
        of the same tokens, followed by those of the trained rows among them."""
        assert "linear" in self
        inside = min(stop, rows_of_layer(self.linear).shape[0]) - start
        first, last = self.between(start, stop)
        found = np.arange(stop - start)
        found[self.ids[first:last] - start] = max(0, inside) + np.arange(last - first)
        return found.astype(np.int32)

    def between(self, start: int, stop: int) -> tuple[int, int]:
        """The trained rows of the tokens from `start` to `stop`: first, and after the last."""
        first, last = np.searchsorted(self.ids, [start, stop]).tolist()
        return first, last


@dataclass(frozen=True)
class TrainedRows:
    """The rows of a `TrainedLayer`; implements `head.HeadRows`."""

    layer: TrainedLayer
    base: HeadRows | None
    """The rows that are not trained; None if all are."""

    @property
    def shape(self) -> tuple[int, int]:
        """(W, D)"""
        return self.layer.count, self.layer.width

    @property
    def trained(self) -> Arrays:
        return self.layer.trained

    @property
    def ids(self) -> np.ndarray:
        return self.layer.ids

    @property
    def pieces(self) -> list[int]:
        return [len(array) for array in self.trained.values()]

    axis = 0

    def put(self, arrays: Arrays) -> None:
        """Set what `trained` returns."""
        self.layer.put([*arrays.values()])

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        first, last = self.layer.between(start, stop)
        own = self.trained_part(first, last, after)
        if self.base is None or last - first == stop - start:
            return own
        inside = min(stop, self.base.shape[0])
        base = self.base.part(start, inside, after)
        if first == last:
            return base
        ids = self.ids[first:last] - start
        places = mx.array(self.layer.places(start, stop))
        is_base = np.ones(inside - start, bool)
        is_base[ids[ids < len(is_base)]] = False
        of_base, of_own = mx.array(is_base), mx.array(ids.astype(np.int32))

        def forward(hidden: mx.array) -> mx.array:
            products = [base.forward(hidden), own.forward(hidden)]
            return mx.concatenate(products, -1)[:, places]

        def backward(shares: mx.array) -> mx.array:
            kept = mx.where(of_base, shares[:, : len(is_base)], 0)
            return base.backward(kept) + own.backward(shares[:, of_own])

        return HeadSlice(stop - start, forward, backward)

    def trained_part(self, first: int, last: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        """The trained rows from `first` to `last`, computed only after the arrays `after`."""
        rows = self.layer.rows_between(first, last)
        if after:
            (rows,) = mx.depends([rows], list(after))
        bias = self.layer.bias[first:last] if "bias" in self.layer else None

        def forward(hidden: mx.array) -> mx.array:
            found: mx.array = hidden @ rows.T.astype(hidden.dtype)
            return found if bias is None else found + bias

        return HeadSlice(last - first, forward, lambda shares: shares @ rows.astype(shares.dtype))

    def add_gradients(
        self, found: dict[str, list[mx.array]], first: int, shares: mx.array, inputs: mx.array
    ) -> list[mx.array]:
        name, array = list(self.trained.items())[first // self.layer.step]
        grad = (shares.T @ inputs).astype(array.dtype)
        found.setdefault(name, []).append(grad)
        return [grad]

    def gather(self, tokens: mx.array) -> mx.array:
        """(S, D), in the dtype of the base's rows."""
        layer = self.layer
        place = np.full(layer.count, -1, np.int32)
        place[self.ids] = np.arange(len(self.ids))
        at = mx.array(place)[tokens]
        found = mx.zeros((len(tokens), layer.width), layer.kind)
        if self.base is not None:
            found = self.base.gather(mx.minimum(tokens, self.base.shape[0] - 1))
        for index, array in enumerate(layer[layer.leaf]):
            own = at - index * layer.step
            is_own = (own >= 0) & (own < len(array))
            rows = array[mx.where(is_own, own, 0)].astype(layer.kind)
            found = mx.where(is_own[:, None], rows, found)
        return found


def rows_of_piece(width: int) -> int:
    """The rows of D numbers that an array of a layer has."""
    return max(1, UPDATE_BYTES // (4 * width))


def in_pieces(rows: mx.array) -> list[mx.array]:
    """Cut (K, D) into arrays."""
    step = rows_of_piece(rows.shape[1])
    return [rows[start : start + step] for start in range(0, len(rows), step)]


def rows_of_layer(layer: nn.Module) -> HeadRows:
    """The rows of an embedding or a head: in its file, partly trained, or in memory."""
    found: HeadRows = getattr(layer, "rows", None) or LayerRows(layer)
    return found


def dtype_of(layer: nn.Module) -> mx.Dtype:
    """The dtype of a row."""
    found: mx.Dtype = layer.scales.dtype if quantization_of(layer) else layer.weight.dtype
    return found


def vocabulary_layers(model: nn.Module) -> tuple[str, str | None]:
    """The paths of the embedding of tokens, and of the head, None if that is tied to it.

    Raises ValueError if there is not one embedding, or if it is not such a layer.
    """
    outside = {
        path: module
        for path, module in model.named_modules()
        if is_outside_blocks(path) and ("weight" in module or hasattr(module, "rows"))
    }

    def named(names: tuple[str, ...]) -> list[str]:
        return [path for path in outside if path.rpartition(".")[2] in names]

    embeddings, heads = named(EMBEDDINGS), named(HEADS)
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(f"the model has {len(embeddings)} embeddings of tokens")
    return embeddings[0], next(iter(heads), None)


@dataclass(frozen=True)
class VocabularyTraining:
    """The rows of the embedding and the head that are trained."""

    new: tuple[int, ...] = ()
    """The tokens whose rows are trained in both, ascending, and all that the base does not have."""
    embeddings: bool = False
    """Whether all rows of the embedding are."""
    head: bool = False
    """Whether all rows of the head are."""

    def __bool__(self) -> bool:
        return bool(self.new) or self.embeddings or self.head

    @property
    def entries(self) -> dict[str, Any]:
        """The entries in adapter_config.json; none if nothing is trained."""
        modules = [name for name in (EMBEDDINGS_OF, HEAD_OF) if getattr(self, name)]
        found = {NEW_TOKENS: list(self.new), TRAINED_MODULES: modules}
        return {name: value for name, value in found.items() if value}


def vocabulary_training(modules: str, new_tokens: Sequence[int]) -> VocabularyTraining:
    """Convert settings. modules: names, as of `--train`; new_tokens: as `new` there."""
    names = modules.split(",")
    return VocabularyTraining(tuple(new_tokens), EMBEDDINGS_OF in names, HEAD_OF in names)


def vocabulary_of_adapter(config: Mapping[str, Any]) -> VocabularyTraining:
    """Convert entries of adapter_config.json. Raises ValueError if it is not possible."""
    new, modules = config.get(NEW_TOKENS, []), config.get(TRAINED_MODULES, [])
    known = (EMBEDDINGS_OF, HEAD_OF)
    if not isinstance(modules, list) or not all(name in known for name in modules):
        raise ValueError(f"{TRAINED_MODULES} {shown(modules)}: give a list of {', '.join(known)}")
    if not isinstance(new, list) or not all(type(token) is int for token in new):
        raise ValueError(f"{NEW_TOKENS} {shown(new)}: give a list of token ids")
    if new and (new != sorted(set(new)) or new[0] < 0 or new[-1] >= MOST_TOKENS):
        raise ValueError(f"{NEW_TOKENS}: give ascending token ids below {MOST_TOKENS:,}")
    return vocabulary_training(",".join(modules), new)


def put_trained_layers(
    model: nn.Module, training: VocabularyTraining, dtype: mx.Dtype = mx.float32
) -> list[TrainedLayer]:
    """Let rows of the embedding and of the head be trained; they are 0 until `start_rows`.

    dtype: of all the rows of a layer; rows of new tokens are few, and float32.
    Raises ValueError if the model has no such layers, or if its head is tied to its embedding and
    only one of them is to be trained.
    """
    if not training:
        return []
    embedding, head = vocabulary_layers(model)
    if head is None and training.embeddings != training.head:
        raise ValueError(
            "the head of this model is tied to its embedding, so both are trained or none: "
            "--train embeddings,head"
        )
    modules, found = dict(model.named_modules()), []
    for path, whole in ((embedding, training.embeddings), (head, training.head)):
        if path is None or not (whole or training.new):
            continue
        base = modules[path]
        count = max(rows_of_layer(base).shape[0], 1 + max(training.new, default=-1))
        ids = np.arange(count) if whole else np.array(training.new)
        if not {*range(rows_of_layer(base).shape[0], count)} <= {*ids.tolist()}:
            raise ValueError(f"{path} has no row for some of the tokens below {count}")
        layer = TrainedLayer(base, ids, count, whole=whole)
        layer.path, layer.is_embedding, layer.asked = path, path == embedding, training
        if whole:
            layer.make(layer.width, dtype)
        parent, _, leaf = path.rpartition(".")
        modules[parent][leaf] = layer
        found.append(layer)
    return found


def vocabulary_trained(model: nn.Module) -> list[VocabularyLayer]:
    """The embedding and the head of a model if something of them is trained."""
    return [module for module in model.modules() if isinstance(module, VocabularyLayer)]


def trained_layers(model: nn.Module) -> list[TrainedLayer]:
    """The layers of `put_trained_layers` in a model."""
    return [layer for layer in vocabulary_trained(model) if isinstance(layer, TrainedLayer)]


def trained_sizes(model: nn.Module) -> tuple[VocabularyArray, ...]:
    """The trained arrays of the vocabulary of a model, for the planner."""
    layers = trained_layers(model)
    tied = bool(layers) and vocabulary_layers(model)[1] is None
    return tuple(
        VocabularyArray(
            len(layer.ids),
            layer.width,
            layer.step,
            layer.leaf == ALL_ROWS,
            layer.is_embedding,
            layer.is_embedding and tied,
        )
        for layer in layers
    )


def training_in(model: nn.Module) -> VocabularyTraining:
    """Return what is trained of the vocabulary of a model."""
    return next((layer.asked for layer in trained_layers(model)), VocabularyTraining())


def start_rows(
    layer: TrainedLayer,
    base: HeadRows,
    spelled: Mapping[int, Sequence[int]],
    slice_rows: int = 1024,
) -> None:
    """Set the trained rows to those of the base, and new ones to the mean of those that spelled it.

    base: V rows of the layer. spelled: the tokens that spelled each new token, by its id. Rows that
    no token uses start at the mean of all, as in Hewitt (2021), "Initializing new word embeddings".
    slice_rows: rows that are read together.
    """
    vars(layer).pop("base_layer", None)
    count = base.shape[0]
    total = mx.zeros(base.shape[1])
    unused = [token for token in layer.ids.tolist() if token >= count and not spelled.get(token)]
    unused += [token for token, parts in spelled.items() if not parts]
    if unused:
        for start in range(0, count, slice_rows):
            some = base.gather(mx.arange(start, min(start + slice_rows, count)))
            total = total + some.astype(mx.float32).sum(0)
            mx.eval(total)
    for index, array in enumerate(layer[layer.leaf]):
        rows = []
        ids = layer.ids[index * layer.step :][: len(array)].tolist()
        plain = [token for token in ids if token < count and token not in spelled]
        of_base = iter(base.gather(mx.array(plain)).astype(mx.float32) if plain else [])
        for token in ids:
            if parts := spelled.get(token):
                rows.append(base.gather(mx.array(list(parts))).astype(mx.float32).mean(0))
            elif token in spelled or token >= count:
                rows.append(total / count)
            else:
                rows.append(next(of_base))
        layer[layer.leaf][index] = mx.stack(rows).astype(array.dtype)
        mx.eval(layer[layer.leaf][index])
