"""Examples -> steps -> micro-batches: few shapes, little padding, no state.

Which rows a step trains is a pure function of (seed, step), so that a resumed run,
and a run that validates more often, see the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from your_ai.data.examples import Examples
from your_ai.rng import derive_seed

MULTIPLE = 32  # lengths are padded to a multiple of this
MERGE_PADDING = 0.05  # buckets merge while that adds less than this share of tokens
MAX_BUCKETS = 12
TARGET_LEVELS = 8  # a batch's targets are padded to an eighth of its tokens
RowsAt = Callable[[int], int]
PADDING = 0xFFFFFFFF  # stands in `Batch.rows` where a packed row has no text


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows padded to T tokens, and the S targets in them.

    Dropout is drawn from which text of the step a token belongs to, and where in it: `rows`
    and `places`, which broadcast to (B, T).
    """

    tokens: np.ndarray
    """(B, T) int32, padded on the right."""
    positions: np.ndarray
    """(S,) int32, where in the flattened (B * T) tokens each target is predicted."""
    targets: np.ndarray
    """(S,) int32, the tokens that are predicted."""
    weights: np.ndarray
    """(S,) float32, of the row; 0 where the slot is padding."""
    texts: np.ndarray
    """(S,) int32, which text of the batch, from 0, a target belongs to; 0 in padding."""
    rows: np.ndarray
    """(B, 1) uint32, or (B, T) where several texts are packed into a row, PADDING in between."""
    places: np.ndarray
    """(1, T) uint32, the place of each token in its text."""
    lengths: np.ndarray
    """(B,) int64, the tokens of each row that are not padding."""
    trained_tokens: int
    reference: np.ndarray | None = None
    """(S,) float32 log-probabilities of the targets under the reference, where there is one."""

    @property
    def real_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def packed(self) -> bool:
        return self.rows.shape == self.tokens.shape

    @property
    def segments(self) -> np.ndarray | None:
        """(B, T) int32, equal where tokens are of one text; None where each row is one."""
        return self.rows.view(np.int32) if self.packed else None

    @property
    def max_segment_tokens(self) -> int | None:
        """A power of two that no text of a packed batch is longer than; None if not packed."""
        return (
            1 << int(self.places[self.rows != PADDING].max()).bit_length() if self.packed else None
        )

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
class Schedule:
    """Which rows each step trains, in micro-batches of `batch_size`.

    packed_tokens: with packing, the most tokens of a micro-batch, whatever `batch_size` is.
    rows_together: consecutive examples that are one group, in one micro-batch, such as a pair.
    """

    examples: Examples
    edges: np.ndarray
    buckets: np.ndarray  # (n,) index into `edges` of each group
    batch_size: int
    rows_per_step: int
    seed: int
    packed_tokens: int | None = None
    rows_together: int = 1
    _orders: dict = field(default_factory=dict, repr=False)  # the epoch in use

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.rows_per_step)

    def epoch_of(self, step: int) -> int:
        """The epoch, from 0, of the step with index `step`, from 0."""
        return step // self.steps_per_epoch

    def rows_of(self, step: int) -> np.ndarray:
        """The examples that step `step` (from 0) trains, group by group, the longest first."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order, starts, ends = self._epoch(epoch)
        groups = order[starts[index] : ends[index]]
        lengths = group_lengths(self.examples.lengths, self.rows_together)[groups]
        groups = groups[np.argsort(-lengths, kind="stable")]
        return members(groups, self.rows_together)

    def batches_of(self, step: int, rows_at: RowsAt | None = None) -> list[Batch]:
        """The micro-batches of step `step` (from 0).

        rows_at: how many rows of so many tokens may go through together; `batch_size` if None.
        """
        rows = self.rows_of(step)
        if self.packed_tokens is None:
            rows_at = rows_at or (lambda _: self.batch_size)
            together = self.rows_together
            return list(micro_batches(self.examples, rows, rows_at, self.edges, together))
        room = self.packed_tokens
        if rows_at is not None:
            longest = int(self.examples.lengths.max()) - 1
            room = min(room, rows_at(longest) * longest)
        return list(packed_batches(self.examples, rows, room, self.rows_together))

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if epoch not in self._orders:
            self._orders.clear()
            seed = derive_seed(self.seed, "epoch", epoch)
            groups = self.rows_per_step // self.rows_together
            self._orders[epoch] = epoch_order(self.buckets, groups, seed)
        return self._orders[epoch]


def group_lengths(lengths: np.ndarray, rows_together: int) -> np.ndarray:
    """The longest of each group of consecutive rows."""
    return lengths.reshape(-1, rows_together).max(axis=1)


def members(groups: np.ndarray, rows_together: int) -> np.ndarray:
    """The rows of groups, in order."""
    return (groups[:, None] * rows_together + np.arange(rows_together)).reshape(-1)


def epoch_order(
    buckets: np.ndarray, rows_per_step: int, seed: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A permutation of the rows, or groups, and where in it each step begins and ends.

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


def make_schedule(
    examples: Examples,
    batch_size: int,
    rows_per_step: int,
    seed: int,
    packed_tokens: int | None = None,
    rows_together: int = 1,
) -> Schedule:
    """rows_per_step, batch_size: of examples; the first must be a multiple of rows_together.

    Raises ValueError where examples are no whole groups.
    """
    if len(examples) % rows_together or rows_per_step % rows_together:
        raise ValueError(f"{len(examples)} rows are no whole groups of {rows_together}")
    inputs = examples.lengths - 1
    edges = bucket_edges(inputs)
    buckets = np.searchsorted(edges, group_lengths(inputs, rows_together))
    return Schedule(
        examples, edges, buckets, batch_size, rows_per_step, seed, packed_tokens, rows_together
    )


def micro_batches(
    examples: Examples,
    rows: np.ndarray,
    rows_at: RowsAt,
    edges: np.ndarray,
    rows_together: int = 1,
) -> Iterator[Batch]:
    """`rows`, the longest groups first, as batches of as many as `rows_at` gives for the first's.

    A batch has whole groups: one at least.
    """
    start = 0
    while start < len(rows):
        first = rows[start : start + rows_together]
        count = rows_at(padded_length(examples, first, edges))
        count = max(1, count // rows_together) * rows_together
        yield make_batch(examples, rows[start : start + count], count, edges, start)
        start += count


def in_order_of_length(examples: Examples, rows_at: RowsAt) -> Iterator[Batch]:
    """Every example once, in a fixed order, longest first: for validation."""
    edges = bucket_edges(examples.lengths - 1)
    order = np.argsort(-examples.lengths, kind="stable")
    return micro_batches(examples, order, rows_at, edges)


def padded_length(examples: Examples, rows: np.ndarray, edges: np.ndarray) -> int:
    """What the longest of `rows` is padded to."""
    return int(edges[np.searchsorted(edges, int(examples.lengths[rows].max()) - 1)])


def make_batch(
    examples: Examples, rows: np.ndarray, batch_size: int, edges: np.ndarray, first: int = 0
) -> Batch:
    """One padded batch. `first`: the place in the step of its first row."""
    length = padded_length(examples, rows, edges)
    return lay_out(
        examples,
        rows,
        np.arange(len(rows)) * length,
        (batch_size, length),
        np.arange(first, first + batch_size, dtype=np.uint32)[:, None],
        np.arange(length, dtype=np.uint32)[None],
    )


def packed_batches(
    examples: Examples, rows: np.ndarray, capacity: int, rows_together: int = 1
) -> Iterator[Batch]:
    """All of a step's `rows`, joined into batches of one row of at most `capacity` tokens.

    A group that takes more than that is a batch of its own.
    """
    inputs = examples.lengths[rows] - 1
    sizes = inputs.reshape(-1, rows_together).sum(axis=1)
    capacity = max(capacity, int(sizes.max()))
    for groups in first_fit(sizes, capacity):
        group = members(np.array(groups), rows_together)
        ends = np.cumsum(inputs[group])
        starts = ends - inputs[group]
        length = packed_length(int(ends[-1]), capacity)
        ids = np.full((1, length), PADDING, np.uint32)
        ids[0, : ends[-1]] = np.repeat(group, inputs[group])
        places = np.arange(length, dtype=np.uint32)[None]
        places[0, : ends[-1]] -= np.repeat(starts, inputs[group]).astype(np.uint32)
        yield lay_out(examples, rows[group], starts, (1, length), ids, places)


def first_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """The indices of `sizes` in groups of at most `capacity`, each put in the first it fits."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index, size in enumerate(sizes.tolist()):
        if size > capacity:
            raise ValueError(f"a row of {size} tokens does not fit into {capacity}")
        fits = next((i for i, left in enumerate(room) if size <= left), None)
        if fits is None:
            groups.append([index])
            room.append(capacity - size)
        else:
            groups[fits].append(index)
            room[fits] -= size
    return groups


def packed_length(tokens: int, capacity: int) -> int:
    """`tokens` padded to one of few lengths, by an eighth at most beyond 256."""
    multiple = max(MULTIPLE, 2 ** (tokens.bit_length() - 4))
    return min(round_up(tokens, multiple), round_up(capacity, MULTIPLE))


def lay_out(
    examples: Examples,
    rows: np.ndarray,
    starts: np.ndarray,
    shape: tuple[int, int],
    ids: np.ndarray,
    places: np.ndarray,
) -> Batch:
    """A batch of `shape` (B, T) with each row from its start in the flattened tokens."""
    tokens = np.zeros(shape, np.int32)
    flat = tokens.reshape(-1)
    positions, targets, weights, texts = [], [], [], []
    lengths = np.zeros(shape[0], np.int64)
    for text, (row, start) in enumerate(zip(rows, starts, strict=True)):
        example = examples[row]
        inputs = len(example.tokens) - 1
        flat[start : start + inputs] = example.tokens[:-1]
        at = np.flatnonzero(example.trained[1:])
        positions.append(start + at)
        targets.append(example.tokens[1:][at])
        weights.append(np.full(len(at), examples.weights[row], np.float32))
        texts.append(np.full(len(at), text))
        lengths[start // shape[1]] += inputs
    trained = sum(map(len, targets))
    slots = padded_targets(trained, tokens.size)
    return Batch(
        tokens=tokens,
        positions=pad(np.concatenate(positions), slots, np.int32),
        targets=pad(np.concatenate(targets), slots, np.int32),
        weights=pad(np.concatenate(weights), slots, np.float32),
        texts=pad(np.concatenate(texts), slots, np.int32),
        rows=ids,
        places=places,
        lengths=lengths,
        trained_tokens=trained,
    )


def padded_targets(count: int, tokens: int) -> int:
    """How many target slots a batch of `tokens` has for `count` targets: few different sizes."""
    level = max(1, -(-tokens // TARGET_LEVELS))
    return max(level, round_up(count, level))


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pad(values: np.ndarray, size: int, dtype: type) -> np.ndarray:
    return np.pad(values.astype(dtype), (0, size - len(values)))
