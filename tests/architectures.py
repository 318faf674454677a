"""A small random model of every architecture of mlx-lm, and which plans compute its gradients.

    python tests/architectures.py [MODEL_TYPE ...]

prints the lists of docs/models.md. For each model: the gradients of LoRA on all linear layers under
each plan, compared with those of mlx-lm's own code, for rows of 24 and 96 tokens.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import numpy as np
from mlx.utils import tree_flatten, tree_map, tree_map_with_path
from mlx_lm.utils import MODEL_REMAPPING

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from your_ai.config import TrainConfig
from your_ai.data.batches import Batch
from your_ai.engine.build import build_engine
from your_ai.engine.weights import open_model
from your_ai.errors import UserError
from your_ai.memory.estimate_kept import everything
from your_ai.memory.workload import NOTHING
from your_ai.nets.model import add_adapters

VOCABULARY = 64
LENGTHS = (24, 96)  # tokens per row
TOLERANCE = 1e-4
PLANS = ("fused", "staged", "streamed", "kept")  # kept: staged, and all blocks keep everything
LAYERS = 4
FULL, SLIDING = "full_attention", "sliding_attention"

# The value of a setting, by its name in the ModelArgs of any architecture.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "model_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("num_transformer_layers",), LAYERS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_hidden_size"), 48),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "num_query_groups"), 2),
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon"), 1e-5),
    **dict.fromkeys(("layernorm_epsilon", "norm_epsilon"), 1e-5),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("moe_num_experts",), 4),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "num_shared_expert"), 1),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("moe_shared_expert_intermediate_size",), 24),
    **dict.fromkeys(("shared_intermediate_size", "expert_ffn_hidden_size"), 24),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state"), 8),
    **dict.fromkeys(("mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim"), 4),
    **dict.fromkeys(("mamba_expand", "expand"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 1),
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "head_dim"), 8),
    **dict.fromkeys(("a_low_rank_dim", "v_low_rank_dim", "gate_low_rank_dim"), 4),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "rope_dim"), 8),
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "conv_bias", "use_qkv_bias"), False),
    **dict.fromkeys(("norm_topk_prob", "use_expert_bias", "use_conv_bias", "use_qk_norm"), True),
    **dict.fromkeys(("post_norm", "qk_norm"), True),
    **dict.fromkeys(("routed_scaling_factor", "residual_multiplier", "logits_scaling"), 1.0),
    **dict.fromkeys(("embedding_multiplier", "scale_depth", "scale_emb"), 1.0),
    **dict.fromkeys(("rope_theta", "rope_base", "swa_rope_theta"), 1e4), "vocab_size": VOCABULARY,
    "attention_multiplier": 0.35, "decay_low_rank_dim": 4, "mamba_d_ssm": 64, "chunk_size": 16,
    "sliding_window": 16, "qk_rope_head_dim": 4, "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "query_pre_attn_scalar": 8, "first_k_dense_replace": 1,
    "full_attention_interval": 2, "partial_rotary_factor": 0.5, "tie_word_embeddings": False,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_layer_freq": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "rope_scaling": None, "conv_L_cache": 3, "num_dense_layers": 1,
    "time_step_limit": [0.001, 100.0], "hidden_act": "silu", "layer_group_size": 2,
    "group_norm_size": 1, "dim_model_base": 32, "index_head_dim": 8, "index_n_heads": 2,
    "index_topk": 256, "zero_expert_num": 1, "mla_scale_q_lora": True, "mla_scale_kv_lora": True,
    "sliding_window_pattern": 2,
}  # fmt: skip
ALTERNATING = {"layer_types": [SLIDING, FULL, SLIDING, FULL]}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
YARN = {
    "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
# What differs, by model type. A string in `text_config` names the architecture of the inner model.
# The code of phi3small writes the logits of tokens 100256 to 100351.
SPECIAL: dict[str, dict[str, Any]] = {
    "afm7": {"num_kv_reuse_layers": 2},
    "afmoe": ALTERNATING,
    "baichuan_m1": {"sliding_window_layers": [0, 2], "conv_window": 2},
    "deepseek_v2": {"rope_scaling": YARN},
    "dbrx": {
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
    },
    "exaone4": {"sliding_window_pattern": "LG"},
    "exaone_moe": ALTERNATING | {"is_moe_layer": [False, True, True, True]},
    "gear": ALTERNATING,
    "gemma3": {"text_config": "gemma3_text"},
    "gemma3n": {
        "text_config": {
            "model_type": "gemma3n", "layer_types": [SLIDING, FULL, SLIDING, FULL],
            "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY, "altup_num_inputs": 4, "altup_active_idx": 0,
            "altup_correct_scale": True, "altup_coef_clip": 120.0, "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "final_logit_softcapping": 30.0,
            "intermediate_size": 48, "rope_local_base_freq": 1e4, "rope_theta": 1e6,
        },
    },
    "gemma4": {"text_config": "gemma4_text"},
    "gemma4_text": {
        **ALTERNATING, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCABULARY, "global_head_dim": 8, "num_experts": None,
    },
    "glm4_moe": {"num_experts_per_tok": 2},
    "glm_moe_dsa": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "hunyuan": {
        "use_mixed_mlp_moe": True, "use_cla": True, "cla_share_factor": 2,
        "rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0},
    },
    "jamba": {
        "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 0,
        "expert_layer_period": 2,
    },
    "kimi_k25": {"text_config": "deepseek_v3"},
    "kimi_vl": {"text_config": "deepseek_v3"},
    "kimi_k3": {
        "text_config": {
            "linear_attn_config": {
                "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8,
                "short_conv_kernel_size": 4,
            },
            "hidden_act": "situ", "num_experts_per_token": 2, "attn_res_block_size": 2,
            "mla_use_nope": True,
        },
    },
    "kimi_linear": {
        "linear_attn_config": {
            "kda_layers": [1, 3], "full_attn_layers": [2, 4], "num_heads": 4, "head_dim": 8,
            "short_conv_kernel_size": 4,
        },
        "model_max_length": 256,
    },
    "lfm2": {
        "block_dim": 32, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1, 3], "layer_types": None,
    },
    "lfm2-vl": {"text_config": "lfm2"},
    "lfm2_moe": {"full_attn_idxs": [1, 3], "layer_types": None},
    "lille-130m": {"block_size": 256, "n_embd": 128},
    "llama4": {
        "text_config": {
            "model_type": "llama4_text", "attention_chunk_size": 16, "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1, "intermediate_size_mlp": 48,
        },
    },
    "llama4_text": {"intermediate_size_mlp": 48, "no_rope_layers": [1, 1, 1, 0]},
    "longcat_flash": {"attention_method": "MLA", "zero_expert_type": "identity"},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {kind: {"rope_theta": 1e4} for kind in (SLIDING, FULL)},
    },
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1],
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False,
        "sliding_window_size": 16, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
        "swa_head_dim": 8, "swa_v_head_dim": 8,
    },
    "minicpm3": {
        "rope_scaling": {
            "original_max_position_embeddings": 128, "short_factor": [1.0, 1.0],
            "long_factor": [1.0, 1.0],
        },
    },
    "minimax": {"rotary_dim": 4},
    "minimax_m3_vl": {
        "text_config": {
            "rotary_dim": 4, "dense_intermediate_size": 48, "moe_layer_freq": [0, 1, 1, 1],
        },
    },
    "ministral3": {
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 8,
        },
    },
    "mistral3": {"text_config": "llama"},
    "mistral4": {"rope_parameters": YARN | {"rope_theta": 1e4, "llama_4_scaling_beta": 0.1}},
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {
        "block_configs": [
            {
                "attention": {"n_heads_in_group": 2, "no_op": False, "replace_with_linear": False},
                "ffn": {"ffn_mult": 1.5, "no_op": False, "replace_with_linear": False},
            },
            {
                "attention": {"no_op": True},
                "ffn": {"ffn_mult": 1.0, "no_op": False, "replace_with_linear": False},
            },
        ]
        * 2,
    },
    "nemotron_h": {"hybrid_override_pattern": "M*M-", "mamba_proj_bias": False},
    "olmo_hybrid": {"linear_allow_neg_eigval": True},
    "openelm": {
        "ffn_dim_divisor": 8, "num_query_heads": [4] * LAYERS, "num_kv_heads": [2] * LAYERS,
        "ffn_multipliers": [1.5] * LAYERS,
    },
    "plamo": {"n_shared_head": 2},
    "phi3small": {
        "dense_attention_every_n_layers": 2, "ff_intermediate_size": 48, "gegelu_limit": 20.0,
        "vocab_size": 100352,
    },
    "phixtral": {"rotary_dim": 4, "n_head": 4, "num_local_experts": 4},
    "pixtral": {"text_config": "llama"},
    "qwen": {"kv_channels": 8},
    "qwen2_vl": {"text_config": "qwen2"},
    "qwen3_5": {"text_config": {"model_type": "qwen3_5", "rope_parameters": PARTIAL_ROPE}},
    "qwen3_5_moe": {"text_config": {"model_type": "qwen3_5_moe", "rope_parameters": PARTIAL_ROPE}},
    "qwen3_vl": {"text_config": "qwen3"},
    "qwen3_vl_moe": {"text_config": "qwen3_moe"},
    "recurrent_gemma": {
        "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 16,
        "block_types": ["recurrent", "attention"],
    },
    "step3p5": {
        "num_attention_groups": 2, "moe_top_k": 2, "moe_num_experts": 4,
        "layer_types": [SLIDING, FULL, SLIDING, FULL],
    },
}  # fmt: skip


def model_types() -> list[str]:
    """Every model type that mlx-lm has code for and that can be imported here."""
    found = []
    for module in pkgutil.iter_modules(mlx_lm.models.__path__):
        text = Path(mlx_lm.models.__path__[0], f"{module.name}.py").read_text(encoding="utf-8")
        if "class Model(" in text and "class ModelArgs" in text:
            found.append(module.name)
    return found


def config_of(model_type: str) -> dict[str, Any]:
    """The config.json of a small model."""
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    special = SPECIAL.get(model_type, {})
    known = {field.name for field in dataclasses.fields(module.ModelArgs)}
    config = {name: value for name, value in SIZES.items() if name in known} | special
    inner = special.get("text_config")
    if isinstance(inner, str):
        config["text_config"] = config_of(inner)
    elif inner is not None:
        config["text_config"] = SIZES | inner
    return {"vocab_size": VOCABULARY, **config, "model_type": model_type}


def write_model(folder: Path, model_type: str, /, **changes: Any) -> Path:
    """Write the folder of a small model with random float32 weights, without a tokenizer."""
    config = config_of(model_type) | changes
    module = importlib.import_module(f"mlx_lm.models.{MODEL_REMAPPING.get(model_type, model_type)}")
    mx.random.seed(0)
    network = module.Model(module.ModelArgs.from_dict(config))

    def random(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        size = 0.05 if array.ndim < 2 else 0.3 * mx.sqrt(mx.square(array).mean()) + 0.01
        return array.astype(mx.float32) + size * mx.random.normal(array.shape)

    weights = dict(tree_flatten(tree_map_with_path(random, network.parameters())))
    folder.mkdir(parents=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def batch_of(tokens: int, seed: int = 0) -> Batch:
    """Two rows of different lengths, every token but the first few a target."""
    random = np.random.default_rng(seed).integers(1, VOCABULARY, (2, tokens + 1)).astype(np.int32)
    lengths = np.array([tokens, tokens - 3])
    spans = [np.arange(2, length) + row * tokens for row, length in enumerate(lengths)]
    positions = np.concatenate(spans).astype(np.int32)
    inputs = np.where(np.arange(tokens) < lengths[:, None], random[:, :-1], 0).astype(np.int32)
    return Batch(
        tokens=inputs, positions=positions, targets=random[:, 1:].reshape(-1)[positions],
        weights=np.ones(len(positions), np.float32), texts=(positions // tokens).astype(np.int32),
        rows=np.arange(2, dtype=np.uint32)[:, None],
        places=np.arange(tokens, dtype=np.uint32)[None], lengths=lengths,
        trained_tokens=len(positions),
    )  # fmt: skip


def opened_with_adapters(folder: Path) -> tuple[Any, Any]:
    """The opened model and its adapters, of rank 4 on all linear layers, with random weights."""
    opened = open_model(folder, mx.float32)
    config = TrainConfig(
        lora_targets=("all-linear",), lora_layers="all", lora_rank=4, lora_experts=True
    )
    adapters = add_adapters(opened.network, config)
    mx.random.seed(1)
    trained = opened.network.trainable_parameters()
    opened.network.update(tree_map(lambda p: p + 0.02 * mx.random.normal(p.shape), trained))
    return opened, adapters


def reference(folder: Path, batch: Batch) -> tuple[float, dict[str, np.ndarray]]:
    """The mean loss and its gradients, by mlx-lm's own code."""
    network = opened_with_adapters(folder)[0].network
    places, targets = mx.array(batch.positions), mx.array(batch.targets)

    def loss(tokens: mx.array) -> mx.array:
        logits = network(tokens).astype(mx.float32)
        return nn.losses.cross_entropy(logits.reshape(-1, logits.shape[-1])[places], targets).mean()

    value, grads = nn.value_and_grad(network, loss)(mx.array(batch.tokens))
    return value.item(), {name: np.array(g, np.float64) for name, g in tree_flatten(grads)}


def largest_error(ours: dict[str, np.ndarray], theirs: dict[str, np.ndarray]) -> float:
    """The largest relative error of the gradient of an array; infinite if names differ."""
    if ours.keys() != theirs.keys():
        return np.inf
    floor = 1e-3 * max(np.linalg.norm(grad) for grad in theirs.values())
    return max(
        np.linalg.norm(ours[name] - grad) / max(np.linalg.norm(grad), floor)
        for name, grad in theirs.items()
    )


def outcome(folder: Path, plan: str, tokens: int, references: dict[Any, Any], seed: int = 0) -> str:
    """`exact`, or why not, in a line.

    references: those of this model that were computed, by number of tokens and seed.
    """
    batch = batch_of(tokens, seed)
    opened, adapters = opened_with_adapters(folder)
    if plan == "streamed" and not opened.can_stream:
        return "the files store weights in another form"
    try:
        engine, kept = ("staged", everything(LAYERS)) if plan == "kept" else (plan, NOTHING)
        keys = adapters.dropout_keys
        built = build_engine(opened.network, keys, engine, tensors=opened.tensors, kept=kept)
    except UserError as error:
        return str(error)
    if built.plan != engine:
        return built.notices[-1]
    sums, grads = built.engine.gradients(batch, 1 / len(batch.targets), 0)
    if (tokens, seed) not in references:
        references[tokens, seed] = reference(folder, batch)
    loss, wanted = references[tokens, seed]
    found = {name: np.array(grad, np.float64) for name, grad in tree_flatten(grads)}
    error = largest_error(found, wanted)
    error = max(error, abs(sums.loss.item() / len(batch.targets) - loss) / abs(loss))
    if error >= TOLERANCE and seed == 0:
        # Rounding can decide which expert a token goes to. A fault shows with other tokens too.
        return outcome(folder, plan, tokens, references, 1)
    return "exact" if error < TOLERANCE else f"error {error:.1e}"


def outcomes(model_type: str, lengths: tuple[int, ...] = LENGTHS) -> Iterator[tuple[str, str]]:
    """(plan, outcome) for each plan; the first that is not exact counts."""
    with tempfile.TemporaryDirectory() as place:
        folder = write_model(Path(place) / "m", model_type)
        references: dict[Any, Any] = {}
        for plan in PLANS:
            found = [outcome(folder, plan, tokens, references) for tokens in lengths]
            yield plan, next((text for text in found if text != "exact"), "exact")


def found_here(name: str, lengths: tuple[int, ...] = LENGTHS) -> dict[str, str]:
    """The outcome of each plan for an architecture, computed in this process."""
    mx.set_default_device(mx.cpu)
    try:
        return dict(outcomes(name, lengths))
    except (Exception, SystemExit) as error:  # the code of an architecture may raise any type
        text = str(error).splitlines() or [""]
        return dict.fromkeys(PLANS, f"{type(error).__name__}: {text[0]}"[:160])


def found_apart(name: str) -> dict[str, str]:
    """The same, in a process of its own, since some code ends its process."""
    command = [sys.executable, __file__, "--json", name]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return dict.fromkeys(PLANS, "mlx-lm's own code ends the process")
    return json.loads(lines[-1])


def main(names: list[str]) -> None:
    """Print the architectures that are exact under every plan, and a line for each other one."""
    found = {name: found_apart(name) for name in names or model_types()}
    exact = [name for name, cells in found.items() if set(cells.values()) == {"exact"}]
    print(f"Exact under every plan ({len(exact)} of {len(found)}): " + ", ".join(exact) + ".\n")
    for name, cells in found.items():
        if name not in exact:
            texts = dict.fromkeys(text for text in cells.values() if text != "exact")
            plans = [plan for plan in PLANS if cells[plan] == "exact"]
            print(f"- {name}: {', '.join(plans) or 'no plan'}. " + "; ".join(texts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--json"]:
        print(json.dumps(found_here(sys.argv[2])))
    else:
        main(sys.argv[1:])
