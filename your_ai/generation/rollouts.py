"""Sample several completions of each of many prompts, many rows at a time.

The tokens of a row are a pure function of the model, its prompt and its seed: each token has a
random key made of the seed and its position. They do not depend on the other rows, unless rounding
decides between two tokens.

Shapes: B rows in a wave, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from your_ai.engine.weights import last_position_only
from your_ai.memory import allocator
from your_ai.memory.sizes import PREFILL_TOKENS

MOST_CACHED = 128 << 20  # bytes of freed buffers
Sampler = Callable[[mx.array, mx.array], mx.array]  # ((B, V) logits, (B, 2) keys) -> (B,) tokens
LEAST_TEMPERATURE = 1e-30  # above 0; what is divided by less may be beyond float32


@dataclass(frozen=True)
class RolloutPrompt:
    """A prompt, and the seeds of its completions: one completion for each."""

    tokens: np.ndarray
    """(T,), at least one."""
    seeds: tuple[int, ...]
    """Each from 0 to 2^64 - 1."""
    max_new_tokens: int | None = None
    """Of each of its completions, at least one, if it has a smaller limit than the others."""
    ends: Callable[[Sequence[int]], bool] | None = None
    """Says whether a completion ends with these tokens, instead of the stop tokens of all."""


@dataclass(frozen=True)
class Completion:
    """The tokens that were sampled for a row."""

    prompt: int
    """The index of its prompt."""
    sample: int
    """The index of its seed."""
    tokens: tuple[int, ...]
    """As they were sampled, with the stop token if there is one."""
    stopped: bool
    """Whether it ended with a stop token, and not at the limit of tokens."""


def sampler_of(temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampler:
    """A function that samples a token for each row.

    temperature: divides the logits; 0, or less than `LEAST_TEMPERATURE`, takes the most likely
    token. top_k: sample from the most likely `top_k` tokens; 0 for all. top_p: then from the most
    likely ones whose total probability is at least this.
    """
    if temperature < LEAST_TEMPERATURE:
        return lambda logits, keys: logits.argmax(-1)

    def sample(logits: mx.array, keys: mx.array) -> mx.array:
        logits = logits.astype(mx.float32) * (1 / temperature)
        if 0 < top_k < logits.shape[-1]:
            least = -mx.partition(-logits, top_k - 1, axis=-1)[:, top_k - 1 : top_k]
            logits = mx.where(logits < least, -mx.inf, logits)
        if top_p < 1:
            shares = mx.sort(mx.softmax(logits, axis=-1), axis=-1)[:, ::-1]
            before = mx.cumsum(shares, axis=-1) - shares
            least = mx.where(before < top_p, shares, mx.inf).min(-1, keepdims=True)
            logits = mx.where(mx.softmax(logits, axis=-1) < least, -mx.inf, logits)
        return mx.vmap(draw)(logits, keys)

    return sample


def draw(logits: mx.array, key: mx.array) -> mx.array:
    """A token of a row, (V,) -> ()."""
    return mx.random.categorical(logits, key=key)


def seed_keys(seeds: Sequence[int]) -> mx.array:
    """(B, 2) uint32 random keys of the rows."""
    return mx.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], mx.uint32)


def keys_at(keys: mx.array, positions: mx.array) -> mx.array:
    """(B, 2) the keys of the tokens at these positions, (B,) uint32, of the completions."""
    return keys ^ mx.stack([positions, mx.zeros_like(positions)], axis=1)


def complete(
    model: nn.Module,
    prompts: Sequence[RolloutPrompt],
    sampler: Sampler,
    stop_tokens: Collection[int],
    max_new_tokens: int,
    rows_at_once: int,
    step: Callable[[int], None] = lambda _: None,
) -> Iterator[Completion]:
    """Yield the completions of all prompts, each when it is finished.

    stop_tokens: the ids that end a completion. max_new_tokens: of each completion, at least one.
    rows_at_once: rows that are generated together, in waves. Models whose caches cannot be
        batched generate one row at a time.
    step: is called with the number of rows before each token, and may raise.

    Each prompt goes through the model once. Whoever changes the model must not do so before all
    completions were yielded.
    """
    rows = [(p, s) for p, prompt in enumerate(prompts) for s in range(len(prompt.seeds))]
    prefilled: dict[int, list[Any]] = {}
    stops = frozenset(stop_tokens)

    def by_default(tokens: Sequence[int]) -> bool:
        return tokens[-1] in stops

    batchable = all(hasattr(cache, "merge") for cache in make_prompt_cache(model))
    rows_at_once = max(1, rows_at_once) if batchable else 1
    with last_position_only(model):
        for start in range(0, len(rows), rows_at_once):
            wave = rows[start : start + rows_at_once]
            left = {p for p, _ in rows[start + len(wave) :]}
            for p in dict.fromkeys(p for p, _ in wave):
                if p not in prefilled:
                    prefilled[p] = prefill(model, prompts[p].tokens[:-1])
            cache = batched([prefilled[p] for p, _ in wave], batchable, groups_heads(model))
            for p in {p for p, _ in wave} - left:
                del prefilled[p]
            last = [int(prompts[p].tokens[-1]) for p, _ in wave]
            keys = seed_keys([prompts[p].seeds[s] for p, s in wave])
            own = [prompts[p].max_new_tokens or max_new_tokens for p, _ in wave]
            most = [min(max_new_tokens, limit) for limit in own]
            ends = [prompts[p].ends or by_default for p, _ in wave]
            yield from run_wave(model, cache, wave, last, keys, sampler, ends, most, step)
            del cache


def prefill(model: nn.Module, tokens: np.ndarray) -> list[Any]:
    """mlx-lm's cache of a prompt; it is empty if there are no tokens."""
    cache = make_prompt_cache(model)
    for start in range(0, len(tokens), PREFILL_TOKENS):
        part = mx.array(tokens[None, start : start + PREFILL_TOKENS].astype(np.int32))
        model(part, cache=cache)  # logits are lazy: nothing computes them
        mx.eval([c.state for c in cache])
    allocator.free(collect=False)
    return cache


class GroupedHeads(BatchKVCache):
    """A cache whose masks fit scores of (B, key heads, query heads of each, 1, T)."""

    def make_mask(self, *args: Any, **kwargs: Any) -> mx.array:
        mask: mx.array = super().make_mask(*args, **kwargs)
        return mask[:, :, None]


def groups_heads(model: nn.Module) -> bool:
    """Return whether it is mlx-lm's attention of gemma2, whose masks lack dimensions in batches.

    It would fail, or mask heads instead of rows if there are as many.
    """
    args: Any = getattr(model, "args", None)
    return (
        getattr(args, "model_type", "") == "gemma2"
        and args.num_attention_heads > args.num_key_value_heads
    )


def batched(caches: list[list[Any]], batchable: bool, grouped: bool = False) -> list[Any]:
    """One cache for all rows, from a cache for each. grouped: as in `groups_heads`."""
    if not batchable:
        (cache,) = caches
        return copy.deepcopy(cache)
    merged = [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]
    for layer in merged if grouped else ():
        layer.__class__ = GroupedHeads  # `merge` makes plain ones of empty caches in any case
    mx.eval([c.state for c in merged if not c.empty()])
    return merged


def run_wave(
    model: nn.Module,
    cache: list[Any],
    wave: list[tuple[int, int]],
    last: list[int],
    keys: mx.array,
    sampler: Sampler,
    ends: Sequence[Callable[[Sequence[int]], bool]],
    most: Sequence[int],
    step: Callable[[int], None],
) -> Iterator[Completion]:
    """Generate the rows of a wave; rows leave it when they are finished.

    last: the last token of each prompt, which the cache does not have. ends: for each row, as of
    `RolloutPrompt`. most: the maximum number of tokens of each row.

    While the tokens of a step are looked at, those of the next are being computed.
    """
    found: list[list[int]] = [[] for _ in wave]
    active = list(range(len(wave)))
    tokens, position = mx.array(last, mx.int32), 0

    def advance(tokens: mx.array, position: int) -> mx.array:
        step(len(active))
        logits = model(tokens[:, None], cache=cache)[:, -1]
        places = mx.full((len(active),), position, mx.uint32)
        sampled = sampler(logits, keys_at(keys, places)).astype(mx.int32)
        mx.async_eval(sampled)
        return sampled

    tokens = advance(tokens, 0)
    while active:
        longest = max(most[row] for row in active)
        following = advance(tokens, position + 1) if position + 1 < longest else None
        position += 1
        if mx.get_cache_memory() > MOST_CACHED:  # arrays grow, so old buffers fit few new ones
            allocator.free(collect=False)
        keep = []
        for place, (row, token) in enumerate(zip(active, np.array(tokens).tolist(), strict=True)):
            found[row].append(token)
            stopped = ends[row](found[row])
            if stopped or position == most[row]:
                yield Completion(*wave[row], tuple(found[row]), stopped)
            else:
                keep.append(place)
        if not keep:
            return
        assert following is not None  # a row goes on
        if len(keep) < len(active):
            active = [active[place] for place in keep]
            chosen = mx.array(keep)
            keys, following = keys[chosen], following[chosen]
            for layer in cache:
                layer.filter(chosen)
        tokens = following
