"""Sample completions with Gumbel noise, many rows at a time.

The model's own trunk runs with mlx-lm's caches, so every architecture can be sampled, also with
streamed weights.

Shapes: B rows, T tokens of the longest completion, D hidden size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from your_ai.engine.weights import last_position_only
from your_ai.generation.rollouts import MOST_CACHED, batched, prefill
from your_ai.memory import allocator
from your_ai.nets.gumbel import Drawn, NoisePlaces, Noisy, draw
from your_ai.nets.head import HeadRows
from your_ai.nets.row_batches import can_merge, groups_heads
from your_ai.soft.roles import Network, Sampled, SoftRows, SoftSettings


def sample(
    policy: Network,
    prompts: Sequence[np.ndarray],
    keys: np.ndarray,
    max_new_tokens: int,
    stop_tokens: Collection[int],
    settings: SoftSettings,
) -> Sampled:
    """Sample a completion for each prompt, (P,) int with at least one token.

    keys: (B,) uint32; the noise of a row is a pure function of its key. A row ends after its first
    stop token, or with `max_new_tokens` tokens.
    """
    found = [np.zeros((0,), np.int32)] * len(prompts)
    for wave in waves(policy, len(prompts)):
        tokens, _ = run(
            policy, [prompts[i] for i in wave], keys[wave], max_new_tokens, stop_tokens, settings
        )
        for place, row in enumerate(wave):
            ends = np.flatnonzero(np.isin(tokens[place], list(stop_tokens)))
            found[row] = tokens[place, : ends[0] + 1 if len(ends) else None]
    lengths = np.array([len(tokens) for tokens in found], np.int32)
    padded = np.zeros((len(prompts), int(lengths.max())), np.int32)
    for row, tokens in enumerate(found):
        padded[row, : len(tokens)] = tokens
    return Sampled(padded, lengths)


def replay(
    policy: Network, rows: SoftRows, settings: SoftSettings, embeddings: Sequence[HeadRows]
) -> list[mx.array]:
    """Sample the relaxed tokens of completions again.

    Returns their mean rows for each of `embeddings`, (B, T, D) each. The tokens themselves are
    not needed: the noise decides.
    """
    found: dict[int, list[mx.array]] = {}
    for wave in waves(policy, len(rows.prompts)):
        prompts = [rows.prompts[i] for i in wave]
        _, means = run(policy, prompts, rows.keys[wave], rows.count, (), settings, embeddings)
        for place, row in enumerate(wave):
            found[row] = [of_embedding[place] for of_embedding in means]
    count = range(len(embeddings))
    return [mx.stack([found[row][index] for row in sorted(found)]) for index in count]


def waves(policy: Network, count: int) -> list[list[int]]:
    """The rows that are sampled together: one at a time if the caches cannot be batched."""
    if can_merge(policy.model):
        return [list(range(count))]
    return [[row] for row in range(count)]


def run(
    policy: Network,
    prompts: Sequence[np.ndarray],
    keys: np.ndarray,
    count: int,
    stop_tokens: Collection[int],
    settings: SoftSettings,
    embeddings: Sequence[HeadRows] = (),
) -> tuple[np.ndarray, list[mx.array]]:
    """The tokens, (B, T) int32, until all rows ended or have `count`; and the mean rows of each of
    `embeddings`, (B, T, D) each."""
    noisy, embedding = Noisy(policy.final, settings.tau), policy.embedding
    wanted = [embedding.rows, *embeddings] if settings.relaxed else []
    key_array = mx.array(keys.astype(np.uint32))
    tokens: list[mx.array] = []
    means: list[list[mx.array]] = []
    ended = mx.zeros(len(prompts), mx.bool_)
    stops = mx.array(sorted(stop_tokens), mx.int32)
    rows = embedding.hard(mx.array([[int(prompt[-1])] for prompt in prompts]))
    with last_position_only(policy.model):
        cache = caches(policy, prompts)
        for position in range(count):
            settings.step(len(prompts))
            at = NoisePlaces(key_array, mx.full((len(prompts),), position, mx.uint32))
            drawn = step(noisy, policy, rows, cache, at, wanted)
            tokens.append(drawn.tokens)
            means.append(drawn.means[1:])
            ended = ended | (drawn.tokens[:, None] == stops).any(axis=1)
            rows = (
                drawn.means[0][:, None].astype(rows.dtype)
                if settings.relaxed
                else embedding.hard(drawn.tokens[:, None])
            )
            mx.eval(tokens[-1], means[-1], rows, ended)
            if mx.get_cache_memory() > MOST_CACHED:
                allocator.free(collect=False)
            if ended.all().item():
                break
    found = np.array(mx.stack(tokens, axis=1))
    return found, [mx.stack([*of_one], axis=1) for of_one in zip(*means, strict=True)]


def step(
    noisy: Noisy,
    policy: Network,
    rows: mx.array,
    cache: list[Any],
    at: NoisePlaces,
    wanted: Sequence[HeadRows],
) -> Drawn:
    """Sample the next token of each row; rows: (B, 1, D) embedding rows of the last one."""
    trunk = policy.embedding.trunk_of(rows).module
    hidden = trunk(mx.zeros(rows.shape[:2], mx.int32), cache=cache)[:, -1]
    return draw(noisy, noisy.head.inputs(hidden), at, wanted)


def caches(policy: Network, prompts: Sequence[np.ndarray]) -> list[Any]:
    """mlx-lm's caches of the prompts without their last tokens; equal prompts run once."""
    known: dict[bytes, list[Any]] = {}
    for prompt in prompts:
        name = np.asarray(prompt, np.int32).tobytes()
        if name not in known:
            known[name] = prefill(policy.model, np.asarray(prompt)[:-1])
    each = [known[np.asarray(prompt, np.int32).tobytes()] for prompt in prompts]
    return batched(each, can_merge(policy.model), groups_heads(policy.model))
