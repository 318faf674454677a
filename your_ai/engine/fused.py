"""The whole graph at once, compiled: fastest when memory is plenty, and the oracle of the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.data.batches import Batch
from your_ai.model import DropoutKeys, Split
from your_ai.objectives import sft
from your_ai.rng import derive_seed


@dataclass(frozen=True)
class Engine:
    """What a training loop needs of a model.

    gradients(batch, scale, step_seed): the loss sum of a micro-batch, and the gradients
    of `scale` times it, as a tree of the trainable parameters; step_seed draws dropout.
    loss(batch): the loss sum alone, without dropout.
    predictions(batch): (S,) the likeliest token at each target.
    """

    gradients: Callable[[Batch, float, int], tuple[mx.array, Any]]
    loss: Callable[[Batch], mx.array]
    predictions: Callable[[Batch], mx.array]


def fused_engine(model: nn.Module, split: Split, dropout_keys: DropoutKeys) -> Engine:
    """An engine that compiles one graph for forward and backward, per batch shape."""

    def trainable_loss(tokens, positions, targets, weights, keys, scale):
        model.train()
        dropout_keys.set(keys)
        hidden = split.trunk(tokens)
        loss = sft.trainable_loss_sum(hidden, positions, targets, weights, scale, split.head)
        dropout_keys.set(None)
        model.eval()
        return loss

    def loss_only(tokens, positions, targets, weights):
        return sft.loss_sum(split.trunk(tokens), positions, targets, weights, split.head)

    def likeliest(tokens, positions):
        return sft.predictions(split.trunk(tokens), positions, split.head)

    state = [model.state]
    compiled_gradients = mx.compile(nn.value_and_grad(model, trainable_loss), inputs=state)
    compiled_loss = mx.compile(loss_only, inputs=state)
    compiled_likeliest = mx.compile(likeliest, inputs=state)

    def gradients(batch: Batch, scale: float, step_seed: int) -> tuple[mx.array, Any]:
        keys = mx.array(row_keys(step_seed, batch.rows))
        parameters = model.trainable_parameters()
        result = compiled_gradients(*_arrays(batch), keys, mx.array(scale, mx.float32))
        model.update(parameters)  # tracing leaves its placeholders in their place
        return result

    def loss(batch: Batch) -> mx.array:
        return compiled_loss(*_arrays(batch))

    def predictions(batch: Batch) -> mx.array:
        return compiled_likeliest(mx.array(batch.tokens), mx.array(batch.positions))

    return Engine(gradients, loss, predictions)


def _arrays(batch: Batch) -> tuple[mx.array, ...]:
    return tuple(map(mx.array, (batch.tokens, batch.positions, batch.targets, batch.weights)))


def row_keys(step_seed: int, rows: np.ndarray) -> np.ndarray:
    """(B,) uint32: the dropout key of each row, from its place in the step."""
    return np.array([derive_seed(step_seed, int(row)) % 2**32 for row in rows], np.uint32)
