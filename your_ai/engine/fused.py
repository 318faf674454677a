"""The fused engine: one compiled graph for the whole model.

It is the fastest engine if memory allows. Tests compare the other engines with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.data.batches import Batch
from your_ai.engine import tiled_head
from your_ai.engine.compiled import Graphs, shape_of
from your_ai.engine.protocol import Engine
from your_ai.nets.adapter_kinds import normed_layers, norms_of, use_norms
from your_ai.nets.head import Head, teacher_state
from your_ai.nets.mlx_types import Arrays
from your_ai.nets.model import DropoutKeys, TokenKeys
from your_ai.nets.neftune import Neftune, noise_added
from your_ai.nets.parts import Parts, arrays_of, put
from your_ai.nets.split import Split
from your_ai.objectives.objective import Objective, Sums, Targets
from your_ai.rng import derive_seed

R = TypeVar("R")
Inputs = tuple[mx.array, mx.array | None, int | None]
"""Tokens, segments and the maximum tokens of a segment."""


def fused_engine(
    model: nn.Module,
    split: Split,
    dropout_keys: DropoutKeys,
    objective: Objective,
    parts: Parts | None = None,
    head: Head | None = None,
    graphs: Graphs | None = None,
    neftune: Neftune | None = None,
) -> Engine:
    """An engine that compiles one graph for forward and backward, per batch shape.

    parts: the model in parts, if it can be split; packed batches need them to keep their texts
        separate.
    head: the head as a `LinearHead`, if `head.linear_head` found one; by default split.head.
    graphs: the cache of compiled graphs.
    neftune: noise on the embeddings in training.
    """
    head = head or split.head
    graphs = Graphs() if graphs is None else graphs
    normed = normed_layers(model)

    def with_norms(function: Callable[..., R]) -> Callable[..., R]:
        """Make f(norms, *args), which gives the adapted layers their norms and calls `function`."""

        def run(norms: Arrays, *args: Any) -> R:
            with use_norms(normed, norms):
                return function(*args)

        return run

    def trunk(
        tokens: mx.array, segments: mx.array | None, max_segment_tokens: int | None
    ) -> mx.array:
        if parts is not None:  # with masks that need less memory than the model's own may
            return parts.finish(parts.run_blocks(tokens, segments, max_segment_tokens))
        if segments is not None:
            raise ValueError("a packed batch needs the parts of the model, but they are missing")
        return split.trunk(tokens)

    @with_norms
    def trainable_loss(
        inputs: Inputs, targets: Targets, rows: mx.array, places: mx.array,
        lengths: mx.array | None, scale: mx.array,
    ) -> Sums:  # fmt: skip
        model.train()
        keys = TokenKeys(rows, places)
        dropout_keys.set(keys)
        with noise_added(neftune, keys, lengths):
            hidden = trunk(*inputs)
        sums = tiled_head.trainable_loss(hidden, Targets(*targets), objective, scale, head)
        dropout_keys.set(None)
        model.eval()
        return sums

    @with_norms
    def loss_only(inputs: Inputs, targets: Targets) -> Sums:
        return tiled_head.loss(trunk(*inputs), Targets(*targets), objective, head)

    @with_norms
    def scored(inputs: Inputs, targets: Targets) -> mx.array:
        return tiled_head.log_probabilities(trunk(*inputs), Targets(*targets), head)

    @with_norms
    def most_likely(inputs: Inputs, targets: Targets) -> mx.array:
        return tiled_head.predictions(trunk(*inputs), Targets(*targets), head)

    @with_norms
    def losses_and_predictions(inputs: Inputs, targets: Targets) -> tuple[mx.array, ...]:
        return tiled_head.score(trunk(*inputs), Targets(*targets), objective, head)

    state = [model.state, *teacher_state(head)]

    def compiled(
        function: Callable[..., R], batch: Batch, trained: bool = False
    ) -> Callable[..., R]:
        shape = shape_of(batch, trained)
        return graphs.get(shape, function, lambda: restoring(graphs.compile(function, state)))

    def restoring(function: Callable[..., R]) -> Callable[..., R]:
        """Restore the arrays of the model after each call: tracing puts placeholders in their
        place, and a function is traced again for arguments of another structure."""

        def run(*args: Any) -> R:
            before = arrays_of(model)
            result = function(*args)
            put(model, before)
            return result

        return run

    loss_and_gradients = nn.value_and_grad(model, trainable_loss)

    def gradients(batch: Batch, scale: float, step_seed: int) -> tuple[Sums, Any]:
        keys = mx.array(row_keys(step_seed, batch.rows)), mx.array(batch.places)
        lengths = None if neftune is None else mx.array(batch.text_lengths)
        sums, grads = compiled(loss_and_gradients, batch, trained=True)(
            norms_of(normed), _inputs(batch), Targets.of(batch), *keys, lengths,
            mx.array(scale, mx.float32),
        )  # fmt: skip
        return Sums(*sums), grads

    def run(function: Callable[..., R], batch: Batch) -> R:
        return compiled(function, batch)(norms_of(normed), _inputs(batch), Targets.of(batch))

    def loss(batch: Batch) -> Sums:
        return Sums(*run(loss_only, batch))

    def log_probabilities(batch: Batch) -> mx.array:
        return run(scored, batch)

    def predictions(batch: Batch) -> mx.array:
        return run(most_likely, batch)

    def score(batch: Batch) -> tuple[mx.array, ...]:
        return run(losses_and_predictions, batch)

    return Engine(
        objective, gradients, loss, log_probabilities, predictions, score, graphs.drop,
        refocus=graphs.drop,
    )  # fmt: skip


def _inputs(batch: Batch) -> Inputs:
    segments = None if batch.segments is None else mx.array(batch.segments)
    return mx.array(batch.tokens), segments, batch.max_segment_tokens


def row_keys(step_seed: int, rows: np.ndarray) -> np.ndarray:
    """The dropout key of each row, uint32 in the shape of `rows`; rows: positions in the step."""
    unique, inverse = np.unique(rows, return_inverse=True)
    keys = [derive_seed(step_seed, row) % 2**32 for row in unique.tolist()]
    return np.array(keys, np.uint32)[inverse].reshape(rows.shape)
