"""The best validation of a run: one definition for every view. The mean of training losses has a
best one too (`running_mean.py`), which views always call the best mean."""

from __future__ import annotations

import math
from collections.abc import Iterable

from your_ai.run.events import Validation


def is_better(found: Validation, best: Validation | None) -> bool:
    """Whether a validation takes the place of the best one so far.

    The run marks each that is, by --best-metric: it keeps that adapter. Of a run that marks none,
    the one with the lowest loss is the best.
    """
    if found.best or (best is not None and best.best):
        return found.best
    return math.isfinite(found.loss) and (best is None or found.loss < best.loss)


def best_of(validations: Iterable[Validation]) -> Validation | None:
    """The best of all, in the order of the run; None if no loss is finite."""
    best = None
    for found in validations:
        best = found if is_better(found, best) else best
    return best
