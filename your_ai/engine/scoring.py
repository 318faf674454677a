"""Weigh texts that do not go through the model together, from their log-probabilities.

All texts are scored first, without gradients. Then the objective weighs them as a whole. The
gradients of the texts with these weights are those of the objective, however the texts are divided
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch
from your_ai.data.target_columns import Columns
from your_ai.engine.protocol import Engine
from your_ai.objectives.objective import (
    Objective,
    ObjectiveWithBaseline,
    Scores,
    Targets,
    Totals,
    Weighed,
)

Summed = Callable[[np.ndarray], np.ndarray]


class ScoredTexts(NamedTuple):
    """The n targets of a micro-batch, with their log-probabilities; arrays of (n,)."""

    current: np.ndarray
    texts: np.ndarray
    """The index of the text of each target, in the step or in the file."""
    weights: np.ndarray
    columns: Columns
    """(n,) each, those of the micro-batch."""

    @staticmethod
    def of(batch: Batch, current: np.ndarray) -> ScoredTexts:
        n = batch.trained_tokens
        columns = {name: array[:n] for name, array in batch.columns.items()}
        return ScoredTexts(current, batch.text_ids, batch.weights[:n], columns)


def score(engine: Engine, batch: Batch) -> ScoredTexts:
    """Compute the log-probabilities of the targets of a micro-batch."""
    found = np.array(engine.log_probabilities(batch))
    return ScoredTexts.of(batch, found[: batch.trained_tokens])


def weigh(objective: Objective, scored: Sequence[ScoredTexts]) -> Weighed:
    """Weigh all targets with the objective, in the order of `scored`."""
    return objective.weigh(*as_targets(scored))


def as_targets(scored: Sequence[ScoredTexts]) -> tuple[Scores, Targets]:
    """All targets, in the order of `scored`, with their log-probabilities."""
    texts = np.concatenate([part.texts for part in scored])
    texts = np.unique(texts, return_inverse=True)[1]  # without gaps, so below the targets' number
    weights = mx.array(np.concatenate([part.weights for part in scored]))
    current = mx.array(np.concatenate([part.current for part in scored]))
    columns = {
        name: mx.array(np.concatenate([part.columns[name] for part in scored]))
        for name in scored[0].columns
    }
    empty = mx.zeros(len(current), mx.int32)
    targets = Targets(empty, empty, weights, mx.array(texts.astype(np.int32)), columns)
    return Scores(current), targets


def with_weights(engine: Engine, batches: Sequence[Batch]) -> tuple[list[Batch], Totals]:
    """The micro-batches of a step with the weights of their targets, and the sums of the step.

    batches: with all texts of the step. Those whose weights are all 0 are left out, but for one.
    """
    scored = [score(engine, batch) for batch in batches]
    weighed = weigh(engine.objective, scored)
    weights = np.array(weighed.weights)
    ends = np.cumsum([len(part.current) for part in scored])
    parts = np.split(weights, ends[:-1])
    found = [
        batch.with_columns({"given": np.pad(part, (0, len(batch.targets) - len(part)))})
        for batch, part in zip(batches, parts, strict=True)
    ]
    totals = Totals()
    totals.add(weighed.sums)
    used = [batch for batch, part in zip(found, parts, strict=True) if part.any()]
    return used or found[:1], totals


def with_baseline(
    engine: Engine,
    batches: Sequence[Batch],
    whole: Sequence[Batch] | None = None,
    summed: Summed = lambda values: values,
) -> list[Batch]:
    """The micro-batches with the first texts of all groups, and the baseline of the step.

    batches: none with first texts and others. The others are scored.
    whole: all texts of the step, if `batches` are only those of this process.
    summed: adds (n,) values of all processes.
    """
    objective = cast(ObjectiveWithBaseline, engine.objective)
    together = objective.rows_together
    firsts = [batch for batch in batches if is_of_first_texts(batch, together)]
    others = [batch for batch in batches if not is_of_first_texts(batch, together)]
    scored = [score(engine, batch) for batch in others]
    if whole is not None:
        every = [batch for batch in whole if not is_of_first_texts(batch, together)]
        scored = scored_by_all(scored, every, summed)
    baseline = float(objective.baseline(*as_targets(scored)))
    return [
        batch.with_columns({"baseline": np.full(len(batch.targets), baseline, np.float32)})
        for batch in firsts
    ]


def is_of_first_texts(batch: Batch, rows_together: int) -> bool:
    return bool(batch.text_ids[0] % rows_together == 0)


def scored_by_all(
    scored: Sequence[ScoredTexts], whole: Sequence[Batch], summed: Summed
) -> list[ScoredTexts]:
    """The texts of `whole` with their log-probabilities, each of which one process computed.

    scored: what this process computed. summed: adds (n,) values of all processes.
    """
    texts = [batch.text_ids for batch in whole]
    counts = np.bincount(np.concatenate(texts))
    values = np.zeros(int(counts.sum()), np.float32)
    starts = np.cumsum(counts) - counts
    for part in scored:
        values[slots(part.texts, starts)] = part.current
    values = summed(values)
    return [
        ScoredTexts.of(batch, values[slots(ids, starts)])
        for batch, ids in zip(whole, texts, strict=True)
    ]


def slots(texts: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """(n,) a place for each target: those of a text are consecutive, in the order of the text.

    texts: (n,) the text of each target; starts: the first place of each text.
    """
    order = np.argsort(texts, kind="stable")
    _, firsts, counts = np.unique(texts[order], return_index=True, return_counts=True)
    within = np.empty(len(texts), np.int64)
    within[order] = np.arange(len(texts)) - np.repeat(firsts, counts)
    found: np.ndarray = starts[texts] + within
    return found
