"""Measures over a whole file of examples. Numbers do not depend on the batch size."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from your_ai.data.batches import RowsAt, bucket_edges, in_order_of_length, micro_batches
from your_ai.data.examples import Examples
from your_ai.engine.protocol import Engine
from your_ai.run.stopping import Stop


@dataclass(frozen=True)
class MeanLoss:
    """The weighted mean cross-entropy of the trained tokens."""

    loss: float
    trained_tokens: int


def mean_loss(engine: Engine, examples: Examples, rows_at: RowsAt, stop: Stop) -> MeanLoss | None:
    """The loss over every example; None when asked to stop, or where all weights are 0.

    rows_at: how many rows of so many tokens go through together.
    """
    total = weight = 0.0
    trained_tokens = 0
    for batch in in_order_of_length(examples, rows_at):
        if stop:
            return None
        total += engine.loss(batch).loss.item()
        weight += engine.objective.denominator([batch])
        trained_tokens += batch.trained_tokens
    return MeanLoss(total / weight, trained_tokens) if weight > 0 else None


def exact_matches(engine: Engine, examples: Examples, rows_at: RowsAt, stop: Stop) -> int | None:
    """How many examples the model answers exactly, taking the likeliest token each time.

    Greedy decoding gives the expected answer just where each of its tokens, the end
    included, is the likeliest after those before it: one forward pass tells. None when
    asked to stop.
    """
    correct = 0
    for batch in in_order_of_length(examples, rows_at):
        if stop:
            return None
        n = batch.trained_tokens
        rows = batch.positions[:n] // batch.tokens.shape[1]
        wrong = np.array(engine.predictions(batch))[:n] != batch.targets[:n]
        correct += len(set(rows) - set(rows[wrong]))
    return correct


@dataclass(frozen=True)
class ExampleScores:
    """Of each example, (n,): losses, float64, the sum over its trained tokens, whatever its
    weight; exact, bool, whether each of them is the likeliest."""

    losses: np.ndarray
    exact: np.ndarray


def scored(
    engine: Engine, examples: Examples, rows_at: RowsAt
) -> Generator[int, None, ExampleScores]:
    """What `mean_loss` and `exact_matches` are made of, example by example; one forward pass.

    Yields how many are done. What was compiled for one shape is dropped before the next: it is
    large, and hardly comes again.
    """
    order = np.argsort(-examples.lengths, kind="stable")
    losses, exact = np.zeros(len(order)), np.ones(len(order), bool)
    done, shape = 0, None
    for batch in micro_batches(examples, order, rows_at, bucket_edges(examples.lengths - 1)):
        n = batch.trained_tokens
        if shape != (shape := (*batch.tokens.shape, len(batch.targets))):
            engine.drop()
        arrays = engine.score(batch)
        mx.eval(arrays)
        found, likeliest = (np.array(array)[:n] for array in arrays)
        rows = order[batch.rows[batch.positions[:n] // batch.tokens.shape[1], 0]]
        np.add.at(losses, rows, found)
        exact[rows[likeliest != batch.targets[:n]]] = False
        done += int((batch.lengths > 0).sum())
        yield done
    return ExampleScores(losses, exact)
