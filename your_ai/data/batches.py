"""Examples -> steps -> micro-batches, with few different shapes, little padding and no state.

The rows of a step are a pure function of (seed, step). So a resumed run, or a run that validates
more often, trains on the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from your_ai.data.examples import Examples
from your_ai.data.target_columns import COLUMNS, ColumnName, Columns
from your_ai.gates.text import counted
from your_ai.rng import derive_seed

MULTIPLE = 32  # lengths are padded to a multiple of this
MERGE_PADDING = 0.05  # buckets are merged while this adds less than 5% padding tokens
MAX_BUCKETS = 12
TARGET_LEVELS = 8  # target slots are padded to a multiple of 1/8 of the batch's tokens
RowsAt = Callable[[int], int]  # sequence length -> maximum rows in a micro-batch
Order = tuple[np.ndarray, np.ndarray, np.ndarray]  # as of `epoch_order`
FIRST_EMPTY = 0x80000000  # the ids in `Batch.rows` of rows without text begin here
PADDING = 0xFFFFFFFF  # the value in `Batch.rows` at padding of a packed row


@dataclass(frozen=True)
class Batch:
    """A micro-batch: B rows padded to T tokens, with S target slots.

    Dropout depends on the text of the step that a token belongs to, and on its place in the text:
    `rows` and `places`, which broadcast to (B, T).
    """

    tokens: np.ndarray
    """(B, T) int32, padded on the right."""
    positions: np.ndarray
    """(S,) int32, the index in the flattened (B * T) tokens that predicts each target."""
    targets: np.ndarray
    """(S,) int32, the token ids to predict."""
    weights: np.ndarray
    """(S,) float32, the weight of the target's row; 0 in padding slots."""
    texts: np.ndarray
    """(S,) int32, the index in the batch of the text that the target belongs to; 0 in padding."""
    rows: np.ndarray
    """(B, 1) uint32, the index in the step of each row's text.

    If several texts are packed into a row: (B, T), one index per token, and PADDING in padding.
    """
    places: np.ndarray
    """(1, T) uint32, the position of each token in its text."""
    lengths: np.ndarray
    """(B,) int64, the tokens of each row that are not padding."""
    trained_tokens: int
    columns: Columns = field(default_factory=dict)
    """(S,) each, as of `COLUMNS`, those that the targets have."""
    teacher: Any = None
    """(S, D) array of MLX: the hidden states of a teacher that predict the targets; None if there
    are none."""

    def with_columns(self, columns: Columns) -> Batch:
        """The batch with more columns."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def real_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def packed(self) -> bool:
        return self.rows.shape == self.tokens.shape

    @property
    def segments(self) -> np.ndarray | None:
        """(B, T) int32, equal for tokens of the same text; None if the batch is not packed."""
        return self.rows.view(np.int32) if self.packed else None

    @property
    def max_segment_tokens(self) -> int | None:
        """The longest text of a packed batch, rounded up to a power of two; None if not packed."""
        return (
            1 << int(self.places[self.rows != PADDING].max()).bit_length() if self.packed else None
        )

    @property
    def text_lengths(self) -> np.ndarray:
        """The input tokens of each token's text: (B, 1), or (B, T) if packed; at least 1."""
        if not self.packed:
            return np.reshape(np.maximum(self.lengths, 1), (-1, 1))
        _, inverse, counts = np.unique(self.rows, return_inverse=True, return_counts=True)
        return np.asarray(counts[inverse].reshape(self.rows.shape))

    @property
    def text_ids(self) -> np.ndarray:
        """(trained_tokens,) the index in the step of the text of each target."""
        ids = np.broadcast_to(self.rows, self.tokens.shape).reshape(-1)
        return np.asarray(ids[self.positions[: self.trained_tokens]])

    @property
    def weight(self) -> float:
        """The sum of the targets' weights, the denominator of a loss over this batch."""
        return float(self.weights.sum(dtype=np.float64))


def bucket_edges(lengths: np.ndarray) -> np.ndarray:
    """Choose the few lengths to pad inputs of these `lengths` (in tokens) to, in ascending order.

    Starts with every multiple of 32 that occurs. Merges neighbors, the cheapest first, while the
    merges together add less than 5% padding, or while there are too many buckets.
    """
    rounded = -(-lengths // MULTIPLE) * MULTIPLE
    edges, counts = np.unique(rounded, return_counts=True)
    room = MERGE_PADDING * float(rounded.sum())
    while len(edges) > 1:
        costs = counts[:-1] * np.diff(edges)  # tokens to pad each bucket to the next edge
        cheapest = int(costs.argmin())
        if costs[cheapest] > room and len(edges) <= MAX_BUCKETS:
            break
        room -= float(costs[cheapest])
        counts[cheapest + 1] += counts[cheapest]
        edges, counts = np.delete(edges, cheapest), np.delete(counts, cheapest)
    return edges


@dataclass(frozen=True)
class Schedule:
    """The rows of each step, in micro-batches of `batch_size`."""

    examples: Examples
    edges: np.ndarray
    buckets: np.ndarray
    """(n,) the index into `edges` of each group."""
    batch_size: int
    rows_per_step: int
    seed: int
    packed_tokens: int | None = None
    """With packing: the maximum tokens of a micro-batch, whatever `batch_size` is."""
    rows_together: int = 1
    """The size of a group: consecutive examples that are weighed together, such as a pair."""
    repeats: int = 1
    """Steps in a row that use the same rows."""
    _orders: dict[int, Order] = field(default_factory=dict, repr=False)  # of the current epoch

    @property
    def steps_per_epoch(self) -> int:
        return -(-len(self.examples) // self.rows_per_step) * self.repeats

    def epoch_of(self, step: int) -> int:
        """The epoch of step `step`. Both count from 0."""
        return step // self.steps_per_epoch

    def rows_of(self, step: int) -> np.ndarray:
        """The examples of step `step` (from 0), group by group, the longest group first."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order, starts, ends = self._epoch(epoch)
        index //= self.repeats
        groups = order[starts[index] : ends[index]]
        lengths = group_lengths(self.examples.lengths, self.rows_together)[groups]
        groups = groups[np.argsort(-lengths, kind="stable")]
        return members(groups, self.rows_together)

    def batches_of(
        self, step: int, rows_at: RowsAt | None = None, ids: np.ndarray | None = None
    ) -> list[Batch]:
        """The micro-batches of step `step` (from 0), with whole groups.

        rows_at: the maximum rows in a micro-batch of a given sequence length. None: `batch_size`.
        ids: the places, in the step, of the rows to take: whole groups. None: all.
        """
        rows = self.rows_of(step)
        if ids is not None and not len(ids):
            return []
        if self.packed_tokens is None:
            rows_at = self._within(rows_at or (lambda _: self.batch_size))
            together = self.rows_together
            return list(micro_batches(self.examples, rows, rows_at, self.edges, together, ids))
        room = self._packed_room(rows_at)
        return list(packed_batches(self.examples, rows, room, self.rows_together, ids))

    def split_batches_of(
        self, step: int, rows_at: RowsAt, ids: np.ndarray | None = None
    ) -> list[Batch]:
        """The micro-batches of step `step` (from 0), each text by itself.

        The first texts of all groups come first, then the second ones, and so on.
        ids: the places, in the step, of the rows to take: whole groups. None: all.
        """
        rows, together = self.rows_of(step), self.rows_together
        ids = np.arange(len(rows)) if ids is None else ids
        if not len(ids):
            return []
        if self.packed_tokens is None:
            rows_at = self._within(rows_at)
            return list(split_batches(self.examples, rows, rows_at, self.edges, together, ids))
        room = self._packed_room(rows_at)
        parts = (ids[place::together] for place in range(together))
        return [b for ids in parts for b in packed_batches(self.examples, rows, room, ids=ids)]

    def _within(self, rows_at: RowsAt) -> RowsAt:
        """`rows_at`, with no more rows than there are: the others would be computed as padding."""
        return lambda tokens: min(rows_at(tokens), len(self.examples))

    def has_room_for_groups(self, step: int, rows_at: RowsAt) -> bool:
        """Return whether every group of step `step` fits into a micro-batch."""
        together = self.rows_together
        if together == 1:
            return True
        groups = (self.examples.lengths[self.rows_of(step)] - 1).reshape(-1, together)
        if self.packed_tokens is None:
            longest = int(self.edges[np.searchsorted(self.edges, groups.max())])
            return rows_at(longest) >= together
        longest = int(self.examples.lengths.max()) - 1
        return int(groups.sum(axis=1).max()) <= rows_at(longest) * longest

    def _packed_room(self, rows_at: RowsAt | None) -> int:
        """Tokens of a packed micro-batch."""
        assert self.packed_tokens is not None
        if rows_at is None:
            return self.packed_tokens
        longest = int(self.examples.lengths.max()) - 1
        return min(self.packed_tokens, rows_at(longest) * longest)

    def _epoch(self, epoch: int) -> Order:
        if epoch not in self._orders:
            self._orders.clear()
            seed = derive_seed(self.seed, "epoch", epoch)
            groups = self.rows_per_step // self.rows_together
            self._orders[epoch] = epoch_order(self.buckets, groups, seed)
        return self._orders[epoch]


def group_lengths(lengths: np.ndarray, rows_together: int) -> np.ndarray:
    """The length of the longest row in each group of consecutive rows."""
    return np.asarray(lengths.reshape(-1, rows_together).max(axis=1))


def members(groups: np.ndarray, rows_together: int) -> np.ndarray:
    return (groups[:, None] * rows_together + np.arange(rows_together)).reshape(-1)


def epoch_order(buckets: np.ndarray, rows_per_step: int, seed: int) -> Order:
    """Return a permutation of the rows (or groups), and the start and end of each step in it.

    Rows are shuffled, then sorted by bucket, so the rows of a step have similar lengths. Then the
    order of the steps is shuffled. One step may have fewer rows, in any bucket.
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
    repeats: int = 1,
) -> Schedule:
    """Make the schedule of a run. batch_size and rows_per_step count examples.

    repeats: steps in a row that use the same rows.

    Raises ValueError if the examples or `rows_per_step` are not a multiple of `rows_together`.
    """
    if len(examples) % rows_together or rows_per_step % rows_together:
        rows = counted(len(examples), "row")
        raise ValueError(f"{rows} cannot be split into groups of {rows_together}")
    inputs = examples.lengths - 1
    edges = bucket_edges(inputs)
    buckets = np.searchsorted(edges, group_lengths(inputs, rows_together))
    return Schedule(
        examples, edges, buckets, batch_size, rows_per_step, seed, packed_tokens, rows_together,
        repeats,
    )  # fmt: skip


def micro_batches(
    examples: Examples,
    rows: np.ndarray,
    rows_at: RowsAt,
    edges: np.ndarray,
    rows_together: int = 1,
    ids: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Split `rows`, sorted by group with the longest first, into padded batches.

    ids: the indices of `rows` to take, in this order; by default all.

    The size of a batch is `rows_at` of the padded length of its first group, rounded down to whole
    groups, but at least one group.
    """
    places, start = np.arange(len(rows)) if ids is None else ids, 0
    while start < len(places):
        first = rows[places[start : start + rows_together]]
        count = rows_at(padded_length(examples, first, edges))
        count = max(1, count // rows_together) * rows_together
        part = places[start : start + count]
        yield make_batch(examples, rows[part], count, edges, part)
        start += count


def split_batches(
    examples: Examples,
    rows: np.ndarray,
    rows_at: RowsAt,
    edges: np.ndarray,
    rows_together: int = 1,
    ids: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Padded batches of `rows` whose groups may be in several batches.

    ids: the indices of `rows` to take, in ascending order; by default all.

    A batch has only first texts of groups, only second texts, and so on, the longest first.
    """
    ids = np.arange(len(rows)) if ids is None else ids
    for place in range(rows_together):
        part = ids[place::rows_together]
        order = part[np.argsort(-examples.lengths[rows[part]], kind="stable")]
        yield from micro_batches(examples, rows, rows_at, edges, ids=order)


def in_order_of_length(
    examples: Examples,
    rows_at: RowsAt,
    rows_together: int = 1,
    edges: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Return every example once, in the order of `by_length`. For validation.

    edges: the lengths to pad to; by default those that suit the examples.
    """
    edges = bucket_edges(examples.lengths - 1) if edges is None else edges
    order = by_length(examples, rows_together)
    return micro_batches(examples, order, rows_at, edges, rows_together)


def by_length(examples: Examples, rows_together: int = 1) -> np.ndarray:
    """(n,) the indices of the examples in a fixed order of groups, the longest group first."""
    lengths = group_lengths(examples.lengths, rows_together)
    return members(np.argsort(-lengths, kind="stable"), rows_together)


def padded_length(examples: Examples, rows: np.ndarray, edges: np.ndarray) -> int:
    """The length that the longest of `rows` is padded to."""
    return int(edges[np.searchsorted(edges, int(examples.lengths[rows].max()) - 1)])


def make_batch(
    examples: Examples, rows: np.ndarray, batch_size: int, edges: np.ndarray, ids: np.ndarray
) -> Batch:
    """Make one padded batch. ids: the index in the step of each row."""
    length = padded_length(examples, rows, edges)
    empty = np.arange(FIRST_EMPTY, FIRST_EMPTY + batch_size - len(ids))
    return lay_out(
        examples,
        rows,
        np.arange(len(rows)) * length,
        (batch_size, length),
        np.append(ids, empty).astype(np.uint32)[:, None],
        np.arange(length, dtype=np.uint32)[None],
    )


def packed_batches(
    examples: Examples,
    rows: np.ndarray,
    capacity: int,
    rows_together: int = 1,
    ids: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Pack the `rows` of a step into batches of one long row with at most `capacity` tokens.

    ids: the indices of `rows` to pack; by default all.

    If a group has more tokens than this, `capacity` is raised to its size.
    """
    ids = np.arange(len(rows)) if ids is None else ids
    inputs = examples.lengths[rows] - 1
    sizes = inputs[ids].reshape(-1, rows_together).sum(axis=1)
    capacity = max(capacity, int(sizes.max()))
    for groups in first_fit(sizes, capacity):
        group = ids[members(np.array(groups), rows_together)]
        ends = np.cumsum(inputs[group])
        starts = ends - inputs[group]
        length = packed_length(int(ends[-1]), capacity)
        by_token = np.full((1, length), PADDING, np.uint32)
        by_token[0, : ends[-1]] = np.repeat(group, inputs[group])
        places = np.arange(length, dtype=np.uint32)[None]
        places[0, : ends[-1]] -= np.repeat(starts, inputs[group]).astype(np.uint32)
        yield lay_out(examples, rows[group], starts, (1, length), by_token, places)


def first_fit(sizes: np.ndarray, capacity: int) -> list[list[int]]:
    """Group the indices of `sizes` into groups of at most `capacity`, by the first-fit rule."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index, size in enumerate(sizes.tolist()):
        if size > capacity:
            raise ValueError(f"a row of {counted(size, 'token')} does not fit into {capacity}")
        fits = next((i for i, left in enumerate(room) if size <= left), None)
        if fits is None:
            groups.append([index])
            room.append(capacity - size)
        else:
            groups[fits].append(index)
            room[fits] -= size
    return groups


def few_edges(longest: int) -> np.ndarray:
    """Lengths to pad inputs of up to `longest` tokens to, in ascending order, without knowing them.

    Eight for each doubling, and multiples of 32.
    """
    found, length = [], 0
    while length < longest:
        length += max(MULTIPLE, 2 ** max(0, length.bit_length() - 4))
        found.append(length)
    return np.array(found)


def packed_length(tokens: int, capacity: int) -> int:
    """Round `tokens` up to one of few lengths. From 256 tokens on, this adds at most 1/8."""
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
    """Make a batch of `shape` (B, T). Row i begins at starts[i] in the flattened tokens."""
    tokens = np.zeros(shape, np.int32)
    flat = tokens.reshape(-1)
    positions, targets, weights = [], [], []
    columns: dict[ColumnName, list[np.ndarray]] = {name: [] for name in examples.columns}
    lengths = np.zeros(shape[0], np.int64)
    for row, start in zip(rows, starts, strict=True):
        example = examples[row]
        inputs = len(example.tokens) - 1
        flat[start : start + inputs] = example.tokens[:-1]
        at = np.flatnonzero(example.trained[1:])
        positions.append(start + at)
        targets.append(example.tokens[1:][at])
        weights.append(np.full(len(at), examples.weights[row], np.float32))
        for name, values in examples.columns.items():
            by_token = COLUMNS[name].per == "token"
            columns[name].append(
                values[examples.starts[row] + 1 + at] if by_token else np.full(len(at), values[row])
            )
        lengths[start // shape[1]] += inputs
    return padded_batch(tokens, positions, targets, weights, columns, ids, places, lengths)


def padded_batch(
    tokens: np.ndarray,
    positions: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
    weights: Sequence[np.ndarray],
    columns: Mapping[ColumnName, Sequence[np.ndarray]],
    rows: np.ndarray,
    places: np.ndarray,
    lengths: np.ndarray,
) -> Batch:
    """Make a batch whose targets are given text by text, with padding to few numbers of slots."""
    trained = sum(map(len, targets))
    slots = padded_targets(trained, tokens.size)
    texts = np.repeat(np.arange(len(targets)), [len(each) for each in targets])
    return Batch(
        tokens=tokens,
        positions=pad(np.concatenate(positions), slots, np.int32),
        targets=pad(np.concatenate(targets), slots, np.int32),
        weights=pad(np.concatenate(weights), slots, np.float32),
        texts=pad(texts, slots, np.int32),
        rows=rows,
        places=places,
        lengths=lengths,
        trained_tokens=trained,
        columns={
            name: pad(np.concatenate(parts), slots, COLUMNS[name].dtype, COLUMNS[name].padding)
            for name, parts in columns.items()
        },
    )


def padded_targets(count: int, tokens: int) -> int:
    """The number of target slots for `count` targets in a batch of `tokens`: few distinct sizes."""
    level = max(1, -(-tokens // TARGET_LEVELS))
    return max(level, round_up(count, level))


def round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def pad(values: np.ndarray, size: int, dtype: type, padding: float = 0) -> np.ndarray:
    return np.pad(values.astype(dtype), (0, size - len(values)), constant_values=padding)


# Deal the rows of a step to ranks, so that all take about the same time. Pure, and the same on
# every rank


def costs_of(lengths: np.ndarray, hidden: int, rows_together: int = 1) -> np.ndarray:
    """(g,) the cost of each group of consecutive rows, in tokens.

    A row of T tokens costs T, and T^2 / (6 hidden) for its attention: with the hidden size D, a
    block does about 24 T D^2 operations in its linear layers and 4 T^2 D in its attention.

    lengths: (n,) tokens of each row.
    """
    tokens = np.maximum(lengths, 1).astype(np.float64)
    costs = tokens + tokens**2 / (6 * max(1, hidden))
    return np.asarray(costs.reshape(-1, rows_together).sum(axis=1))


def dealt(costs: Sequence[float], shares: Sequence[float]) -> list[list[int]]:
    """The items of each rank, in ascending order: the dearest first, to who would end earliest.

    shares: the relative speed of each rank. Some ranks get none if there are few items.
    """
    order = sorted(range(len(costs)), key=lambda item: (-costs[item], item))
    loads = [0.0] * len(shares)
    found: list[list[int]] = [[] for _ in shares]
    for item in order:
        ends = [(load + costs[item]) / share for load, share in zip(loads, shares, strict=True)]
        rank = ends.index(min(ends))
        loads[rank] += costs[item]
        found[rank].append(item)
    return [sorted(items) for items in found]


def rows_of_rank(
    lengths: np.ndarray, hidden: int, shares: Sequence[float], rank: int, rows_together: int = 1
) -> np.ndarray:
    """The places, in the step, of the rows that a rank trains: whole groups, in their order.

    lengths: (n,) tokens of each row of the step.
    """
    mine = dealt(costs_of(lengths, hidden, rows_together).tolist(), shares)[rank]
    return members(np.array(mine, np.int64), rows_together)
