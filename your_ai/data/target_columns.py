"""Named columns of targets: arrays that only some rows have, with a value for each target.

`Examples` has them by row or by token; `Batch`, `Targets` and `ScoredTexts` have them by target.
What lays them out, cuts and joins them does not know their names. So a new column is a line here,
and what makes or uses its values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

ColumnName = Literal[
    "labels", "ratings", "reference", "advantages", "old", "given", "baseline",
    "loss", "clip_low", "clip_high", "slot",
]  # fmt: skip
Columns = Mapping[ColumnName, np.ndarray]


@dataclass(frozen=True)
class Column:
    dtype: type[np.generic]
    per: Literal["row", "token", "target"]
    """What has a value in `Examples`: each row, (n,), or each token, (N,). A column by target is
    made for micro-batches, (S,), and is not in `Examples`."""
    padding: float = 0
    """The value in the empty slots of a micro-batch."""
    is_cached: bool = False
    """Whether it is read from the data, and kept with the tokens."""


COLUMNS: dict[ColumnName, Column] = {
    # whether the answer is good
    "labels": Column(np.bool_, "row", is_cached=True),
    # in the data of a reward model: the score of the text, or the margin by which the scores of its
    # pair are to differ
    "ratings": Column(np.float32, "row", is_cached=True),
    # log-probability under the reference model; 0 for tokens that are not trained
    "reference": Column(np.float32, "token"),
    # of a rollout: how much better the completion, or this turn of it, is than others of its group;
    # 0 for tokens that are not trained
    "advantages": Column(np.float32, "token"),
    # of a rollout: log-probability when it was generated, if the adapters have changed since; 0 for
    # tokens that are not trained
    "old": Column(np.float32, "token"),
    # weight that `Objective.weigh` gave when all texts of the step were scored; if there are any,
    # the objective is not asked again
    "given": Column(np.float32, "target"),
    # what the other texts of the groups say in this step, the same for all targets, which are those
    # of first texts
    "baseline": Column(np.float32, "target"),
    # of a loop of other people: the number of the token's loss, and its thresholds
    "loss": Column(np.int32, "target"),
    "clip_low": Column(np.float32, "target"),
    "clip_high": Column(np.float32, "target"),
    # the place of a target whose log-probability is to be known by itself
    "slot": Column(np.int32, "target", -1),
}
CACHED = {name: column for name, column in COLUMNS.items() if column.is_cached}
