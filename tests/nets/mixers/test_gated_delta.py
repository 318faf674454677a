"""Compare the gated delta rule in chunks with mlx-lm's loop."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import compute_g, compute_lower_bound_g

from tests.nets.mixers.plain import (
    assert_equal,
    delta,
    delta_inputs,
    normal,
    outputs_and_gradients,
    relative_error,
)
from your_ai.nets.mixers.gated_delta import by_mlx, gated_delta, log_decays, uses_mlx


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("tokens", [1, 5, 24, 96])
def test_equals_the_loop(vector, tokens):
    assert_equal(gated_delta, delta, delta_inputs(tokens, vector))


@given(
    vector=st.booleans(),
    rows=st.integers(1, 3),
    heads=st.integers(1, 2),
    repeats=st.integers(1, 3),
    size=st.sampled_from([1, 4, 7]),
    tokens=st.integers(1, 20),
    chunk=st.integers(1, 24),
    strength=st.sampled_from([0.0, 0.1, 5.0, 30.0]),
)
def test_equals_the_loop_for_any_shape_and_chunk(
    vector, rows, heads, repeats, size, tokens, chunk, strength
):
    arrays = delta_inputs(tokens, vector, rows, heads, repeats, size, strength)
    assert_equal(gated_delta, delta, arrays, tokens=chunk)


@pytest.mark.parametrize("vector", [False, True])
def test_mixes_strong_and_weak_decays_exactly(vector):
    """A difference of running sums of logarithms would lose three digits here."""
    q, k, v, logs, beta = delta_inputs(90, vector, strength=0.01)
    logs = mx.where(mx.random.uniform(shape=logs.shape) < 0.3, -300.0, logs)
    assert_equal(gated_delta, delta, [q, k, v, logs, beta])


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("kind", ["all forgotten", "none forgotten", "nothing written"])
def test_extreme_gates_are_exact(vector, kind):
    q, k, v, logs, beta = delta_inputs(70, vector)
    if kind == "all forgotten":
        logs = mx.where(mx.random.uniform(shape=logs.shape) < 0.5, -mx.inf, logs)
    elif kind == "none forgotten":
        logs = mx.zeros_like(logs)
    else:
        beta = mx.zeros_like(beta)
    arrays = [q, k, v, logs, beta]
    found = outputs_and_gradients(gated_delta, arrays)
    # Without a gradient of -inf: the loop's own is NaN there.
    finite = [q, k, v, mx.maximum(logs, -1e4), beta]
    for a, b in zip(found, outputs_and_gradients(delta, finite), strict=True):
        assert mx.isfinite(a).all().item()
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("vector", [False, True])
def test_equal_keys_lose_no_digits(vector):
    """Powers of the matrix of a chunk would be as large as 1e18 here."""
    q, k, v, logs, beta = delta_inputs(64, vector, strength=1e-3)
    k = mx.broadcast_to(k[:, :1], k.shape)
    assert_equal(gated_delta, delta, [q, k, v, logs, beta], tokens=64)


def test_takes_a_state_and_gives_its_gradient():
    state = normal(2, 4, 10, 8)
    assert_equal(gated_delta, delta, [*delta_inputs(70, False), state])
    assert_equal(gated_delta, delta, [*delta_inputs(40, True), state])


@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_computed_in_float32(vector, dtype):
    rounded = [x.astype(dtype) for x in delta_inputs(70, vector)]
    found = outputs_and_gradients(gated_delta, rounded)
    exact = outputs_and_gradients(delta, [x.astype(mx.float32) for x in rounded])
    assert [x.dtype for x in found] == [dtype, mx.float32, *[dtype] * 5]
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < mx.finfo(dtype).eps


def test_mlx_operation_is_the_same_function():
    assert_equal(by_mlx, delta, delta_inputs(20, vector=False))


def test_mlx_operation_is_chosen_on_metal_for_decays_per_head():
    assert uses_mlx("metal", (0, 32, 4), scalar=True)
    assert not uses_mlx("metal", (0, 32, 3), scalar=True)
    assert not uses_mlx("metal", (0, 33, 0), scalar=False)
    assert not uses_mlx("cpu", (0, 33, 0), scalar=True)
    assert not uses_mlx("cuda", (0, 33, 0), scalar=True)


def test_logarithms_are_those_of_the_decays_of_mlx_lm():
    A_log, a, bias = normal(4), 3 * normal(2, 5, 4), normal(4)
    ours, theirs = log_decays(a, A_log, bias, None), compute_g(A_log, a, bias)
    assert mx.allclose(mx.exp(ours), theirs, rtol=1e-5).item()
    ours = log_decays(a, A_log, bias, -5.0)
    assert mx.allclose(mx.exp(ours), compute_lower_bound_g(A_log, a, bias, -5.0), rtol=1e-5).item()
