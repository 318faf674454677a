"""What a model finds likely at each place of a text: the top k tokens, or draws.

Shapes: n tokens of the text, m places, c places at a time, V vocabulary, k tokens at a place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from your_ai.generation.rollouts import LEAST_TEMPERATURE, draw, prefill
from your_ai.memory import allocator
from your_ai.rng import derive_seed


class TokensAtPlaces(NamedTuple):
    """Tokens that might be at m places, and their log-probabilities."""

    ids: np.ndarray
    """(m, k) int32."""
    logprobs: np.ndarray
    """(m, k) float32, at temperature 1."""


Chosen = Callable[[mx.array, int], mx.array]
"""Log-probabilities (c, V), and the first of their places -> (c, k) tokens."""


def top(k: int) -> Chosen:
    """Choose the k most likely tokens, the most likely first."""

    def choose(scores: mx.array, _: int) -> mx.array:
        most = min(k, scores.shape[-1])
        found = mx.argpartition(scores, -most, axis=-1)[:, -most:]
        order = mx.argsort(-mx.take_along_axis(scores, found, axis=-1), axis=-1)
        return mx.take_along_axis(found, order, axis=-1)

    return choose


def drawn(k: int, seed: int, temperature: float) -> Chosen:
    """Draw k tokens, with replacement. They depend on the seed and the place alone."""

    def choose(scores: mx.array, first: int) -> mx.array:
        if temperature < LEAST_TEMPERATURE:
            return mx.repeat(scores.argmax(-1, keepdims=True), k, axis=-1)
        places = range(first, first + len(scores))
        seeds = [derive_seed(seed, "alternative", place) % 2**64 for place in places]
        keys = mx.array([[each >> 32, each & 0xFFFFFFFF] for each in seeds], mx.uint32)
        draws = []
        for each in range(k):  # each has as many random numbers as there are scores
            counted = keys ^ mx.array([0, each], mx.uint32)
            draws.append(mx.vmap(draw)(scores * (1 / temperature), counted))
            mx.eval(draws[-1])
        return mx.stack(draws, axis=-1)

    return choose


def likely(
    model: nn.Module, tokens: np.ndarray, start: int, at_once: int, choose: Chosen
) -> TokensAtPlaces:
    """Choose tokens at the places of a text from `start` on, where `tokens[start:]` are.

    tokens: (n,). start: at least 1, as nothing predicts the first token. at_once: c; there are
        logits of so many places.
    """
    cache: list[Any] = prefill(model, tokens[: start - 1])
    ids, logprobs = list[np.ndarray](), list[np.ndarray]()
    for place in range(start, len(tokens), at_once):
        part = tokens[place - 1 : min(place - 1 + at_once, len(tokens) - 1)]
        logits = model(mx.array(part[None].astype(np.int32)), cache=cache)[0].astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        del logits
        found = choose(scores, place)
        ids.append(np.array(found.astype(mx.int32)))
        logprobs.append(np.array(mx.take_along_axis(scores, found, axis=-1)))
    allocator.free(collect=False)
    return TokensAtPlaces(np.concatenate(ids), np.concatenate(logprobs))
