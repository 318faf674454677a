"""Where models are split into trunk and head, judged by shapes alone."""

from __future__ import annotations

import os

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.architectures import write_model
from tests.conftest import EXTRA, TINY, make_model
from your_ai.nets.model import load_network
from your_ai.nets.split import split, split_at, trunk_path

PATHS = {
    "llama": ("model",),
    "mamba2": ("backbone",),
    "dbrx": ("transformer",),
    "gemma3": ("language_model", "model"),
    "lfm2": ("model",),
    "qwen3_next": ("model",),
    "gpt_neox": (),
    "gemma3n": (),  # its trunk returns logits
    "afm7": (),  # its blocks are in two lists
}


@pytest.mark.parametrize("model_type", PATHS)
def test_the_trunk_judged_by_shapes_is_the_one_whose_logits_are_the_models(tmp_path, model_type):
    network, _ = load_network(write_model(tmp_path / "m", model_type), mx.float32)
    halves = split(network)
    assert trunk_path(network) == PATHS[model_type]
    assert halves.path == PATHS[model_type]
    assert halves.hidden == bool(PATHS[model_type])


@pytest.mark.parametrize("architecture", [name for name in EXTRA if name != "qwen3_moe"])
def test_the_trunk_is_found_before_a_weight_is_read(tmp_path, architecture):
    folder = make_model(tmp_path / "m", architecture, **TINY)
    network, _ = load_network(folder, mx.float32)
    os.truncate(folder / "model.safetensors", 100)
    assert trunk_path(network) == ("model",)
    with pytest.raises(RuntimeError):
        mx.eval(network.parameters())


@pytest.mark.parametrize("model_type", ["llama", "gemma3"])
def test_trunk_and_head_at_a_path_are_the_model(tmp_path, model_type):
    network, _ = load_network(write_model(tmp_path / "m", model_type), mx.float32)
    tokens, before = mx.array([[3, 1, 4, 1, 5]]), [id(a) for _, a in tree_flatten(network)]
    path = trunk_path(network)
    halves = split_at(network, path)
    assert (halves.path, halves.hidden) == (path, True)
    assert mx.allclose(halves.head(halves.trunk(tokens)), network(tokens), rtol=1e-4, atol=1e-4)
    assert [id(array) for _, array in tree_flatten(network)] == before
