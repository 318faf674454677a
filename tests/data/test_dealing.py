"""Rows are dealt to ranks whole, once, and by cost."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from your_ai.data.batches import costs_of, dealt, rows_of_rank


@given(st.lists(st.integers(1, 4000), max_size=30), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_every_group_is_dealt_once_and_stays_whole(lengths, ranks, together):
    rows = np.repeat(np.array(lengths, np.int64), together)
    found = [rows_of_rank(rows, 64, (1.0,) * ranks, r, together) for r in range(ranks)]
    assert sorted(np.concatenate(found).tolist()) == list(range(len(rows)))
    for part in found:
        groups = part.reshape(-1, together)
        assert (groups[:, :1] // together == groups // together).all()
        assert (np.diff(part) > 0).all()


def test_a_slower_rank_gets_less():
    parts = dealt([1.0] * 12, (1.0, 0.5))
    assert [len(part) for part in parts] == [8, 4]


def test_a_long_row_costs_its_attention_as_well():
    short, long = costs_of(np.array([100, 1000]), hidden=100)
    assert (short, long) == (100 + 100**2 / 600, 1000 + 1000**2 / 600)
    assert costs_of(np.array([100, 1000, 0, 1]), 100, rows_together=2)[0] == short + long
    assert costs_of(np.array([0]), hidden=0) == 1 + 1 / 6
    assert dealt([long, *[short] * 10], (1.0, 1.0))[0] == [0]


def test_some_ranks_get_nothing_of_few_rows():
    assert dealt([5.0], (1.0, 1.0, 1.0)) == [[0], [], []]
