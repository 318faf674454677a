from __future__ import annotations

import dataclasses
import shutil

import mlx.core as mx
import pytest

from tests.conftest import change_json, make_model
from tests.export.runs import make_trained
from tests.export.transformers_bases import write_base
from your_ai.errors import UserError
from your_ai.export import names, peft


@pytest.fixture
def trained(tiny_model):
    return make_trained(tiny_model)


def test_an_architecture_outside_the_list_is_refused(tiny_model, tmp_path):
    base = shutil.copytree(tiny_model, tmp_path / "other")
    change_json(base, "config.json", model_type="gemma")
    with pytest.raises(UserError, match=r"architecture gemma is not supported.*llama, mistral"):
        names.check_names(base)


def test_adapters_of_experts_are_refused(tmp_path):
    base = make_model(tmp_path / "moe", "qwen3_moe", bits=None)
    trained = make_trained(base, lora_targets=("switch_mlp.up_proj",))
    with pytest.raises(UserError, match=r"switch_mlp.up_proj adapts stacked experts .* which PEFT"):
        names.check_dense(trained, "PEFT")


def test_adapters_of_embeddings_are_refused(trained):
    a, b = mx.zeros((768, 4)), mx.zeros((4, 64))
    arrays = {"model.embed_tokens.lora_a": a, "model.embed_tokens.lora_b": b}
    adapter = dataclasses.replace(trained.adapter, arrays=arrays)
    with pytest.raises(UserError, match="embed_tokens is an embedding"):
        names.check_dense(dataclasses.replace(trained, adapter=adapter), "PEFT")


def test_modules_of_lists_the_layers_of_the_files(tiny_model):
    found = names.modules_of(tiny_model)
    assert {"model.layers.2.mlp.up_proj", "model.embed_tokens", "model.norm"} <= found


@pytest.mark.parametrize(
    ("path", "block", "name"),
    [
        ("model.layers.12.self_attn.q_proj", 12, "self_attn.q_proj"),
        ("model.layers.3.mlp.experts.7.up_proj", 3, "mlp.experts.7.up_proj"),
        ("lm_head", None, "lm_head"),
    ],
)
def test_a_path_is_split_into_block_index_and_name(path, block, name):
    assert names.block_of(path) == block
    assert names.name_in_block(path) == name


@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        ("mlp.gate", r"PEFT cannot adapt model.layers.\d.mlp.gate of this architecture"),
        ("mlp.shared_expert.up_proj", r"PEFT cannot adapt .*shared_expert.up_proj"),
    ],
)
def test_layers_that_peft_cannot_adapt_are_refused(tmp_path, target, pattern):
    trained = make_trained(write_base(tmp_path / "base", "qwen3_next"), lora_targets=(target,))
    with pytest.raises(UserError, match=pattern):
        peft.write(trained, tmp_path / "out")
    assert not (tmp_path / "out").exists()
