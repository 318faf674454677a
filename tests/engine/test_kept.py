"""Kept results: which are kept, and that the backward pass uses them."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten

from tests.architectures import batch_of, write_model
from tests.engine.test_tiles import engine_of
from your_ai.engine.compiled import Graphs
from your_ai.engine.kept import Keeps, keep_results
from your_ai.memory.estimate_kept import everything
from your_ai.memory.workload import NOTHING, Kept
from your_ai.nets import attention
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


def test_activations_are_kept_only_beside_the_outputs_of_linear_layers():
    kept = Kept(linear=1, attention=2, activations=2)
    assert [Keeps.of(kept, place) for place in range(3)] == [
        Keeps(attention=True, linear=True, activations=True),
        Keeps(attention=True),
        Keeps(),
    ]


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


def gradients_of(
    block: nn.Module, x: mx.array, prepare: Callable[[], None] = lambda: None
) -> dict[str, mx.array]:
    """Of its parameters, and of x. prepare: is called before each pass."""

    def loss(x: mx.array) -> mx.array:
        return mx.square(block(x)).sum()

    prepare()
    found = dict(tree_flatten(nn.value_and_grad(block, loss)(x)[1]))
    prepare()
    return {**found, "x": mx.grad(loss)(x)}


def test_gradients_of_a_given_output_are_those_of_the_layer(block):
    x = mx.random.normal((3, 4))
    expected, up = gradients_of(block, x), block.up(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True))
    found = gradients_of(block, x, lambda: results.use([up]))
    for name, grad in expected.items():
        assert mx.allclose(found[name], grad, rtol=1e-5, atol=1e-6), name


class GatedMLP(nn.Module):
    """down(f(gate(x)) * up(x)), or with one of these changed."""

    def __init__(self, function=nn.silu, product=lambda gate, up, x: gate * up) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(4, 64), nn.Linear(4, 64)
        self.down_proj = nn.Linear(64, 4)
        self.function, self.product = function, product

    def __call__(self, x: mx.array) -> mx.array:
        gate, up = self.function(self.gate_proj(x)), self.up_proj(x)
        return self.down_proj(self.product(gate, up, x))


class GatedBlock(nn.Module):
    """x + mlp(x)"""

    def __init__(self, **options) -> None:
        super().__init__()
        self.mlp = GatedMLP(**options)

    def __call__(self, x: mx.array) -> mx.array:
        return x + self.mlp(x)


@pytest.mark.parametrize("function", [nn.silu, nn.gelu, nn.gelu_approx, nn.relu2])
def test_a_product_and_its_derivatives_take_the_place_of_gate_and_up(function):
    mx.random.seed(0)
    block, x = GatedBlock(function=function), mx.random.normal((3, 2, 4))
    expected = gradients_of(block, x)
    output, gate, up = block(x), block.mlp.gate_proj(x), block.mlp.up_proj(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True, activations=True))
    results.record()
    assert mx.allclose(block(x), output, rtol=1e-5, atol=1e-6)
    kept = results.recorded()
    slope = mx.grad(lambda gate: function(gate).sum())(gate)
    expected_kept = function(gate), slope * up, function(gate) * up
    for found, wanted in zip(kept, expected_kept, strict=True):
        assert mx.allclose(found, wanted, rtol=1e-5, atol=1e-6)
    found = gradients_of(block, x, lambda: results.use(kept))
    for name, grad in expected.items():
        assert mx.allclose(found[name], grad, rtol=1e-5, atol=1e-5), name


OTHER_FORMS = {
    "over features": {"function": nn.softmax},
    "not linear": {"product": lambda gate, up, x: gate * nn.silu(up)},
    "of its input": {"product": lambda gate, up, x: gate * up + x.sum()},
    "shifted": {"product": lambda gate, up, x: gate * up + 1},
}


@pytest.mark.parametrize("options", OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_an_mlp_of_another_form_keeps_the_outputs_of_its_layers(options):
    block, x = GatedBlock(**options), mx.random.normal((3, 2, 4))
    gate, up = block.mlp.gate_proj(x), block.mlp.up_proj(x)
    results = keep_results(block, DropoutKeys([None]), Keeps(linear=True, activations=True))
    results.record()
    block(x)
    for found, wanted in zip(results.recorded(), (gate, up), strict=True):
        assert mx.array_equal(found, wanted)


def test_attention_of_unknown_code_keeps_nothing(block):
    block.attention = nn.MultiHeadAttention(4, 2)
    results = keep_results(block, DropoutKeys([None]), Keeps(attention=True))
    results.record()
    block(mx.zeros((3, 4)))
    assert results.recorded() == []


# 96 tokens are 3 blocks of queries, or 2 large ones where the outputs of linear layers are kept.
# Each is exponentiated in the forward pass, in the backward pass, and where it is computed again.
@pytest.mark.parametrize(
    ("kept", "exponentials"),
    [
        (NOTHING, 4 * 9),
        (Kept(attention=3), 3 * 6 + 9),
        (Kept(linear=2, attention=3), 2 * 4 + 6 + 9),
        (everything(4), 4 * 4),
    ],
)
def test_scores_of_kept_attention_are_computed_once_in_each_pass(
    tmp_path, monkeypatch, kept, exponentials
):
    graphs = Graphs()
    engine = engine_of(write_model(tmp_path / "m", "llama"), graphs=graphs)
    graphs.compiles = False  # else blocks of the same structure are traced once
    engine.keep(lambda rows, tokens: kept)
    mx.eval(engine.gradients(batch_of(96), 1.0, 0))  # makes the programs, which tries the blocks
    counted = []
    monkeypatch.setattr(attention, "exp", lambda scores: counted.append(1) or mx.exp(scores))
    mx.eval(engine.gradients(batch_of(96), 1.0, 0))
    assert len(counted) == exponentials


def test_what_is_kept_follows_the_shape_of_a_batch(tmp_path):
    engine, asked = engine_of(write_model(tmp_path / "m", "llama")), []
    engine.keep(lambda rows, tokens: asked.append((rows, tokens)) or NOTHING)
    for tokens in (24, 40):
        mx.eval(engine.gradients(batch_of(tokens), 1.0, 0))
    assert asked == [(2, 24), (2, 40)]


@pytest.mark.memory
def test_the_number_of_blocks_can_be_changed_between_steps(tmp_path):
    engine, batch = engine_of(write_model(tmp_path / "m", "llama")), batch_of(24)

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
