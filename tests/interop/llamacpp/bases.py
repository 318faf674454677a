"""Small random models of every model type that the GGUF export knows.

Their rows are whole blocks of 32, so that all matrices can be quantized.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.conftest import VOCABULARY
from tests.export.transformers_bases import settings_of, write_files
from your_ai.export.gguf_architectures import KNOWN

KINDS = (*KNOWN, "mistral3")
# Of log-probabilities. llama.cpp looks up GELU in a table of float16, and MLX imitates that in the
# tests; they differ where an input is rounded to another entry.
TOLERANCE, GELU_TOLERANCE = 1e-3, 1e-2
WITH_GELU = ("gemma", "starcoder2", "phi-")
# Other settings of the same model types.
VARIANTS: dict[str, dict[str, Any]] = {
    "gemma4-dense": {}, "granitemoehybrid-dense": {}, "llama-tied": {}, "mistral3-mistral": {},
    # As in gemma-4-26b, whose values are its keys in some blocks.
    "gemma4-whole": {
        "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "attention_k_eq_v": True,
        "num_global_key_value_heads": 1, "use_double_wide_mlp": False,
    },
    "phi3-long": {
        "rope_scaling": {
            "type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 1.5, 2.0, 3.0],
        },
        "original_max_position_embeddings": 32, "partial_rotary_factor": 0.5,
    },
}  # fmt: skip
NAMES = (*KINDS, *VARIANTS)
SIZES = {
    **dict.fromkeys(("hidden_size", "block_dim", "intermediate_size", "moe_intermediate_size"), 64),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    "head_dim": 16,
}
FULL = "full_attention"
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
# What llama.cpp has in its code, and the models of the hub have in their config.json.
CHANGES: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": False},
    "cohere2": {"sliding_window_pattern": 4},
    "dots1": {"num_key_value_heads": 4},
    "exaone": {"rope_scaling": LLAMA3},
    "exaone4": {
        "layer_types": [FULL] * 4,
        "sliding_window_pattern": None,
        "rope_scaling": LLAMA3,
    },
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16},
    "granitemoehybrid": {"mamba_d_head": 16},
    "ministral3": {
        "layer_types": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "hunyuan_v1_dense": {"rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0}},
    "mamba": {"intermediate_size": 128},
    "nemotron_h": {"mamba_head_dim": 16},
    "olmoe": {"norm_topk_prob": False, "num_key_value_heads": 4},
    "olmo3": {"rope_scaling": YARN},
    "qwen3_moe": {"rope_scaling": YARN},  # which mlx-lm does not compute
    "smollm3": {"no_rope_layers": [1, 1, 1, 0]},
}


def config_for(name: str) -> dict[str, Any]:
    """The config.json of a small model. name: one of NAMES."""
    config = settings_of(name)
    text = config.get("text_config", config)
    text |= {key: size for key, size in SIZES.items() if key in text}
    text |= CHANGES.get(name.partition("-")[0], {}) | VARIANTS.get(name, {})
    return config


def write_base(folder: Path, name: str) -> Path:
    """Write a model with random float32 weights and the demo's tokenizer."""
    config = config_for(name)
    assert (config.get("text_config") or config)["vocab_size"] == VOCABULARY
    return write_files(folder, config)


def tolerance_of(name: str) -> float:
    """The largest difference of a log-probability of such a model from that of llama.cpp."""
    return GELU_TOLERANCE if f"{name}-".startswith(WITH_GELU) else TOLERANCE
