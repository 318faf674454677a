"""Rollouts of a run on several ranks: prompts are dealt, and what was found is given to all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from your_ai.data.batches import Batch, RowsAt, micro_batches
from your_ai.data.examples import Examples
from your_ai.generation.rollouts import Completion
from your_ai.run.rollout_files import RolloutRecord
from your_ai.training.distributed import Ranks

GIVEN_UP = "given up"  # instead of what a rank was to give


class GivenUp(Exception):
    """A signal asked the run to stop before the completions of a step were there."""


def shared(
    ranks: Ranks, make: Callable[[], list[RolloutRecord] | None]
) -> list[RolloutRecord] | None:
    """The records that rank 0 makes, on every rank. Raises GivenUp on all if it does."""
    if ranks.size == 1:
        return make()

    def as_json() -> Any:
        try:
            records = make()
        except GivenUp:
            return GIVEN_UP
        return None if records is None else [asdict(record) for record in records]

    found = ranks.of_first(as_json)
    if found == GIVEN_UP:
        raise GivenUp
    return None if found is None else [RolloutRecord(**record) for record in found]


def of_all(ranks: Ranks, own: Iterator[Completion]) -> Iterator[Completion]:
    """The completions of this rank as they come, and then those of the others.

    Raises GivenUp on all ranks if one gives up.
    """
    found, gave_up = [], False
    try:
        for completion in own:
            found.append(completion)
            yield completion
    except GivenUp:
        gave_up = True
    parts = ranks.gather(GIVEN_UP if gave_up else [asdict(each) for each in found])
    if GIVEN_UP in parts:
        raise GivenUp
    for rank, part in enumerate(parts):
        for each in part if rank != ranks.rank else []:
            yield Completion(**{**each, "tokens": tuple(each["tokens"])})


def own_batches(
    ranks: Ranks,
    examples: Examples,
    rows: np.ndarray,
    rows_at: RowsAt,
    edges: np.ndarray,
    hidden: int,
) -> list[Batch]:
    """The micro-batches of these rows, the longest first, that this rank trains.

    hidden: hidden size of the model.
    """
    if ranks.size == 1:
        return list(micro_batches(examples, rows, rows_at, edges))
    ids, most = ranks.rows(examples.lengths[rows], hidden), ranks.most_rows(len(rows))
    batches = micro_batches(examples, rows, lambda n: min(most, rows_at(n)), edges, ids=ids)
    return list(batches)
