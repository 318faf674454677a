"""Small random models of the architectures that `--to hf` supports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.architectures import config_of, write_model
from tests.conftest import VOCABULARY, with_tokenizer_of_demo
from your_ai.export.transformers_names import KNOWN, OUTER

# The model types of config.json that are supported.
KINDS = (*(kind for kind, known in KNOWN.items() if not known.inner), *OUTER)
HEADS = {"num_key_value_heads": 4}  # as many as query heads, in every model with latent attention
# What the models of the hub have in their config.json, where tests.architectures has something
# else or nothing.
CHANGES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**HEADS, "topk_method": "greedy"},
    "deepseek_v3": {**HEADS, "kv_lora_rank": 32, "qk_nope_head_dim": 32},
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "falcon_h1": {
        "embedding_multiplier": 2.0, "lm_head_multiplier": 0.25, "mlp_multipliers": [0.5, 2.0],
        "key_multiplier": 0.5, "ssm_multipliers": [0.5, 2.0, 3.0, 0.25, 1.5],
        "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5, "attention_in_multiplier": 1.5,
        "attention_out_multiplier": 0.5,
    },
    # mlx-lm rounds the square root of the hidden size to bfloat16.
    "gemma3_text": {"hidden_size": 64},
    "gemma4_text": {
        "use_double_wide_mlp": True, "global_head_dim": 16, "tie_word_embeddings": True,
        "final_logit_softcapping": 30.0, "enable_moe_block": True, "num_experts": 4,
        "top_k_experts": 2, "moe_intermediate_size": 24,
    },
    "glm4_moe_lite": {**HEADS, "partial_rotary_factor": 1.0},
    "gpt_oss": {
        "rope_scaling": {
            "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096,
        },
    },
    "granitemoehybrid": {"mamba_conv_bias": True, "position_embedding_type": "rope"},
    "kimi_linear": {
        **HEADS, "num_experts_per_token": 2, "num_shared_experts": 1, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4, "v_head_dim": 8, "mla_use_nope": True,
    },
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "llama4_text": {"rms_norm_eps": 1e-6},  # mlx-lm has this number in its code
    "ministral3": {"layer_types": None, "sliding_window": None},
    "mistral": {"sliding_window": None},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
}  # fmt: skip
# The text model inside a model of OUTER.
INNER = {
    "gemma3": "gemma3_text", "gemma3n": "gemma3n_text", "gemma4": "gemma4_text",
    "llama4": "llama4_text", "mistral3": "ministral3", "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}  # fmt: skip
# Other settings of the same model types.
VARIANTS: dict[str, dict[str, Any]] = {
    "falcon_h1-tied": {"tie_word_embeddings": True},
    "gemma4-dense": {"enable_moe_block": False, "num_experts": None},
    "granitemoehybrid-dense": {"num_local_experts": 0, "shared_intermediate_size": 48},
    "llama-tied": {"tie_word_embeddings": True},
    "mistral3-mistral": {
        **config_of("llama"), "model_type": "mistral", "sliding_window": None,
    },
    "nemotron_h-moe": {"hybrid_override_pattern": "M*ME"},
}  # fmt: skip
NAMES = (*KINDS, *VARIANTS)


def settings_of(name: str) -> dict[str, Any]:
    """The config.json of a small model. name: one of NAMES."""
    kind = name.partition("-")[0]
    config = {**config_of(kind), **CHANGES.get(kind, {})}
    if kind in INNER:
        inner = config_of("ministral3") if kind == "mistral3" else config["text_config"]
        changes = {"model_type": INNER[kind], **CHANGES.get(INNER[kind], {})}
        dense = {"num_experts": 0} if kind == "qwen3_5" else {}
        text = VARIANTS.get(name, {})
        if "model_type" not in text:
            text = {**inner, **changes, **dense, **text}
        config["text_config"] = with_tokens(text | {"vocab_size": VOCABULARY})
    else:
        config |= VARIANTS.get(name, {})
    return with_tokens(config | {"model_type": kind, "pad_token_id": 0, "eos_token_id": 1})


def with_tokens(config: dict[str, Any]) -> dict[str, Any]:
    keys = [key for key in config if key in ("vocab_size", "vocab_size_per_layer_input")]
    return config | dict.fromkeys(keys, VOCABULARY)


def write_base(folder: Path, name: str) -> Path:
    """Write a model with random float32 weights, the tokens of the demo, and its tokenizer."""
    return write_files(folder, settings_of(name))


def write_files(folder: Path, config: dict[str, Any]) -> Path:
    write_model(folder, config["model_type"], **config)
    return with_tokenizer_of_demo(folder)
