"""Attention in blocks of queries. It never allocates a T x T array, forward or backward.

This is FlashAttention-2 (Dao, 2023, arXiv 2307.08691) written with MLX operations. The backward
pass recomputes the scores from q, k and the log-sum-exp of each row. A block of queries is
multiplied with all its visible keys in one step, so no running softmax is needed. Blocks stop
at the diagonal, which is half the work of a masked T x T attention.

Shapes: B rows, T tokens per row, H query heads, K key heads, R = H / K, d head size,
D hidden size, N queries per block, S visible keys of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.memory.sizes import (
    CPU_TOKENS,
    FEWEST_QUERIES,
    LEAN_QUERY_BLOCK,
    METAL_TOKENS,
    QUERY_BLOCK,
    SCORE_BYTES,
)
from your_ai.nets.block_calls import Mask, seen_keys
from your_ai.nets.mlx_types import custom_function
from your_ai.nets.numerics import METAL_VJP, device, exp, mlx_version


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    segments: mx.array | None = None,
    queries: int | None = None,
    sinks: mx.array | None = None,
    chunk: int | None = None,
) -> mx.array:
    """Causal softmax(scale q kᵀ) v; q: (B, H, T, d), k and v: (B, K, T, d) -> (B, H, T, d).

    window: a query sees only the last `window` keys, including its own.
    segments: (B, T) int32; a query sees only keys of its own segment.
    chunk: a query sees only keys of its own chunk of so many tokens, counted from the row's start.
    queries: queries per block, QUERY_BLOCK by default.
    sinks: (H,) scores of a key of each head that every query sees and whose value is 0. They are
        constants here: their gradient is given as 0.

    H must be a multiple of K. Scores and softmax are computed in float32; the result has the
    dtype of the inputs. Differentiable in q, k and v.
    """
    return attention_results(q, k, v, scale, window, segments, queries, sinks, chunk)[0]


def attention_results(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    window: int | None = None,
    segments: mx.array | None = None,
    queries: int | None = None,
    sinks: mx.array | None = None,
    chunk: int | None = None,
    *,
    known: tuple[mx.array, mx.array] | None = None,
) -> tuple[mx.array, mx.array]:
    """The result of `attention`, and the (B, K, R, T, 1) log-sum-exp of the scores of each query.

    known: both, if they were computed before. They are returned, and the gradients of the first
        are computed from them, so that nothing of the forward pass is computed again.
    """
    if window is not None and window >= q.shape[2]:
        window = None
    if chunk is not None and chunk >= q.shape[2]:
        chunk = None
    more = [array for array in (segments, sinks) if array is not None]
    functions = _attention(scale, window, chunk, queries or QUERY_BLOCK, segments is None)
    if known is None:
        return functions.attend(q, k, v, *more)
    return functions.known(*known, q, k, v, *more)


class AttentionFunctions(NamedTuple):
    """Both return an output, (B, H, T, d), and a log-sum-exp, (B, K, R, T, 1)."""

    attend: Callable[..., tuple[mx.array, mx.array]]
    """(q, k, v[, segments][, sinks])"""
    known: Callable[..., tuple[mx.array, mx.array]]
    """(output, log-sum-exp, q, k, v[, segments][, sinks]); returns its first two."""


@lru_cache
def _attention(
    scale: float, window: int | None, chunk: int | None, max_queries: int, unpacked: bool
) -> AttentionFunctions:
    @custom_function
    def attend(q: mx.array, k: mx.array, v: mx.array, *more: mx.array) -> tuple[mx.array, mx.array]:
        segments, last = more[: not unpacked], more[not unpacked :]
        sinks = [sink.reshape(k.shape[1], -1, 1, 1).astype(mx.float32) for sink in last]
        queries, k, v = by_key_head(q, k), contiguous_float32(k), mx.contiguous(v)
        places = mx.arange(q.shape[2])
        outputs: list[mx.array] = []
        sums: list[mx.array] = []
        done = [k]
        for rows, keys in _blocks(q.shape, window, chunk, max_queries):
            # Compute one block after another, including its mask, so that few are in memory.
            rows_q, *mask_inputs = mx.depends([queries[..., rows, :], places, *segments], done)
            rows_q = rows_q.astype(mx.float32) * scale
            scores = _scores(rows_q, k[:, :, keys], rows, keys, window, chunk, *mask_inputs)
            top = scores.max(axis=-1, keepdims=True)
            for sink in sinks:
                top = mx.maximum(top, sink)
            p = exp(scores - top)
            total = p.sum(axis=-1, keepdims=True)
            for sink in sinks:
                total = total + exp(sink - top)
            output = fold(p.astype(v.dtype)) @ v[:, :, keys]
            outputs.append((output.reshape(*p.shape[:-1], -1) / total).astype(q.dtype))
            sums.append(top + mx.log(total))
            done = [outputs[-1], sums[-1]]
        output = mx.concatenate(outputs, axis=-2).reshape(*q.shape[:-1], -1)
        return output, mx.concatenate(sums, axis=-2)

    @attend.vjp
    def attend_vjp(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
        return gradients(cotangents[0], *results, *primals)

    @custom_function
    def known(output: mx.array, sums: mx.array, *inputs: mx.array) -> tuple[mx.array, mx.array]:
        return output, sums

    @known.vjp
    def known_vjp(primals: Any, cotangents: Any, results: Any) -> tuple[mx.array, ...]:
        output, sums, *inputs = primals
        grads = gradients(cotangents[0], output, sums, *inputs)
        return mx.zeros_like(output), mx.zeros_like(sums), *grads

    def gradients(
        cotangent: mx.array, output: mx.array, sums: mx.array,
        q: mx.array, k: mx.array, v: mx.array, *more: mx.array,
    ) -> tuple[mx.array, ...]:  # fmt: skip
        """The cotangents of q, k, v and of the others."""
        segments = more[: not unpacked]
        delta = (cotangent.astype(mx.float32) * output).sum(axis=-1, keepdims=True)
        delta, cotangent = by_key_head(delta, k), by_key_head(cotangent, k)
        queries, keys_k, keys_v = by_key_head(q, k), contiguous_float32(k), contiguous_float32(v)
        grad_k, grad_v = mx.zeros(k.shape, mx.float32), mx.zeros(v.shape, mx.float32)
        places = mx.arange(q.shape[2])
        grads_q: list[mx.array] = []
        done = [delta]  # prevents mx.compile from sharing masks and scores with the forward pass
        for rows, keys in _blocks(q.shape, window, chunk, max_queries):
            rows_q, *mask_inputs = mx.depends([queries[..., rows, :], places, *segments], done)
            rows_q = rows_q.astype(mx.float32) * scale
            scores = _scores(rows_q, keys_k[:, :, keys], rows, keys, window, chunk, *mask_inputs)
            p = exp(scores - sums[..., rows, :])
            rows_c = fold(cotangent[..., rows, :])
            grad_p = rows_c.astype(mx.float32) @ keys_v[:, :, keys].swapaxes(-1, -2)
            grad_s = fold(p * (grad_p.reshape(p.shape) - delta[..., rows, :]))
            p = fold(p.astype(q.dtype)).swapaxes(-1, -2)
            grad_v = grad_v.at[:, :, keys].add(p @ rows_c)
            grad_k = grad_k.at[:, :, keys].add(grad_s.swapaxes(-1, -2) @ fold(rows_q))
            grad_q = (grad_s @ keys_k[:, :, keys]) * scale
            grads_q.append(grad_q.reshape(rows_q.shape).astype(q.dtype))
            done = [grads_q[-1], grad_k, grad_v]
        grad_q = mx.concatenate(grads_q, axis=-2).reshape(q.shape)
        none = (mx.zeros_like(array) for array in more)
        return grad_q, grad_k.astype(k.dtype), grad_v.astype(v.dtype), *none

    return AttentionFunctions(attend, known)


def by_key_head(x: mx.array, k: mx.array) -> mx.array:
    """(B, H, T, d) -> (B, K, R, T, d)"""
    return mx.unflatten(x, 1, (k.shape[1], -1))


def fold(x: mx.array) -> mx.array:
    """(B, K, R, N, d) -> (B, K, R N, d): the rows of one matmul per key head."""
    return x.flatten(2, 3)


def contiguous_float32(x: mx.array) -> mx.array:
    """Convert to contiguous float32: a matmul would copy a non-contiguous array in every block."""
    return mx.contiguous(x.astype(mx.float32))


def _blocks(
    shape: tuple[int, ...], window: int | None, chunk: int | None, max_queries: int
) -> Iterator[tuple[slice, slice]]:
    """Yield the queries of each block and the keys that any of them sees; shape: of q."""
    B, H, T, _ = shape
    reach = min(window or T, chunk or T)
    queries = min(max_queries, SCORE_BYTES // (4 * B * H * min(T, reach + max_queries)))
    queries = max(queries, FEWEST_QUERIES)
    for start in range(0, T, queries):
        stop = min(T, start + queries)
        first = 0 if window is None else max(0, start - window + 1)
        if chunk is not None:
            first = max(first, start // chunk * chunk)
        yield slice(start, stop), slice(first, stop)


def _scores(
    q: mx.array,
    k: mx.array,
    rows: slice,
    keys: slice,
    window: int | None,
    chunk: int | None,
    places: mx.array,
    segments: mx.array | None = None,
) -> mx.array:
    """Scores of a block, (B, K, R, N, S), -inf for masked keys. Every query sees some key.

    q: (B, K, R, N, d), k: (B, K, S, d), both float32; places: (T,) positions, 0 to T - 1.
    """
    scores = mx.unflatten(fold(q) @ k.swapaxes(-1, -2), 2, q.shape[2:4])
    query, key = places[rows, None], places[keys]
    if window is None and chunk is None and segments is None:  # only the last N keys can be masked
        hidden = mx.where(query >= key[rows.start :], 0.0, -mx.inf)
        return scores.at[..., rows.start :].add(hidden)
    seen = seen_keys(query, key, window, chunk)
    if segments is not None:
        own, other = segments[:, rows, None], segments[:, None, keys]
        seen = seen & (own == other)[:, None, None]
    return mx.where(seen, scores, -mx.inf)


# -- use in models ------------------------------------------------------------------------


def needs_blocks(
    device: str,
    mlx_version: tuple[int, ...],
    tokens: int,
    segments: bool,
    reach: int | None,
) -> bool:
    """Return whether attention in blocks is better here than MLX's own attention.

    device: cpu, metal or cuda. reach: as in Mask. MLX needs an array mask for segments, windows
    and chunks, and its backward pass then allocates T x T scores on every device.
    """
    if segments or (reach is not None and reach < tokens):
        return True
    if device == "cpu":
        return tokens >= CPU_TOKENS
    return device == "metal" and mlx_version < METAL_VJP and tokens >= METAL_TOKENS


def _separate(attn: nn.Module, x: mx.array) -> tuple[mx.array, ...]:
    return attn.q_proj(x), attn.k_proj(x), attn.v_proj(x)


def _separate_normed(attn: nn.Module, x: mx.array) -> tuple[mx.array, ...]:
    return attn.q_norm(attn.q_proj(x)), attn.k_norm(attn.k_proj(x)), attn.v_proj(x)


def _joined(attn: nn.Module, x: mx.array) -> tuple[mx.array, ...]:
    queries, keys = attn.n_heads * attn.head_dim, attn.n_kv_heads * attn.head_dim
    return tuple(mx.split(attn.qkv_proj(x), [queries, queries + keys], axis=-1))


@dataclass(frozen=True)
class AttentionLayout:
    """The way an attention class of mlx-lm computes its queries, keys and values.

    After these steps come `rope`, attention with `scale`, and `o_proj`.
    """

    project: Callable[[nn.Module, mx.array], tuple[mx.array, ...]] = _separate
    """(B, T, D) -> q (B, T, H d), k and v (B, T, K d)."""
    heads: tuple[str, str] = ("n_heads", "n_kv_heads")
    """Names of the attributes for H and K."""
    head_norms: bool = False
    """Whether q_norm and k_norm are applied to each head."""


# Keyed by name, so that nothing is imported; a version of mlx-lm may lack some of these classes.
LAYOUTS = {
    "llama.Attention": AttentionLayout(),  # also used by Mistral, SmolLM3 and others
    "qwen2.Attention": AttentionLayout(),
    "qwen2_moe.Attention": AttentionLayout(),
    "gemma.Attention": AttentionLayout(),
    "glm4.Glm4Attention": AttentionLayout(),
    "granite.Attention": AttentionLayout(),
    "granitemoe.GraniteMoeAttention": AttentionLayout(),
    "seed_oss.Attention": AttentionLayout(),
    "starcoder2.Attention": AttentionLayout(),
    "mixtral.MixtralAttention": AttentionLayout(heads=("num_heads", "num_key_value_heads")),
    "qwen3.Attention": AttentionLayout(head_norms=True),
    "qwen3_moe.Attention": AttentionLayout(head_norms=True),
    "gemma3_text.Attention": AttentionLayout(head_norms=True),
    "olmo2.Attention": AttentionLayout(_separate_normed),
    "olmoe.Attention": AttentionLayout(_separate_normed),
    "phi3.Attention": AttentionLayout(_joined),
}


def _layout(module: Any) -> AttentionLayout | None:
    package, _, name = type(module).__module__.rpartition(".")
    if package != "mlx_lm.models":
        return None
    return LAYOUTS.get(f"{name}.{type(module).__name__}")


class BlockwiseAttention(nn.Module):
    """An attention layer of mlx-lm that also accepts a `Mask`. Same children and attributes.

    It calls the original class for generation with a KV cache, for masks other than a `Mask`
    or "causal", and where `needs_blocks` is false.
    """

    takes_segments = True
    o_proj: nn.Module
    attend: Callable[..., mx.array]
    _base: type[nn.Module]

    @staticmethod
    def from_base(base: nn.Module, lean: bool = False) -> BlockwiseAttention:
        """base: an instance of a class in LAYOUTS."""
        twin = BlockwiseAttention()
        vars(twin).update({n: v for n, v in vars(base).items() if n != "_no_grad"})
        dict.update(twin, base)
        # Keep the class, not `base`: a later skeleton has other children than `base`.
        twin._base, twin._layout, twin._lean = type(base), _layout(base), lean
        twin.attend = attention  # replaced where its results are kept
        return twin

    def __call__(self, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        """x: (B, T, D) -> (B, T, D)"""
        tokens = x.shape[1]
        causal = (isinstance(mask, str) and mask == "causal") or (mask is None and tokens == 1)
        seen = Mask() if causal else mask
        if cache is not None or not isinstance(seen, Mask):
            return self._base.__call__(self, x, mask, cache)
        packed = seen.segments is not None
        if not needs_blocks(device(), mlx_version(), tokens, packed, seen.reach):
            return self._base.__call__(self, x, "causal", None)
        q, k, v = self._heads(x)
        queries = LEAN_QUERY_BLOCK if self._lean else None
        q, k = self.rope(q), self.rope(k)
        masked = (seen.window, seen.segments, queries, None, seen.chunk)
        y = self.attend(q, k, v, self.scale, *masked)
        return self.o_proj(y.swapaxes(1, 2).flatten(2))

    def _heads(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Queries (B, H, T, d), keys and values (B, K, T, d), before rope."""
        layout = self._layout
        q, k, v = layout.project(self, x)
        H, K = (getattr(self, name) for name in layout.heads)
        q, k, v = (mx.unflatten(y, -1, (n, -1)) for y, n in ((q, H), (k, K), (v, K)))
        if layout.head_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        return q.swapaxes(1, 2), k.swapaxes(1, 2), v.swapaxes(1, 2)


def replace_attention(module: nn.Module, lean: bool = False) -> int:
    """Replace the attention layers in `module` whose layout is known; return their number."""
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.items()
        if _layout(child) is not None
    ]
    for parent, name, child in found:
        parent[name] = BlockwiseAttention.from_base(child, lean)
    return len(found)
