"""Compare the other mixers in chunks with loops over the tokens."""

from __future__ import annotations

from unittest.mock import patch

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.models.ssm import ssm_update

from tests.conftest import peak_of
from tests.nets.mixers import plain
from tests.nets.mixers.plain import assert_equal, normal, outputs_and_gradients, relative_error
from your_ai.nets.mixers import chunks
from your_ai.nets.mixers.gated_delta import gated_delta
from your_ai.nets.mixers.linear_attention import linear_attention, state_space, step_sizes
from your_ai.nets.mixers.replace import FUNCTIONS
from your_ai.nets.mixers.rwkv7 import rwkv7
from your_ai.nets.mixers.scans import (
    by_doubling,
    convolution,
    real_gated_lru,
    selective_scan,
    token_by_token,
)

KINDS = {
    "linear": (linear_attention, plain.linear, plain.linear_inputs),
    "rwkv7": (rwkv7, plain.rwkv, plain.rwkv_inputs),
    "selective": (selective_scan, plain.selective, plain.selective_inputs),
    "lru": (real_gated_lru, plain.lru, plain.lru_inputs),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 5, 24, 96])
def test_equals_the_loop(kind, tokens):
    ours, loop, inputs = KINDS[kind]
    assert_equal(ours, loop, inputs(tokens))


@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.integers(1, 3),
    size=st.sampled_from([1, 4, 7]),
    tokens=st.integers(1, 20),
    chunk=st.integers(1, 24),
)
def test_equals_the_loop_for_any_shape_and_chunk(kind, rows, size, tokens, chunk):
    ours, loop, inputs = KINDS[kind]
    assert_equal(ours, loop, inputs(tokens, rows=rows, size=size), tokens=chunk)


def state_space_update(x, A_log, B, C, D, dt, dt_bias):
    dt = step_sizes(dt, dt_bias, (0.1, 2.0))
    return state_space(x, B, C, D, dt, -dt * mx.exp(A_log))


def ssm(x, A_log, B, C, D, dt, dt_bias):
    return ssm_update(x, A_log, B, C, D, dt, dt_bias, time_step_limit=(0.1, 2.0))


@pytest.mark.parametrize("tokens", [1, 5, 96, 280])
def test_mamba_2_equals_mlx_lm(tokens):
    assert_equal(state_space_update, ssm, plain.space_inputs(tokens))


@pytest.mark.parametrize("tokens", [1, 5, 96, 280])
def test_lightning_attention_equals_mlx_lm(tokens):
    mx.random.seed(tokens)
    given = [*(normal(2, 3, tokens, 8) for _ in range(3)), -mx.exp(normal(3) - 2)]
    ours = FUNCTIONS["recurrent_gla"](None)
    assert_equal(lambda q, k, v, g: ours(q, k, v, g, 0.5), plain.lightning, given)


STRONG = {
    "linear": [(3, lambda x: mx.full(x.shape, -30.0)), (3, lambda x: 400 * x), (3, mx.zeros_like)],
    "rwkv7": [(1, lambda x: mx.full(x.shape, 1e-13)), (1, mx.zeros_like), (1, mx.ones_like)],
    "selective": [(1, lambda x: 1e3 * x), (1, mx.zeros_like)],
    "lru": [(1, lambda x: mx.full(x.shape, 1e-13)), (1, mx.zeros_like), (1, mx.ones_like)],
}


@pytest.mark.parametrize(
    ("kind", "place", "change"), [(kind, *case) for kind in STRONG for case in STRONG[kind]]
)
def test_extreme_decays_are_exact(kind, place, change):
    ours, loop, inputs = KINDS[kind]
    arrays = inputs(70)
    arrays[place] = change(arrays[place])
    assert_equal(ours, loop, arrays)


def test_decay_to_nothing_is_finite():
    q, k, v, logs = plain.linear_inputs(70)
    logs = mx.where(mx.random.uniform(shape=logs.shape) < 0.5, -mx.inf, logs)
    found = outputs_and_gradients(linear_attention, [q, k, v, logs])
    finite = outputs_and_gradients(plain.linear, [q, k, v, mx.maximum(logs, -1e4)])
    for a, b in zip(found, finite, strict=True):
        assert relative_error(a, b) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_half_precision_is_computed_in_float32(kind, dtype):
    ours, loop, inputs = KINDS[kind]
    rounded = [x.astype(dtype) for x in inputs(40)]
    found = outputs_and_gradients(ours, rounded)
    exact = outputs_and_gradients(loop, [x.astype(mx.float32) for x in rounded])
    assert [x.dtype for x in found] == [dtype, mx.float32, *[dtype] * len(rounded)]
    for a, b in zip(found, exact, strict=True):
        assert relative_error(a, b) < mx.finfo(dtype).eps


def test_lru_scans_are_one_function():
    a, x, state = mx.sigmoid(normal(2, 13, 4)), normal(2, 13, 4), normal(2, 4)

    def of(scan):
        return lambda *given: (scan(*given), mx.zeros((1,)))

    assert_equal(of(by_doubling), of(token_by_token), [a, x, state])


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_convolution_equals_mlx(size, tokens):
    mx.random.seed(tokens)
    layer = nn.Conv1d(6, 6, size, groups=6, bias=False)
    x, zero = normal(2, tokens + size - 1, 6), mx.zeros((1,))

    def theirs(x, weight):
        return mx.conv1d(x, weight, groups=6), zero

    assert_equal(lambda x, w: (convolution(x, w), zero), theirs, [x, layer.weight])


SIZES = {
    "delta": lambda tokens: plain.delta_inputs(tokens, False, 1, 1, 1, 16),
    "vector delta": lambda tokens: plain.delta_inputs(tokens, True, 1, 1, 1, 16),
    "linear": lambda tokens: plain.linear_inputs(tokens, 1, 1, 16),
    "rwkv7": lambda tokens: plain.rwkv_inputs(tokens, 1, 1, 16),
    "selective": lambda tokens: plain.selective_inputs(tokens, 1, 64),
    "lru": lambda tokens: plain.lru_inputs(tokens, 1, 64),
}


@pytest.mark.memory
@pytest.mark.parametrize(
    ("kind", "compiled"), [*((kind, False) for kind in SIZES), ("delta", True)]
)
def test_memory_grows_linearly_with_the_tokens(kind, compiled):
    ours = gated_delta if "delta" in kind else KINDS[kind][0]

    def peak(tokens: int) -> int:
        arrays = SIZES[kind](tokens)

        def loss(*given: mx.array) -> mx.array:
            return mx.square(ours(*given)[0]).sum()

        step = mx.value_and_grad(loss, argnums=tuple(range(len(arrays))))
        step = mx.compile(step) if compiled else step
        mx.eval(arrays)
        mx.clear_cache()
        return peak_of(lambda: step(*arrays))

    assert peak(2048) <= 2.2 * peak(1024)


def test_gradients_hold_under_compile_vjp_and_checkpoint():
    arrays = plain.delta_inputs(70, vector=False)

    def loss(*given: mx.array) -> mx.array:
        return mx.sin(gated_delta(*given)[0]).sum()

    expected = mx.grad(loss, argnums=(0, 1, 2, 3, 4))(*arrays)
    _, by_vjp = mx.vjp(loss, arrays, [mx.array(1.0)])
    compiled = mx.compile(mx.grad(loss, argnums=(0, 1, 2, 3, 4)))(*arrays)
    kept = mx.grad(mx.checkpoint(loss), argnums=(0, 1, 2, 3, 4))(*arrays)
    for found in (by_vjp, compiled, kept):
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) < 1e-5


def test_a_chunk_is_computed_twice_not_kept():
    """Once forward and once for the gradient, each time with the sizes it has."""
    seen: list[int] = []

    def step(state, x):
        seen.append(x.shape[1])
        return state + x.sum(axis=1), mx.sin(x)

    def loss(x: mx.array) -> mx.array:
        return chunks.in_chunks(step, 4, mx.zeros((1, 3)), [x])[0].sum()

    with patch.object(chunks, "_over_chunks", chunks._over_chunks.__wrapped__):
        found = mx.grad(loss)(normal(1, 10, 3))
    mx.eval(found)
    assert sorted(seen) == [2, 2, 4, 4, 4, 4]
