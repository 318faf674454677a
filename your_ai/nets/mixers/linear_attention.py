"""Linear attention with a decay per head, in chunks: Mamba 2 and lightning attention.

S_t = g_t S_{t-1} + v_t k_t',  o_t = S_t q_t

Mamba 2 (Dao and Gu, 2024, arXiv 2405.21060) has C as q, B as k and dt x as v. Lightning
attention (Qin et al., 2024, arXiv 2401.04658) has the same decay at all tokens. In a chunk, the
tokens of the chunk are attended to with their decays, and those before it through the state.

Shapes: B rows, T tokens per row, n tokens per chunk, G groups of heads that share queries and
keys, R heads per group, N features of a key, P features of a value.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from your_ai.memory.sizes import LINEAR_CHUNK
from your_ai.nets.mixers.chunks import in_chunks, scalar_decays


def linear_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    logs: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """-> output (B, T, GR, P) in v's dtype, last state (B, GR, P, N) in float32.

    q, k: (B, T, G, N); v: (B, T, GR, P); logs: (B, T, GR), the logarithms of the decays;
    state: (B, GR, P, N), zeros by default. tokens: per chunk.

    Computed in float32. Differentiable in all arrays.
    """
    state = _zeros(v, k) if state is None else state
    return in_chunks(_step, tokens or LINEAR_CHUNK, state, (q, k, v, logs))


def state_space(
    x: mx.array,
    B: mx.array,
    C: mx.array,
    D: mx.array,
    dt: mx.array,
    logs: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """Mamba 2: -> output (B, T, GR, P), last state (B, GR, P, N) in float32.

    x: (B, T, GR, P); B, C: (B, T, G, N); D: (GR,); dt: (B, T, GR), the step sizes;
    logs: (B, T, GR), the logarithms of the decays; state: (B, GR, P, N), zeros by default.
    tokens: per chunk.

    The output has the dtype that x D has. Computed in float32. Differentiable in all arrays.
    """
    state = _zeros(x, B) if state is None else state
    return in_chunks(_state_space_step, tokens or LINEAR_CHUNK, state, (x, B, C, dt, logs), (D,))


def step_sizes(dt: mx.array, dt_bias: mx.array, limit: tuple[float, float]) -> mx.array:
    """The step sizes that mlx-lm computes from the same arguments, in float32."""
    return mx.clip(nn.softplus(dt.astype(mx.float32) + dt_bias), *limit)


def _zeros(v: mx.array, k: mx.array) -> mx.array:
    return mx.zeros((v.shape[0], *v.shape[2:], k.shape[-1]), mx.float32)


def _state_space_step(
    state: mx.array,
    x: mx.array,
    B: mx.array,
    C: mx.array,
    dt: mx.array,
    logs: mx.array,
    D: mx.array,
) -> tuple[mx.array, mx.array]:
    skip = x.astype(mx.float32) * D.astype(mx.float32)[:, None]
    state, y = _step(state, C, B, dt[..., None] * x.astype(mx.float32), logs)
    return state, (y + skip).astype(mx.result_type(x, D))


def _step(
    state: mx.array, q: mx.array, k: mx.array, v: mx.array, logs: mx.array
) -> tuple[mx.array, mx.array]:
    G, dtype = k.shape[2], v.dtype
    q, k, v, logs = (x.astype(mx.float32).swapaxes(1, 2) for x in (q, k, v, logs))
    q, k = q[:, :, None], k[:, :, None]  # (B, G, 1, n, N)
    v, logs, before = (mx.unflatten(x, 1, (G, -1)) for x in (v, logs, state))
    decays = scalar_decays(logs)
    begun, ended = decays.from_start[..., None], decays.to_end[..., None]
    seen = decays.between * (q @ k.swapaxes(-1, -2))
    output = begun * (q @ before.swapaxes(-1, -2)) + seen @ v
    after = before * begun[..., -1:, :] + (ended * v).swapaxes(-1, -2) @ k
    return after.flatten(1, 2), output.flatten(1, 2).swapaxes(1, 2).astype(dtype)
