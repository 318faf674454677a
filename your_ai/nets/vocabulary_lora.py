"""LoRA on the embedding of tokens and on a head that is not tied to it.

An embedding gives W[t] + scale * A[t] B with A (V, r) and B (r, D), a head W x + scale * (x A) B
with A (D, r) and B (r, V). Both are rows W + scale * across @ along, with `across` (V, r) and
`along` (r, D). B begins at 0. The weight stays as it is, in memory or in its file, quantized or
not.

Shapes: S hidden states, D hidden size, V vocabulary, r rank, n tokens of a slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.config.adapter_facts import MATRICES
from your_ai.nets.head import HeadRows, HeadSlice
from your_ai.nets.layer_sizes import LayerSize
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.vocabulary import (
    VocabularyLayer,
    rows_of_layer,
    vocabulary_layers,
)
from your_ai.rng import derive_seed

LOW_RANK = "low_rank"  # the matrices of a layer: PATH.low_rank.lora_a and .lora_b
LOW_RANK_LAYERS = "vocabulary_lora"  # [rank, scale] by path, in adapter_config.json
TIED = (
    "the head of this model is tied to its embedding, so LoRA on one would change both or untie "
    "them; leave it out, or train all rows of both: --train embeddings,head"
)


class LowRankLayer(VocabularyLayer):
    """An embedding or a head with LoRA.

    linear: the base's layer, frozen. low_rank: `lora_a` and `lora_b`, A and B.
    """

    def __init__(self, base: nn.Module, path: str, size: LayerSize, *, is_embedding: bool) -> None:
        super().__init__()
        self.linear, self.path, self.is_embedding = base, path, is_embedding
        self.rank, self.scale = size
        self.make(*rows_of_layer(base).shape)

    def make(self, count: int, width: int) -> None:
        """Make matrices of zeros for V = `count` and D = `width`."""
        inputs, outputs = (count, width) if self.is_embedding else (width, count)
        matrices = mx.zeros((inputs, self.rank)), mx.zeros((self.rank, outputs))
        self[LOW_RANK] = dict(zip(MATRICES, matrices, strict=True))
        self.count, self.width = count, width

    def start(self, seed: int) -> None:
        """Draw A as LoRA does for a linear layer: uniformly, up to 1 / sqrt(inputs).

        Of the inputs of an embedding one is 1 and the others are 0, so they count as one.
        """
        a, b = self[LOW_RANK].values()
        bound = 1.0 if self.is_embedding else self.width**-0.5
        key = mx.random.key(derive_seed(seed, self.path) % 2**64)
        self.put([mx.random.uniform(-bound, bound, a.shape, key=key), mx.zeros_like(b)])

    @property
    def trained(self) -> Arrays:
        return {f"{self.path}.{LOW_RANK}.{name}": a for name, a in self[LOW_RANK].items()}

    def put(self, arrays: Sequence[mx.array]) -> None:
        self[LOW_RANK] = dict(zip(MATRICES, arrays, strict=True))

    def cut(self, tokens: int) -> None:
        self.make(min(tokens, self.count), self.width)

    @property
    def rows(self) -> LowRankRows:
        return LowRankRows(self, rows_of_layer(self.linear))

    @property
    def as_layer(self) -> Arrays:
        """A (D, r) and B (r, V) of a linear layer with these rows."""
        a, b = self[LOW_RANK].values()
        return dict(zip(MATRICES, (b.T, a.T) if self.is_embedding else (a, b), strict=True))

    def as_linear(self, x: mx.array) -> mx.array:
        product: Any = getattr(self.linear, "as_linear", self.linear)
        products: mx.array = product(x)
        a, b = self.as_layer.values()
        x = x[..., -products.shape[-2] :, :]  # a head in a file may return one
        return products + (self.scale * (x @ a) @ b).astype(products.dtype)


@dataclass(frozen=True)
class LowRankRows:
    """The rows of a `LowRankLayer`; implements `head.SomeTrained`."""

    layer: LowRankLayer
    base: HeadRows
    axis = 1

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)"""
        return self.base.shape

    @property
    def trained(self) -> Arrays:
        return self.layer.trained

    @property
    def ids(self) -> np.ndarray:
        return np.arange(self.layer.count)

    @property
    def pieces(self) -> list[int]:
        return [self.layer.count]

    def put(self, arrays: Arrays) -> None:
        """Set what `trained` returns."""
        self.layer.put([arrays[name] for name in self.trained])

    def factors(self, which: slice | mx.array) -> tuple[mx.array, mx.array]:
        """across[which] (n, r), and scale * along (r, D)."""
        a, b = self.layer.as_layer.values()
        return b[:, which].T, self.layer.scale * a.T

    def part(self, start: int, stop: int, after: Sequence[mx.array] = ()) -> HeadSlice:
        base = self.base.part(start, stop, after)
        across, along = self.factors(slice(start, stop))

        def forward(hidden: mx.array) -> mx.array:
            inner = (hidden @ along.T).astype(hidden.dtype)
            return base.forward(hidden) + inner @ across.T.astype(hidden.dtype)

        def backward(shares: mx.array) -> mx.array:
            inner = shares @ across.astype(shares.dtype)
            return base.backward(shares) + inner @ along.astype(shares.dtype)

        return HeadSlice(base.count, forward, backward)

    trained_part = part

    def add_gradients(
        self, found: dict[str, list[mx.array]], first: int, shares: mx.array, inputs: mx.array
    ) -> list[mx.array]:
        """Do as `head.SomeTrained` says, for a head: A has a sum over the slices, B its columns."""
        across, along = self.factors(slice(first, first + shares.shape[1]))
        of_a, of_b = self.trained
        total = self.layer.scale * (inputs.T @ (shares @ across))
        found[of_a] = [found[of_a][0] + total if of_a in found else total]
        found.setdefault(of_b, []).append((inputs @ along.T).T @ shares)
        return [found[of_a][0], found[of_b][-1]]

    def gather(self, tokens: mx.array) -> mx.array:
        """(S, D), in the dtype of the base's rows."""
        across, along = self.factors(tokens)
        rows = self.base.gather(tokens)
        return rows + (across @ along).astype(rows.dtype)


def entries_of(sizes: Mapping[str, LayerSize]) -> dict[str, Any]:
    """The entries in adapter_config.json; none without such layers."""
    return {LOW_RANK_LAYERS: {path: list(size) for path, size in sizes.items()}} if sizes else {}


def put_low_rank(model: nn.Module, sizes: Mapping[str, LayerSize]) -> list[LowRankLayer]:
    """Add LoRA to the embedding or the head, by path; A and B are 0 until `LowRankLayer.start`.

    Raises ValueError if the model has no such layers, or if its head is tied to its embedding.
    """
    found: list[LowRankLayer] = []
    modules = dict(model.named_modules())
    for path, size in sizes.items():
        embedding, head = vocabulary_layers(model)
        if head is None:
            raise ValueError(TIED)
        if path not in (embedding, head) or isinstance(modules[path], VocabularyLayer):
            raise ValueError(f"LoRA on {path} is not possible")
        layer = LowRankLayer(modules[path], path, size, is_embedding=path == embedding)
        parent, _, leaf = path.rpartition(".")
        modules[parent][leaf] = layer
        found.append(layer)
    return found
