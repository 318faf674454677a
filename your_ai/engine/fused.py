"""The whole graph at once, compiled: fastest when memory is plenty, and the oracle of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.blocks import Arrays, Parts
from your_ai.data.batches import Batch
from your_ai.dora import dora_layers, given, norms_of
from your_ai.engine.compiled import Graphs, shape_of
from your_ai.losses import Head
from your_ai.model import DropoutKeys, Split, TokenKeys
from your_ai.objectives import sft
from your_ai.rng import derive_seed


@dataclass(frozen=True)
class Engine:
    """What a training loop needs of a model.

    gradients(batch, scale, step_seed): the loss sum of a micro-batch, and the gradients
    of `scale` times it, as a tree of the trainable parameters; step_seed draws dropout.
    loss(batch): the loss sum alone, without dropout.
    predictions(batch): (S,) the likeliest token at each target.
    score(batch): (S,) the loss of each target, whatever its weight, and its prediction.
    drop(): forget what was compiled; it is compiled again when it is needed.
    fill(batches): fill the prefix cache, where that is cheaper before the first step.
    """

    gradients: Callable[[Batch, float, int], tuple[mx.array, Any]]
    loss: Callable[[Batch], mx.array]
    predictions: Callable[[Batch], mx.array]
    score: Callable[[Batch], tuple[mx.array, mx.array]]
    drop: Callable[[], None]
    fill: Callable[[Iterable[Batch]], None] | None = None


def fused_engine(
    model: nn.Module,
    split: Split,
    dropout_keys: DropoutKeys,
    parts: Parts | None = None,
    head: Head | None = None,
    graphs: Graphs | None = None,
) -> Engine:
    """An engine that compiles one graph for forward and backward, per batch shape.

    parts: the model's, which packed batches need so that their texts are kept apart.
    head: the split's as `head.linear_head` knows it, where it does. graphs: keeps what is
    compiled.
    """
    head = head or split.head
    graphs = Graphs() if graphs is None else graphs
    dora = dora_layers(model)

    def with_norms(function: Callable) -> Callable:
        """f(norms, *args): `function(*args)` of a model whose DoRA layers are given their norms."""

        def run(norms: Arrays, *args: Any) -> Any:
            with given(dora, norms):
                return function(*args)

        return run

    def trunk(tokens: mx.array, segments: mx.array | None, reach: int | None) -> mx.array:
        if segments is None:
            return split.trunk(tokens)
        if parts is None:
            raise ValueError("a packed batch needs the parts of the model, and there are none")
        return parts.finish(parts.run_blocks(tokens, segments, reach))

    def trainable_loss(tokens, segments, reach, positions, targets, weights, rows, places, scale):
        model.train()
        dropout_keys.set(TokenKeys(rows, places))
        hidden = trunk(tokens, segments, reach)
        loss = sft.trainable_loss_sum(hidden, positions, targets, weights, scale, head)
        dropout_keys.set(None)
        model.eval()
        return loss

    def loss_only(tokens, segments, reach, positions, targets, weights):
        return sft.loss_sum(trunk(tokens, segments, reach), positions, targets, weights, head)

    def likeliest(tokens, segments, reach, positions):
        return sft.predictions(trunk(tokens, segments, reach), positions, head)

    def losses_and_likeliest(tokens, segments, reach, positions, targets):
        return sft.score(trunk(tokens, segments, reach), positions, targets, head)

    state = [model.state]

    def compiled(function: Callable, batch: Batch, trained: bool = False) -> Callable:
        shape = shape_of(batch, trained)
        return graphs.get(shape, function, lambda: mx.compile(function, inputs=state))

    loss_and_gradients = nn.value_and_grad(model, with_norms(trainable_loss))
    loss_only, likeliest, losses_and_likeliest = map(
        with_norms, (loss_only, likeliest, losses_and_likeliest)
    )

    def gradients(batch: Batch, scale: float, step_seed: int) -> tuple[mx.array, Any]:
        keys = mx.array(row_keys(step_seed, batch.rows)), mx.array(batch.places)
        parameters = model.trainable_parameters()
        result = compiled(loss_and_gradients, batch, trained=True)(
            norms_of(dora), *_inputs(batch), *_targets(batch), *keys, mx.array(scale, mx.float32)
        )
        model.update(parameters)  # tracing leaves its placeholders in their place
        return result

    def loss(batch: Batch) -> mx.array:
        return compiled(loss_only, batch)(norms_of(dora), *_inputs(batch), *_targets(batch))

    def predictions(batch: Batch) -> mx.array:
        positions = mx.array(batch.positions)
        return compiled(likeliest, batch)(norms_of(dora), *_inputs(batch), positions)

    def score(batch: Batch) -> tuple[mx.array, mx.array]:
        positions, targets, _ = _targets(batch)
        return compiled(losses_and_likeliest, batch)(
            norms_of(dora), *_inputs(batch), positions, targets
        )

    return Engine(gradients, loss, predictions, score, graphs.drop)


def _inputs(batch: Batch) -> tuple[mx.array, mx.array | None, int | None]:
    segments = batch.segments
    segments = None if segments is None else mx.array(segments)
    return mx.array(batch.tokens), segments, batch.reach


def _targets(batch: Batch) -> tuple[mx.array, ...]:
    return tuple(map(mx.array, (batch.positions, batch.targets, batch.weights)))


def row_keys(step_seed: int, rows: np.ndarray) -> np.ndarray:
    """uint32 in the shape of `rows`: the dropout key of each, from its place in the step."""
    unique, inverse = np.unique(rows, return_inverse=True)
    keys = [derive_seed(step_seed, row) % 2**32 for row in unique.tolist()]
    return np.array(keys, np.uint32)[inverse].reshape(rows.shape)
