"""Kept outputs: which are kept, and that the backward pass uses them."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.architectures import batch_of, opened_with_adapters, write_model
from your_ai.engine.build import build_engine
from your_ai.engine.kept import Keeps, keep_results
from your_ai.memory.estimate_kept import everything
from your_ai.memory.workload import NOTHING
from your_ai.nets.model import DropoutKeys


class Block(nn.Module):
    """x + down(relu(up(x)))"""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.down(nn.relu(self.up(x)))


@pytest.fixture
def block():
    mx.random.seed(0)
    return Block()


def test_all_outputs_but_the_last_are_kept(block):
    x = mx.random.normal((3, 4))
    expected, up = block(x), block.up(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True))
    results.record()
    assert mx.array_equal(block(x), expected)
    (kept,) = results.recorded()
    assert mx.array_equal(kept, up)
    assert results.recorded() == []


def test_a_given_output_takes_the_place_of_the_layer_once(block):
    x = mx.random.normal((3, 4))
    expected = block(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True))
    results.use([mx.zeros((3, 8))])
    assert mx.array_equal(block(x), x + block.down(mx.zeros((3, 8))))
    assert mx.array_equal(block(x), expected)


def test_gradients_of_a_given_output_are_those_of_the_layer(block):
    x = mx.random.normal((3, 4))

    def loss(x: mx.array) -> mx.array:
        return mx.square(block(x)).sum()

    expected, of_x = nn.value_and_grad(block, loss)(x)[1], mx.grad(loss)(x)
    up = block.up(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True))
    results.use([up])
    found = dict(tree_flatten(nn.value_and_grad(block, loss)(x)[1]))
    for name, grad in tree_flatten(expected):
        assert mx.allclose(found[name], grad, rtol=1e-5, atol=1e-6), name
    results.use([up])
    assert mx.allclose(mx.grad(loss)(x), of_x, rtol=1e-5, atol=1e-6)


def test_the_number_of_blocks_can_be_changed_between_steps(tmp_path):
    opened, adapters = opened_with_adapters(write_model(tmp_path / "m", "llama"))
    engine = build_engine(
        opened.network, adapters.dropout_keys, "staged", tensors=opened.tensors
    ).engine
    batch = batch_of(24)

    def peak_and_gradients() -> tuple[int, dict[str, mx.array]]:
        mx.eval(engine.gradients(batch, 1.0, 0))  # compiled and traced
        mx.synchronize()
        mx.clear_cache()
        mx.reset_peak_memory()
        grads = dict(tree_flatten(engine.gradients(batch, 1.0, 0)[1]))
        mx.eval(grads)
        return mx.get_peak_memory(), grads

    least, expected = peak_and_gradients()
    engine.keep(lambda rows, tokens: everything(4))
    most, found = peak_and_gradients()
    engine.keep(lambda rows, tokens: NOTHING)
    again, same = peak_and_gradients()
    assert most > least
    assert again < most
    for name, grad in expected.items():
        assert mx.allclose(found[name], grad, rtol=1e-4, atol=1e-6), name
        assert mx.array_equal(same[name], grad), name
