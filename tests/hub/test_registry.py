"""Facts about the models with an alias, without their files."""

from __future__ import annotations

import importlib
import math

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten

from tests.conftest import MODULES
from your_ai.hub.registry import (
    Known,
    alias_of,
    config_of,
    known,
    nearest_aliases,
    size_text,
)
from your_ai.hub.tensor_sizes import tensors_of_config

MODELS = list(known().values())


def test_the_default_model_is_in_the_registry():
    model = known()["llama-8b"]
    assert model.repo == "mlx-community/Meta-Llama-3.1-8B-Instruct-4bit"
    assert size_text(model.bytes_on_disk) == "4.52 GB"


def test_every_model_family_is_in_the_registry():
    families = {alias.split("-")[0] for alias in known()}
    assert families == {
        *("llama", "qwen2.5", "qwen3", "mistral", "gemma2", "gemma3"),
        *("phi3.5", "phi4", "smollm2"),
    }


def test_no_repository_has_two_aliases():
    assert len({model.repo for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.alias)
def test_tensors_have_the_stated_number_of_parameters(model: Known):
    count = sum(math.prod(entry.shape) for entry in tensors_of_config(config_of(model)))
    assert count == pytest.approx(model.parameters, rel=0.03)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.alias)
def test_mlx_lm_builds_exactly_the_tensors_of_a_known_model(model: Known):
    """Nothing is evaluated: the arrays have shapes and take no memory."""
    config = config_of(model)
    name = MODULES.get(model.model_type, model.model_type)
    module = importlib.import_module(f"mlx_lm.models.{name}")
    built = module.Model(module.ModelArgs.from_dict(config))
    if model.tied:
        built.pop("lm_head", None)  # as mlx-lm does if the files have no head
    weights = dict(tree_flatten(built.parameters()))
    expected = {entry.name: entry.shape for entry in tensors_of_config(config)}
    assert {name: tuple(weight.shape) for name, weight in weights.items()} == expected
    if model.bits is None:
        assert 2 * sum(weight.size for weight in weights.values()) == model.bytes_on_disk
        return
    nn.quantize(built, model.group_size, model.bits)
    sizes = [
        weight.size * (weight.dtype.size if weight.dtype == mx.uint32 else 2)
        for _, weight in tree_flatten(built.parameters())
    ]
    assert sum(sizes) == model.bytes_on_disk


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("lama-8b", "llama-8b"),
        ("Meta-Llama-3.1-8B-Instruct", "llama-8b"),
        ("qwen3-8B", "qwen3-8b"),
        ("mistral", "mistral-7b"),
    ],
)
def test_the_most_similar_alias_comes_first(name, first):
    near = nearest_aliases(name)
    assert near[0] == first
    assert len(near) <= 3


def test_a_dissimilar_name_has_no_similar_alias():
    assert nearest_aliases("xyzzy") == []


def test_alias_of_finds_the_alias_of_a_repository():
    assert alias_of("mlx-community/phi-4-4bit") == "phi4"
    assert alias_of("someone/else") is None


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 kB"), (2_500, "2 kB"), (12_300_000, "12.3 MB"), (1e9, "1.00 GB")],
)
def test_size_text_chooses_the_unit(size_bytes, text):
    assert size_text(size_bytes) == text
