"""Measures over a whole file of examples. The results do not depend on the batch size."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from your_ai.data.batches import (
    RowsAt,
    bucket_edges,
    by_length,
    in_order_of_length,
    micro_batches,
    split_batches,
)
from your_ai.data.examples import Examples
from your_ai.engine.protocol import Engine
from your_ai.engine.scoring import score, weigh
from your_ai.objectives.objective import Totals
from your_ai.run.stopping import Stop


@dataclass(frozen=True)
class MeanLoss:
    """The loss of an objective over a whole file."""

    loss: float
    """For supervised fine-tuning, the weighted mean cross-entropy of the trained tokens."""
    trained_tokens: int
    metrics: dict[str, float] = field(default_factory=dict)
    """Means of the objective's metrics, by name."""


def mean_loss_of_all(
    engine: Engine,
    examples: Examples,
    rows_at: RowsAt,
    stop: Stop,
    ids: np.ndarray,
    gather: Callable[[Any], list[Any]],
) -> MeanLoss | None:
    """Compute `mean_loss` of a token-local objective, of which each process does a part.

    ids: the indices, in the order of length, of the examples of this process.
    gather: gives what each process found, in the order of the processes.
    """
    totals, weight, trained_tokens = Totals(), 0.0, 0
    edges, order = bucket_edges(examples.lengths - 1), by_length(examples)
    for batch in engine.ahead(micro_batches(examples, order, rows_at, edges, ids=ids)):
        if stop:
            break
        totals.add(engine.loss(batch))
        weight += engine.objective.denominator([batch])
        trained_tokens += batch.trained_tokens
    parts = gather(None if stop else [totals.loss, totals.metrics, weight, trained_tokens])
    if None in parts:
        return None
    whole = Totals()
    for loss, metrics, _, _ in parts:
        whole.add_sums(loss, metrics)
    weight = sum(part[2] for part in parts)
    if weight <= 0:
        return None
    return MeanLoss(whole.loss / weight, sum(part[3] for part in parts), whole.means())


def mean_loss(engine: Engine, examples: Examples, rows_at: RowsAt, stop: Stop) -> MeanLoss | None:
    """Return the mean loss over all examples; None if asked to stop or if all weights are 0.

    rows_at: how many rows of a given sequence length go through together.
    """
    totals, weight, objective = Totals(), 0.0, engine.objective
    trained_tokens, texts = 0, []
    edges, every = bucket_edges(examples.lengths - 1), np.arange(len(examples))
    if objective.token_local:
        batches = in_order_of_length(examples, rows_at)
    else:
        batches = split_batches(examples, every, rows_at, edges, objective.rows_together)
    for batch in engine.ahead(batches):
        if stop:
            return None
        if objective.token_local:
            totals.add(engine.loss(batch))
        else:
            texts.append(score(engine, batch))
        weight += objective.denominator([batch])
        trained_tokens += batch.trained_tokens
    if texts:
        totals.add(weigh(objective, texts).sums)
    if weight <= 0:
        return None
    return MeanLoss(totals.loss / weight, trained_tokens, totals.means())


def exact_matches(engine: Engine, examples: Examples, rows_at: RowsAt, stop: Stop) -> int | None:
    """Count the examples of `exact_examples`; None if asked to stop."""
    exact = exact_examples(engine, examples, rows_at, stop)
    return None if exact is None else int(exact.sum())


def exact_examples(
    engine: Engine, examples: Examples, rows_at: RowsAt, stop: Stop
) -> np.ndarray | None:
    """(n,) bool: whether greedy decoding would reproduce the answer of each example exactly.

    Greedy decoding gives the expected answer if and only if each of its tokens, including the
    end token, is the most likely one after the tokens before it. One forward pass shows this.
    Returns None if asked to stop.
    """
    exact, done = np.ones(len(examples), bool), 0
    order = by_length(examples)
    for batch in in_order_of_length(examples, rows_at):
        if stop:
            return None
        n = batch.trained_tokens
        rows = batch.positions[:n] // batch.tokens.shape[1]
        wrong = np.array(engine.predictions(batch))[:n] != batch.targets[:n]
        exact[order[done + rows[wrong]]] = False
        done += len(batch.tokens)
    return exact


@dataclass(frozen=True)
class ExampleScores:
    """The scores of n examples."""

    losses: np.ndarray
    """(n,) float64: the sum of the losses of an example's trained tokens; its weight is ignored."""
    exact: np.ndarray
    """(n,) bool: whether every trained token is the most likely one."""
    divergences: np.ndarray
    """(n,) float64: the sum of the divergences from a teacher at an example's trained tokens; 0
    without a teacher."""
    agreements: np.ndarray
    """(n,) float64: how many of these tokens the teacher and the model find the most likely one
    together; 0 without a teacher."""


def scored(
    engine: Engine, examples: Examples, rows_at: RowsAt
) -> Generator[int, None, ExampleScores]:
    """Compute the parts of `mean_loss` and `exact_matches` per example, in one forward pass.

    Yields how many examples are done. The functions compiled for one shape are dropped before
    the next shape, because they are large and rarely used again.
    """
    order = by_length(examples)
    losses, exact = np.zeros(len(order)), np.ones(len(order), bool)
    divergences, agreements = np.zeros(len(order)), np.zeros(len(order))
    done, shape = 0, None
    for batch in micro_batches(examples, order, rows_at, bucket_edges(examples.lengths - 1)):
        n = batch.trained_tokens
        if shape != (shape := (*batch.tokens.shape, len(batch.targets))):
            engine.drop()
        arrays = engine.score(batch)
        mx.eval(arrays)
        found, likeliest, *compared = (np.array(array)[:n] for array in arrays)
        rows = order[batch.rows[batch.positions[:n] // batch.tokens.shape[1], 0]]
        np.add.at(losses, rows, found)
        for sums, values in zip((divergences, agreements), compared, strict=False):
            np.add.at(sums, rows, values)
        exact[rows[likeliest != batch.targets[:n]]] = False
        done += int((batch.lengths > 0).sum())
        yield done
    return ExampleScores(losses, exact, divergences, agreements)
