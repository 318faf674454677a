"""The interface between the training loop and a model, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from your_ai.data.batches import Batch
from your_ai.objectives.objective import Objective, Sums


@dataclass(frozen=True)
class Engine:
    """A model with an objective. Shapes: S target slots of a batch.

    All sums are over the targets of one micro-batch.
    """

    objective: Objective
    gradients: Callable[[Batch, float, int], tuple[Sums, Any]]
    """(batch, scale, step_seed) -> the sums, and the gradients of `scale` times the loss, as a
    tree of the trainable parameters. step_seed is the seed of dropout and noise."""
    loss: Callable[[Batch], Sums]
    """Only the sums, without dropout and noise."""
    log_probabilities: Callable[[Batch], mx.array]
    """(S,) of each target, without dropout and noise."""
    predictions: Callable[[Batch], mx.array]
    """(S,) the most likely token at each target."""
    score: Callable[[Batch], tuple[mx.array, mx.array]]
    """(S,) the unweighted cross-entropy of each target, and (S,) the most likely token there."""
    drop: Callable[[], None]
    """Free the compiled graphs; they are compiled again when needed."""
    fill: Callable[[Iterable[Batch]], None] | None = None
    """Fill the prefix cache before the first step; None if that would not be cheaper."""
    keep: Callable[[int], None] = lambda _: None
    """Set the number of blocks, from the last, that keep the outputs of their linear layers from
    the forward to the backward pass. Engines that are not staged ignore it."""
    hold: Callable[[int, int], None] = lambda resident, blocks_ahead: None
    """Set the number of blocks, from the last, whose streamed weights stay in memory, and the
    number that are read while the block before them runs. Other engines ignore it."""
    forget: Callable[[], int] = lambda: 0
    """Free the weights that a streamed engine keeps in memory, to be read again when needed;
    return their bytes."""
    waited: Callable[[], float | None] = lambda: None
    """Seconds in which a streamed engine waited for its weights since the last call; None if the
    weights of all blocks are in memory."""
