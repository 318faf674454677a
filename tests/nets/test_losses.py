from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.conftest import peak_of
from tests.engine.test_fused import relative_error
from your_ai.nets import losses
from your_ai.nets.head import LayerRows, LinearHead
from your_ai.nets.losses import cross_entropy
from your_ai.nets.numerics import exp, sum_in_blocks
from your_ai.objectives.objective import Scores, Targets
from your_ai.objectives.sft import SUPERVISED

KERNELS = "measured"  # whose number is tested


def targets_of(tokens: mx.array, weights: mx.array) -> Targets:
    return Targets(mx.arange(len(tokens)), tokens, weights, mx.zeros(len(tokens), mx.int32))


def sft_loss(
    hidden: mx.array, tokens: mx.array, weights: mx.array, scale: mx.array, head: losses.Head
) -> mx.array:
    """The SFT loss; its gradient is multiplied by `scale`."""
    return losses.trainable_loss(hidden, targets_of(tokens, weights), SUPERVISED, scale, head).loss


def sft_evaluated(
    hidden: mx.array, tokens: mx.array, weights: mx.array, head: losses.Head
) -> mx.array:
    return losses.chunked_loss(hidden, targets_of(tokens, weights), SUPERVISED, head).loss


def cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    return sum_in_blocks(cross_entropy(logits, targets) * weights)


def reference(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """The cross-entropy sum in float64, directly from the definition."""
    logits = logits.astype(np.float64)
    total = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        shifted = row - row.max()
        total += weight * (np.log(np.exp(shifted).sum()) - shifted[target])
    return total


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_cross_entropy_equals_the_definition(scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.standard_normal((37, 101))).astype(np.float32)
    targets = rng.integers(0, 101, 37)
    weights = rng.random(37).astype(np.float32)
    got = cross_entropy_sum(mx.array(logits), mx.array(targets), mx.array(weights)).item()
    assert got == pytest.approx(reference(logits, targets, weights), rel=1e-5)


def test_half_precision_logits_have_losses_in_float32():
    found = cross_entropy(mx.zeros((3, 5), mx.float16), mx.zeros((3,), mx.int32))
    assert found.dtype == mx.float32
    assert found.tolist() == pytest.approx([np.log(5)] * 3, rel=1e-6)


S, D, V = 300, 48, 500


@pytest.fixture
def case() -> dict[str, mx.array]:
    """Hidden states, the weight of a head, targets, and target weights with some padding."""
    mx.random.seed(0)
    return {
        "hidden": mx.random.normal((S, D)),
        "head": mx.random.normal((V, D)),
        "targets": mx.random.randint(0, V, (S,)),
        "weights": mx.concatenate([mx.random.uniform(shape=(S - 20,)), mx.zeros((20,))]),
    }


@pytest.fixture(params=[64, 100, S, 10 * S])
def rows(request, monkeypatch) -> int:
    """Number of rows per chunk."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", request.param)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    return request.param


@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_give_the_loss_and_gradient_of_full_logits(case, rows, compiled):
    def head(rows: mx.array) -> mx.array:
        return rows @ case["head"].T

    check(head, head, case, compiled)
    found = losses.chunked_predictions(case["hidden"], head)
    assert mx.array_equal(found, head(case["hidden"]).argmax(-1))


@pytest.mark.memory
@pytest.mark.parametrize("compiled", [False, True])
def test_full_logits_are_never_allocated(monkeypatch, compiled):
    rows, vocabulary = 2048, 2000
    monkeypatch.setattr(losses, "CHUNK_BYTES", losses.CHUNK_BYTES // 8)  # of a vocabulary of 16,000
    state = {
        "head": mx.random.normal((vocabulary, 64)),
        "targets": mx.zeros((rows,), mx.int32),
        "weights": mx.ones((rows,)),
        "scale": mx.array(1.0),
    }
    hidden = mx.random.normal((rows, 64))

    def loss(hidden: mx.array) -> mx.array:
        fixed = (state["targets"], state["weights"], state["scale"])
        return sft_loss(2 * hidden, *fixed, lambda rows: rows @ state["head"].T)

    both = mx.value_and_grad(loss)
    both = mx.compile(both, inputs=state) if compiled else both
    mx.eval(hidden, state)
    logits = 4 * rows * vocabulary
    assert peak_of(lambda: both(hidden)) < logits  # the full computation needs four times as much


# -- in slices of the vocabulary ----------------------------------------------------------


def embedding(weight: mx.array) -> nn.Embedding:
    layer = nn.Embedding(*weight.shape)
    layer.weight = weight
    return layer


def softcap(logits: mx.array) -> mx.array:
    return 5 * mx.tanh(logits / 5)


def by_slices(layer: nn.Module, step: int, **more) -> LinearHead:
    """A head with slices of `step` tokens for up to D hidden states."""
    return LinearHead(LayerRows(layer), slice_bytes=4 * D * step, **more)


def check(head: losses.Head, plain, case: dict[str, mx.array], compiled: bool = False) -> None:
    """Assert that a head in slices or chunks gives the loss and gradient of the plain head."""

    def in_parts(hidden: mx.array, scale: mx.array) -> mx.array:
        return sft_loss(hidden, case["targets"], case["weights"], scale, head)

    def whole(hidden: mx.array) -> mx.array:
        return cross_entropy_sum(plain(hidden), case["targets"], case["weights"])

    both = mx.value_and_grad(in_parts)
    state = [case, head.rows.layer if isinstance(head, LinearHead) else {}]
    both = mx.compile(both, inputs=state) if compiled else both
    loss, grad = both(mx.array(case["hidden"]), mx.array(0.25))
    expected, expected_grad = mx.value_and_grad(whole)(case["hidden"])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert relative_error(grad, 0.25 * expected_grad) < 1e-5
    evaluated = sft_evaluated(case["hidden"], case["targets"], case["weights"], head)
    assert evaluated.item() == pytest.approx(expected.item(), rel=1e-5)


def shortened(case: dict[str, mx.array], count: int, vocabulary: int) -> dict[str, mx.array]:
    """The last `count` targets, some with weight 0, and the first `vocabulary` tokens."""
    case = {name: array[-count:] for name, array in case.items()} | {"head": case["head"]}
    return case | {"head": case["head"][:vocabulary], "targets": case["targets"] % vocabulary}


@pytest.mark.parametrize("vocabulary", [2, 31, 64, 500])
@pytest.mark.parametrize("step", [1, 7, 64, 499, 500, 10_000])
def test_slices_give_the_loss_and_gradient_of_full_logits(case, vocabulary, step):
    case = shortened(case, D, vocabulary)
    head = by_slices(embedding(case["head"]), step)
    check(head, lambda hidden: hidden @ case["head"].T, case)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("walk_rows", [64, 299, 1000])
def test_hidden_states_pass_the_head_in_groups(case, walk_rows, compiled, monkeypatch):
    monkeypatch.setattr(losses, "HEAD_ROWS", walk_rows)
    head = LinearHead(LayerRows(embedding(case["head"])), slice_bytes=4 * walk_rows * 130)
    check(head, lambda hidden: hidden @ case["head"].T, case, compiled)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("bits", [None, 4])
def test_head_with_operations_before_and_after_the_linear_layer(case, bits, compiled):
    case["head"] = mx.concatenate([case["head"], case["head"][:, :16]], axis=1)  # 64 wide
    linear = nn.Linear(64, V)
    linear.weight, linear.bias = case["head"], mx.random.normal((V,))
    layer = linear if bits is None else nn.QuantizedLinear.from_linear(linear, 32, bits)
    plain = lambda hidden: softcap(layer(before(hidden)))  # noqa: E731

    def before(hidden: mx.array) -> mx.array:
        return mx.tanh(mx.concatenate([hidden, hidden[:, :16]], axis=1))

    check(by_slices(layer, 150, before=before, after=softcap), plain, case, compiled)


def test_on_a_gpu_quantized_slices_are_not_dequantized(case, monkeypatch):
    weight = mx.concatenate([case["head"], case["head"][:, :16]], axis=1)
    case["hidden"] = mx.concatenate([case["hidden"], case["hidden"][:, :16]], axis=1)
    layer = nn.QuantizedEmbedding.from_embedding(embedding(weight), 32, 4)
    monkeypatch.setattr(losses.mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    check(by_slices(layer, 150), layer.as_linear, case)


@pytest.mark.parametrize("size", [1e-30, 100.0, 1e4])
def test_small_and_large_logits(case, size):
    case = shortened(case, D, V)
    largest = mx.abs(case["hidden"] @ case["head"].T).max()
    case["head"] = case["head"] * (size / largest)
    check(by_slices(embedding(case["head"]), 64), lambda hidden: hidden @ case["head"].T, case)


@pytest.mark.parametrize("rising", [True, False])
def test_largest_logit_may_be_in_the_first_or_last_slice(case, rising):
    """The logits of each slice are about 500 above, or below, those of the previous slice."""
    case = shortened(case, D, V)
    order = mx.arange(V) if rising else mx.arange(V)[::-1]
    layer = nn.Linear(D, V)
    layer.weight, layer.bias = case["head"], 10.0 * order
    check(by_slices(layer, 50), layer, case)


def test_zero_weights_give_zero_loss_and_gradient(case):
    fixed = (case["targets"], mx.zeros((S,)), mx.array(1.0))
    head = by_slices(embedding(case["head"]), 64)
    loss, grad = mx.value_and_grad(sft_loss)(case["hidden"], *fixed, head)
    assert (loss.item(), mx.abs(grad).max().item()) == (0, 0)


def test_nonfinite_hidden_states_give_a_nonfinite_loss(case):
    head = by_slices(embedding(case["head"]), 64)
    for bad in (mx.nan, mx.inf):
        case["hidden"][3, 5] = bad
        loss = sft_loss(*(case[n] for n in ("hidden", "targets", "weights")), 1.0, head)
        assert not np.isfinite(loss.item())


@pytest.mark.parametrize("walk_rows", [64, 1000])
@pytest.mark.parametrize("step", [1, 7, 100, 500])
def test_prediction_is_the_first_of_the_most_likely_tokens(case, step, walk_rows, monkeypatch):
    monkeypatch.setattr(losses, "HEAD_ROWS", walk_rows)
    weight = mx.round(case["head"][:, :4])  # few distinct values, so that there are many ties
    hidden = mx.round(case["hidden"][:, :4])
    head = LinearHead(LayerRows(embedding(weight)), slice_bytes=4 * min(S, walk_rows) * step)
    expected = np.array(hidden @ weight.T)
    assert ((expected == expected.max(1, keepdims=True)).sum(1) > 1).mean() > 0.2
    found = losses.chunked_predictions(hidden, head)
    assert np.array_equal(np.array(found), expected.argmax(1))


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
def test_half_precision_hidden_states(case, dtype):
    layer = embedding(case["head"].astype(dtype))
    hidden = case["hidden"].astype(dtype)
    fixed = (case["targets"], case["weights"])
    expected, expected_grad = mx.value_and_grad(
        lambda hidden: cross_entropy_sum(hidden @ layer.weight.astype(mx.float32).T, *fixed)
    )(hidden.astype(mx.float32))
    loss, grad = mx.value_and_grad(sft_loss)(hidden, *fixed, mx.array(1.0), by_slices(layer, 64))
    assert (loss.dtype, grad.dtype) == (mx.float32, dtype)
    assert loss.item() == pytest.approx(expected.item(), rel=2e-3)
    assert relative_error(grad.astype(mx.float32), expected_grad) < 1e-2


def test_float16_slices_with_large_sums_do_not_overflow():
    """All tokens of a slice are equally likely, and all rows of its weight are equal."""
    vocabulary = 20_000
    layer = embedding(mx.full((vocabulary, 8), 10.0, mx.float16))
    layer.weight[1] = 0
    fixed = (mx.array([1, 2]), mx.ones((2,)), mx.array(1.0), LinearHead(LayerRows(layer)))
    grad = mx.grad(sft_loss)(mx.zeros((2, 8), mx.float16), *fixed)
    assert np.allclose(np.array(grad), [[10.0] * 8, [0.0] * 8], atol=0.02)


@pytest.mark.parametrize("sliced", [False, True])
def test_float16_gradient_is_scaled_before_rounding(case, sliced):
    """Unscaled, most of these gradients would underflow float16."""
    hidden, weight = case["hidden"].astype(mx.float16), case["head"].astype(mx.float16)
    weights = mx.full((S,), 1e-7)
    head = by_slices(embedding(weight), 64) if sliced else lambda rows: rows @ weight.T
    fixed = (case["targets"], weights, mx.array(2.0**20), head)
    grad = mx.grad(sft_loss)(hidden, *fixed)
    exact = mx.grad(cross_entropy_sum)(
        (hidden.astype(mx.float32) @ weight.astype(mx.float32).T), case["targets"], weights
    )
    assert relative_error(grad, 2.0**20 * (exact @ weight.astype(mx.float32))) < 0.01


def test_online_softmax_can_be_evaluated_after_each_slice(case):
    head = by_slices(embedding(case["head"]), 90)
    softmax = losses.begin(head.inputs(case["hidden"]), case["targets"])
    for start, stop in head.slices(S):
        softmax = losses.add(softmax, head.rows.part(start, stop), head)
        mx.eval(softmax)
    targets = targets_of(case["targets"], case["weights"])
    sums, grad, _ = losses.finish(
        softmax, head, lambda logp: SUPERVISED.weigh(Scores(logp), targets), mx.array(0.5)
    )
    expected = losses.loss_and_gradient(case["hidden"], targets, SUPERVISED, mx.array(0.5), head)
    assert sums.loss.item() == pytest.approx(expected[0].loss.item(), rel=1e-6)
    assert relative_error(grad, expected[1]) < 1e-6


def test_compiled_loss_uses_the_current_weights(case):
    layer = embedding(case["head"])
    head = by_slices(layer, 100)

    def loss(hidden: mx.array) -> mx.array:
        return sft_loss(hidden, case["targets"], case["weights"], 1.0, head)

    compiled = mx.compile(loss, inputs=[layer.state, case])
    compiled(case["hidden"])
    layer.weight = 2 * layer.weight
    logits = case["hidden"] @ layer.weight.T
    expected = cross_entropy_sum(logits, case["targets"], case["weights"]).item()
    assert compiled(case["hidden"]).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.compiled
@pytest.mark.memory
@pytest.mark.parametrize("compiled", [False, True])
def test_large_vocabulary_needs_little_memory(compiled):
    """A head in 4 bits; dequantized it would take 20 MB, in slices of a 16th of their bytes."""
    vocabulary, width, rows, smaller = 20_000, 256, 96, 16
    layer = nn.QuantizedEmbedding(vocabulary, width, 64, 4)
    targets, weights, scale = mx.zeros((rows,), mx.int32), mx.ones((rows,)), mx.array(1.0)
    head = LinearHead(LayerRows(layer), slice_bytes=LinearHead.slice_bytes // smaller)
    hidden = mx.random.normal((rows, width))
    both = mx.value_and_grad(sft_loss)
    function = lambda *args: both(*args, head)  # noqa: E731
    function = mx.compile(function, inputs=[layer.state]) if compiled else function
    mx.eval(hidden, targets, weights, scale, layer.state)
    assert peak_of(lambda: function(hidden, targets, weights, scale)) < 40e6 / smaller


COUNT_KERNELS = """
import mlx.core as mx, mlx.nn as nn
from your_ai.nets import losses
from your_ai.nets.head import LayerRows, LinearHead
from your_ai.objectives.objective import Targets
from your_ai.objectives.sft import SUPERVISED
layer = nn.Embedding(600, 8)
head = LinearHead(LayerRows(layer), slice_bytes=4 * 8 * 20)
targets = Targets(mx.arange(8), mx.arange(8), mx.ones((8,)), mx.arange(8))
def loss(hidden, scale):
    return losses.trainable_loss(hidden, targets, SUPERVISED, scale, head).loss
both = mx.value_and_grad(loss)
mx.eval(mx.compile(both, inputs=[layer.state])(mx.ones((8, 8)), mx.array(1.0)))
mapped = {line.split()[-1] for line in open("/proc/self/maps") if line.endswith(".so\\n")}
print(*(path for path in mapped if "/mlx/" in path and "site-packages" not in path), sep="\\n")
"""


@pytest.mark.compiled
@pytest.mark.skipif(sys.platform != "linux", reason="only there kernels are compiled to files")
def test_all_slices_share_compiled_kernels():
    """A number that differs between slices would be compiled into separate kernels."""
    done = subprocess.run([sys.executable, "-c", COUNT_KERNELS], capture_output=True, check=True)
    assert 5 < len(done.stdout.splitlines()) < 30, "for 30 slices"


def test_exp_is_accurate():
    x = -mx.concatenate([mx.arange(0, 87, 1e-3), mx.array([1e-8, 1e-30])])
    exact = np.exp(np.array(x, np.float64))
    assert np.abs(np.array(exp(x)) - exact).max() < 2e-7
    assert np.abs(np.array(exp(x)) / exact - 1).max() < 4e-6  # mx.exp: 1.8e-6


def test_exp_of_zero_is_one_of_large_negative_values_zero_and_of_nan_nan():
    assert exp(mx.array([0.0, -0.0, -89.0, -1e4, -3e38, -mx.inf])).tolist() == [1, 1, 0, 0, 0, 0]
    assert mx.isnan(exp(mx.array([mx.nan]))).item()


def test_sum_of_many_similar_values_is_accurate():
    values = mx.full(70_001, 1.3862944)  # a running sum would be 6e-4 too small
    assert sum_in_blocks(values).item() == pytest.approx(70_001 * 1.3862944, rel=5e-6)
