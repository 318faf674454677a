"""Trained rows of embeddings and heads, and LoRA on them: their gradients under each plan."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten, tree_map, tree_unflatten

from tests.conftest import TINY, load_base, make_model
from tests.engine.test_fused import assert_step, encode, plain_loss, step_of, weight_of
from tests.engine.test_plans import VARIANTS, small_pieces
from your_ai.config import TrainConfig
from your_ai.data.batches import make_schedule
from your_ai.engine.build import build_engine
from your_ai.engine.dequantized import dequantize_on_the_cpu
from your_ai.engine.weights import tensors_of
from your_ai.errors import UserError
from your_ai.nets import model
from your_ai.nets.vocabulary import (
    TrainedLayer,
    VocabularyLayer,
    put_trained_layers,
    vocabulary_trained,
    vocabulary_training,
)

__all__ = ["small_pieces"]  # a fixture
GROWN = (3, 70, 71, 600, 601, 602, 603)  # some of the base's tokens, some that it does not have
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "new tokens": ("", GROWN),
    "embeddings": ("embeddings", ()),
    "head": ("head", ()),
    "both": ("embeddings,head", ()),
    "both, new tokens": ("embeddings,head", GROWN),
}
TARGETS = {
    "LoRA on the embedding": ("embed_tokens",),
    "LoRA on the head": ("lm_head",),
    "LoRA on both": ("embed_tokens", "lm_head"),
}


def load(folder: Path, kind: str) -> tuple[nn.Module, Any, model.Adapters]:
    """A network with adapters in its last block but one, and rows of its vocabulary, none 0."""
    train, new = KINDS.get(kind, ("", ()))
    network, tokenizer = load_base(folder, mx.float32)
    count = network.model.embed_tokens.weight.shape[0]
    new = tuple(token if token < count else count + i for i, token in enumerate(new))
    new = tuple(sorted({*new, *range(count, max(new, default=0) + 1)}))
    put_trained_layers(network, vocabulary_training(train, new))
    targets = ("q_proj", *TARGETS.get(kind, ()))
    config = TrainConfig(lora_layers=1, lora_targets=targets, lora_rank="2,lm_head=3")
    if "lm_head" not in targets:
        config = replace(config, lora_rank=2)
    adapters = model.add_adapters(network, config)
    mx.random.seed(1)
    trained = network.trainable_parameters()
    network.update(tree_map(lambda p: p + 0.05 * mx.random.normal(p.shape), trained))
    mx.eval(network.parameters())
    return network, tokenizer, adapters


class DenseLowRank(nn.Module):
    """A layer with LoRA as one matrix, differentiated by MLX."""

    def __init__(self, layer: VocabularyLayer) -> None:
        super().__init__()
        self._base, self.is_embedding = weight_of(layer.linear), layer.is_embedding
        self.scale, self.low_rank = layer.scale, layer.low_rank

    def __call__(self, x: mx.array) -> mx.array:
        product = self.low_rank["lora_a"] @ self.low_rank["lora_b"]
        weight = self._base + self.scale * (product if self.is_embedding else product.T)
        return x @ weight.T if mx.issubdtype(x.dtype, mx.floating) else weight[x]


class Dense(nn.Module):
    """A layer as one matrix, differentiated by MLX."""

    def __init__(self, layer: TrainedLayer) -> None:
        super().__init__()
        base = mx.zeros((0, layer.width))
        if "linear" in layer:
            base = weight_of(layer.linear)
        more = mx.zeros((layer.count - len(base), base.shape[1]))
        self._base = mx.concatenate([base, more]).at[mx.array(layer.ids)].multiply(0)
        self._ids, self.leaf = mx.array(layer.ids), layer.leaf
        self[layer.leaf] = layer[layer.leaf]

    def __call__(self, x: mx.array) -> mx.array:
        weight = self._base.at[self._ids].add(mx.concatenate(self[self.leaf]))
        return x @ weight.T if mx.issubdtype(x.dtype, mx.floating) else weight[x]

    as_linear = __call__


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Makes a model, and the loss and gradients of `Dense` layers; once for each case."""

    @functools.cache
    def make(architecture: str, bits: int | None, kind: str):
        place = tmp_path_factory.mktemp("case")
        folder = make_model(place / "m", architecture, bits, **TINY)
        network, tokenizer, _ = load(folder, kind)
        dequantize_on_the_cpu(network)
        dense = DenseLowRank if kind in TARGETS else Dense
        replaced = [(layer.path, dense(layer)) for layer in vocabulary_trained(network)]
        assert replaced
        network.update_modules(tree_unflatten(replaced))
        examples = encode(tokenizer, place)
        loss, grads = nn.value_and_grad(network, lambda: plain_loss(network, examples))()
        return folder, loss.item(), dict(tree_flatten(grads))

    return make


CASES = [
    *(("llama", 4, kind) for kind in ("new tokens", "both", "both, new tokens")),  # tied
    ("gemma2", None, "new tokens"),  # scales its embeddings, caps its logits
    *(("llama-untied", None, kind) for kind in KINDS),
    ("qwen2", 4, "new tokens"),
    ("qwen2", 4, "head"),
    *(("llama-untied", bits, kind) for kind in TARGETS for bits in (None, 4)),
]


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed", "kept"])
@pytest.mark.parametrize(("architecture", "bits", "kind"), CASES)
def test_gradients_are_those_of_whole_matrices(tmp_path, reference, architecture, bits, kind, plan):
    folder, *expected = reference(architecture, bits, kind)
    plan, more = VARIANTS.get(plan, (plan, {}))
    network, tokenizer, adapters = load(folder, kind)
    tensors = tensors_of(model.load_network(folder, mx.float32)[0], folder)
    built = build_engine(network, adapters.dropout_keys, plan, tensors=tensors, **more)
    assert built.plan == plan
    batches = make_schedule(encode(tokenizer, tmp_path), 5, 5, seed=0).batches_of(0)
    found = step_of(built.engine, batches, 3)
    alone = sum(built.engine.loss(batch).loss.item() for batch in batches)
    # A last place of the new rows alone moves the gradients of gemma2 by 6e-6, of others by 2e-6.
    most = 2e-5 if architecture == "gemma2" else 1e-5
    assert_step((*found, alone / sum(batch.weight for batch in batches)), *expected, most)


@pytest.mark.parametrize("plan", ["fused", "staged", "streamed"])
def test_trained_embeddings_get_the_noise_of_neftune(tmp_path, reference, plan):
    folder, plain, _ = reference("llama-untied", None, "embeddings")
    network, tokenizer, adapters = load(folder, "embeddings")
    batches = make_schedule(encode(tokenizer, tmp_path), 5, 5, seed=0).batches_of(0)
    tensors = tensors_of(model.load_network(folder, mx.float32)[0], folder)
    keys = adapters.dropout_keys
    built = build_engine(network, keys, plan, tensors=tensors, neftune_alpha=20.0)
    loss, grads = step_of(built.engine, batches, 3)
    network, _, adapters = load(folder, "embeddings")
    replaced = [(layer.path, Dense(layer)) for layer in vocabulary_trained(network)]
    for _, dense in replaced:
        dense.weight = mx.zeros(1)  # by which embeddings are known
        dense.freeze(keys=["weight"])
    dequantize_on_the_cpu(network)
    network.update_modules(tree_unflatten(replaced))
    whole = build_engine(network, adapters.dropout_keys, "fused", neftune_alpha=20.0)
    assert_step((loss, grads), *step_of(whole.engine, batches, 3))
    assert loss != pytest.approx(plain, rel=1e-3)


@pytest.mark.parametrize("architecture", ["llama", "llama-untied"])
def test_a_head_without_gradients_of_its_rows_is_refused(tmp_path, monkeypatch, architecture):
    folder = make_model(tmp_path / "m", architecture, None, **TINY)
    network, _, adapters = load(folder, "both")
    monkeypatch.setattr("your_ai.engine.build.linear_head", lambda *_: None)
    with pytest.raises(UserError, match=r"--add-tokens: the head of this model computes more"):
        build_engine(network, adapters.dropout_keys, "fused")
