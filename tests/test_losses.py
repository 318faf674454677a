from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from your_ai import losses
from your_ai.losses import cross_entropy_sum


def reference(logits: np.ndarray, targets: np.ndarray, weights: np.ndarray) -> float:
    """In float64, straight from the definition."""
    logits = logits.astype(np.float64)
    total = 0.0
    for row, target, weight in zip(logits, targets, weights, strict=True):
        shifted = row - row.max()
        total += weight * (np.log(np.exp(shifted).sum()) - shifted[target])
    return total


@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_equals_the_definition(scale):
    rng = np.random.default_rng(0)
    logits = (scale * rng.standard_normal((37, 101))).astype(np.float32)
    targets = rng.integers(0, 101, 37)
    weights = rng.random(37).astype(np.float32)
    got = cross_entropy_sum(mx.array(logits), mx.array(targets), mx.array(weights)).item()
    assert got == pytest.approx(reference(logits, targets, weights), rel=1e-5)


def test_a_weight_of_zero_hides_even_an_infinite_target():
    logits = mx.array([[0.0, 1.0], [0.0, 1.0]])
    loss = cross_entropy_sum(logits, mx.array([0, 1]), mx.array([0.0, 1.0])).item()
    assert loss == pytest.approx(np.log1p(np.e) - 1, rel=1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = mx.zeros((70_000, 4), mx.float16)  # the sum is above float16's largest number
    targets = mx.zeros((70_000,), mx.int32)
    loss = cross_entropy_sum(logits, targets, mx.ones((70_000,)))
    assert loss.dtype == mx.float32
    assert loss.item() == pytest.approx(70_000 * np.log(4), rel=1e-5)


S, D, V = 300, 48, 500


@pytest.fixture
def case() -> dict[str, mx.array]:
    """Hidden states, a head's weight, targets, and weights with some padding."""
    mx.random.seed(0)
    return {
        "hidden": mx.random.normal((S, D)),
        "head": mx.random.normal((V, D)),
        "targets": mx.random.randint(0, V, (S,)),
        "weights": mx.concatenate([mx.random.uniform(shape=(S - 20,)), mx.zeros((20,))]),
    }


@pytest.fixture(params=[64, 100, S, 10 * S])
def rows(request, monkeypatch) -> int:
    """How many rows a chunk has."""
    monkeypatch.setattr(losses, "CHUNK_ROWS", request.param)
    monkeypatch.setattr(losses, "CHUNK_BYTES", 0)
    return request.param


def norm_error(ours: mx.array, theirs: mx.array) -> float:
    a, b = np.array(ours, np.float64), np.array(theirs, np.float64)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize("compiled", [False, True])
def test_chunks_give_the_loss_and_gradient_of_the_whole(case, rows, compiled):
    def whole(hidden: mx.array) -> mx.array:
        return cross_entropy_sum(hidden @ case["head"].T, case["targets"], case["weights"])

    def in_chunks(hidden: mx.array, scale: mx.array) -> mx.array:
        fixed = (case["targets"], case["weights"], scale, lambda rows: rows @ case["head"].T)
        return losses.trainable_loss(hidden, *fixed)

    expected, expected_grad = mx.value_and_grad(whole)(case["hidden"])
    both = mx.value_and_grad(in_chunks)
    both = mx.compile(both, inputs=case) if compiled else both
    loss, grad = both(mx.array(case["hidden"]), mx.array(0.25))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert norm_error(grad, 0.25 * expected_grad) < 1e-5


def test_chunks_are_evaluated_alike(case, rows):
    def head(rows: mx.array) -> mx.array:
        return rows @ case["head"].T

    logits = head(case["hidden"])
    expected = cross_entropy_sum(logits, case["targets"], case["weights"]).item()
    loss = losses.chunked_loss(case["hidden"], case["targets"], case["weights"], head)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    found = losses.chunked_predictions(case["hidden"], head)
    assert mx.array_equal(found, logits.argmax(-1))


def test_a_float16_gradient_is_scaled_before_it_is_rounded(case):
    """Unscaled, most of these gradients are under float16's smallest number."""
    hidden, head = case["hidden"].astype(mx.float16), case["head"].astype(mx.float16)
    weights = mx.full((S,), 1e-7)
    fixed = (case["targets"], weights, mx.array(2.0**20), lambda rows: rows @ head.T)
    grad = mx.grad(losses.trainable_loss)(hidden, *fixed)
    exact = mx.grad(cross_entropy_sum)(
        (hidden.astype(mx.float32) @ head.astype(mx.float32).T), case["targets"], weights
    )
    assert norm_error(grad, 2.0**20 * (exact @ head.astype(mx.float32))) < 0.01


@pytest.mark.parametrize("compiled", [False, True])
def test_the_full_logits_never_exist(compiled):
    rows, vocabulary = 2048, 16_000
    state = {
        "head": mx.random.normal((vocabulary, 64)),
        "targets": mx.zeros((rows,), mx.int32),
        "weights": mx.ones((rows,)),
        "scale": mx.array(1.0),
    }
    hidden = mx.random.normal((rows, 64))

    def loss(hidden: mx.array) -> mx.array:
        fixed = (state["targets"], state["weights"], state["scale"])
        return losses.trainable_loss(2 * hidden, *fixed, lambda rows: rows @ state["head"].T)

    both = mx.value_and_grad(loss)
    both = mx.compile(both, inputs=state) if compiled else both
    mx.eval(both(hidden))
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(both(hidden))
    logits = 4 * rows * vocabulary
    assert mx.get_peak_memory() - held < logits  # and what is made of them takes four times that
