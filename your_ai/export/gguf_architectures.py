"""What llama.cpp calls and computes for each model type, as data.

llama.cpp has code for each architecture. A model type names its architecture there, the rules that
turn mlx-lm's tensors into llama.cpp's, the settings that only this architecture has, and what its
code assumes. The package gguf knows the name of a tensor by its name in transformers, so rules
rename only what mlx-lm or llama.cpp calls differently. `gguf_model.py` applies all this, and
tests/interop/llamacpp compares each model type with llama.cpp itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from your_ai.export.transformers_names import Add, Rename, Rule, kind_of

SLIDING = "sliding_attention"
LOG_MULTIPLIER = "rope.scaling.yarn_log_multiplier"
LINEAR_SCALINGS = ("default", "linear")
SCALINGS = (*LINEAR_SCALINGS, "yarn")


@dataclass(frozen=True)
class ModelSettings:
    """mlx-lm's settings of a text model."""

    args: Any
    config: Mapping[str, Any]
    """The text model's part of config.json."""

    def get(self, *names: str) -> Any:
        """The first of these settings that mlx-lm has a value for; None without one."""
        found = (getattr(self.args, name, None) for name in names)
        return next((value for value in found if value is not None), None)

    @property
    def blocks(self) -> int:
        return int(self.get("num_hidden_layers", "num_layers"))

    @property
    def heads(self) -> int:
        return int(self.get("num_attention_heads") or 0)

    @property
    def key_heads(self) -> int:
        return int(self.get("num_key_value_heads") or self.heads)

    @property
    def head_dim(self) -> int:
        return int(self.get("head_dim") or self.args.hidden_size // max(self.heads, 1))

    @property
    def rotated_dim(self) -> int:
        """The number of features of a head that RoPE applies to."""
        return int(self.head_dim * (self.get("partial_rotary_factor") or 1))

    @property
    def rope(self) -> dict[str, Any]:
        """The RoPE scaling settings, with the kind as `type`; "default" means no scaling."""
        found = dict(self.get("rope_scaling", "rope_parameters") or {})
        return {**found, "type": found.get("type") or found.get("rope_type", "default")}

    def in_blocks(self, value: int, blocks: list[int]) -> list[int]:
        """One number for each block: this value for those of the list, 0 for the others."""
        return [value if index in blocks else 0 for index in range(self.blocks)]


Change = Callable[[mx.array, ModelSettings], mx.array]


@dataclass(frozen=True)
class Reorder:
    """Puts the rows of tensors in another order, or the columns; an adapter's with them."""

    parts: tuple[str, ...]
    change: Change
    """Reorders the first axis."""
    columns: bool = False


@dataclass(frozen=True)
class Shares:
    """Makes a tensor of each equal share of the rows."""

    part: str
    theirs: tuple[str, ...]


@dataclass(frozen=True)
class Convert:
    """Computes other values or another shape."""

    parts: tuple[str, ...]
    change: Change


GgufRule = Rule | Reorder | Shares | Convert
Value = str | Callable[[ModelSettings], Any]


@dataclass(frozen=True)
class LlamaCppModel:
    """The form of a model type in llama.cpp."""

    architecture: str
    """llama.cpp's name."""
    rules: tuple[GgufRule, ...] = ()
    settings: Mapping[str, Value] = field(default_factory=dict)
    """Settings beside those of every architecture, by their names after the architecture's: the
    name of mlx-lm's setting, or a function. None is not written."""
    assumed: Mapping[str, Any] = field(default_factory=dict)
    """mlx-lm's settings that llama.cpp has no setting for: the value in its code, or a function."""
    scalings: tuple[str, ...] = SCALINGS
    """The kinds of RoPE scaling that are computed in the same way; empty if mlx-lm computes none,
    whatever its settings say."""
    traditional: bool = False
    """Whether RoPE applies to neighboring pairs of features."""
    slides: bool = False
    """Whether blocks can have a sliding window."""
    unadapted: tuple[str, ...] = ()
    """Parts of the names of layers that adapters have another effect on."""


# What every architecture has, if mlx-lm has it: llama.cpp's name -> the names in mlx-lm.
WHOLE_NUMBERS: dict[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "num_layers"),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "vocab_size": ("vocab_size",),
    "expert_count": ("num_experts", "num_local_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok", "top_k_experts"),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_count": ("n_shared_experts",),
    "expert_shared_feed_forward_length": (
        *("shared_expert_intermediate_size", "shared_intermediate_size"),
    ),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "num_dense_layers"),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "shortconv.l_cache": ("conv_L_cache",),
    "full_attention_interval": ("full_attention_interval",),
}
NUMBERS: dict[str, tuple[str, ...]] = {
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps", "layer_norm_epsilon"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "norm_epsilon", "norm_eps"),
    "rope.freq_base": ("rope_theta",),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "attention.temperature_scale": (),
    LOG_MULTIPLIER: (),
    "expert_weights_scale": ("routed_scaling_factor",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "residual_scale": ("residual_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "attention.scale": ("attention_multiplier",),
}
FLAGS: dict[str, tuple[str, ...]] = {"expert_weights_norm": ("norm_topk_prob",)}


def in_pairs(array: mx.array, heads: int) -> mx.array:
    """Reorder rows (out, ...) from RoPE pairs in two halves of a head to neighboring pairs."""
    rows, *rest = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(array.shape)


# For these, llama.cpp applies RoPE to neighboring pairs of features, and mlx-lm pairs the two
# halves of a head.
PAIRS = (
    Reorder(("self_attn.q_proj",), lambda rows, of: in_pairs(rows, of.heads)),
    Reorder(("self_attn.k_proj",), lambda rows, of: in_pairs(rows, of.key_heads)),
)


def experts(module: str) -> tuple[GgufRule, ...]:
    """Return the rules for experts that both store in one tensor."""
    return tuple(Rename(f"{module}.{n}_proj", f"ffn_{n}_exps") for n in ("gate", "up", "down"))


EXPERTS, BLOCK_EXPERTS = experts("mlp.switch_mlp"), experts("block_sparse_moe.switch_mlp")
SIGMOID = 2  # llama.cpp's number of the function that makes weights of a router's scores
SCORE_BIAS = Rename("mlp.gate.e_score_correction_bias", "mlp.gate.e_score_correction.bias")
ALL_KEYS = {"num_key_value_heads": lambda of: of.heads}
BIASES = ("attention_bias", "attention_out_bias", "mlp_bias", "use_bias")
NO_BIAS = dict.fromkeys(BIASES, False)
NORMS = ("norm", "input_layernorm", "post_attention_layernorm", "q_norm", "k_norm")
FEED_FORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
# llama.cpp does not add 1 to the norm weights of gemma.
PLUS_ONE = Add((*NORMS, *FEED_FORWARD_NORMS), 1.0)
WINDOW = 4096  # sliding window of gemma2, if its config names none
LARGEST_BLOCKS = {
    "gemma2": 46,
    "gemma3": 62,
}  # number of blocks of the models whose queries llama.cpp scales differently


def query_scalar(architecture: str) -> Callable[[ModelSettings], float]:
    """llama.cpp's query scale for gemma: queries are multiplied by this value to the power -1/2."""

    def scalar(of: ModelSettings) -> float:
        if of.blocks == LARGEST_BLOCKS[architecture]:
            return int(of.args.hidden_size // of.heads)
        return of.head_dim

    return scalar


def windows(of: ModelSettings) -> list[bool]:
    """The presence of a sliding window, for each block."""
    return [kind == SLIDING for kind in of.args.layer_types]


def every(period: int) -> Callable[[ModelSettings], list[str]]:
    """The kinds of attention if each block after `period` - 1 others has no window."""
    kinds = [SLIDING] * (period - 1) + ["full_attention"]
    return lambda of: [kinds[index % period] for index in range(of.blocks)]


def in_tiles(rows: mx.array, of: ModelSettings) -> mx.array:
    """Reorder rows from the value heads of each key head to the first ones of all key heads, the
    second ones of all and so on.
    """
    count, *rest = rows.shape
    keys, values = of.args.linear_num_key_heads, of.args.linear_num_value_heads
    groups = rows.reshape(keys, values // keys, count // values, *rest)
    return groups.swapaxes(0, 1).reshape(rows.shape)


def values_in_tiles(rows: mx.array, of: ModelSettings) -> mx.array:
    """The same for rows of queries, keys and values that follow each other."""
    before = 2 * of.args.linear_num_key_heads * of.args.linear_key_head_dim
    return mx.concatenate([rows[:before], in_tiles(rows[before:], of)])


TO_MATRIX = Convert(("conv1d.weight", "conv.conv.weight"), lambda array, _: array.squeeze(-1))
DECAY = Convert(("A_log",), lambda array, _: -mx.exp(array))
STEP = Rename("dt_bias", "dt_proj.bias")
DELTA_NET: tuple[GgufRule, ...] = (
    STEP,
    DECAY,
    TO_MATRIX,
    Reorder(("linear_attn.in_proj_qkv", "linear_attn.conv1d"), values_in_tiles),
    Reorder(
        tuple(f"linear_attn.{n}" for n in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log")),
        in_tiles,
    ),
    Reorder(("linear_attn.dt_proj",), in_tiles),
    Reorder(("linear_attn.out_proj",), in_tiles, columns=True),
)


def recurrent(conv: str, state: str, groups: str, heads: str, head_dim: str) -> dict[str, Value]:
    """The settings of a recurrent mixer, by the names of mlx-lm's."""
    return {
        "ssm.conv_kernel": conv,
        "ssm.state_size": state,
        "ssm.group_count": groups,
        "ssm.time_step_rank": heads,
        "ssm.inner_size": lambda of: getattr(of.args, heads) * getattr(of.args, head_dim),
    }


DELTA_NET_SETTINGS: dict[str, Value] = {
    "rope.dimension_sections": lambda of: sections(of),
    **recurrent(
        *("linear_conv_kernel_dim", "linear_key_head_dim", "linear_num_key_heads"),
        *("linear_num_value_heads", "linear_value_head_dim"),
    ),
}
DELTA_NET_ASSUMED = {
    "linear_value_head_dim": lambda of: of.args.linear_key_head_dim,
    "attention_bias": False,
}


def sections(of: ModelSettings) -> list[int]:
    """The numbers of rotated pairs for the positions in time, height and width.

    They take turns, and a text has the same position in all three.
    """
    known = (of.get("rope_parameters") or {}).get("mrope_section")
    pairs = of.rotated_dim // 2
    return [*(known or [(pairs + 2 - place) // 3 for place in range(3)]), 0]


MAMBA = recurrent(
    "mamba_d_conv", "mamba_d_state", "mamba_n_groups", "mamba_n_heads", "mamba_d_head"
)


def by_groups(array: mx.array, of: ModelSettings) -> mx.array:
    return array.reshape(of.get("mamba_n_groups", "n_groups"), -1)


MAMBA2: tuple[GgufRule, ...] = (
    STEP,
    DECAY,
    TO_MATRIX,
    Convert(("mamba.A_log", "mamba.D", "mixer.A_log", "mixer.D"), lambda array, _: array[:, None]),
    Convert(("mamba.norm", "mixer.norm"), by_groups),
)
UNBOUND = 1 << 20  # context length of a model without positions


def lfm2_width(of: ModelSettings) -> int:
    """mlx-lm's width of the feed-forward layers of lfm2."""
    args, width = of.args, of.args.block_ff_dim
    if args.block_auto_adjust_ff_dim:
        width = int((args.block_ffn_dim_multiplier or 1) * int(2 * width / 3))
        width = -(-width // args.block_multiple_of) * args.block_multiple_of
    return int(width)


LFM2_KEYS: dict[str, Value] = {
    "attention.head_count_kv": lambda of: of.in_blocks(of.key_heads, of.args.full_attn_idxs)
}


def stretched(of: ModelSettings) -> float:
    """The base of RoPE with hunyuan's `alpha`, all that mlx-lm computes of its scaling."""
    dim = of.head_dim
    return float(of.args.rope_theta * of.rope.get("alpha", 1.0) ** (dim / (dim - 2)))


def of_rope(key: str) -> Callable[[ModelSettings], Any]:
    """A setting among `rope_parameters`."""
    return lambda of: of.args.rope_parameters.get(key)


def of_kind(key: str, kind: str, default: Any = None) -> Callable[[ModelSettings], Any]:
    """A RoPE setting of gemma4's blocks of this kind."""
    return lambda of: of.args.rope_parameters.get(kind, {}).get(key, default)


def gemma4_widths(of: ModelSettings) -> list[int]:
    """The width of each block's feed-forward layer: blocks that share keys can have twice it."""
    args, shared_from = of.args, of.blocks - of.args.num_kv_shared_layers
    double = args.use_double_wide_mlp and shared_from > 0
    return [
        args.intermediate_size * (2 if double and index >= shared_from else 1)
        for index in range(of.blocks)
    ]


def gemma4_keys(of: ModelSettings) -> list[int]:
    """The number of key heads of each block."""
    args, own = of.args, of.key_heads
    whole = args.num_global_key_value_heads if args.attention_k_eq_v else None
    return [own if slides or whole is None else whole for slides in windows(of)]


GEMMA4: dict[str, Value] = {
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": windows,
    "attention.head_count_kv": gemma4_keys,
    "attention.key_length": "global_head_dim",
    "attention.value_length": "global_head_dim",
    "attention.key_length_swa": "head_dim",
    "attention.value_length_swa": "head_dim",
    "rope.dimension_count": "global_head_dim",
    "rope.dimension_count_swa": "head_dim",
    "rope.freq_base": of_kind("rope_theta", "full_attention", 10000.0),
    "rope.freq_base_swa": of_kind("rope_theta", SLIDING, 10000.0),
    "feed_forward_length": gemma4_widths,
}
HYBRID: dict[str, Value] = {
    **MAMBA,
    "attention.head_count_kv": lambda of: of.in_blocks(
        of.key_heads, [i for i, kind in enumerate(of.args.layer_types) if kind == "attention"]
    ),
    "rope.scaling.finetuned": lambda of: of.args.position_embedding_type == "rope",
}


def blocks_with(letter: str, setting: str) -> Callable[[ModelSettings], list[int]]:
    """A setting for the blocks of nemotron_h that are of this kind, and 0 for the others."""
    return lambda of: of.in_blocks(
        getattr(of.args, setting),
        [index for index, own in enumerate(of.args.hybrid_override_pattern) if own == letter],
    )


NEMOTRON_H: dict[str, Value] = {
    **recurrent("conv_kernel", "ssm_state_size", "n_groups", "mamba_num_heads", "mamba_head_dim"),
    "attention.head_count_kv": blocks_with("*", "num_key_value_heads"),
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "feed_forward_length": blocks_with("-", "intermediate_size"),
    "expert_count": lambda _: None,
}
LLAMA = LlamaCppModel("llama", PAIRS, scalings=(*SCALINGS, "llama3"))

# The model_type of config.json, without the end `_text` -> its form in llama.cpp.
KNOWN: dict[str, LlamaCppModel] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral3": LlamaCppModel(
        "mistral3",
        PAIRS,
        {
            "attention.temperature_scale": of_rope("llama_4_scaling_beta"),
            "rope.freq_base": of_rope("rope_theta"),
            "rope.scaling.original_context_length": of_rope("original_max_position_embeddings"),
            LOG_MULTIPLIER: of_rope("mscale_all_dim"),
        },
    ),
    "mixtral": LlamaCppModel("llama", (*PAIRS, *BLOCK_EXPERTS), scalings=()),
    "helium": LlamaCppModel("llama"),
    "qwen2": LlamaCppModel("qwen2"),
    "qwen2_moe": LlamaCppModel("qwen2moe", EXPERTS, scalings=()),
    "qwen3": LlamaCppModel("qwen3"),
    "qwen3_moe": LlamaCppModel(
        "qwen3moe",
        EXPERTS,
        assumed={"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
        scalings=(),
    ),
    "qwen3_5": LlamaCppModel(
        "qwen35", DELTA_NET, DELTA_NET_SETTINGS, {**DELTA_NET_ASSUMED, "num_experts": 0}
    ),
    "qwen3_5_moe": LlamaCppModel(
        "qwen35moe", (*EXPERTS, *DELTA_NET), DELTA_NET_SETTINGS, DELTA_NET_ASSUMED
    ),
    "qwen3_next": LlamaCppModel(
        "qwen3next",
        (*EXPERTS, STEP, DECAY, TO_MATRIX),
        DELTA_NET_SETTINGS,
        {**DELTA_NET_ASSUMED, "mlp_only_layers": [], "decoder_sparse_step": 1},
    ),
    "gemma": LlamaCppModel("gemma", (PLUS_ONE,)),
    "gemma2": LlamaCppModel(
        "gemma2",
        (PLUS_ONE,),
        {"attention.sliding_window": lambda of: of.config.get("sliding_window") or WINDOW},
        {"query_pre_attn_scalar": query_scalar("gemma2")},
        LINEAR_SCALINGS,
    ),
    "gemma3": LlamaCppModel(
        "gemma3",
        (PLUS_ONE,),
        {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": "sliding_window_pattern",
        },
        {"query_pre_attn_scalar": query_scalar("gemma3")},
        LINEAR_SCALINGS,
        slides=True,
    ),
    "gemma4": LlamaCppModel(
        "gemma4",
        (
            Rename("layer_scalar", "layer_output_scale.weight"),
            Rename("router.scale", "ffn_gate_inp.scale"),
            Rename("router.per_expert_scale", "ffn_down_exps.scale"),
            *experts("experts.switch_glu"),
        ),
        GEMMA4,
        slides=True,
        unadapted=("experts.switch_glu.down_proj",),  # each expert's scale is not for the adapter
    ),
    "gpt_oss": LlamaCppModel(
        "gpt-oss",
        (Rename("self_attn.sinks", "self_attn.sinks.weight"),),
        {
            "attention.sliding_window": "sliding_window",
            "expert_feed_forward_length": "intermediate_size",
        },
        {"layer_types": every(2)},
        slides=True,
    ),
    "phi3": LlamaCppModel("phi3", scalings=("default", "longrope", "su")),
    "smollm3": LlamaCppModel(
        "smollm3",
        PAIRS,
        assumed={"no_rope_layers": lambda of: [int((i + 1) % 4 != 0) for i in range(of.blocks)]},
    ),
    "olmo2": LlamaCppModel("olmo2", assumed={**NO_BIAS, "tie_word_embeddings": False}),
    "olmo3": LlamaCppModel(
        "olmo2",
        settings={"attention.sliding_window": "sliding_window"},
        assumed={**NO_BIAS, "tie_word_embeddings": False, "layer_types": every(4)},
        slides=True,
    ),
    "olmoe": LlamaCppModel(
        "olmoe", EXPERTS, assumed={**NO_BIAS, **ALL_KEYS, "norm_topk_prob": False}
    ),
    "granite": LlamaCppModel("granite", PAIRS, scalings=LINEAR_SCALINGS),
    "granitemoe": LlamaCppModel("granitemoe", (*PAIRS, *BLOCK_EXPERTS), scalings=LINEAR_SCALINGS),
    "granitemoehybrid": LlamaCppModel(
        "granitehybrid",
        (
            *PAIRS,
            *BLOCK_EXPERTS,
            *MAMBA2,
            Shares("shared_mlp.input_linear", ("ffn_gate_shexp", "ffn_up_shexp")),
        ),
        HYBRID,
    ),
    "glm4": LlamaCppModel("glm4", traditional=True),
    "glm4_moe": LlamaCppModel(
        "glm4moe", (*EXPERTS, SCORE_BIAS), {"expert_gating_func": lambda _: SIGMOID}, scalings=()
    ),
    "lfm2": LlamaCppModel(
        "lfm2", (TO_MATRIX,), {**LFM2_KEYS, "feed_forward_length": lfm2_width}, {"conv_bias": False}
    ),
    "lfm2_moe": LlamaCppModel(
        "lfm2moe",
        (
            *experts("feed_forward.switch_mlp"),
            TO_MATRIX,
            Rename("feed_forward.expert_bias", "exp_probs_b.bias"),
        ),
        {**LFM2_KEYS, "expert_gating_func": lambda _: SIGMOID},
        {"conv_bias": False},
    ),
    "falcon_h1": LlamaCppModel(
        "falcon-h1", MAMBA2, {**MAMBA, "embedding_scale": lambda _: None}, {"attention_bias": False}
    ),
    "mamba2": LlamaCppModel(
        "mamba2",
        MAMBA2,
        {
            "context_length": lambda _: UNBOUND,
            **recurrent("conv_kernel", "state_size", "n_groups", "num_heads", "head_dim"),
            "feed_forward_length": lambda _: 0,
        },
        NO_BIAS,
    ),
    "mamba": LlamaCppModel(
        "mamba",
        (DECAY, TO_MATRIX),
        {
            "context_length": lambda _: UNBOUND,
            "ssm.conv_kernel": "conv_kernel",
            "ssm.state_size": "state_size",
            "ssm.time_step_rank": "time_step_rank",
            "ssm.inner_size": "intermediate_size",
            "feed_forward_length": lambda _: 0,
            "attention.layer_norm_rms_epsilon": lambda _: 1e-5,
        },
        {**NO_BIAS, "intermediate_size": lambda of: 2 * of.args.hidden_size, "use_bcdt_rms": False},
    ),
    "exaone": LlamaCppModel("exaone", assumed=NO_BIAS, scalings=(*LINEAR_SCALINGS, "llama3")),
    "exaone4": LlamaCppModel(
        "exaone4",
        settings={"attention.sliding_window": lambda of: of.args.sliding_window or 0},
        assumed={"sliding_window_pattern": lambda of: "LLLG" if of.blocks == 64 else None},
        scalings=(*LINEAR_SCALINGS, "llama3"),
        slides=True,
    ),
    "exaone_moe": LlamaCppModel(
        "exaone-moe",
        (*EXPERTS, SCORE_BIAS),
        {
            "attention.sliding_window": "sliding_window",
            "attention.sliding_window_pattern": windows,
            "expert_gating_func": lambda _: SIGMOID,
            "expert_shared_count": "num_shared_experts",
            "leading_dense_block_count": lambda of: of.args.is_moe_layer.index(True),
        },
        {"is_moe_layer": lambda of: sorted(of.args.is_moe_layer)},
        slides=True,
    ),
    "hunyuan_v1_dense": LlamaCppModel(
        "hunyuan-dense", (), {"rope.freq_base": stretched}, NO_BIAS, ("default", "dynamic")
    ),
    "ernie4_5": LlamaCppModel("ernie4_5", assumed=NO_BIAS),
    "cohere": LlamaCppModel("command-r", assumed={**NO_BIAS, "use_qk_norm": False}),
    "cohere2": LlamaCppModel(
        "cohere2",
        settings={"attention.sliding_window": "sliding_window"},
        assumed={**NO_BIAS, "sliding_window_pattern": 4},
        slides=True,
    ),
    "stablelm": LlamaCppModel("stablelm", assumed={"qk_layernorm": False}),
    "seed_oss": LlamaCppModel("seed_oss", assumed={"attention_out_bias": False, "mlp_bias": False}),
    "dots1": LlamaCppModel(
        "dots1", (SCORE_BIAS,), {"expert_gating_func": lambda _: SIGMOID}, {**NO_BIAS, **ALL_KEYS}
    ),
    "starcoder2": LlamaCppModel("starcoder2"),
    "phi": LlamaCppModel("phi2"),
    "nemotron_h": LlamaCppModel("nemotron_h", MAMBA2, NEMOTRON_H, NO_BIAS),
    "nemotron": LlamaCppModel(
        "nemotron",
        (Add(tuple(f"{n}.weight" for n in NORMS), 1.0),),
        scalings=LINEAR_SCALINGS,
    ),
}


def known_of(config: Mapping[str, Any]) -> LlamaCppModel | None:
    """Return the form of a model in llama.cpp, by its config.json; None if it is not known."""
    names = (kind_of(config), str(config.get("model_type")))
    return next((KNOWN[n] for n in (n.removesuffix("_text") for n in names) if n in KNOWN), None)
