"""Whole weights of a few blocks at a time: which ones, and the change from one period to the next.

As in BAdam (Luo et al., 2024, arXiv 2404.02827), every block has its turn before one has it again,
in a random order, and the states of the optimizer begin anew in each period. LISA (Pan et al.,
2024, arXiv 2403.17919) trains some blocks at a time, too. Only their gradients and states exist.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from your_ai.engine.protocol import Engine
from your_ai.nets.full import train_blocks
from your_ai.rng import derive_seed
from your_ai.training.optimizer import StatefulOptimizer, restart


def blocks_of(number: int, blocks: Sequence[int], at_a_time: int, seed: int) -> list[int]:
    """The blocks that are trained in period `number` (from 0): of `blocks`, so many at a time, or
    those that are left of a turn. A pure function."""
    turn, place = divmod(number, -(-len(blocks) // at_a_time))
    rng = np.random.default_rng(derive_seed(seed, "blocks", turn))
    order = [blocks[i] for i in rng.permutation(len(blocks)).tolist()]
    return sorted(order[place * at_a_time : (place + 1) * at_a_time])


@dataclass(frozen=True)
class Periods:
    """The periods of a run that trains some blocks at a time."""

    steps: int
    """Of a period."""
    at_a_time: int
    blocks: Sequence[int]
    """All that it trains."""
    keys: Collection[str] | None
    """As of `full.train_blocks`."""
    seed: int

    def begins(self, step: int) -> bool:
        """Return whether a period begins with step `step` (from 0)."""
        return step % self.steps == 0

    def enter(
        self, step: int, model: nn.Module, engine: Engine, optimizer: StatefulOptimizer
    ) -> None:
        """Let the blocks of step `step` be trained, with their first states."""
        number = step // self.steps
        train_blocks(model, blocks_of(number, self.blocks, self.at_a_time, self.seed), self.keys)
        engine.refocus()
        restart(optimizer, [name for name, _ in tree_flatten(model.trainable_parameters())])
