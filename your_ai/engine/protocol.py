"""What a training loop needs of a model, whichever way its gradients are computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Objective, Sums


@dataclass(frozen=True)
class Engine:
    """A model under an objective. Shapes: S target slots of a batch.

    All sums are over the targets of one micro-batch.
    """

    objective: Objective
    gradients: Callable[[Batch, float, int], tuple[Sums, Any]]
    """(batch, scale, step_seed) -> the sums, and the gradients of `scale` times the loss, as a
    tree of the trainable parameters. step_seed draws dropout."""
    loss: Callable[[Batch], Sums]
    """The sums alone, without dropout."""
    predictions: Callable[[Batch], mx.array]
    """(S,) the likeliest token at each target."""
    score: Callable[[Batch], tuple[mx.array, mx.array]]
    """(S,) the cross-entropy of each target, whatever its weight, and its prediction."""
    drop: Callable[[], None]
    """Forget compiled graphs; they are compiled again when they are needed."""
    fill: Callable[[Iterable[Batch]], None] | None = None
    """Fill the prefix cache, where that is cheaper before the first step."""
