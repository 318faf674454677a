"""What llama.cpp is told of a model: its architecture, its sizes, and its tensors' names.

Where llama.cpp computes another function than mlx-lm, the weights are laid out for it: it
turns the queries and keys of llama in neighbouring pairs of features, where mlx-lm pairs the
two halves of a head, and it does not add 1 to the norms of gemma.
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

# llama.cpp's architectures, by the model_type of config.json.
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
}  # llama.cpp scales the queries of these otherwise
CONTEXT = 8192  # tokens, where the model does not say how many it was made for
WINDOW = 4096  # of gemma2, where it does not say
HALVED = ("q_proj", "k_proj")  # layers whose heads are turned
SUFFIXES = (".weight", ".bias")


@dataclass(frozen=True)
class Description:
    """A model as llama.cpp knows it.

    architecture: llama.cpp's name; args: mlx-lm's settings of the text model; config: the same
    part of config.json; prefix: of the text model's paths; names: gguf's for its tensors.
    """

    base: Path
    architecture: str
    args: Any
    config: dict[str, Any]
    prefix: str
    names: gguf.TensorNameMap

    @property
    def heads(self) -> int:
        return self.args.num_attention_heads

    @property
    def key_heads(self) -> int:
        return self.args.num_key_value_heads or self.heads

    @property
    def head_dim(self) -> int:
        return getattr(self.args, "head_dim", None) or self.args.hidden_size // self.heads

    @property
    def context(self) -> int:
        known = getattr(self.args, "max_position_embeddings", None)
        return known or self.config.get("max_position_embeddings") or CONTEXT

    @property
    def rope(self) -> dict[str, Any]:
        """How positions are stretched, with its kind as `type`; {"type": "default"} for not."""
        found = dict(getattr(self.args, "rope_scaling", None) or {})
        return {**found, "type": found.get("type") or found.get("rope_type", "default")}


def describe(base: Path, network: nn.Module, config: dict[str, Any]) -> Description:
    """The model that mlx-lm has loaded from `base`, for llama.cpp.

    Raises UserError for what llama.cpp does not have, or computes in another way.
    """
    from gguf import MODEL_ARCH, get_tensor_name_map

    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UserError(
            f"{base}: GGUF of the architecture {kind} cannot be written; of {known} it can"
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
        raise UserError(f"{base}: {fault}, which llama.cpp's {name} has not; GGUF cannot hold it")
    return described


def faults(described: Description) -> list[str]:
    """What of a model llama.cpp cannot compute."""
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
    """What the queries of gemma are scaled by in llama.cpp, -1/2 its power."""
    args = described.args
    if args.num_hidden_layers == LARGEST_BLOCKS[described.architecture]:
        return args.hidden_size // described.heads
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

    if rope["type"] not in ("linear", "yarn"):  # llama3's is a tensor
        return
    writer.add_rope_scaling_type(RopeScalingType(rope["type"]))
    writer.add_rope_scaling_factor(rope["factor"])
    if rope["type"] == "yarn":
        # As mlx-lm has it where the model does not say.
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 4096))
        writer.add_rope_scaling_yarn_beta_fast(rope.get("beta_fast", 32))
        writer.add_rope_scaling_yarn_beta_slow(rope.get("beta_slow", 1))


def rope_factors(described: Description) -> mx.array | None:
    """What each of llama3's frequencies is divided by, (head_dim / 2,) float32, or None."""
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
    """What llama.cpp calls a parameter of the network. Raises UserError where it has none such."""
    path = parameter.removeprefix(described.prefix)
    name = described.names.get_name(path, try_suffixes=SUFFIXES)
    if name is None or not parameter.startswith(described.prefix):
        raise UserError(
            f"{described.base}: {parameter} is a weight that llama.cpp's "
            f"{described.architecture} has not; GGUF cannot hold it"
        )
    return name


def arranged(described: Description, parameter: str, array: mx.array) -> mx.array:
    """A parameter as llama.cpp wants it; (out, ...) for those of a linear layer."""
    path, _, _ = parameter.rpartition(".")
    layer = path.rpartition(".")[2]
    if described.architecture == "llama" and layer in HALVED:
        heads = described.heads if layer == "q_proj" else described.key_heads
        return in_pairs(array, heads)
    if described.architecture in GEMMA and layer.endswith("norm"):
        return array.astype(mx.float32) + 1
    return array


def in_pairs(array: mx.array, heads: int) -> mx.array:
    """Rows (out, ...) whose heads are in halves, put so that the two of a pair are neighbours."""
    rows, *rest = array.shape
    halves = array.reshape(heads, 2, rows // heads // 2, *rest)
    return halves.swapaxes(1, 2).reshape(array.shape)
