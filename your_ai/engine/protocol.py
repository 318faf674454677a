"""The interface between the training loop and a model, the same for every engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from your_ai.data.batches import Batch
from your_ai.engine.gradients import Gradients
from your_ai.engine.weights import FileTensor
from your_ai.memory.workload import KeptAt
from your_ai.nets.mlx_types import Arrays
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
    score: Callable[[Batch], tuple[mx.array, ...]]
    """(S,) the unweighted cross-entropy of each target, and (S,) the most likely token there. With
    hidden states of a teacher, also (S,) the divergence from its predictions, and (S,) bool,
    whether the most likely token is the teacher's."""
    drop: Callable[[], None]
    """Free the compiled graphs; they are compiled again when needed."""
    fill: Callable[[Iterable[Batch]], None] | None = None
    """Fill the prefix cache before the first step; None if that would not be cheaper."""
    keep: Callable[[KeptAt], None] = lambda _: None
    """Set what blocks keep from the forward to the backward pass, by the shape of a micro-batch.
    Engines that are not staged ignore it."""
    hold: Callable[[int, int], None] = lambda resident, blocks_ahead: None
    """Set the number of blocks, from the last, whose streamed weights stay in memory, and the
    number that are read while the block before them runs. Other engines ignore it."""
    forget: Callable[[], int] = lambda: 0
    """Free the weights that a streamed engine keeps in memory, to be read again when needed;
    return their bytes."""
    waited: Callable[[], float | None] = lambda: None
    """Seconds in which a streamed engine waited for its weights since the last call; None if the
    weights of all blocks are in memory."""
    moved: Callable[[Mapping[str, FileTensor]], None] = lambda _: None
    """Read trained parameters, by name, from other files from now on; of a streamed engine."""
    refocus: Callable[[], None] = lambda: None
    """Compute gradients of the parameters that can be trained now, which are of other blocks."""
    by_block: Callable[[Batch, float, int, Callable[[Arrays], None]], Sums] | None = None
    """Like `gradients`, but calls a function with the gradients of each block, by the names of
    their parameters, as soon as they are there; None if they are there all at once."""

    head_inputs: Callable[[Sequence[np.ndarray]], Iterator[mx.array]] | None = None
    """For texts of n tokens, the inputs of the head's linear layer, (n, D): what it predicts the
    next tokens from. The blocks are read once for all texts. Of an engine that is not fused."""

    ahead: Callable[[Iterable[Batch]], Iterator[Batch]] = iter
    """Pass micro-batches on, in their order, of which something may be prepared for several
    together; they are then only measured."""

    def add_gradients(self, batch: Batch, scale: float, step_seed: int, total: Gradients) -> Sums:
        """Add what `gradients` computes to `total`, and return the sums."""
        if self.by_block is not None:
            return self.by_block(batch, scale, step_seed, total.add)
        sums, grads = self.gradients(batch, scale, step_seed)
        found = dict(tree_flatten(grads))
        del grads  # `add` frees each when it is added
        total.add(found, sums)
        return sums
