"""Which blocks share compiled programs."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.architectures import write_model
from tests.conftest import make_model, peak_of
from your_ai.config import TrainConfig
from your_ai.engine.weights import open_model
from your_ai.errors import RunError
from your_ai.nets import lora, model, parts
from your_ai.nets.block_calls import (
    Mask,
    State,
    StateArray,
    TextMask,
    Unsplittable,
    leaves,
    mapped,
    mask_of,
)
from your_ai.nets.model import add_adapters
from your_ai.nets.parts import arrays_of, parts_of, put, structure
from your_ai.nets.split import split


class Placed(nn.Module):
    """A block that stores its index but does not use it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.weight = mx.ones((3,))

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight


class Named(Placed):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.place = index

    @staticmethod
    def place_of(block: Named) -> int:
        return block.place

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.weight * self.place_of(self)


def test_unused_block_index_does_not_change_the_structure():
    assert structure(nn.Sequential(nn.Linear(2, 2))) == structure(nn.Sequential(nn.Linear(2, 2)))
    assert structure(Placed(1)) == structure(Placed(2))


def test_block_index_that_is_read_changes_the_structure():
    assert structure(Named(1)) != structure(Named(2))
    assert structure(Named(1)) == structure(Named(1))


@pytest.mark.parametrize(
    ("architecture", "kinds"), [("llama", 1), ("gemma2", 1), ("gemma3_text", 2), ("qwen3_moe", 1)]
)
def test_number_of_block_structures_per_architecture(tmp_path, architecture, kinds):
    folder = make_model(tmp_path / "m", architecture, num_hidden_layers=7)
    network, _ = model.load_network(folder, mx.float32)
    assert len({structure(block) for block in network.layers}) == kinds


@pytest.mark.parametrize("rounding", ["same", "4:32"])
def test_blocks_that_are_rounded_alike_have_one_structure(tmp_path, rounding):
    network, _ = model.load_network(make_model(tmp_path / "m", num_hidden_layers=7), mx.float32)
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    lora.put(network, 4, parameters | {"qat": rounding})
    assert len({structure(block) for block in network.layers[-4:]}) == 1


def test_arrays_in_lists_are_put_back():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = [mx.zeros((2,)), mx.ones((2,))]

    module = Listed()
    put(module, {"rows.1": mx.full((2,), 7.0)})
    assert mx.array_equal(arrays_of(module)["rows.1"], mx.full((2,), 7.0)).item()


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (RunError("gone"), RunError),
        (RuntimeError("[read] Unable to read from file."), RuntimeError),
        (MemoryError(), MemoryError),
        (ValueError("shapes"), Unsplittable),
    ],
)
def test_only_errors_of_a_models_code_mean_that_it_cannot_be_split(tmp_path, error, wanted):
    """The blocks of a streamed model read their files while it is split."""
    network, _ = model.load_network(make_model(tmp_path / "m", "llama"), mx.float32)
    halves = split(network)

    class Failing(nn.Module):
        use_sliding = False

        def __call__(self, *args, **kwargs):
            raise error

    network.model.layers = [Failing() for _ in network.layers]
    with pytest.raises(wanted):
        parts_of(network, halves)


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


def test_rows_that_show_a_model_are_as_long_as_its_windows():
    settings = {"sliding_window": 1512, "text_config": {"attention_chunk_size": 8192}, "n": 2000}
    assert parts.showing(settings, 20_000) == 8194
    assert parts.showing(settings, 4096) == 1514
    assert parts.showing({}, 4096) == parts.SHOWN_TOKENS
    assert parts.showing(settings, 700) == 700
    assert parts.showing({"windows": [None, 3000], "window": "none"}, 4096) == 3002


@pytest.mark.memory
def test_asking_what_a_block_does_with_its_mask_evaluates_nothing(tmp_path):
    opened = open_model(make_model(tmp_path / "m", "gemma3_text"), mx.float32)
    add_adapters(opened.network, TrainConfig(use_dora=True, lora_layers="all"))
    found = parts_of(opened.network, split(opened.network), checks=False)
    before = mx.get_active_memory()
    for index, block in enumerate(found.blocks):
        found.passes_text(index, block)
    mx.synchronize()
    assert mx.get_active_memory() - before < 1000


# Windows beside whole attention, in two ways; chunks; arrays that are simply causal; latent
# attention; factors of each token.
MASKED = ["cohere2", "gpt_oss", "llama4_text", "gemma2", "deepseek_v3", "ministral3"]


@pytest.mark.parametrize("architecture", MASKED)
def test_calls_for_long_rows_are_those_whose_masks_are_computed(
    tmp_path, monkeypatch, architecture
):
    network, _ = model.load_network(write_model(tmp_path / "m", architecture), mx.float32)
    wanted = parts_of(network, split(network)).calls(100)
    monkeypatch.setattr(parts, "SHOWN_TOKENS", 8)
    found = parts_of(network, split(network)).calls(100)
    assert [call.key for call in found] == [call.key for call in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one.constants.keys() == other.constants.keys()
        assert all(mx.array_equal(one.constants[n], other.constants[n]) for n in one.constants)


@pytest.mark.memory
@pytest.mark.parametrize("architecture", ["cohere2", "gemma2"])
def test_masks_of_long_rows_are_not_computed(tmp_path, architecture):
    network, _ = model.load_network(write_model(tmp_path / "m", architecture), mx.float32)
    whole = parts_of(network, split(network))
    square, long = parts.SHOWN_TOKENS**2, 4 * parts.SHOWN_TOKENS
    assert peak_of(lambda: whole.calls(long) and mx.zeros(())) < 8 * square
