"""Examples -> batches: every row once per epoch, padding not trained, few shapes, no state."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.batches import (
    MAX_BUCKETS,
    MERGE_PADDING,
    MULTIPLE,
    PADDING,
    Batch,
    Schedule,
    bucket_edges,
    few_edges,
    in_order_of_length,
    make_batch,
    make_schedule,
    packed_length,
    padded_targets,
)
from your_ai.data.examples import Examples, RowCounts


def make_examples(lengths: list[int], seed: int = 0) -> Examples:
    """Examples of tokens 1, 2, 3, ... in sequence, so the first token identifies the row."""
    rng = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    trained = rng.random(starts[-1]) < 0.5
    trained[starts[:-1]] = False
    trained[starts[1:] - 1] = True  # the end of an answer
    tokens = np.arange(1, starts[-1] + 1, dtype=np.uint32)
    weights = rng.choice(np.array([0, 0.25, 1, 3], np.float32), len(lengths))
    return Examples(tokens, trained, starts, weights, RowCounts())


LENGTHS = st.integers(1, 30).flatmap(
    lambda rows: st.lists(st.integers(2, 1000), min_size=rows, max_size=rows)
)
EXAMPLES = st.builds(make_examples, LENGTHS, st.integers(0, 100))
SIZES = st.integers(1, 5)
SEEDS = st.integers(0, 2**32)
PLANS = st.builds(
    lambda examples, size, accumulation, seed: make_schedule(
        examples, size, size * accumulation, seed
    ),
    EXAMPLES,
    SIZES,
    st.integers(1, 4),
    SEEDS,
)


def steps_of(plan: Schedule, epoch: int = 0) -> range:
    return range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)


def batches_with_rows(plan: Schedule, epoch: int = 0) -> Iterator[tuple[Batch, np.ndarray]]:
    """The batches of an epoch, each with the indices of its examples."""
    for step in steps_of(plan, epoch):
        rows, batches = plan.rows_of(step), plan.batches_of(step)
        size = plan.batch_size
        chunks = [rows[i : i + size] for i in range(0, len(rows), size)]
        yield from zip(batches, chunks, strict=True)


def same(a: Batch, b: Batch) -> bool:
    return all(
        np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Batch)
    )


# The rows of a step


@given(plan=PLANS, epoch=st.integers(0, 3))
def test_an_epoch_trains_every_row_once_in_full_steps_with_the_longest_rows_first(plan, epoch):
    """So the rows of a micro-batch have similar lengths, and the largest micro-batch is first."""
    steps = [plan.rows_of(step) for step in steps_of(plan, epoch)]
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(plan.examples)))
    assert sum(len(rows) != plan.rows_per_step for rows in steps) <= 1
    for rows in steps:
        assert len(rows) > 0
        assert (np.diff(plan.examples.lengths[rows]) <= 0).all()


@given(plan=PLANS, data=st.data())
def test_rows_depend_only_on_the_step(plan, data):
    """Steps are requested in any order, repeatedly, and from a fresh schedule."""
    steps = range(3 * plan.steps_per_epoch)
    in_order = {step: plan.rows_of(step).tolist() for step in steps}
    asked = data.draw(st.lists(st.sampled_from(steps), min_size=1, max_size=12))
    fresh = dataclasses.replace(plan, _orders={})
    for step in asked:
        assert fresh.rows_of(step).tolist() == in_order[step]


@given(plan=PLANS, data=st.data())
def test_batches_depend_only_on_the_step(plan, data):
    step = data.draw(st.sampled_from(range(3 * plan.steps_per_epoch)))
    examples, size, rows_per_step = plan.examples, plan.batch_size, plan.rows_per_step
    first = plan.batches_of(step)
    plan.batches_of(data.draw(st.sampled_from(range(3 * plan.steps_per_epoch))))
    again = make_schedule(examples, size, rows_per_step, plan.seed).batches_of(step)
    assert all(same(a, b) for a, b in zip(first, again, strict=True))


@given(plan=PLANS)
def test_epoch_of_counts_steps_per_epoch(plan):
    for epoch in range(3):
        assert {plan.epoch_of(step) for step in steps_of(plan, epoch)} == {epoch}


def order(plan: Schedule, epoch: int = 0) -> list[list[int]]:
    return [sorted(plan.rows_of(step).tolist()) for step in steps_of(plan, epoch)]


def test_each_epoch_and_each_seed_has_another_order():
    examples = make_examples([20] * 40)
    plans = [make_schedule(examples, 2, 4, seed) for seed in range(4)]
    for orders in ([order(plans[0], epoch) for epoch in range(4)], [order(p) for p in plans]):
        assert all(orders[i] != orders[j] for i in range(4) for j in range(i))


def test_each_epoch_groups_other_rows_into_steps():
    """Not only the order of the steps changes, but also which rows share a step."""
    plan = make_schedule(make_examples([20] * 40), 2, 4, seed=0)
    assert sorted(order(plan, 0)) != sorted(order(plan, 1))


def test_steps_of_short_and_long_rows_are_mixed():
    """Steps are shuffled, so not all short rows come first."""
    plan = make_schedule(make_examples([10] * 40 + [900] * 40), 4, 4, seed=0)
    longest = [int(plan.examples.lengths[plan.rows_of(step)].max()) for step in steps_of(plan)]
    assert sum(a != b for a, b in pairwise(longest)) > 3


# Micro-batches of a step


SPLITS = ((4, 1), (2, 2), (1, 4))


def keys_by_example(plan: Schedule, step: int) -> dict[int, int]:
    """First token of each example in `step` -> the key of its dropout."""
    return {
        int(first): int(key)
        for batch in plan.batches_of(step)
        for first, key in zip(batch.tokens[:, 0], batch.rows[:, 0], strict=True)
        if first > 0
    }


@given(examples=EXAMPLES, seed=SEEDS)
def test_accumulation_changes_neither_rows_nor_dropout_nor_the_weight_of_a_step(examples, seed):
    plans = [make_schedule(examples, size, size * times, seed) for size, times in SPLITS]
    for step in steps_of(plans[0], 1):
        for found in (
            [plan.rows_of(step).tolist() for plan in plans],
            [keys_by_example(plan, step) for plan in plans],
            [sum(batch.weight for batch in plan.batches_of(step)) for plan in plans],
        ):
            assert found == [found[0]] * 3


@given(plan=PLANS)
def test_the_rows_of_a_step_have_different_dropout_keys(plan):
    for step in steps_of(plan):
        keys = [key for batch in plan.batches_of(step) for key in batch.rows[:, 0].tolist()]
        assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_one_step_takes_fewer_rows_than_a_batch(rows):
    plan = make_schedule(make_examples([5, 9, 7][:rows]), 4, 8, seed=0)
    (batch,) = plan.batches_of(0)
    assert (plan.steps_per_epoch, int((batch.tokens[:, 0] > 0).sum())) == (1, rows)


# Contents of a batch


def expected_targets(examples: Examples, rows: np.ndarray, length: int) -> list[tuple]:
    """(position, target, weight) of each trained token."""
    return [
        (i * length + t - 1, int(examples[row].tokens[t]), float(examples.weights[row]))
        for i, row in enumerate(rows)
        for t in range(1, len(examples[row].tokens))
        if examples[row].trained[t]
    ]


def targets_of(batch: Batch, slots: slice) -> list[tuple]:
    arrays = batch.positions[slots], batch.targets[slots], batch.weights[slots]
    return list(zip(*(array.tolist() for array in arrays), strict=True))


@given(plan=PLANS)
def test_a_batch_has_the_inputs_and_targets_of_its_rows(plan):
    """No padding is a target, no token is one twice, none is missing, and each is predicted from
    the token before it. Empty slots have weight 0 and positions within the batch."""
    for batch, rows in batches_with_rows(plan):
        inputs = np.zeros_like(batch.tokens)
        for i, row in enumerate(rows):
            inputs[i, : len(plan.examples[row].tokens) - 1] = plan.examples[row].tokens[:-1]
        np.testing.assert_array_equal(batch.tokens, inputs)
        slots, rest = slice(batch.trained_tokens), slice(batch.trained_tokens, None)
        expected = expected_targets(plan.examples, rows, batch.tokens.shape[1])
        assert targets_of(batch, slots) == expected
        before = batch.tokens.reshape(-1)[batch.positions[slots]]
        np.testing.assert_array_equal(before + 1, batch.targets[slots])
        assert not batch.weights[rest].any()
        assert ((batch.positions[rest] >= 0) & (batch.positions[rest] < batch.tokens.size)).all()


@given(plan=PLANS)
def test_the_batches_of_an_epoch_have_the_tokens_and_weights_of_the_examples(plan):
    batches, examples = [batch for batch, _ in batches_with_rows(plan)], plan.examples
    found = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert sorted(found[found > 0].tolist()) == examples.tokens[examples.starts[:-1]].tolist()
    assert sum(b.trained_tokens for b in batches) == int(examples.trained.sum())
    assert sum(b.real_tokens for b in batches) == int((examples.lengths - 1).sum())
    targets = [int(examples[i].trained.sum()) for i in range(len(examples))]
    weights = zip(examples.weights.tolist(), targets, strict=True)
    assert sum(b.weight for b in batches) == sum(weight * count for weight, count in weights)


def test_the_weight_of_many_targets_is_exact():
    """A float32 sum would stop at 2^24."""
    weights = np.array([2**24, 1, 1], np.float32)
    empty = np.zeros(3, np.int32)
    ids = np.zeros((1, 1), np.uint32)
    batch = Batch(empty[None], empty, empty, weights, empty, ids, ids, np.array([3]), 3)
    assert batch.weight == 2**24 + 2


def test_the_first_token_is_never_a_target():
    tokens, trained = np.arange(1, 4, dtype=np.uint32), np.ones(3, bool)
    one = Examples(tokens, trained, np.array([0, 3]), np.ones(1, np.float32), RowCounts())
    batch = make_batch(one, np.array([0]), 1, bucket_edges(one.lengths - 1), np.array([0]))
    assert batch.targets[: batch.trained_tokens].tolist() == [2, 3]


def test_arrays_have_the_documented_dtypes():
    (batch,) = make_schedule(make_examples([5, 9]), 2, 2, seed=0).batches_of(0)
    integers = (batch.tokens, batch.positions, batch.targets, batch.texts)
    assert {array.dtype for array in integers} == {np.dtype(np.int32)}
    assert {batch.rows.dtype, batch.places.dtype} == {np.dtype(np.uint32)}
    assert batch.weights.dtype == np.float32


# Few shapes, little padding


@given(plan=PLANS)
def test_batches_have_the_same_number_of_rows_and_lengths_that_are_multiples_of_32(plan):
    rows = min(plan.batch_size, len(plan.examples))
    for batch, _ in batches_with_rows(plan):
        assert batch.tokens.shape[0] == rows
        assert batch.tokens.shape[1] % MULTIPLE == 0


@given(lengths=st.lists(st.integers(2, 3000), min_size=13, max_size=200), size=SIZES, seed=SEEDS)
def test_batches_have_few_different_lengths(lengths, size, seed):
    plan = make_schedule(make_examples(lengths), size, size, seed)
    found = {batch.tokens.shape[1] for e in range(2) for batch, _ in batches_with_rows(plan, e)}
    assert len(found) <= MAX_BUCKETS


def test_a_batch_is_padded_only_to_its_bucket():
    """Batches of short rows are not padded to the longest bucket."""
    plan = make_schedule(make_examples([10] * 8 + [900] * 8), 4, 4, seed=0)
    shapes = Counter(batch.tokens.shape[1] for batch, _ in batches_with_rows(plan))
    assert shapes == {32: 2, 928: 2}


INPUTS = st.one_of(
    st.lists(st.integers(1, 2999), min_size=1, max_size=400).map(np.array),
    st.builds(
        lambda rows, longest, seed: np.random.default_rng(seed).integers(1, longest, rows),
        st.integers(1, 400),
        st.integers(2, 2999),
        st.integers(0, 1000),
    ),
)


def rounded(inputs: np.ndarray) -> np.ndarray:
    return -(-inputs // MULTIPLE) * MULTIPLE


def padded(inputs: np.ndarray) -> np.ndarray:
    edges = bucket_edges(inputs)
    return edges[np.searchsorted(edges, inputs)]


@given(inputs=INPUTS)
def test_buckets_are_few_and_have_room_for_every_input_with_little_padding(inputs):
    """More padding is only allowed if there would be too many buckets otherwise."""
    edges = bucket_edges(inputs)
    assert (np.diff(edges) > 0).all()
    assert edges[-1] == rounded(inputs).max()
    assert len(edges) <= MAX_BUCKETS
    assert (padded(inputs) >= inputs).all()
    added = (padded(inputs) - rounded(inputs)).sum()
    assert added <= MERGE_PADDING * rounded(inputs).sum() or len(edges) == MAX_BUCKETS


@pytest.mark.parametrize("seed", range(4))
def test_merging_chat_lengths_adds_little_padding(seed):
    """Typical chat lengths: many of a few hundred tokens, a few long ones."""
    lengths = np.random.default_rng(seed).lognormal(5.5, 0.4, 5000).clip(2, 2999).astype(int)
    assert (padded(lengths) - rounded(lengths)).sum() <= MERGE_PADDING * rounded(lengths).sum()


@given(inputs=INPUTS)
def test_no_cheap_merge_of_buckets_is_left(inputs):
    """No two neighbors are left that could be merged within the padding limit."""
    edges = bucket_edges(inputs)
    spent = float((padded(inputs) - rounded(inputs)).sum())
    counts = np.bincount(np.searchsorted(edges, inputs), minlength=len(edges))
    costs = counts[:-1] * np.diff(edges)
    assert (costs + spent > MERGE_PADDING * rounded(inputs).sum()).all()


@given(count=st.integers(0, 4000), rows=SIZES, length=st.integers(1, 94))
def test_padded_targets_has_room_for_all_targets(count, rows, length):
    tokens = rows * length * MULTIPLE
    assert padded_targets(min(count, tokens), tokens) >= max(1, min(count, tokens))


@given(rows=SIZES, length=st.integers(1, 94))
def test_batches_of_one_length_have_few_slot_counts(rows, length):
    tokens = rows * length * MULTIPLE
    assert len({padded_targets(count, tokens) for count in range(0, tokens + 1, 7)}) <= 8


# Validation


def validation(examples: Examples, size: int) -> list[Batch]:
    return list(in_order_of_length(examples, lambda _: size))


@given(examples=EXAMPLES, size=SIZES)
def test_validation_has_every_row_and_target_once_in_the_same_batches_of_few_lengths(
    examples, size
):
    batches, again = validation(examples, size), validation(examples, size)
    found = np.concatenate([batch.tokens[:, 0] for batch in batches])
    assert sorted(found[found > 0].tolist()) == examples.tokens[examples.starts[:-1]].tolist()
    assert sum(batch.trained_tokens for batch in batches) == int(examples.trained.sum())
    assert all(same(a, b) for a, b in zip(batches, again, strict=True))
    assert len({batch.tokens.shape[1] for batch in batches}) <= MAX_BUCKETS


# Packing


def texts_of(batch: Batch) -> dict[int, tuple]:
    """Index in the step -> (tokens, places in the text, targets with weights) of each text."""
    shape = batch.tokens.shape
    ids, places = (np.broadcast_to(a, shape).reshape(-1) for a in (batch.rows, batch.places))
    n = batch.trained_tokens
    targets: dict[int, list] = {}
    for at, *target in zip(
        *(a[:n].tolist() for a in (batch.positions, batch.targets, batch.weights)), strict=True
    ):
        targets.setdefault(int(ids[at]), []).append((int(places[at]), *target))
    return {
        int(i): (
            np.trim_zeros(batch.tokens.reshape(-1)[ids == i], "b").tolist(),
            places[ids == i].tolist(),
            targets.get(int(i), []),
        )
        for i in np.unique(ids)
        if i != PADDING
    }


@given(examples=EXAMPLES, seed=SEEDS, room=st.integers(0, 500))
def test_packing_keeps_the_texts_of_a_step(examples, seed, room):
    capacity = int(examples.lengths.max()) - 1 + room
    plain, packed = (make_schedule(examples, 4, 8, seed, n) for n in (None, capacity))
    for step in steps_of(plain):
        expected = {i: t for b in plain.batches_of(step) for i, t in texts_of(b).items()}
        batches = packed.batches_of(step)
        found = [pair for batch in batches for pair in texts_of(batch).items()]
        assert len(dict(found)) == len(found) == len(packed.rows_of(step))
        for i, (tokens, places, targets) in found:
            assert (tokens, targets) == (expected[i][0], expected[i][2])
            assert places == list(range(len(places)))
        assert all(b.packed and b.tokens.shape[0] == 1 for b in batches)
        assert all(b.real_tokens <= capacity for b in batches)
        again = packed.batches_of(step)
        assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(batches, again, strict=True))


@given(tokens=st.integers(1, 20000), capacity=st.integers(1, 20000))
def test_packed_rows_have_few_lengths_and_little_padding(tokens, capacity):
    tokens = min(tokens, capacity)
    length = packed_length(tokens, capacity)
    assert length >= tokens
    assert length % MULTIPLE == 0
    assert length - tokens < max(MULTIPLE, tokens / 8 + 1)


def test_short_rows_share_a_batch():
    plan = make_schedule(make_examples([41] * 8), 1, 8, seed=0, packed_tokens=256)
    assert [batch.tokens.shape for batch in plan.batches_of(0)] == [(1, 256), (1, 96)]


@given(examples=EXAMPLES, seed=SEEDS)
def test_max_segment_tokens_bounds_the_texts_of_a_packed_batch(examples, seed):
    longest = int(examples.lengths.max()) - 1
    for batch in make_schedule(examples, 4, 8, seed, longest + 100).batches_of(0):
        texts = [len(places) for _, places, _ in texts_of(batch).values()]
        assert max(texts) <= batch.max_segment_tokens < 2 * max(texts)
    assert make_schedule(examples, 4, 8, seed).batches_of(0)[0].max_segment_tokens is None


# Rollouts: steps in a row with the same rows, and lengths that are not known before


@given(examples=EXAMPLES, seed=SEEDS, repeats=st.integers(1, 4), rows=SIZES)
def test_steps_in_a_row_use_the_same_rows(examples, seed, repeats, rows):
    once = make_schedule(examples, rows, rows, seed)
    again = make_schedule(examples, rows, rows, seed, repeats=repeats)
    assert again.steps_per_epoch == repeats * once.steps_per_epoch
    for step in range(2 * again.steps_per_epoch):
        first = once.rows_of(step // repeats)
        np.testing.assert_array_equal(again.rows_of(step), first)
        assert again.epoch_of(step) == once.epoch_of(step // repeats)


@given(examples=EXAMPLES, seed=SEEDS, repeats=st.integers(1, 4))
def test_each_row_is_in_as_many_steps_of_an_epoch_as_it_is_repeated(examples, seed, repeats):
    plan = make_schedule(examples, 2, 4, seed, repeats=repeats)
    for epoch in range(2):
        rows = Counter(row for step in steps_of(plan, epoch) for row in plan.rows_of(step).tolist())
        assert rows == dict.fromkeys(range(len(examples)), repeats)


@given(st.integers(1, 200_000))
def test_edges_are_few_multiples_of_32_that_cover_all_lengths_with_little_padding(longest):
    edges = np.array([0, *few_edges(longest)])
    assert (np.diff(edges) > 0).all()
    assert not (edges % MULTIPLE).any()
    assert longest <= edges[-1] < longest + max(MULTIPLE, longest / 8)
    eight_for_each_doubling = 8 * max(1, np.log2(longest / MULTIPLE) - 1)
    assert len(edges) - 1 <= eight_for_each_doubling + 2


@given(st.integers(1, 100_000), st.integers(0, 100_000))
def test_edges_do_not_depend_on_the_longest(longest, more):
    edges = few_edges(longest)
    np.testing.assert_array_equal(few_edges(longest + more)[: len(edges)], edges)


def test_a_batch_is_not_wider_than_the_data():
    """3 rows with --batch-size 64 computed 61 rows of padding."""
    examples = make_examples([5, 6, 7])
    for together in (1, 3):
        schedule = make_schedule(examples, 63, 63, seed=0, rows_together=together)
        (batch,) = schedule.batches_of(0)
        assert batch.tokens.shape[0] == 3
