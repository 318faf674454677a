"""How the arguments of blocks are found and passed on."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from your_ai.nets.block_calls import Mask, State, StateArray, TextMask, leaves, mapped, mask_of


@st.composite
def state_arrays(draw) -> StateArray:
    count = draw(st.integers(0, 2))
    rows, tokens = draw(st.permutations(range(count + 2)))[:2]
    others = tuple(draw(st.lists(st.integers(1, 4), min_size=count, max_size=count)))
    return StateArray(rows, tokens, others, mx.float32)


@given(st.lists(state_arrays(), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4))
def test_arrays_of_a_state_are_unpacked_as_they_were_packed(kinds, rows, tokens):
    state = State(tuple(kinds))
    shapes = [kind.shape(rows, tokens) for kind in kinds]
    arrays = [mx.random.normal(shape, key=mx.random.key(i)) for i, shape in enumerate(shapes)]
    packed = state.pack(arrays)
    assert packed.shape == (rows, tokens, state.features)
    found = state.unpack(packed)
    assert [array.shape for array in found] == shapes
    assert all(mx.array_equal(a, b).item() for a, b in zip(arrays, found, strict=True))


def test_one_array_of_hidden_states_is_passed_as_it_is():
    state = State((StateArray(0, 1, (8,), mx.float32),))
    hidden = mx.ones((2, 3, 8))
    assert state.is_plain
    assert state.pack([hidden]) is hidden
    assert state.unpack(hidden)[0] is hidden


@pytest.mark.parametrize("tree", [(1, [2, {"a": 3}], ()), {"a": (1,)}, 5])
def test_trees_keep_their_form(tree):
    assert mapped(lambda leaf: leaf, tree) == tree
    assert leaves(tree) == sorted(leaves(tree))


def test_a_text_mask_is_the_text_and_the_mask():
    text = TextMask.of(Mask(window=4))
    assert text == "causal"
    assert text.mask.window == 4
    assert text.received == []


@pytest.mark.parametrize("tokens", [2, 5, 12, 30])
@pytest.mark.parametrize("mask", [Mask(), Mask(window=4), Mask(chunk=4), Mask(chunk=7)], ids=str)
def test_an_array_is_known_as_the_mask_that_it_is(mask, tokens):
    known = mask_of(mask.array(tokens), tokens)
    assert mx.array_equal(known.array(tokens), mask.array(tokens))
    assert known.reach == (None if mask.reach is None or mask.reach >= tokens else mask.reach)


def test_other_arrays_are_no_mask():
    seen = Mask(chunk=4).array(9)
    seen[8, 1] = True
    for value in (seen, seen[:, :5], mx.zeros((9, 9), mx.bool_), seen.astype(mx.float32)):
        assert mask_of(value, 9) is None
