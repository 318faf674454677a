"""Examples -> steps -> micro-batches: few shapes, little padding, no state.

Which rows a step trains is a pure function of (seed, step), so that a resumed run,
and a run that validates more often, see the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from your_ai.data.examples import Examples
from your_ai.rng import derive_seed

MULTIPLE = 32  # lengths are padded to a multiple of this
MERGE_PADDING = 0.05  # buckets merge while that adds less than this share of tokens
MAX_BUCKETS = 12
TARGET_LEVELS = 4  # a batch's targets are padded to a quarter of its tokens


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows padded to T tokens, and the S targets in them.

    tokens: (B, T) int32, padded on the right; positions: (S,) int32, where in the
    flattened (B * T) tokens each target is predicted; targets: (S,) int32;
    weights: (S,) float32, 0 where the slot is padding; rows: (B,) uint32, each row's
    place in its step, from which its dropout is drawn.
    """

    tokens: np.ndarray
    positions: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    rows: np.ndarray
    real_tokens: int
    trained_tokens: int

    @property
    def weight(self) -> float:
        """The sum of the targets' weights: what a loss over this batch is divided by."""
        return float(self.weights.sum(dtype=np.float64))


def bucket_edges(lengths: np.ndarray) -> np.ndarray:
    """The few lengths that inputs of `lengths` tokens are padded to, ascending.

    Begins with every multiple of 32 in use and merges neighbours, the cheapest first,
    while all merging together adds less than 5% of padding, or there are too many.
    """
    rounded = -(-lengths // MULTIPLE) * MULTIPLE
    edges, counts = np.unique(rounded, return_counts=True)
    room = MERGE_PADDING * float(rounded.sum())
    while len(edges) > 1:
        costs = counts[:-1] * np.diff(edges)  # the shorter bucket padded to the longer
        cheapest = int(costs.argmin())
        if costs[cheapest] > room and len(edges) <= MAX_BUCKETS:
            break
        room -= float(costs[cheapest])
        counts[cheapest + 1] += counts[cheapest]
        edges, counts = np.delete(edges, cheapest), np.delete(counts, cheapest)
    return edges


@dataclass(frozen=True)
class StepPlan:
    """Which rows each step trains, in micro-batches of `batch_size`."""

    examples: Examples
    edges: np.ndarray
    buckets: np.ndarray  # (n,) index into `edges` of each example
    batch_size: int
    rows_per_step: int
    seed: int
    _orders: dict = field(default_factory=dict, repr=False)  # the epoch in use

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.rows_per_step)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the step with index `step`, from 0."""
        return step // self.steps_per_epoch

    def rows_of(self, step: int) -> np.ndarray:
        """The examples that step `step` (from 0) trains, longest first."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order, starts, ends = self._epoch(epoch)
        rows = order[starts[index] : ends[index]]
        return rows[np.argsort(-self.examples.lengths[rows], kind="stable")]

    def batches_of(self, step: int) -> list[Batch]:
        """The micro-batches of step `step` (from 0)."""
        return list(micro_batches(self.examples, self.rows_of(step), self.batch_size, self.edges))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if epoch not in self._orders:
            self._orders.clear()
            seed = derive_seed(self.seed, "epoch", epoch)
            self._orders[epoch] = epoch_order(self.buckets, self.rows_per_step, seed)
        return self._orders[epoch]


def epoch_order(
    buckets: np.ndarray, rows_per_step: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A permutation of the rows, and where in it each step begins and ends.

    Rows are shuffled, then sorted by bucket, so that a step's rows are alike in length;
    the steps are shuffled across lengths. One step may be short, of any length.
    """
    rng = np.random.Generator(np.random.PCG64(seed))
    order = rng.permutation(len(buckets))
    order = order[np.argsort(buckets[order], kind="stable")]
    whole, rest = divmod(len(order), rows_per_step)
    sizes = np.full(whole, rows_per_step)
    if rest:
        sizes = np.insert(sizes, rng.integers(whole + 1), rest)
    ends = np.cumsum(sizes)
    steps = rng.permutation(len(sizes))
    return order, (ends - sizes)[steps], ends[steps]


def plan_steps(examples: Examples, batch_size: int, rows_per_step: int, seed: int) -> StepPlan:
    inputs = examples.lengths - 1
    edges = bucket_edges(inputs)
    buckets = np.searchsorted(edges, inputs)
    return StepPlan(examples, edges, buckets, batch_size, rows_per_step, seed)


def micro_batches(
    examples: Examples, rows: np.ndarray, batch_size: int, edges: np.ndarray
) -> Iterator[Batch]:
    """`rows`, in their order, as batches of `batch_size`."""
    for start in range(0, len(rows), batch_size):
        yield make_batch(examples, rows[start : start + batch_size], batch_size, edges, start)


def in_order_of_length(examples: Examples, batch_size: int) -> Iterator[Batch]:
    """Every example once, in a fixed order: for validation."""
    edges = bucket_edges(examples.lengths - 1)
    order = np.argsort(examples.lengths, kind="stable")
    return micro_batches(examples, order, batch_size, edges)


def make_batch(
    examples: Examples, rows: np.ndarray, batch_size: int, edges: np.ndarray, first: int = 0
) -> Batch:
    """One padded batch. `first`: the place in the step of its first row."""
    length = int(edges[np.searchsorted(edges, int(examples.lengths[rows].max()) - 1)])
    tokens = np.zeros((batch_size, length), np.int32)
    positions, targets, weights = [], [], []
    real = 0
    for i, row in enumerate(rows):
        example = examples[row]
        inputs = len(example.tokens) - 1
        tokens[i, :inputs] = example.tokens[:-1]
        at = np.flatnonzero(example.trained[1:])
        positions.append(i * length + at)
        targets.append(example.tokens[1:][at])
        weights.append(np.full(len(at), examples.weights[row], np.float32))
        real += inputs
    trained = sum(map(len, targets))
    slots = padded_targets(trained, tokens.size)
    return Batch(
        tokens=tokens,
        positions=pad(np.concatenate(positions), slots, np.int32),
        targets=pad(np.concatenate(targets), slots, np.int32),
        weights=pad(np.concatenate(weights), slots, np.float32),
        rows=np.arange(first, first + batch_size, dtype=np.uint32),
        real_tokens=real,
        trained_tokens=trained,
    )


def padded_targets(count: int, tokens: int) -> int:
    """How many target slots a batch of `tokens` has for `count` targets: few different sizes."""
    level = max(1, -(-tokens // TARGET_LEVELS))
    return max(1, -(-count // level)) * level


def pad(values: np.ndarray, size: int, dtype: type) -> np.ndarray:
    return np.pad(values.astype(dtype), (0, size - len(values)))
