"""Weigh texts that do not go through the model together, from their log-probabilities.

All texts are scored first, without gradients. Then the objective weighs them as a whole. The
gradients of the texts with these weights are those of the objective, however the texts are divided
into micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from your_ai.data.batches import Batch
from your_ai.engine.protocol import Engine
from your_ai.objectives.objective import (
    Objective,
    ObjectiveWithBaseline,
    Scores,
    Targets,
    Totals,
    Weighed,
)


class ScoredTexts(NamedTuple):
    """The n targets of a micro-batch, with their log-probabilities; arrays of (n,)."""

    current: np.ndarray
    texts: np.ndarray
    """The index of the text of each target, in the step or in the file."""
    weights: np.ndarray
    reference: np.ndarray | None
    good: np.ndarray | None
    ratings: np.ndarray | None


def score(engine: Engine, batch: Batch) -> ScoredTexts:
    """Compute the log-probabilities of the targets of a micro-batch."""
    n = batch.trained_tokens
    optional = (None if a is None else a[:n] for a in (batch.reference, batch.good, batch.ratings))
    found = np.array(engine.log_probabilities(batch))[:n]
    return ScoredTexts(found, batch.text_ids, batch.weights[:n], *optional)


def weigh(objective: Objective, scored: Sequence[ScoredTexts]) -> Weighed:
    """What the objective says about all targets, in the order of `scored`."""
    return objective.weigh(*as_targets(scored))


def as_targets(scored: Sequence[ScoredTexts]) -> tuple[Scores, Targets]:
    """All targets, in the order of `scored`, with their log-probabilities."""
    current, texts, weights, *optional = map(joined, zip(*scored, strict=True))
    texts = np.unique(texts, return_inverse=True)[1]  # without gaps, so below the targets' number
    empty = mx.zeros(len(current), mx.int32)
    reference, good, ratings = (None if a is None else mx.array(a) for a in optional)
    targets = Targets(
        empty, empty, mx.array(weights), mx.array(texts.astype(np.int32)),
        reference, good, ratings=ratings,
    )  # fmt: skip
    return Scores(mx.array(current)), targets


def joined(arrays: Iterable[np.ndarray | None]) -> np.ndarray | None:
    """All arrays as one; None if the batches have none."""
    found = [array for array in arrays if array is not None]
    return np.concatenate(found) if found else None


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
        replace(batch, given=np.pad(part, (0, len(batch.targets) - len(part))))
        for batch, part in zip(batches, parts, strict=True)
    ]
    totals = Totals()
    totals.add(weighed.sums)
    return [batch for batch in found if batch.given.any()] or found[:1], totals


def with_baseline(engine: Engine, batches: Sequence[Batch]) -> list[Batch]:
    """The micro-batches with the first texts of all groups, and the baseline of the step.

    batches: with all texts of the step, none with first texts and others. The others are scored.
    """
    objective: ObjectiveWithBaseline = engine.objective
    firsts, scored = [], []
    for batch in batches:
        if batch.text_ids[0] % objective.rows_together == 0:
            firsts.append(batch)
        else:
            scored.append(score(engine, batch))
    baseline = objective.baseline(*as_targets(scored)).item()
    return [
        replace(batch, baseline=np.full(len(batch.targets), baseline, np.float32))
        for batch in firsts
    ]
