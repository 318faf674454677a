"""Describe a model to llama.cpp: its architecture, its sizes, and the names of its tensors.

Where llama.cpp and mlx-lm compute different functions, the weights are converted. For llama,
llama.cpp applies RoPE to neighboring pairs of features, and mlx-lm pairs the two halves of a
head. For gemma, llama.cpp does not add 1 to the norm weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError

if TYPE_CHECKING:
    import gguf

# The model_type of config.json -> llama.cpp's architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}
GEMMA = ("gemma2", "gemma3")
LARGEST_BLOCKS = {
    "gemma2": 46,
    "gemma3": 62,
}  # number of blocks of the models whose queries llama.cpp scales differently
CONTEXT = 8192  # context length in tokens, if the model's config names none
WINDOW = 4096  # sliding window of gemma2, if its config names none
HALVED = ("q_proj", "k_proj")  # layers that RoPE applies to
SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True)
class Description:
    """A model as llama.cpp describes it."""

    base: Path
    architecture: str
    """llama.cpp's name."""
    args: Any
    """mlx-lm's settings of the text model."""
    config: dict[str, Any]
    """The text model's part of config.json."""
    prefix: str
    """Prefix of the paths of the text model's parameters."""
    names: gguf.TensorNameMap
    """gguf's names of the tensors."""

    @property
    def heads(self) -> int:
        return int(self.args.num_attention_heads)

    @property
    def key_heads(self) -> int:
        return self.args.num_key_value_heads or self.heads

    @property
    def head_dim(self) -> int:
        return int(getattr(self.args, "head_dim", None) or self.args.hidden_size // self.heads)

    @property
    def context(self) -> int:
        known = getattr(self.args, "max_position_embeddings", None)
        return known or self.config.get("max_position_embeddings") or CONTEXT

    @property
    def rope(self) -> dict[str, Any]:
        """The RoPE scaling settings, with the kind as `type`; "default" means no scaling."""
        found = dict(getattr(self.args, "rope_scaling", None) or {})
        return {**found, "type": found.get("type") or found.get("rope_type", "default")}


def describe(base: Path, network: nn.Module, config: dict[str, Any]) -> Description:
    """Describe the model that mlx-lm loaded from `base`.

    Raises UserError if llama.cpp does not support it or computes it differently.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{base}: architecture {kind} cannot be exported to GGUF; supported: {known}"
        )
    name = ARCHITECTURES[kind]
    nested = "language_model" in network
    args = network.language_model.args if nested else network.args
    described = Description(
        base=base,
        architecture=name,
        args=args,
        config=config.get("text_config", config) if nested else config,
        prefix="language_model." if nested else "",
        names=get_tensor_name_map(MODEL_ARCH[name.upper()], args.num_hidden_layers),
    )
    for fault in faults(described):
        raise UserError(
            f"{base}: {fault}, which llama.cpp's {name} does not support; it cannot be exported "
            "to GGUF"
        )
    return described


def faults(described: Description) -> list[str]:
    """The properties of a model that llama.cpp does not support."""
    args, name, rope = described.args, described.architecture, described.rope
    found = []
    if getattr(args, "rope_traditional", False):
        found.append("rope_traditional is set")
    if name == "llama" and "sliding_attention" in args.layer_types:
        found.append("some layers have a sliding window")
    known = {"default", "linear", "yarn"} | ({"llama3"} if name == "llama" else set())
    if name in GEMMA:
        known -= {"yarn"}
    if rope["type"] not in known or {"mscale", "mscale_all_dim"} & rope.keys():
        found.append(f"rope_scaling is {rope['type']}")
    if name in GEMMA and not math.isclose(args.query_pre_attn_scalar, query_scalar(described)):
        found.append(f"query_pre_attn_scalar is {args.query_pre_attn_scalar}")
    return found


def query_scalar(described: Description) -> float:
    """llama.cpp's query scale for gemma: queries are multiplied by this value to the power -1/2."""
    args = described.args
    if args.num_hidden_layers == LARGEST_BLOCKS[described.architecture]:
        return int(args.hidden_size // described.heads)
    return described.head_dim


def add_parameters(writer: gguf.GGUFWriter, described: Description) -> None:
    args, rope = described.args, described.rope
    writer.add_block_count(args.num_hidden_layers)
    writer.add_context_length(described.context)
    writer.add_embedding_length(args.hidden_size)
    writer.add_feed_forward_length(args.intermediate_size)
    writer.add_head_count(described.heads)
    writer.add_head_count_kv(described.key_heads)
    writer.add_key_length(described.head_dim)
    writer.add_value_length(described.head_dim)
    writer.add_layer_norm_rms_eps(args.rms_norm_eps)
    writer.add_vocab_size(args.vocab_size)
    writer.add_rope_dimension_count(described.head_dim)
    writer.add_rope_freq_base(args.rope_theta)
    add_rope_scaling(writer, described, rope)
    if described.architecture == "gemma2":
        writer.add_attn_logit_softcapping(args.attn_logit_softcapping)
        writer.add_final_logit_softcapping(args.final_logit_softcapping)
        writer.add_sliding_window(described.config.get("sliding_window") or WINDOW)
    if described.architecture == "gemma3":
        writer.add_rope_freq_base_swa(args.rope_local_base_freq)
        writer.add_sliding_window(args.sliding_window)
        writer.add_sliding_window_pattern(args.sliding_window_pattern)


def add_rope_scaling(writer: gguf.GGUFWriter, described: Description, rope: dict[str, Any]) -> None:
    from gguf import RopeScalingType

    if rope["type"] not in ("linear", "yarn"):  # llama3's scaling is stored as a tensor
        return
    writer.add_rope_scaling_type(RopeScalingType(rope["type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["type"] == "yarn":
        # mlx-lm's defaults.
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 4096))
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1))


def rope_factors(described: Description) -> mx.array | None:
    """The divisors of llama3's RoPE frequencies, (head_dim / 2,) float32; None for other models."""
    rope = described.rope
    if rope["type"] != "llama3":
        return None
    factor, trained = rope["factor"], rope.get("original_max_position_embeddings", 8192)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    places = mx.arange(0, described.head_dim, 2, dtype=mx.float32)
    waves = 2 * math.pi * described.args.rope_theta ** (places / described.head_dim)
    smooth = (trained / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return mx.where(waves > trained / low, factor, mx.where(waves < trained / high, 1, between))


def name_of(described: Description, parameter: str) -> str:
    """llama.cpp's name of a parameter of the network. Raises UserError if it has none."""
    path = parameter.removeprefix(described.prefix)
    name = described.names.get_name(path, try_suffixes=SUFFIXES)
    if name is None or not parameter.startswith(described.prefix):
        raise UserError(
            f"{described.base}: {parameter} is a weight that llama.cpp's "
            f"{described.architecture} does not support; it cannot be exported to GGUF"
        )
    return name


def arranged(described: Description, parameter: str, array: mx.array) -> mx.array:
    """Convert a parameter to llama.cpp's layout; linear layers are (out, ...)."""
    path, _, _ = parameter.rpartition(".")
    layer = path.rpartition(".")[2]
    if described.architecture == "llama" and layer in HALVED:
        heads = described.heads if layer == "q_proj" else described.key_heads
        return in_pairs(array, heads)
    if described.architecture in GEMMA and layer.endswith("norm"):
        return array.astype(mx.float32) + 1
    return array


def in_pairs(array: mx.array, heads: int) -> mx.array:
    """Reorder rows (out, ...) from RoPE pairs in two halves of a head to neighboring pairs."""
    rows, *rest = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(array.shape)
