"""The gated delta rule in chunks.

S_t = S_{t-1} G_t + d_t k_t',  d_t = b_t (v_t - S_{t-1} G_t k_t),  o_t = S_t q_t

G_t is a number per head (Gated DeltaNet: Yang et al., 2024, arXiv 2412.06464), or diagonal, a
number per feature of a key (Kimi Delta Attention: 2025, arXiv 2510.26692). In a chunk with the
decays of `decays`, the d of all tokens come from one triangular system (Yang et al., 2024,
arXiv 2406.06484):

(I + A) d = b (v - K S_0'),  A_ti = b_t (k_t . decay from i to t . k_i) for i < t,
K_t = k_t decayed from the start of the chunk to t

Shapes: B rows, T tokens per row, n tokens per chunk, H heads of keys, R heads of values per head
of keys, Dk features of a key, Dv features of a value. Only matrix products are used.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from your_ai.memory.sizes import DELTA_CHUNK, VECTOR_DELTA_CHUNK
from your_ai.nets.mixers.chunks import (
    decays_of,
    in_chunks,
    lower,
    products,
    scalar_decays,
    unit_lower_inverse,
)
from your_ai.nets.numerics import METAL_VJP


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    logs: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """-> output (B, T, HR, Dv) in q's dtype, last state (B, HR, Dv, Dk) in float32.

    q, k: (B, T, H, Dk); v: (B, T, HR, Dv); beta: (B, T, HR); state: (B, HR, Dv, Dk), zeros by
    default.
    logs: the logarithms of the decays, (B, T, HR) or (B, T, HR, Dk).
    tokens: per chunk.

    Computed in float32. Differentiable in all arrays.
    """
    if state is None:
        state = mx.zeros((v.shape[0], *v.shape[2:], k.shape[-1]), mx.float32)
    step, default = (
        (_scalar_step, DELTA_CHUNK) if logs.ndim == 3 else (_vector_step, VECTOR_DELTA_CHUNK)
    )
    return in_chunks(step, tokens or default, state, (q, k, v, logs, beta))


def _scalar_step(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, logs: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array]:
    n, H, dtype = q.shape[1], k.shape[2], q.dtype
    q, k, v, beta, logs = _by_key_head(q, k, v, beta[..., None], logs[..., None])
    decays, turned = scalar_decays(logs.squeeze(-1)), k.swapaxes(-1, -2)
    seen = decays.between * (q @ turned)
    known = mx.where(lower(n, -1), decays.between * (k @ turned), 0.0)
    begun, ended = decays.from_start[..., None], decays.to_end[..., None]
    before = mx.unflatten(state, 1, (H, -1))
    turned = before.swapaxes(-1, -2)
    d = unit_lower_inverse(beta * known) @ (beta * (v - begun * (k @ turned)))
    output = begun * (q @ turned) + seen @ d
    after = before * begun[..., -1:, :] + (ended * d).swapaxes(-1, -2) @ k
    return after.flatten(1, 2), output.flatten(1, 2).swapaxes(1, 2).astype(dtype)


def _vector_step(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, logs: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array]:
    n, H, dtype = q.shape[1], k.shape[2], q.dtype
    q, k, v, beta, logs = _by_key_head(q, k, v, beta[..., None], logs)
    decays = decays_of(logs)
    own = mx.where(mx.eye(n, dtype=mx.bool_), (q * k).sum(axis=-1, keepdims=True), 0.0)
    seen, known = products(q, k, decays) + own, products(k, k, decays)
    before = mx.unflatten(state, 1, (H, -1))
    turned, begun = before.swapaxes(-1, -2), decays.from_start
    d = unit_lower_inverse(beta * known) @ (beta * (v - (k * begun) @ turned))
    output = (q * begun) @ turned + seen @ d
    after = before * begun[..., -1:, :] + d.swapaxes(-1, -2) @ (k * decays.to_end)
    return after.flatten(1, 2), output.flatten(1, 2).swapaxes(1, 2).astype(dtype)


def _by_key_head(q: mx.array, k: mx.array, *others: mx.array) -> tuple[mx.array, ...]:
    """Float32 q, k: (B, n, H, Dk) -> (B, H, 1, n, Dk); others: (B, n, HR, D) -> (B, H, R, n, D)."""
    found = (mx.unflatten(x.astype(mx.float32), 2, (k.shape[2], -1)) for x in (q, k, *others))
    return tuple(x.transpose(0, 2, 3, 1, 4) for x in found)


# -- use in models ------------------------------------------------------------------------


def uses_mlx(device: str, mlx_version: tuple[int, ...], scalar: bool) -> bool:
    """Return whether MLX's own gated delta rule is better here; it has a gradient on Metal only.

    device: cpu, metal or cuda. scalar: whether the decay is a number per head.

    Not yet run on a Mac: there the choice follows MLX's documentation.
    """
    return device == "metal" and mlx_version >= METAL_VJP and scalar


def by_mlx(
    q: mx.array, k: mx.array, v: mx.array, logs: mx.array, beta: mx.array
) -> tuple[mx.array, mx.array]:
    """`gated_delta` from zeros by MLX's own operation, for decays per head."""
    output, state = mx.fast.gated_delta_update(q, k, v, mx.exp(logs), beta)
    return output.astype(q.dtype), state


def log_decays(
    a: mx.array, A_log: mx.array, dt_bias: mx.array, lower_bound: float | None
) -> mx.array:
    """The logarithms of the decays that mlx-lm computes from the same arguments, in float32.

    With them a decay that rounds to 0 has gradients like any other.
    """
    rate = mx.exp(A_log.astype(mx.float32))
    if lower_bound is None:
        return -rate * nn.softplus(a + dt_bias).astype(mx.float32)
    return lower_bound * mx.sigmoid(rate * (a.astype(mx.float32) + dt_bias))
