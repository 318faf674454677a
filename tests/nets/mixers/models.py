"""Tiny models of mlx-lm with mixers of every kind."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map_with_path

VOCABULARY = 40
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5, "rope_theta": 10000.0, "attention_bias": False, "mlp_bias": False,
    "use_bias": True, "use_conv_bias": True, "tie_word_embeddings": True, "conv_kernel": 4,
    "state_size": 6, "time_step_rank": 5, "time_step_limit": [0.001, 100.0], "num_experts": 4,
    "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "shared_intermediate_size": 16, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "partial_rotary_factor": 0.5, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4, "linear_allow_neg_eigval": True, "full_attention_interval": 2,
    "mamba_n_heads": 8, "mamba_num_heads": 8, "mamba_d_head": 8, "mamba_head_dim": 8,
    "mamba_d_ssm": 64, "mamba_d_state": 6, "mamba_d_conv": 4, "mamba_n_groups": 2,
    "mamba_expand": 2, "mamba_dt_rank": 5, "mamba_conv_bias": True, "mamba_proj_bias": False,
    "ssm_state_size": 6, "n_groups": 2, "num_heads": 8, "num_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 8, "q_lora_rank": 8,
    "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "routed_scaling_factor": 1.0,
    "embedding_multiplier": 1.0, "attention_multiplier": 0.3, "residual_multiplier": 1.0,
    "logits_scaling": 1.0, "norm_topk_prob": True,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
KIMI = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 8}
LOW_RANKS = ("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim", "decay_low_rank_dim")
MODELS: dict[str, dict[str, Any]] = {
    "mamba": {},
    "falcon_mamba": {},
    "mamba2": {},
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0,
        "expert_layer_period": 2,
    },
    "rwkv7": dict.fromkeys(LOW_RANKS, 6),
    "qwen3_next": {},
    "qwen3_5": {},
    "kimi_linear": {"linear_attn_config": KIMI, "model_max_length": 512},
    "kimi_k3": {
        "text_config": {
            **SIZES,
            "linear_attn_config": {**KIMI, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0},
            "num_experts_per_token": 2, "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "attn_res_block_size": 1,
        },
    },
    "falcon_h1": {"mamba_rms_norm": True},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "nemotron_h": {"hybrid_override_pattern": ["M", "*", "-"]},
    "plamo2": {"hidden_size_per_head": 8, "mamba_step": 2, "mamba_enabled": True},
    "olmo_hybrid": HYBRID,
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 16,
        "block_types": ["recurrent", "attention"], "num_key_value_heads": 1,
    },
    "bailing_moe_linear": {
        "layer_group_size": 2, "group_norm_size": 2, "num_key_value_heads": 4, "use_bias": False,
    },
    "bailing_hybrid": {"layer_group_size": 2, "group_norm_size": 2, "num_key_value_heads": 4},
    "bailing_moe_v3": {"layer_group_size": 2, "topk_group": 1, "n_group": 1},
    "lfm2": {
        "conv_bias": True, "conv_L_cache": 3, "block_dim": 32, "block_multiple_of": 8,
        "block_ffn_dim_multiplier": 1.0, "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention"],
    },
    "gear": {"layer_types": ["conv_mixer", "full_attention"]},
}  # fmt: skip
MODULES = {"falcon_mamba": "mamba"}  # mlx-lm runs it with that code


def make(kind: str) -> nn.Module:
    """A model with random weights, its logarithms of decays among them."""
    module = importlib.import_module(f"mlx_lm.models.{MODULES.get(kind, kind)}")
    config = {**SIZES, **MODELS[kind], "model_type": kind}
    arguments = module.TextModelArgs if kind == "qwen3_5" else module.ModelArgs
    mx.random.seed(1)
    model = getattr(module, "TextModel" if kind == "qwen3_5" else "Model")(
        arguments.from_dict(config)
    )

    def drawn(path: str, p: mx.array) -> mx.array:
        factor = 1 if path.endswith(("A_log", "norm.weight")) else 2
        return factor * p + 0.1 * mx.random.normal(p.shape)

    model.update(tree_map_with_path(drawn, model.parameters()))
    return model
