"""Facts of models whose blocks differ, compared with the models of mlx-lm that they describe."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from your_ai.config import TrainConfig
from your_ai.engine.build import build_engine
from your_ai.gates.untrusted import Entry
from your_ai.hub.built_tensors import build, quantize, tensors_built
from your_ai.memory import mixer_facts as kinds
from your_ai.memory.estimate import Plan, Workload, estimate
from your_ai.memory.estimate_adapters import adapter_bytes
from your_ai.memory.estimate_generation import cached_bytes
from your_ai.memory.facts import ModelFacts, facts_from
from your_ai.memory.mixer_facts import MixerFacts
from your_ai.memory.workload import WHOLE, Training
from your_ai.nets import model

BASE = {
    "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "intermediate_size": 96, "vocab_size": 128, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 256, "tie_word_embeddings": True,
}  # fmt: skip
MLA = {
    "kv_lora_rank": 16, "q_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 24,
    "v_head_dim": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "moe_layer_freq": 1, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": True, "rope_scaling": None,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "attention_bias": False,
}  # fmt: skip
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.25, "type": "default"},
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
           "shared_expert_intermediate_size": 32}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention"] * 2
NEXT_TO_IT = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128,
              "num_kv_shared_layers": 2, "sliding_window": 8}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_moe": {
        **EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": [1], "norm_topk_prob": True
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8,
                "intermediate_size": 64},
    "qwen3_5": {"text_config": {**BASE, **DELTA, "model_type": "qwen3_5_text"}},
    "qwen3_5_moe": {
        "text_config": {**BASE, **DELTA, **EXPERTS, "model_type": "qwen3_5_moe_text"}
    },
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 64,
        "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_proj_bias": False, "mamba_d_state": 32,
        "mamba_d_conv": 4, "mamba_n_groups": 1, "mamba_conv_bias": True, "logits_scaling": 1.0,
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "residual_multiplier": 1.0,
        "embedding_multiplier": 1.0, "attention_multiplier": 1.0, "attention_bias": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": ["M", "*", "-", "E"], "mamba_num_heads": 4, "n_groups": 2,
        "mamba_head_dim": 16, "mamba_proj_bias": False, "ssm_state_size": 32, "conv_kernel": 4,
        "attention_bias": False, "mlp_bias": False, "layer_norm_epsilon": 1e-5, "use_bias": False,
        "use_conv_bias": True, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32, "topk_group": 1,
        "n_shared_experts": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0,
    },
    "lfm2": {
        "norm_eps": 1e-5, "conv_bias": False, "conv_L_cache": 3, "block_dim": 64,
        "block_ff_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True, "layer_types": ["conv", "conv", "full_attention", "conv"],
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_conv": 4,
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_proj_bias": False, "mamba_conv_bias": True,
    },
    "deepseek_v3": MLA,
    "glm4_moe_lite": {**MLA, "partial_rotary_factor": 1.0, "num_nextn_predict_layers": 1},
    "gemma3n": {
        "text_config": {
            **BASE, **NEXT_TO_IT, "model_type": "gemma3n_text", "rope_local_base_freq": 10000.0,
            "final_logit_softcapping": 30.0, "layer_types": SLIDING, "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.5] * 4, "altup_coef_clip": 1.0, "laurel_rank": 8,
            "altup_correct_scale": True, "altup_active_idx": 0,
        }
    },
    "gemma4": {
        "text_config": {
            **BASE, **NEXT_TO_IT, "model_type": "gemma4_text", "layer_types": SLIDING,
            "global_head_dim": 32, "use_double_wide_mlp": True,
        }
    },
    "mistral3": {
        "text_config": {
            **BASE, "model_type": "ministral3",
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 128,
            },
        }
    },
    "rwkv7": {
        "norm_eps": 1e-5, "hidden_ratio": 4.0, "a_low_rank_dim": 16, "v_low_rank_dim": 16,
        "gate_low_rank_dim": 16, "decay_low_rank_dim": 16, "head_dim": 32,
    },
}  # fmt: skip
QUANTIZATION = {"bits": 4, "group_size": 32}


def config_for(kind: str, bits: int | None = None) -> dict[str, Any]:
    quantization = {"quantization": QUANTIZATION} if bits else {}
    return {**BASE, **CONFIGS[kind], "model_type": kind, **quantization}


def facts_for(kind: str, bits: int | None = None) -> ModelFacts:
    entries, config = tensors_built(config_for(kind, bits))
    return facts_from(entries, config, 4, None, 0)


@pytest.mark.parametrize("bits", [4, None])
@pytest.mark.parametrize("kind", CONFIGS)
def test_adapters_are_exactly_those_that_training_adds(kind, bits):
    facts = facts_for(kind, bits)
    cases = [(("all-linear",), False, 4), (("all-linear",), True, 4), (("all-linear",), False, 1),
             (("all-linear",), True, 2)]  # fmt: skip
    for targets, experts, blocks in cases:
        network = build(config_for(kind))
        if bits:
            quantize(network, QUANTIZATION, config_for(kind))
        network.freeze()
        settings = {"lora_experts": experts, "lora_layers": blocks, "lora_rank": 2}
        model.add_adapters(network, TrainConfig(lora_targets=targets, **settings))
        found = sum(array.nbytes for array in model.adapter_arrays(network).values())
        training = Training(blocks=blocks, rank=2, targets=targets, experts=experts)
        assert adapter_bytes(facts, training) == found, (targets, experts, blocks)


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_are_those_of_the_model(kind):
    network = build(config_for(kind))
    arrays = dict(tree_flatten(network.parameters()))
    if "lm_head.weight" in arrays and facts_for(kind).weights_bytes:
        arrays.pop("lm_head.weight")  # the configs tie it
    sizes = {name: 4 if mx.issubdtype(a.dtype, mx.floating) else 1 for name, a in arrays.items()}
    facts = facts_for(kind)
    assert facts.weights_bytes == sum(sizes[name] * array.size for name, array in arrays.items())
    assert facts.blocks == 4


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_model_has_an_estimate_for_every_plan(kind):
    facts = facts_for(kind, bits=4)
    training = Training(blocks=4, rank=2, targets=("all-linear",))
    for engine in ("fused", "staged", "streamed"):
        found = estimate(Workload(facts=facts, training=training), Plan(engine, 256), 1, 256)
        assert found.process_bytes > max(kind.weights_bytes for kind in facts.kinds)


@pytest.mark.parametrize("kind", CONFIGS)
def test_only_some_architectures_cannot_be_split_into_blocks(kind):
    network = build(config_for(kind))
    network.freeze()
    adapters = model.add_adapters(network, TrainConfig(lora_rank=2))
    built = build_engine(network, adapters.dropout_keys, "staged")
    assert (built.plan == "fused") == (kind in WHOLE), "change WHOLE in memory/workload.py"


def mixers(kind: str) -> list[tuple[str, ...]]:
    """The kinds of mixers of each block."""
    facts = facts_for(kind)
    return [tuple(mixer.kind for mixer in facts.kinds[i].mixers) for i in facts.order]


def test_each_block_has_its_mixer():
    attention = (kinds.ATTENTION,)
    assert mixers("llama") == [attention] * 4
    assert mixers("gpt_oss") == [attention] * 4
    assert mixers("qwen3_5") == [(kinds.GATED_DELTA,)] * 3 + [attention]
    assert mixers("granitemoehybrid") == [(kinds.MAMBA2,)] * 2 + [attention, (kinds.MAMBA2,)]
    assert mixers("nemotron_h") == [(kinds.MAMBA2,), attention, (), ()]
    conv = (kinds.CONVOLUTION,)
    assert mixers("lfm2") == [conv, conv, attention, conv]
    assert mixers("jamba") == [(kinds.MAMBA1,), attention] * 2
    assert mixers("deepseek_v3") == [(kinds.MLA,)] * 4
    assert mixers("gemma4") == mixers("gemma3n") == [attention] * 4
    assert mixers("rwkv7") == [(kinds.RWKV7,)] * 4


def test_mixers_have_the_sizes_of_the_config():
    (delta,), (attention,) = (kind.mixers for kind in facts_for("qwen3_5", 4).kinds)
    assert delta == MixerFacts(
        kind=kinds.GATED_DELTA, heads=4, kv_heads=2, key_dim=32, value_dim=16,
        conv_channels=2 * 2 * 32 + 4 * 16,
    )  # fmt: skip
    assert attention == MixerFacts(
        kind=kinds.ATTENTION, heads=4, kv_heads=2, key_dim=16, value_dim=16, cached=2 * 2 * 16
    )
    mamba = facts_for("granitemoehybrid").kinds[0].mixers[0]
    assert (mamba.heads, mamba.value_dim, mamba.state_size) == (4, 16, 32)
    latent = facts_for("deepseek_v3").kinds[0].mixers[0]
    assert (latent.heads, latent.key_dim, latent.value_dim, latent.cached) == (4, 32, 16, 16 + 8)


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_caches_of_a_row_are_those_of_the_model(kind):
    """With a prompt that is read in two parts, and is longer than the windows."""
    caches = make_prompt_cache(network := build(config_for(kind)))
    for layer in caches:
        for part in getattr(layer, "caches", (layer,)):
            part.step = 1
    for tokens in (40, 16):
        network(mx.zeros((1, tokens), mx.int32), cache=caches)
    assert cached_bytes(facts_for(kind), 56, together=16) == sum(each.nbytes for each in caches)
    network(mx.zeros((1, 1), mx.int32), cache=caches)
    assert cached_bytes(facts_for(kind), 57) == sum(each.nbytes for each in caches)


def test_a_model_that_cannot_be_built_has_keys_and_values_in_every_block():
    facts = replace(facts_for("llama"), config={"model_type": "unheard-of"})
    assert cached_bytes(facts, 10) == 4 * 10 * 2 * 64 * 4


def test_a_dense_first_block_counts_with_its_own_layers():
    facts = facts_for("deepseek_v3")
    assert facts.order == (0, 1, 1, 1)
    dense, mixed = facts.kinds
    assert not dense.experts
    assert mixed.experts["mlp.switch_mlp.up_proj"] == (4 * 64, 4 * 32)
    assert mixed.linears["mlp.switch_mlp.up_proj"] == (2 * 64, 2 * 32)
    assert facts.bytes_of_last(1) == mixed.weights_bytes


@pytest.mark.parametrize("name", ["A_log", "r_k", "conv.conv.weight", "q_proj.weight"])
@pytest.mark.parametrize("shape", [(), (0,), (0, 0), (3, 0, 1)])
def test_shapes_that_no_model_has_are_no_error(name, shape):
    entries = [Entry(f"model.layers.0.mixer.{name}", "F32", shape)]
    entries += [Entry("model.layers.0.mixer.out_proj.weight", "F32", (4, 4))]
    entries += [Entry("model.layers.0.mixer.in_proj.weight", "F32", (4, 4))]
    assert facts_from(entries, {**BASE, "model_type": "x"}, 4, None, 0).blocks == 1


def test_more_blocks_than_any_model_has_are_refused():
    entries = [Entry("model.layers.999999999.up_proj.weight", "F32", (4, 4))]
    with pytest.raises(ValueError, match="block 999999999, and no model has so many"):
        facts_from(entries, {"model_type": "x"}, 4, None, 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"sliding_window": 8, "layer_types": SLIDING}, True),
        ({"text_config": {"sliding_window": 8}}, True),
        ({"sliding_window": 8, "use_sliding_window": False}, False),
        ({"sliding_window": None}, False),
        ({}, False),
    ],
)
def test_windows_are_those_of_the_config(config, expected):
    facts = replace(facts_for("llama"), config=config)
    assert facts.has_windows == expected


def test_blocks_that_the_config_calls_otherwise_are_of_another_kind():
    assert facts_for("gemma3n").order == (0, 1, 0, 1)
