"""RWKV-7's recurrence in chunks (Peng et al., 2025, arXiv 2503.14456).

S_t = S_{t-1} diag(w_t) + u_t b_t' + v_t k_t',  u_t = S_{t-1} a_t,  o_t = S_t r_t

In a chunk, u of all tokens comes from one triangular system:

(I - A) u = a S_0' + E v,  A_ti = a_t . (decay from i to t - 1) b_i,  E_ti likewise with k_i,
with a decayed from the start of the chunk to t - 1.

Shapes: B rows, T tokens per row, n tokens per chunk, H heads, D features per head.
"""

from __future__ import annotations

import mlx.core as mx

from your_ai.memory.sizes import RWKV_CHUNK
from your_ai.nets.mixers.chunks import decays_of, in_chunks, products, unit_lower_inverse

FAINTEST = 1e-30  # added to decays: the logarithm of 0 has no gradient


def rwkv7(
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array | None = None,
    tokens: int | None = None,
) -> tuple[mx.array, mx.array]:
    """-> output (B, T, H, D) in r's dtype, last state (B, H, D, D) in float32.

    r, w, k, v, a, b: (B, T, H, D); w: the decays, 0 to 1; state: (B, H, D, D), of v by k, zeros
    by default. tokens: per chunk.

    Computed in float32. Differentiable in all arrays.
    """
    if state is None:
        state = mx.zeros((r.shape[0], r.shape[2], v.shape[-1], r.shape[-1]), mx.float32)
    return in_chunks(_step, tokens or RWKV_CHUNK, state, (r, w, k, v, a, b))


def _step(
    state: mx.array,
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
) -> tuple[mx.array, mx.array]:
    dtype, n = r.dtype, r.shape[1]
    r, w, k, v, a, b = (x.astype(mx.float32).swapaxes(1, 2) for x in (r, w, k, v, a, b))
    decays = decays_of(mx.log(w + FAINTEST))
    # a reads the state before its own token: it is a second query of the token before it.
    queries = mx.stack([r, mx.concatenate([a[..., 1:, :], a[..., :1, :]], axis=-2)])[:, None]
    keys = mx.stack([b, k])
    own = mx.where(mx.eye(n, dtype=mx.bool_), (queries * keys).sum(axis=-1, keepdims=True), 0.0)
    (of_r, of_a) = products(queries, keys, decays) + own  # (2, B, H, n, n) each, of b and k
    of_a = _one_later(of_a, 0.0)
    turned, begun = state.swapaxes(-1, -2), decays.from_start
    u = unit_lower_inverse(-of_a[0]) @ ((a * _one_later(begun, 1.0)) @ turned + of_a[1] @ v)
    output = (r * begun) @ turned + of_r[0] @ u + of_r[1] @ v
    ended = keys * decays.to_end
    state = state * begun[..., -1:, :] + u.swapaxes(-1, -2) @ ended[0]
    return state + v.swapaxes(-1, -2) @ ended[1], output.swapaxes(1, 2).astype(dtype)


def _one_later(x: mx.array, first: float) -> mx.array:
    """(..., n, m): each row one token later."""
    return mx.concatenate([mx.full(x[..., :1, :].shape, first), x[..., :-1, :]], axis=-2)
