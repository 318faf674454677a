"""Rollouts: the tokens of a row, whatever is generated beside it, and what they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

from tests.conftest import TINY, VOCABULARY, make_model
from your_ai.engine.weights import open_model, stream, stream_vocabulary
from your_ai.generation import rollouts
from your_ai.generation.rollouts import (
    Completion,
    RolloutPrompt,
    complete,
    keys_at,
    sampler_of,
    seed_keys,
)
from your_ai.nets import row_batches
from your_ai.rng import derive_seed

KINDS = [("llama", 4), ("llama", None), ("qwen2", 4), ("gemma2", 4), ("gemma3_text", None),
         ("gemma3_text", 4), ("qwen3_moe", 4)]  # fmt: skip
NEW = 9  # tokens of a completion
SAMPLED = sampler_of(1.0)


@pytest.fixture(scope="module")
def network_of(tmp_path_factory) -> Any:
    """(architecture, bits) -> a network with random weights, made once."""

    @cache
    def make(architecture: str = "llama", bits: int | None = 4) -> nn.Module:
        return opened(tmp_path_factory.mktemp("models") / "m", architecture, bits)[0]

    return make


@pytest.fixture(scope="module")
def alone_of(network_of) -> Any:
    """(architecture, bits) -> the completions of PROMPTS, generated one by one."""
    return cache(lambda *kind: tokens_of(network_of(*kind), rows_at_once=1))


def opened(
    path: Path, architecture: str = "llama", bits: int | None = 4
) -> tuple[nn.Module, dict[str, Any]]:
    """A new network, and the tensors of its files."""
    sizes = {} if architecture == "qwen3_moe" else TINY  # its router has groups of 64
    make_model(path, architecture, bits, factor=1.5, **sizes)
    found = open_model(path, mx.float32)
    found.network.eval()
    return found.network, found.tensors


def prompts_of(
    lengths: Sequence[int], group: int = 2, vocabulary: int = VOCABULARY
) -> list[RolloutPrompt]:
    rng = np.random.default_rng(0)
    return [
        RolloutPrompt(
            rng.integers(3, vocabulary, length),
            tuple(derive_seed(0, "rollout", index, n) for n in range(group)),
        )
        for index, length in enumerate(lengths)
    ]


PROMPTS = prompts_of([5, 1, 40, 17, 2])


def tokens_of(
    network: nn.Module,
    prompts: Sequence[RolloutPrompt] = PROMPTS,
    rows_at_once: int = 100,
    stops: Sequence[int] = (),
    sampler: Any = SAMPLED,
    new: int = NEW,
) -> dict[tuple[int, int], Completion]:
    found = list(complete(network, prompts, sampler, stops, new, rows_at_once))
    by_row = {(completion.prompt, completion.sample): completion for completion in found}
    assert len(by_row) == len(found)
    return by_row


def differing(first: dict, second: dict) -> float:
    """The share of tokens that differ."""
    assert first.keys() == second.keys()
    pairs = [(a, b) for row in first for a, b in zip(first[row].tokens, second[row].tokens)]  # noqa: B905
    return sum(a != b for a, b in pairs) / len(pairs)


# -- a row does not depend on the others


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_tokens_do_not_depend_on_the_wave(network_of, alone_of, architecture, bits):
    network, alone = network_of(architecture, bits), alone_of(architecture, bits)
    assert len({completion.tokens for completion in alone.values()}) == len(alone)
    for rows_at_once in (3, 5, 100):
        assert differing(alone, tokens_of(network, rows_at_once=rows_at_once)) < 1e-4


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_tokens_do_not_depend_on_the_other_rows(network_of, alone_of, architecture, bits):
    """Neither on their order, nor on the rows that end early."""
    network, alone = network_of(architecture, bits), alone_of(architecture, bits)
    last = len(PROMPTS) - 1
    turned = tokens_of(network, PROMPTS[::-1], rows_at_once=6)
    assert differing(alone, {(last - p, s): c for (p, s), c in turned.items()}) < 1e-4
    stops = [alone[0, 0].tokens[1], alone[1, 0].tokens[4]]
    ended = tokens_of(network, stops=stops)
    assert len({len(completion.tokens) for completion in ended.values()}) > 1
    assert differing(ended, alone) < 1e-4


def test_other_seeds_give_other_tokens(network_of):
    same = [RolloutPrompt(PROMPTS[0].tokens, (1, 2, 1 << 32, 1 << 63, 1))]
    found = [completion.tokens for _, completion in sorted(tokens_of(network_of(), same).items())]
    assert found[0] == found[4]
    assert len(set(found)) == 4


def test_models_whose_caches_cannot_be_batched_generate_one_row_at_a_time(network_of, monkeypatch):
    network = network_of()
    expected = tokens_of(network)
    sizes = []

    class Unmergeable:
        def __init__(self, cache: Any) -> None:
            self.cache = cache

        def __getattr__(self, name: str) -> Any:
            if name in ("merge", "cache") or name.startswith("__"):
                raise AttributeError(name)
            return getattr(self.cache, name)

    def make(model: nn.Module) -> list[Any]:
        return [Unmergeable(cache) for cache in rollouts_cache(model)]

    rollouts_cache = rollouts.make_prompt_cache
    monkeypatch.setattr(rollouts, "make_prompt_cache", make)
    monkeypatch.setattr(row_batches, "make_prompt_cache", make)
    found = {
        (c.prompt, c.sample): c
        for c in complete(network, PROMPTS, SAMPLED, (), NEW, 100, sizes.append)
    }
    assert differing(expected, found) < 1e-4
    assert set(sizes) == {1}


def test_weights_in_files_give_the_same_tokens(tmp_path, monkeypatch):
    resident, tensors = opened(tmp_path / "m", "qwen2", None)
    staged = open_model(tmp_path / "m", mx.float32).network.eval()
    stream_vocabulary(staged, tensors)
    streamed = open_model(tmp_path / "m", mx.float32).network.eval()
    stream(streamed, tensors)
    expected = tokens_of(resident, rows_at_once=6)
    for network in (staged, streamed):
        assert differing(expected, tokens_of(network, rows_at_once=6)) < 1e-4


def test_gemma2_masks_rows_and_not_heads(network_of):
    """Also where a wave has as many rows as there are key heads, and shapes do not tell."""
    network, prompts = network_of("gemma2"), prompts_of([3, 40], 1)
    assert network.args.num_key_value_heads == len(prompts)
    alone, together = (tokens_of(network, prompts, rows) for rows in (1, 2))
    assert differing(alone, together) == 0


# -- where a row ends


def test_completions_have_as_many_tokens_as_allowed(network_of):
    for new in (1, 2, 7):
        found = tokens_of(network_of(), new=new).values()
        assert {(len(c.tokens), c.stopped) for c in found} == {(new, False)}


def test_a_stop_token_ends_a_row_and_is_kept(network_of):
    free = tokens_of(network_of())
    stops = {free[0, 0].tokens[0], free[1, 1].tokens[NEW - 1], free[3, 1].tokens[4]}
    for row, found in tokens_of(network_of(), stops=list(stops), rows_at_once=4).items():
        ends = [n for n, token in enumerate(free[row].tokens) if token in stops]
        length = ends[0] + 1 if ends else NEW
        assert found.tokens == free[row].tokens[:length]
        assert found.stopped == bool(ends)


def test_finished_rows_are_no_longer_computed(network_of):
    free = tokens_of(network_of())
    stops = [free[0, 0].tokens[0], free[2, 1].tokens[3]]
    sizes: list[int] = []
    found = list(complete(network_of(), PROMPTS, SAMPLED, stops, NEW, 100, sizes.append))
    lengths = np.array([len(completion.tokens) for completion in found])
    needed = [int((lengths > position).sum()) for position in range(lengths.max())]
    # The next tokens are computed before those of a step are looked at.
    assert sizes == [needed[0], *needed[:-1]]


def test_rows_are_given_when_they_end(network_of):
    free = tokens_of(network_of())
    stops = [free[1, 1].tokens[0]]
    found = complete(network_of(), PROMPTS, SAMPLED, stops, NEW, 100)
    assert next(found).tokens == (stops[0],)


@pytest.mark.parametrize(("rows_at_once", "group"), [(1, 3), (2, 3), (3, 3), (4, 3), (100, 3)])
def test_a_prompt_is_read_once(network_of, rows_at_once, group, monkeypatch):
    """Also if its group is in two waves."""
    network, read = network_of(), []
    prompts = prompts_of([9, 6, 12], group)
    kept = rollouts.prefill

    def prefill(model: nn.Module, tokens: np.ndarray) -> list[Any]:
        read.append(tokens.tolist())
        return kept(model, tokens)

    monkeypatch.setattr(rollouts, "prefill", prefill)
    tokens_of(network, prompts, rows_at_once)
    assert read == [prompt.tokens[:-1].tolist() for prompt in prompts]


def test_only_the_last_token_of_a_prompt_is_read_with_its_completions(network_of):
    """The model sees each prompt once and then one token of each row at a time."""

    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.layers, self.shapes = network_of(), network_of().layers, []

        def __call__(self, tokens: mx.array, cache: Any = None) -> mx.array:
            self.shapes.append(tokens.shape)
            return self.inner(tokens, cache=cache)

        def make_cache(self) -> list[Any]:
            return rollouts.make_prompt_cache(self.inner)

    counted = Counted()
    tokens_of(counted, prompts_of([9, 700], 3), rows_at_once=4, new=3)
    long = [shape for shape in counted.shapes if shape[1] > 1]
    assert sum(shape[1] for shape in long) == 8 + 699
    assert {shape[0] for shape in long} == {1}
    assert [s[0] for s in counted.shapes if s not in long] == [4] * 3 + [2] * 3


def test_an_error_of_the_caller_ends_it_and_the_model_is_as_before(tmp_path):
    network, tensors = opened(tmp_path / "m")
    stream_vocabulary(network, tensors)
    with pytest.raises(KeyboardInterrupt):
        list(complete(network, PROMPTS, SAMPLED, (), NEW, 4, Mock(side_effect=KeyboardInterrupt)))
    assert network(mx.array([[3, 4, 5]])).shape == (1, 3, VOCABULARY)  # all positions again


# -- what is sampled


@pytest.mark.parametrize(("architecture", "bits"), KINDS)
def test_temperature_0_is_the_greedy_generation_of_mlx_lm(network_of, architecture, bits):
    network = network_of(architecture, bits)
    found = tokens_of(network, prompts_of([7, 1, 40], 1), sampler=sampler_of(0))
    for index, prompt in enumerate(prompts_of([7, 1, 40], 1)):
        steps = generate_step(mx.array(prompt.tokens.astype(np.int32)), network, max_tokens=NEW)
        assert found[index, 0].tokens == tuple(token for token, _ in steps)


SIZE = 12  # a tiny vocabulary
COUNT = 8_000


def sampled(logits: np.ndarray, sampler: Any, seed: int = 0) -> np.ndarray:
    """The shares of the tokens among COUNT rows with these logits."""
    keys = seed_keys([derive_seed(seed, n) for n in range(COUNT)])
    tokens = sampler(mx.broadcast_to(mx.array(np.float32(logits)), (COUNT, len(logits))), keys)
    return np.bincount(np.array(tokens), minlength=len(logits)) / COUNT


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def kept_by(logits: np.ndarray, top_p: float, top_k: int) -> set[int]:
    """The tokens that may be sampled: first the most likely top_k, of these those of top_p."""
    order = np.argsort(-logits, kind="stable")[: top_k or None]
    shares = softmax(logits[order])
    before = np.cumsum(shares) - shares
    return {int(token) for token, share in zip(order, before, strict=True) if share < top_p}


@pytest.mark.parametrize("temperature", [1e-300, 1e-39, 1e-30, 1e-5])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 3)])
def test_the_smallest_temperatures_take_the_most_likely_token(temperature, top_p, top_k):
    logits = np.random.default_rng(3).normal(size=SIZE) * 20
    found = sampled(logits, sampler_of(temperature, top_p, top_k))
    assert found[logits.argmax()] == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 4), (0.7, 5)])
def test_tokens_are_drawn_from_the_softmax(temperature, top_p, top_k):
    logits = np.random.default_rng(3).normal(size=SIZE)
    kept = sorted(kept_by(logits / temperature, top_p, top_k))
    expected = np.zeros(SIZE)
    expected[kept] = softmax(logits[kept] / temperature)
    found = sampled(logits, sampler_of(temperature, top_p, top_k))
    assert not found[expected == 0].any()
    squares = COUNT * (found[kept] - expected[kept]) ** 2 / expected[kept]
    assert squares.sum() < len(kept) + 5 * np.sqrt(2 * len(kept))  # chi-square


def test_tokens_at_different_positions_are_independent():
    """With keys of the same row."""
    keys = seed_keys([derive_seed(1, n) for n in range(COUNT)])
    logits, draw = mx.zeros((COUNT, 4)), sampler_of(1.0)
    tokens = [
        np.array(draw(logits, keys_at(keys, mx.full((COUNT,), position, mx.uint32))))
        for position in (0, 1, 255)
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        table = np.bincount(4 * tokens[first] + tokens[second], minlength=16) / COUNT
        assert (16 * COUNT * (table - 1 / 16) ** 2).sum() < 15 + 5 * np.sqrt(30)


LOGITS = st.lists(st.integers(-40, 40), min_size=2, max_size=SIZE, unique=True).map(
    lambda values: np.array(values) / 8
)


@given(LOGITS, st.floats(0.01, 1.0), st.integers(0, SIZE + 2))
def test_exactly_the_most_likely_tokens_are_sampled(logits, top_p, top_k):
    """All of them, where every seed would have to miss one for it to be missing."""
    shares = softmax(np.sort(logits)[::-1][: top_k or None])
    edges = np.abs(np.cumsum(shares) - top_p).min()
    kept = kept_by(logits, top_p, top_k)
    if edges < 1e-5 and top_p < 1:
        return  # rounding decides
    sampler, drawn = sampler_of(1.0, top_p, top_k), []

    def draw(logits: mx.array, key: mx.array) -> mx.array:
        drawn.append(logits)
        return logits.argmax()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx, "vmap", lambda function: lambda rows, keys: function(rows[0], keys[0]))
        patch.setattr(rollouts, "draw", draw)
        sampler(mx.array(np.float32(logits))[None], seed_keys([0]))
    assert set(np.flatnonzero(np.isfinite(np.array(drawn[0]))).tolist()) == kept
