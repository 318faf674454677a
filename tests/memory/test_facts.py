"""Facts of model folders, compared with the models that mlx-lm loads from them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from tests.conftest import EXTRA, make_model
from tests.headers import write_with_header
from your_ai.config import TrainConfig
from your_ai.doctor.shapes import SHAPES
from your_ai.gates.untrusted import DTYPE_BITS
from your_ai.memory.facts import (
    ModelFacts,
    adapters_named,
    digest_of,
    facts_of,
    facts_of_config,
    layers_named,
    vocabulary_held,
)
from your_ai.modelfiles.quantize import quantized_lazily
from your_ai.nets import model

KINDS = {mx.float32: "F32", mx.bfloat16: "BF16", mx.uint32: "U32", mx.uint8: "U8"}
WITHOUT_EXPERTS = [name for name in EXTRA if name != "qwen3_moe"]
Tensors = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape of each tensor


def write_headers(folder: Path, tensors: Tensors, config: Mapping[str, Any], shard: str = ""):
    """Write a model folder with real headers, and weights that are holes in sparse files."""
    folder.mkdir(parents=True, exist_ok=True)
    header, at = {}, 0
    for name, (kind, shape) in tensors.items():
        end = at + math.prod(shape) * DTYPE_BITS[kind] // 8
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}
        at = end
    header["__metadata__"] = {"format": "mlx"}
    write_with_header(folder / f"model{shard}.safetensors", header, at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_in(network: Any) -> Tensors:
    """The tensors of a model, without evaluating them."""
    return {
        name: (KINDS[array.dtype], tuple(array.shape))
        for name, array in tree_flatten(network.parameters())
    }


def sizes_of(network: Any) -> dict[str, Any]:
    """Bytes of a loaded model, by the names of the fields of ModelFacts."""
    blocks: dict[int, int] = {}
    vocabulary_bytes = rest_bytes = 0
    for name, array in tree_flatten(network.parameters()):
        block = re.search(r"layers\.(\d+)\.", name)
        if block is not None:
            blocks[int(block[1])] = blocks.get(int(block[1]), 0) + array.nbytes
        elif "embed_tokens" in name or "lm_head" in name:
            vocabulary_bytes += array.nbytes
        else:
            rest_bytes += array.nbytes
    return {
        "blocks": len(blocks),
        "block_bytes": max(blocks.values()),
        "blocks_bytes": sum(blocks.values()),
        "vocabulary_bytes": vocabulary_bytes,
        "rest_bytes": rest_bytes,
        "weights_bytes": sum(blocks.values()) + vocabulary_bytes + rest_bytes,
    }


def same_sizes(facts: ModelFacts, sizes: dict[str, Any]) -> None:
    assert {name: size_of(facts, name) for name in sizes} == sizes


def size_of(facts: ModelFacts, name: str) -> Any:
    return largest_block(facts) if name == "block_bytes" else getattr(facts, name)


def largest_block(facts: ModelFacts) -> int:
    """Bytes of its weights."""
    return max(kind.weights_bytes for kind in facts.kinds)


# Sizes and layers of loaded models


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("architecture", EXTRA)
def test_sizes_equal_those_of_the_loaded_model(tmp_path, architecture, bits):
    folder = make_model(tmp_path / "m", architecture, bits)
    for dtype in (mx.float32, mx.bfloat16):
        network, config = model.load_network(folder, dtype)
        facts = facts_of(folder, dtype.size)
        same_sizes(facts, sizes_of(network))
        assert facts.float_bytes == dtype.size
        assert facts.quantized == (bits is not None)
        assert (facts.hidden, facts.vocabulary) == (config["hidden_size"], config["vocab_size"])
        assert facts.heads == config["num_attention_heads"]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("architecture", WITHOUT_EXPERTS)
def test_predicts_sizes_of_a_model_quantized_on_load(tmp_path, architecture, bits):
    odd = {"hidden_size": 128, "intermediate_size": 96}  # 96 is not a multiple of the group size 64
    folder = make_model(tmp_path / "m", architecture, bits=None, **odd)
    network, *_ = quantized_lazily(folder, bits)
    facts = facts_of(folder, 4, bits)
    same_sizes(facts, sizes_of(network))
    assert facts.quantized


@pytest.mark.parametrize("bits", [4, 8])
def test_predicts_sizes_of_experts_quantized_on_load(tmp_path, bits):
    """Except the router, which mlx-lm quantizes to 8 bits."""
    folder = make_model(tmp_path / "m", "qwen3_moe", bits=None, hidden_size=128)
    network, *_ = quantized_lazily(folder, bits)
    for name, size in sizes_of(network).items():
        assert size_of(facts_of(folder, 4, bits), name) == pytest.approx(size, rel=0.01)


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("architecture", EXTRA)
def test_linears_are_the_layers_that_get_adapters(tmp_path, architecture, bits):
    folder = make_model(tmp_path / "m", architecture, bits)
    network, _ = model.load_network(folder, mx.float32)
    everything = TrainConfig(lora_targets=("all-linear",), lora_layers=1, lora_experts=True)
    model.add_adapters(network, everything)
    found = {}
    for name, layer in network.layers[-1].named_modules():
        if "lora_a" in layer:
            a, b = layer.lora_a.shape, layer.lora_b.shape
            if len(a) == 2:  # (inputs, rank), (rank, outputs)
                found[name] = (a[0], b[1])
            else:  # (experts, rank, inputs), (experts, outputs, rank): count all experts
                found[name] = (a[0] * a[2], b[0] * b[1])
    facts = facts_of(folder, 4)
    assert facts.linears.keys() == found.keys()
    assert sorted(adapters_named(facts, ("all-linear",), True)) == sorted(found.values())
    assert sorted(facts.experts) == [name for name in sorted(found) if "switch" in name]


def test_targets_match_the_same_layers_as_in_training(tiny_model):
    facts = facts_of(tiny_model, 4)
    assert layers_named(facts, ("q_proj",)) == [(32, 32)]
    assert layers_named(facts, ("self_attn.v_proj",)) == [(32, 16)]
    assert sorted(layers_named(facts, ("q_proj", "v_proj"))) == [(32, 16), (32, 32)]
    assert sorted(layers_named(facts, ("all-linear",))) == sorted(facts.linears.values())
    assert layers_named(facts, ("proj", "attn.q_proj", "unheard-of")) == []


def test_linears_count_only_the_experts_that_a_token_uses(tmp_path):
    """A token uses two of four experts, each with 64 outputs."""
    facts = facts_of(make_model(tmp_path / "m", "qwen3_moe"), 4)
    assert facts.linears["mlp.switch_mlp.gate_proj"] == (2 * 64, 2 * 64)
    assert facts.experts["mlp.switch_mlp.gate_proj"] == (4 * 64, 4 * 64)
    assert facts.linears["mlp.gate"] == (64, 4)


# Reading headers


def test_facts_are_found_without_reading_weights(tmp_path):
    """Two folders have sparse files without weights; reading the larger one would take minutes."""
    whole = make_model(tmp_path / "whole")
    network, config = model.load_network(whole, mx.float32)
    bare = write_headers(tmp_path / "bare", tensors_in(network), config)
    facts = facts_of(bare, 4)
    assert facts == facts_of(whole, 4)
    huge = {"model.norm.weight": ("F32", (1 << 38,))}
    assert facts_of(write_headers(tmp_path / "huge", huge, config), 4).rest_bytes == 4 << 38


def test_shards_count_as_one_model(tmp_path):
    whole = make_model(tmp_path / "whole")
    arrays = mx.load(str(whole / "model.safetensors"))
    shards = tmp_path / "shards"
    shards.mkdir()
    (shards / "config.json").write_bytes((whole / "config.json").read_bytes())
    names = sorted(arrays)
    for index in range(3):
        part = {name: arrays[name] for name in names[index::3]}
        mx.save_safetensors(str(shards / f"model-0000{index + 1}-of-00003.safetensors"), part)
    mx.save_safetensors(str(shards / "adapters.safetensors"), {"a": mx.zeros(100)})  # not a shard
    facts = facts_of(shards, 4)
    assert facts == facts_of(whole, 4)


def test_shapes_of_quantized_layers_come_from_headers(tmp_path):
    """The tensors have the shapes of Qwen2.5-0.5B."""
    tensors = {
        "model.layers.0.self_attn.q_proj.weight": ("U32", (896, 112)),
        "model.layers.0.self_attn.q_proj.scales": ("F16", (896, 14)),
        "model.layers.0.self_attn.q_proj.biases": ("F16", (896, 14)),
        "model.layers.0.self_attn.q_proj.bias": ("F16", (896,)),
    }
    config = {"hidden_size": 896, "vocab_size": 151936, "quantization": {"group_size": 64}}
    facts = facts_of(write_headers(tmp_path / "m", tensors, config), 4)
    assert facts.linears == {"self_attn.q_proj": (896, 896)}
    assert largest_block(facts) == 4 * (896 * 112 + 2 * 896 * 14 + 896)
    assert largest_block(facts_of(tmp_path / "m", 2)) == 4 * 896 * 112 + 2 * (2 * 896 * 14 + 896)


# Facts from a config.json alone

CONFIGS = {
    **{name: {} for name in EXTRA},
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 32},
    "phi3": {"max_position_embeddings": 4096},
    "smollm3": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("bits", [4, 8, None])
@pytest.mark.parametrize("architecture", CONFIGS)
def test_facts_of_a_config_equal_those_of_the_files(tmp_path, monkeypatch, architecture, bits):
    for name in ("phi3", "smollm3"):
        monkeypatch.setitem(EXTRA, name, {})
    changes = {"intermediate_size": 144, **CONFIGS[architecture]}  # 144 is not a multiple of 32
    folder = make_model(tmp_path / "m", architecture, bits, **changes)
    config = json.loads((folder / "config.json").read_text())
    if architecture == "gemma3_text":
        config["tie_word_embeddings"] = False  # the model made by make_model has a head
    for float_bytes in (2, 4):
        found, expected = facts_of_config(config, float_bytes), facts_of(folder, float_bytes)
        assert found == expected


def test_a_model_of_70_billion_parameters_is_built_without_its_weights():
    large = {"hidden_size": 8192, "num_hidden_layers": 80, "intermediate_size": 28672}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    facts = facts_of_config({**SHAPES["llama-3.1-8b"], **large, **heads}, 2)
    assert facts.weights_bytes == pytest.approx(2 * 70.6e9, rel=0.01)
    assert mx.get_peak_memory() - before < 1_000_000


# Files of other libraries: tensors that mlx-lm ignores or converts


def test_tied_head_is_not_counted_twice(tmp_path):
    folder = make_model(tmp_path / "m", "qwen3", bits=None)
    once = facts_of(folder, 4)
    arrays = mx.load(str(folder / "model.safetensors"))
    arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    mx.save_safetensors(str(folder / "model.safetensors"), arrays)
    network, _ = model.load_network(folder, mx.float32)
    same_sizes(facts_of(folder, 4), sizes_of(network))
    assert facts_of(folder, 4).vocabulary_bytes == once.vocabulary_bytes


LINEAR = {
    "model.embed_tokens.weight": ("BF16", (1000, 64)),
    "model.layers.0.mlp.up_proj.weight": ("BF16", (128, 64)),
    "model.layers.1.mlp.up_proj.weight": ("BF16", (128, 64)),
    "model.norm.weight": ("BF16", (64,)),
}


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
        "model.visual.blocks.7.attn.qkv.weight",
        "multi_modal_projector.linear_1.weight",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
    ],
)
def test_tensors_outside_the_text_model_are_not_counted(tmp_path, name):
    config = {"text_config": {"hidden_size": 64, "vocab_size": 1000, "num_hidden_layers": 2}}
    text = facts_of(write_headers(tmp_path / "a", LINEAR, config), 2)
    more = {**LINEAR, name: ("BF16", (512, 512))}
    both = facts_of(write_headers(tmp_path / "b", more, config), 2)
    assert both == text
    assert (both.blocks, both.hidden, both.vocabulary) == (2, 64, 1000)


def test_blocks_name_the_layers_that_are_not_quantized(tmp_path):
    config = json.loads((make_model(tmp_path / "m", "qwen2", None) / "config.json").read_text())
    dense = ["model.layers.1.mlp.up_proj", "model.layers.1.self_attn.q_proj", "lm_head"]
    layers = {"group_size": 32, "bits": 4} | dict.fromkeys(dense, False)
    mixed = facts_of_config(config | {"quantization": layers}, 4)
    first, second = (mixed.kinds[kind] for kind in mixed.order[:2])
    assert mixed.quantized
    assert not mixed.head_quantized
    assert first.dense == ()
    assert second.dense == ("mlp.up_proj", "self_attn.q_proj")
    assert len(mixed.counts_of_last(mixed.blocks)) == 2
    whole = facts_of_config(config | {"quantization": {"group_size": 32, "bits": 4}}, 4)
    assert whole.head_quantized
    assert not any(kind.dense for kind in whole.kinds)
    none = facts_of_config(config, 4)
    assert not none.quantized
    assert not none.head_quantized
    assert not any(kind.dense for kind in none.kinds)


def test_layers_that_groups_do_not_divide_are_not_quantized_on_load(tmp_path):
    config = json.loads((make_model(tmp_path / "m", "qwen2", None) / "config.json").read_text())
    found = facts_of_config(config | {"intermediate_size": 96}, 4, 4)
    assert {kind.dense for kind in found.kinds} == {("mlp.down_proj",)}


def test_separate_experts_count_the_same_as_stacked_ones(tmp_path):
    """Three experts, of which a token uses one, in the formats of Hugging Face and of mlx-lm."""
    config = {"hidden_size": 64, "vocab_size": 1000, "num_experts_per_tok": 1}
    block = "model.layers.0.mlp"
    alone = {f"{block}.experts.{e}.up_proj.weight": ("BF16", (32, 64)) for e in range(3)}
    joined = {f"{block}.switch_mlp.up_proj.weight": ("BF16", (3, 32, 64))}
    a = facts_of(write_headers(tmp_path / "a", alone, config), 2)
    b = facts_of(write_headers(tmp_path / "b", joined, config), 2)
    assert a.weights_bytes == b.weights_bytes == 2 * 3 * 32 * 64
    for facts in (a, b):
        assert layers_named(facts, ("up_proj",), True) == [(64, 32)]
        assert adapters_named(facts, ("switch_mlp.up_proj",)) == [(3 * 64, 3 * 32)]


@pytest.mark.parametrize("blocks", ["model.h", "transformer.blocks", "backbone.layers"])
def test_blocks_are_found_by_other_names(tmp_path, blocks):
    tensors = {f"{blocks}.{i}.attn.c_attn.weight": ("F32", (96, 32)) for i in range(5)}
    config = {"n_embd": 32, "n_head": 4, "vocab_size": 100}
    facts = facts_of(write_headers(tmp_path / "m", tensors, config), 4)
    assert (facts.blocks, facts.hidden, facts.heads) == (5, 32, 4)
    assert facts.linears == {"attn.c_attn": (32, 96)}
    assert facts.rest_bytes == 0


def test_per_layer_embedding_counts_as_vocabulary(tmp_path):
    """Gemma 3n and 4 have an embedding for all layers, which stays in its file, too."""
    more = {**LINEAR, "model.embed_tokens_per_layer.weight": ("BF16", (1000, 32))}
    facts = facts_of(write_headers(tmp_path / "m", more, {"hidden_size": 64}), 2)
    assert facts.vocabulary_bytes == 2 * (1000 * 64 + 1000 * 32)
    assert facts.rest_bytes == 2 * 64


def test_vocabulary_held_moves_the_vocabulary_to_the_rest(tiny_model):
    facts = facts_of(tiny_model, 4)
    held = vocabulary_held(facts)
    assert held.vocabulary_bytes == 0
    assert held.weights_bytes == facts.weights_bytes
    assert held.rest_bytes == facts.rest_bytes + facts.vocabulary_bytes


def test_the_digest_of_a_configuration_tells_activations_apart_but_not_copies():
    digest = digest_of({"hidden_act": "silu", "quantization": {"bits": 4}})
    assert digest == digest_of({"hidden_act": "silu", "_name_or_path": "a"})
    assert digest != digest_of({"hidden_act": "gelu"})
