"""Which blocks share compiled programs."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.conftest import make_model
from your_ai.errors import RunError
from your_ai.nets import model
from your_ai.nets.block_calls import Unsplittable
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
    ("architecture", "kinds"),
    [("llama", 1), ("gemma2", 1), ("gemma3_text", 2), ("qwen3_moe", 1)],
)
def test_number_of_block_structures_per_architecture(tmp_path, architecture, kinds):
    folder = make_model(tmp_path / "m", architecture, num_hidden_layers=7)
    network, _ = model.load_network(folder, mx.float32)
    assert len({structure(block) for block in network.layers}) == kinds


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
