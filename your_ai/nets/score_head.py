"""The head of a reward model: one number per text, r = w . h, from a hidden state.

It replaces the head over the vocabulary. The weight w is trained with the adapters. It has the
name and shape of the head of a sequence classifier with one label in transformers.

Shapes: S hidden states, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn

from your_ai.nets.mlx_types import Arrays
from your_ai.rng import derive_seed
from your_ai.run.checkpoint import SCORE_WEIGHT as WEIGHT

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
        """What is trained, by name in the model."""
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
