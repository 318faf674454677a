"""What transformers calls the tensors of mlx-lm, as data.

mlx-lm's `Model.sanitize` turns the tensors of transformers into its own. The rules of a model type
are the way back. Each rule is applied to all tensors, to what the rule before it returned. One test
applies the rules and then `sanitize`, and must get the same tensors; another loads them in
transformers and compares the logits. `transformers_weights.py` applies the rules.

A `part` is one or more whole parts of a dotted name: `mlp.gate` is a part of `0.mlp.gate.weight`,
and not of `0.mlp.gate_proj.weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class Rename:
    """Replaces a part of the names."""

    part: str
    theirs: str


@dataclass(frozen=True)
class Unstack:
    """Makes one tensor of each index of the first axis. theirs: `{}` stands for the index."""

    part: str
    theirs: str


@dataclass(frozen=True)
class Join:
    """Concatenates the tensors of several parts to one."""

    parts: tuple[str, ...]
    theirs: str
    axis: int
    alternating: bool = False
    """Whether rows of the tensors alternate along the axis, instead of following each other."""


@dataclass(frozen=True)
class Swap:
    """Exchanges the second and the third axis."""

    part: str


@dataclass(frozen=True)
class Flatten:
    """Makes one axis of the first two."""

    part: str


@dataclass(frozen=True)
class Add:
    """Adds a number to all values."""

    parts: tuple[str, ...]
    number: float


Rule = Rename | Unstack | Join | Swap | Flatten | Add
Rules = tuple[Rule, ...]
Config = Mapping[str, Any]


@dataclass(frozen=True)
class TransformersModel:
    """The form of a model type in transformers."""

    head: str
    """The class in transformers."""
    rules: Rules = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    """Settings with which transformers computes as mlx-lm does. A function gives the value from
    the other settings, or None for none."""
    scorer: str = ""
    """The class with a score head; empty if it has none that a test compares."""
    inner: bool = False
    """Whether config.json is the `text_config` of the base."""
    peft: bool = True
    """Whether an adapter has the same effect there, on layers that no rule changes."""


def together(module: str) -> Rules:
    """Return the rules for experts that transformers, too, stores in one tensor."""
    return (
        Join((f"{module}.gate_proj.weight", f"{module}.up_proj.weight"), "experts.gate_up_proj", 1),
        Rename(f"{module}.down_proj.weight", "experts.down_proj"),
    )


EXPERTS = Unstack("switch_mlp", "experts.{}")
W123 = (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))
MIXTRAL: Rules = (*(Rename(f"switch_mlp.{ours}", f"switch_mlp.{w}") for ours, w in W123), EXPERTS)
GRANITE = (
    Join(("switch_mlp.gate_proj", "switch_mlp.up_proj"), "input_linear", axis=1),
    Rename("switch_mlp.down_proj", "output_linear"),
)
GRANITE_DENSE = (
    Join(("mlp.gate_proj", "mlp.up_proj"), "shared_mlp.input_linear", axis=0),
    Rename("mlp.down_proj", "shared_mlp.output_linear"),
)
GPT_OSS = (
    Join(("experts.gate_proj.bias", "experts.up_proj.bias"), "experts.gate_up_proj_bias", 1, True),
    Join(("experts.gate_proj.weight", "experts.up_proj.weight"), "experts.gate_up_proj", 1, True),
    Rename("experts.down_proj.bias", "experts.down_proj_bias"),
    Rename("experts.down_proj.weight", "experts.down_proj"),
    Swap("experts.gate_up_proj"),
    Swap("experts.down_proj"),
)
LLAMA4 = (*together("experts"), Swap("experts.gate_up_proj"), Swap("experts.down_proj"))
CONVOLUTION = Swap("conv1d.weight")
LFM2: Rules = (
    Swap("conv.conv.weight"),
    *(Rename(f"feed_forward.{ours}", f"feed_forward.{w}") for ours, w in W123),
    *MIXTRAL,
)
LATENT = (
    Swap("self_attn.embed_q.weight"),
    Join(("self_attn.embed_q", "self_attn.unembed_out"), "self_attn.kv_b_proj", axis=1),
    Flatten("self_attn.kv_b_proj.weight"),
)
NEMOTRON: Rules = (
    Rename("switch_mlp.fc1", "switch_mlp.up_proj"),
    Rename("switch_mlp.fc2", "switch_mlp.down_proj"),
    EXPERTS,
    CONVOLUTION,
)
KIMI: Rules = (
    *(Rename(f"mlp.switch_mlp.{ours}", f"block_sparse_moe.switch_mlp.{w}") for ours, w in W123),
    EXPERTS,
    Rename("mlp.shared_experts", "block_sparse_moe.shared_experts"),
    Rename("mlp.gate", "block_sparse_moe.gate"),
    Rename("mlp.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias"),
    *(Rename(f"{x}_conv.conv", f"{x}_conv1d") for x in "qkv"),
    *(Swap(f"{x}_conv1d.weight") for x in "qkv"),
    *LATENT,
)
BLOCK_NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight")
NORMS = (*BLOCK_NORMS, "model.norm.weight", "q_norm.weight", "k_norm.weight")
QWEN_NEXT = (CONVOLUTION, Add(NORMS, -1.0))


def yarn(key: str) -> Callable[[Config], Any]:
    """mlx-lm rounds the dimensions between which YaRN interpolates."""
    return lambda config: {**config[key], "truncate": True} if config.get(key) else None


def same_base(config: Config) -> Any:
    """Without this, transformers uses its default RoPE base for one of the kinds of attention."""
    default = {"rope_type": "default", "rope_theta": config.get("rope_theta")}
    kinds = ("full_attention", "sliding_attention")
    return config.get("rope_parameters") or dict.fromkeys(kinds, default)


def head_multiplier(config: Config) -> float:
    """mlx-lm has multiplied the head by its multiplier, but not an embedding that is the head."""
    if not config.get("tie_word_embeddings"):
        return 1.0
    return float(config["lm_head_multiplier"] / config["embedding_multiplier"])


# mlx-lm multiplies the weights by these when it loads them, except for `key_multiplier`, which it
# does not use.
FALCON: dict[str, Any] = {
    **dict.fromkeys(("embedding_multiplier", "key_multiplier"), 1.0),
    **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier"), 1.0),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier"), 1.0),
    "mlp_multipliers": [1.0] * 2,
    "ssm_multipliers": [1.0] * 5,
    "lm_head_multiplier": head_multiplier,
}
# transformers reads "gelu" as its approximation in gemma.
GEMMA = {"hidden_act": "gelu_python", "hidden_activation": "gelu"}
PHIMOE = {"attention_bias": True, "lm_head_bias": True}

# Not here, though transformers has them: llama4_text alone, since mlx-lm normalizes queries and
# keys of layers without RoPE, too; ernie4_5_moe, since mlx-lm drops the router's bias; olmo, since
# mlx-lm's needs another package.
KNOWN: dict[str, TransformersModel] = {
    "llama": TransformersModel("LlamaForCausalLM", scorer="LlamaForSequenceClassification"),
    "mistral": TransformersModel("MistralForCausalLM", scorer="MistralForSequenceClassification"),
    "qwen2": TransformersModel("Qwen2ForCausalLM", scorer="Qwen2ForSequenceClassification"),
    "qwen3": TransformersModel("Qwen3ForCausalLM", scorer="Qwen3ForSequenceClassification"),
    "qwen3_moe": TransformersModel(
        "Qwen3MoeForCausalLM", (EXPERTS,), scorer="Qwen3MoeForSequenceClassification"
    ),
    "qwen2_moe": TransformersModel("Qwen2MoeForCausalLM", (EXPERTS,)),
    "mixtral": TransformersModel("MixtralForCausalLM", MIXTRAL),
    "gemma": TransformersModel("GemmaForCausalLM", config=GEMMA, peft=False),
    "gemma2": TransformersModel("Gemma2ForCausalLM", scorer="Gemma2ForSequenceClassification"),
    "gemma3_text": TransformersModel(
        "Gemma3ForCausalLM", scorer="Gemma3TextForSequenceClassification"
    ),
    "phi3": TransformersModel("Phi3ForCausalLM", scorer="Phi3ForSequenceClassification"),
    "phimoe": TransformersModel("PhimoeForCausalLM", MIXTRAL, PHIMOE),
    "smollm3": TransformersModel("SmolLM3ForCausalLM", scorer="SmolLM3ForSequenceClassification"),
    "olmo2": TransformersModel("Olmo2ForCausalLM"),
    "olmo3": TransformersModel("Olmo3ForCausalLM", config={"rope_parameters": same_base}),
    "olmoe": TransformersModel("OlmoeForCausalLM", (EXPERTS,)),
    "granite": TransformersModel("GraniteForCausalLM"),
    "granitemoe": TransformersModel("GraniteMoeForCausalLM", GRANITE),
    "granitemoehybrid": TransformersModel(
        "GraniteMoeHybridForCausalLM", (*GRANITE, *GRANITE_DENSE, CONVOLUTION)
    ),
    "glm4": TransformersModel("Glm4ForCausalLM"),
    "glm4_moe": TransformersModel("Glm4MoeForCausalLM", (EXPERTS,)),
    "glm4_moe_lite": TransformersModel("Glm4MoeLiteForCausalLM", (EXPERTS, *LATENT)),
    "gpt_oss": TransformersModel(
        "GptOssForCausalLM",
        GPT_OSS,
        {key: yarn(key) for key in ("rope_scaling", "rope_parameters")},
        peft=False,
    ),
    "deepseek_v2": TransformersModel("DeepseekV2ForCausalLM", (EXPERTS,)),
    "deepseek_v3": TransformersModel("DeepseekV3ForCausalLM", (EXPERTS, *LATENT)),
    "qwen3_next": TransformersModel("Qwen3NextForCausalLM", (EXPERTS, *QWEN_NEXT)),
    "qwen3_5_text": TransformersModel("Qwen3_5ForCausalLM", QWEN_NEXT, inner=True),
    "qwen3_5_moe_text": TransformersModel(
        "Qwen3_5MoeForCausalLM", (*together("switch_mlp"), *QWEN_NEXT), inner=True
    ),
    "lfm2": TransformersModel("Lfm2ForCausalLM", (Swap("conv.conv.weight"),)),
    "lfm2_moe": TransformersModel("Lfm2MoeForCausalLM", LFM2),
    "falcon_h1": TransformersModel("FalconH1ForCausalLM", (CONVOLUTION,), FALCON, peft=False),
    "mamba2": TransformersModel("Mamba2ForCausalLM", (CONVOLUTION,)),
    "nemotron_h": TransformersModel("NemotronHForCausalLM", NEMOTRON, peft=False),
    "nemotron": TransformersModel("NemotronForCausalLM"),
    "exaone": TransformersModel("LlamaForCausalLM", peft=False),
    "exaone4": TransformersModel("Exaone4ForCausalLM"),
    "hunyuan_v1_dense": TransformersModel("HunYuanDenseV1ForCausalLM"),
    "ernie4_5": TransformersModel("Ernie4_5ForCausalLM"),
    "cohere": TransformersModel("CohereForCausalLM"),
    "cohere2": TransformersModel("Cohere2ForCausalLM"),
    "starcoder2": TransformersModel(
        "Starcoder2ForCausalLM", config={"hidden_act": "gelu"}, peft=False
    ),
    "stablelm": TransformersModel("StableLmForCausalLM"),
    "gemma3n_text": TransformersModel("Gemma3nForCausalLM", inner=True),
    "gemma4_text": TransformersModel("Gemma4ForCausalLM", together("experts.switch_glu")),
    "llama4_text": TransformersModel("Llama4ForCausalLM", LLAMA4, inner=True),
    "ministral3": TransformersModel("Ministral3ForCausalLM"),
    "kimi_linear": TransformersModel("KimiLinearForCausalLM", KIMI, peft=False),
    "dots1": TransformersModel("Dots1ForCausalLM", (Unstack("mlp.experts", "mlp.experts.{}"),)),
    "exaone_moe": TransformersModel("ExaoneMoeForCausalLM", (EXPERTS,)),
    "mellum": TransformersModel("MellumForCausalLM", (EXPERTS,)),
    "mamba": TransformersModel("MambaForCausalLM", (CONVOLUTION,)),
    "phi": TransformersModel("PhiForCausalLM"),
    "seed_oss": TransformersModel("SeedOssForCausalLM"),
    "helium": TransformersModel("HeliumForCausalLM"),
}
# Linear layers that PEFT does not adapt: routers, which are no linear layers in transformers, and
# those of Mamba whose weights are read past the layer. Where transformers fuses experts, PEFT takes
# every layer with the name of one for an expert.
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "router.layer", "feed_forward.gate")
NOT_IN_PEFT = (*ROUTERS, "mixer.out_proj", "mixer.dt_proj")
EXPERT_NAMES = tuple(ours for ours, _ in W123)
# Models that mlx-lm runs as the text model inside another; only the text model is exported.
OUTER = ("gemma3", "gemma3n", "gemma4", "llama4", "mistral3", "qwen3_5", "qwen3_5_moe")
TEXT_ALONE = (
    Rename("language_model.model", "model"),
    Rename("model.language_model", "model"),
    Rename("language_model.lm_head", "lm_head"),
)


def is_in_peft(known: TransformersModel, path: str) -> bool:
    """Return whether PEFT adapts a linear layer of mlx-lm by its path."""
    names = [*NOT_IN_PEFT]
    for rule in known.rules:
        names += rule.parts if isinstance(rule, Join | Add) else [rule.part]
        names += EXPERT_NAMES if isinstance(rule, Unstack) else []
    weight = f".{path}.weight."
    return not any(f".{name}." in weight for name in names)


def kind_of(config: Config) -> str:
    """The model_type of config.json; that of the text model for one of OUTER."""
    kind = str(config.get("model_type"))
    inner = config.get("text_config")
    return str(inner.get("model_type")) if kind in OUTER and isinstance(inner, dict) else kind


def known_of(config: Config) -> TransformersModel | None:
    """Return the form of the model in transformers; None if it is not known."""
    known, outer = KNOWN.get(kind_of(config)), config.get("model_type") in OUTER
    if known is None or (known.inner and not outer):
        return None
    return replace(known, rules=(*TEXT_ALONE, *known.rules), inner=True) if outer else known
