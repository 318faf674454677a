"""Compare models of mlx-lm with and without mixers in chunks."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from tests.nets.mixers.models import MODELS, VOCABULARY, make
from your_ai.nets.mixers import replace
from your_ai.nets.mixers.replace import chunked_class, replace_mixers
from your_ai.nets.parts import arrays_of, put, skeleton, structure

TOKENS = mx.array([[(7 * i * i + 3 * row) % VOCABULARY for i in range(21)] for row in range(2)])
REPLACED = {"falcon_h1": 4, "plamo2": 1}  # others: a mixer, and one more or attention


def replaced(model: nn.Module) -> nn.Module:
    twin = skeleton(model)
    replace_mixers(twin)
    return twin


def logits_and_gradients(model: nn.Module) -> dict[str, mx.array]:
    weight = mx.random.normal((*TOKENS.shape, VOCABULARY), key=mx.random.key(3))
    arrays = dict(tree_flatten(model.parameters()))

    def loss(arrays: dict[str, mx.array]) -> tuple[mx.array, mx.array]:
        put(model, arrays)
        logits = model(TOKENS)
        return (logits * weight).sum(), logits

    (_, logits), grads = mx.value_and_grad(loss)(arrays)
    put(model, arrays)
    return {"logits": logits, **grads}


@pytest.mark.parametrize("kind", MODELS)
def test_training_is_the_same(kind, monkeypatch):
    monkeypatch.setattr(replace, "needs_blocks", lambda *_: True)  # as for long rows
    model = make(kind)
    twin = skeleton(model)
    assert replace_mixers(twin) == REPLACED.get(kind, 2)
    found, expected = logits_and_gradients(twin), logits_and_gradients(model)
    assert set(found) == set(expected)
    for path, b in expected.items():
        error = mx.linalg.norm(found[path] - b) / mx.maximum(mx.linalg.norm(b), 1e-3)
        assert error.item() < 1e-4, path


@pytest.mark.parametrize("kind", MODELS)
def test_generation_is_identical(kind):
    model = make(kind)
    twin = replaced(model)
    caches = [make_prompt_cache(model) for _ in range(2)]
    for tokens in (TOKENS[:1, :13], TOKENS[:1, 13:20], TOKENS[:1, 20:]):
        ours, theirs = (m(tokens, cache=c) for m, c in zip((twin, model), caches, strict=True))
        assert mx.array_equal(ours, theirs).item()


def test_paths_and_frozen_parameters_stay():
    model = make("qwen3_next")
    model.freeze()
    model.layers[0].linear_attn.unfreeze(recurse=False, keys=["dt_bias"])
    twin = replaced(model)
    assert set(arrays_of(twin)) == set(arrays_of(model))
    trained = [path for path, _ in tree_flatten(twin.trainable_parameters())]
    assert trained == ["model.layers.0.linear_attn.dt_bias"]


def test_equal_blocks_stay_equal():
    model = make("mamba2")
    one, other = replaced(model).layers
    assert structure(one) == structure(other)
    assert type(one.mixer) is type(other.mixer) is chunked_class(type(model.layers[0].mixer))
    assert type(one.mixer) is not type(model.layers[0].mixer)


def test_replacing_again_changes_nothing():
    twin = replaced(make("recurrent_gemma"))
    kinds = [type(module) for module in twin.modules()]
    assert replace_mixers(twin) == 0
    assert [type(module) for module in twin.modules()] == kinds


def test_unknown_modules_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(4, 4, 3, groups=4))
    kinds = [type(module) for module in model.modules()]
    assert replace_mixers(model) == 0
    assert [type(module) for module in model.modules()] == kinds


def test_a_mask_goes_to_the_code_of_mlx_lm():
    model = make("qwen3_next")
    mixer, twin = model.layers[0].linear_attn, replaced(model).layers[0].linear_attn
    x, mask = mx.random.normal((2, 9, 32)), mx.arange(9)[None] >= mx.array([[0], [4]])
    assert mx.allclose(twin(x, mask), mixer(x, mask), rtol=1e-5, atol=1e-6).item()


def test_mlx_operation_is_used_where_it_is_chosen(monkeypatch):
    model = make("qwen3_next")
    twin = replaced(model)
    monkeypatch.setattr("your_ai.nets.mixers.replace.uses_mlx", lambda *_: True)
    assert mx.allclose(twin(TOKENS), model(TOKENS), rtol=1e-4, atol=1e-4).item()
