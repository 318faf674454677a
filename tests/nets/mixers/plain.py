"""The loops over tokens that the mixers are compared with, mlx-lm's where it has a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.bailing_moe_linear import recurrent_gla
from mlx_lm.models.gated_delta import gated_delta_ops
from mlx_lm.models.recurrent_gemma import rnn_scan
from mlx_lm.models.rwkv7 import _wkv7_step_ops as wkv7_step

Mixer = Callable[..., tuple[mx.array, mx.array]]


def normal(*shape: int) -> mx.array:
    return mx.random.normal(shape)


def unit(x: mx.array) -> mx.array:
    return x / mx.sqrt(mx.square(x).sum(axis=-1, keepdims=True) + 1e-6)


def delta_inputs(
    tokens: int,
    vector: bool,
    rows: int = 2,
    heads: int = 2,
    repeats: int = 2,
    size: int = 8,
    strength: float = 0.05,
) -> list[mx.array]:
    """q, k, v, logarithms of decays and beta; strength: the middle of -log g."""
    mx.random.seed(tokens)
    q, k = (unit(normal(rows, tokens, heads, size)) for _ in range(2))
    v = normal(rows, tokens, heads * repeats, size + 2)
    beta = 2 * mx.sigmoid(normal(rows, tokens, heads * repeats))
    logs = normal(rows, tokens, heads * repeats, *([size] if vector else []))
    return [q, k, v, -strength * mx.exp(logs), beta]


def delta(q, k, v, logs, beta, state=None) -> tuple[mx.array, mx.array]:
    return gated_delta_ops(q, k, v, mx.exp(logs), beta, state)


def linear_inputs(tokens: int, rows: int = 2, heads: int = 2, size: int = 8) -> list[mx.array]:
    """q, k, v, logarithms of decays"""
    mx.random.seed(tokens)
    q, k = normal(rows, tokens, heads, size), normal(rows, tokens, heads, size)
    return [q, k, normal(rows, tokens, 2 * heads, 6), -mx.exp(normal(rows, tokens, 2 * heads) - 2)]


def linear(q, k, v, logs) -> tuple[mx.array, mx.array]:
    repeats = v.shape[2] // k.shape[2]
    q, k = mx.repeat(q, repeats, axis=2), mx.repeat(k, repeats, axis=2)
    state, found = mx.zeros((v.shape[0], v.shape[2], v.shape[3], k.shape[3])), []
    for t in range(q.shape[1]):
        state = mx.exp(logs[:, t, :, None, None]) * state + v[:, t, :, :, None] * k[:, t, :, None]
        found.append((state @ q[:, t, :, :, None]).squeeze(-1))
    return mx.stack(found, axis=1), state


def space_inputs(tokens: int, rows: int = 2, groups: int = 2, size: int = 5) -> list[mx.array]:
    """x, A_log, B, C, D, dt and its bias: the arguments of mlx-lm's ssm_update"""
    mx.random.seed(tokens)
    heads = 2 * groups
    B, C = normal(rows, tokens, groups, size), normal(rows, tokens, groups, size)
    x, dt = normal(rows, tokens, heads, 6), normal(rows, tokens, heads)
    return [x, normal(heads), B, C, normal(heads), dt, normal(heads)]


def rwkv_inputs(tokens: int, rows: int = 2, heads: int = 2, size: int = 8) -> list[mx.array]:
    """r, w, k, v, a, b"""
    mx.random.seed(tokens)
    r, k, v = (normal(rows, tokens, heads, size) for _ in range(3))
    w = mx.exp(-0.606531 * mx.sigmoid(normal(rows, tokens, heads, size)))
    key, rate = unit(normal(rows, tokens, heads, size)), mx.sigmoid(normal(*r.shape))
    return [r, w, k, v, -key, key * rate]


def rwkv(r, w, k, v, a, b) -> tuple[mx.array, mx.array]:
    state = mx.zeros((r.shape[0], r.shape[2], v.shape[3], r.shape[3]))
    found = []
    for t in range(r.shape[1]):
        y, state = wkv7_step(r[:, t], w[:, t], k[:, t], v[:, t], a[:, t], b[:, t], state)
        found.append(y.squeeze(-1))
    return mx.stack(found, axis=1), state


def selective_inputs(tokens: int, rows: int = 2, size: int = 6) -> list[mx.array]:
    """x, delta, A, B, C, D"""
    mx.random.seed(tokens)
    x, delta = normal(rows, tokens, size), mx.exp(normal(rows, tokens, size) - 2)
    B, C = normal(rows, tokens, 3), normal(rows, tokens, 3)
    return [x, delta, -mx.exp(normal(size, 3)), B, C, normal(size)]


def selective(x, delta, A, B, C, D) -> tuple[mx.array, mx.array]:
    """The steps of mlx-lm's MambaBlock.ssm_step."""
    state, found = mx.zeros((x.shape[0], *A.shape)), []
    for t in range(x.shape[1]):
        new = (delta[:, t] * x[:, t])[..., None] * B[:, t, None]
        state = new + state * mx.exp(delta[:, t, :, None] * A)
        found.append((state @ C[:, t, :, None]).squeeze(2) + D * x[:, t])
    return mx.stack(found, axis=1), state


def lru_inputs(tokens: int, rows: int = 2, size: int = 6) -> list[mx.array]:
    """x, a"""
    mx.random.seed(tokens)
    return [normal(rows, tokens, size), mx.sigmoid(3 * normal(rows, tokens, size))]


def lru(x, a) -> tuple[mx.array, mx.array]:
    return rnn_scan(x, a, mx.zeros((x.shape[0], x.shape[2])))


def lightning(q, k, v, g) -> tuple[mx.array, mx.array]:
    """mlx-lm's recurrent_gla; q, k, v: (B, H, T, D), g: (H,)"""
    return recurrent_gla(q, k, v, g, 0.5)


def outputs_and_gradients(mixer: Mixer, given: list[mx.array], **more: Any) -> list[mx.array]:
    """[output, last state, the gradient of each given array]"""

    def loss(*arrays: mx.array) -> Any:
        y, state = mixer(*arrays, **more)
        total = sum((x * mx.cos(mx.arange(x.size)).reshape(x.shape)).sum() for x in (y, state))
        return total, (y, state)

    (_, found), grads = mx.value_and_grad(loss, argnums=tuple(range(len(given))))(*given)
    return [*found, *grads]


def relative_error(ours: mx.array, theirs: mx.array) -> float:
    """The largest difference, relative to the largest value; values near 0 count as 0.1."""
    a, b = (np.array(x.astype(mx.float32), np.float64) for x in (ours, theirs))
    return float(np.abs(a - b).max() / max(np.abs(b).max(), 0.1))


def assert_equal(ours: Mixer, theirs: Mixer, given: list[mx.array], **more: Any) -> None:
    """Compare outputs to 1e-5 and gradients to 1e-4."""
    found = outputs_and_gradients(ours, given, **more)
    expected = outputs_and_gradients(theirs, given)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), i
        assert mx.isfinite(a).all().item(), i
        assert relative_error(a, b) < (1e-5 if i < 2 else 1e-4), i
