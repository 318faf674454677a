"""NEFTune's noise: the same as by hand under every plan, and only in training."""

from __future__ import annotations

import functools
import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.conftest import events_of, losses_of, make_model, resume, train
from tests.engine.test_fused import assert_step, encode, load, plain_loss
from tests.engine.test_plans import by_plan
from tests.training.test_train import final_files
from your_ai.data.batches import make_schedule
from your_ai.data.examples import Examples
from your_ai.engine.build import build_engine
from your_ai.errors import UserError
from your_ai.nets.model import DropoutKeys, TokenKeys
from your_ai.nets.neftune import Neftune
from your_ai.rng import derive_seed
from your_ai.run import events

ALPHA, SEED = 20.0, 3  # by_plan's seed of a step
PLANS = ["fused", "staged", "streamed"]
CASES = [("llama", 4), ("qwen2", None), ("gemma2", None)]  # tied, untied, scaled by sqrt(D)


def mixed(h: np.ndarray) -> np.ndarray:
    h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def noise_by_hand(row: int, tokens: int, size: int) -> np.ndarray:
    """(T, D) of row `row` of the step, which has `tokens` input tokens."""
    key = np.array([derive_seed(SEED, row) % 2**32], np.uint32)
    layer = np.uint32(derive_seed("neftune") % 2**32)
    places = np.arange(tokens, dtype=np.uint32) * np.uint32(0x9E3779B9)
    features = np.arange(size, dtype=np.uint32) * np.uint32(0x85EBCA77)
    bits = mixed(mixed(mixed(key ^ layer) + places)[:, None] + features)
    return ALPHA / math.sqrt(tokens * size) * ((bits >> 8) / 2**23 - 1)


class Fixed(nn.Module):
    """An embedding with a given noise, (T, D)."""

    def __init__(self, embedding: nn.Module, noise: np.ndarray) -> None:
        super().__init__()
        self.embedding, self._noise = embedding, mx.array(noise.astype(np.float32))
        self.freeze()

    def __call__(self, tokens: mx.array) -> mx.array:
        return self.embedding(tokens) + self._noise

    def as_linear(self, x: mx.array) -> mx.array:
        return self.embedding.as_linear(x)


def part(examples: Examples, row: int) -> Examples:
    """One of the examples alone."""
    here = slice(examples.starts[row], examples.starts[row + 1])
    tokens, trained = examples.tokens[here], examples.trained[here]
    starts = np.array([0, len(tokens)])
    return Examples(tokens, trained, starts, examples.weights[row : row + 1], examples.tally)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Makes a model, and the loss and gradients with the noise, row by row; once for each case."""

    @functools.cache
    def make(architecture: str, bits: int | None):
        place = tmp_path_factory.mktemp("case")
        folder = make_model(place / "m", architecture, bits)
        network, tokenizer, _ = load(folder)
        examples = encode(tokenizer, place)
        embedding = network.model.embed_tokens
        counts = [int(examples[row].trained.sum()) for row in range(len(examples))]
        weights = [float(w) * n for w, n in zip(examples.weights, counts, strict=True)]

        def loss() -> mx.array:
            total = mx.array(0.0)
            for index, row in enumerate(make_schedule(examples, 5, 5, seed=0).rows_of(0)):
                if weights[row] == 0:
                    continue
                noise = noise_by_hand(index, int(examples.lengths[row]) - 1, 64)
                network.model.embed_tokens = Fixed(embedding, noise)
                total = total + weights[row] * plain_loss(network, part(examples, row))
            return total / sum(weights)

        found, grads = nn.value_and_grad(network, loss)()
        return folder, found.item(), dict(tree_flatten(grads))

    return make


@pytest.mark.parametrize(
    ("architecture", "bits", "plan"),
    [
        *((*CASES[0], plan) for plan in ("fused", "streamed")),
        (*CASES[1], "staged"),
        *((*CASES[2], plan) for plan in ("fused", "streamed")),
    ],
)
def test_every_plan_adds_the_noise_of_the_paper(tmp_path, reference, architecture, bits, plan):
    folder, loss, grads = reference(architecture, bits)
    found = by_plan(folder, tmp_path, plan, neftune_alpha=ALPHA)
    assert_step(found[:2], loss, grads, 2e-5)
    assert found[2] == by_plan(folder, tmp_path, plan)[2]  # without noise outside training
    assert loss != pytest.approx(found[2], rel=1e-3)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("split", [{"batch_size": 2}, {"packed": 128}], ids=["split", "packed"])
def test_noise_does_not_depend_on_the_micro_batches(tmp_path, reference, plan, split):
    folder, *expected = reference("llama", 4)
    found = by_plan(folder, tmp_path, plan, neftune_alpha=ALPHA, **split)
    assert_step(found[:2], *expected, 2e-5)


def test_spilled_rows_have_the_same_noise(tmp_path, tiny_model):
    loss, grads, _ = by_plan(tiny_model, tmp_path, "staged", neftune_alpha=ALPHA)
    spilled = by_plan(tiny_model, tmp_path, "staged", spill=tmp_path, neftune_alpha=ALPHA)
    assert spilled[0] == loss
    assert all(mx.array_equal(grad, grads[name]) for name, grad in spilled[1].items())


def test_a_row_without_text_leaves_the_gradients_finite(tmp_path, tiny_model):
    """Five rows in micro-batches of three: the last one has a row of padding."""
    loss, grads, _ = by_plan(tiny_model, tmp_path, "fused", batch_size=3, neftune_alpha=ALPHA)
    assert math.isfinite(loss)
    assert all(mx.isfinite(grad).all().item() for grad in grads.values())


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_noise_keeps_the_dtype_and_the_tied_head(dtype):
    model, tokens = nn.Module(), mx.zeros((2, 3), mx.int32)
    model.wte = nn.Embedding(7, 64)
    model.wte.weight = model.wte.weight.astype(dtype)
    plain, hidden = model.wte(tokens), mx.ones((1, 64), dtype)
    logits, layer = model.wte.as_linear(hidden), model.wte
    keys = TokenKeys(mx.array([[1], [2]], mx.uint32), mx.arange(3, dtype=mx.uint32)[None])
    lengths = mx.array([[3], [2]])
    with Neftune(8.0, model, "wte").added(keys, lengths):
        noise = model.wte(tokens) - plain
        assert mx.array_equal(model.wte.as_linear(hidden), logits)
    assert model.wte is layer
    assert noise.dtype == dtype
    largest = mx.abs(noise).max(axis=(1, 2)).astype(mx.float32)
    bounds = 8 / mx.sqrt(lengths[:, 0] * 64.0)
    assert mx.allclose(largest, bounds, rtol=0.05)


def test_model_without_a_known_embedding_is_refused(tiny_model):
    network, _, _ = load(tiny_model)
    network.model.embeddings = network.model.embed_tokens  # two: which one is it?
    with pytest.raises(UserError, match="--neftune-alpha: the embedding layer"):
        build_engine(network, DropoutKeys([None]), "fused", neftune_alpha=1.0)


def test_resumed_run_has_the_same_noise(configure):
    settings = {"neftune_alpha": 5.0, "batch_size": 2, "grad_accumulation": 2, "plan": "staged"}
    whole = train(configure(run="whole", max_steps=5, **settings))
    cut = train(configure(run="cut", max_steps=3, **settings))
    assert resume(cut, max_steps=5) == 0
    assert losses_of(cut) == losses_of(whole)
    assert final_files(cut) == final_files(whole)
    plain = train(configure(run="plain", max_steps=5, **{**settings, "neftune_alpha": 0.0}))
    assert losses_of(plain)[1] != losses_of(whole)[1]
    assert not events_of(whole, events.Skipped)
