"""Tensors of a model that is known by its config.json alone, and the bytes they take.

One place knows how the linear layers of each architecture are shaped. The registry computes
sizes of downloads from it, and `memory.facts` computes estimates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from your_ai.gates.untrusted import DTYPE_BITS, Entry

GROUP_SIZE = 64  # MLX's default for quantized weights
MODE_GROUP_SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # of modes other than affine
FLOATS = ("F64", "F32", "F16", "BF16")
BIASED_IF_ASKED = ("llama", "mistral", "smollm3")  # mlx-lm runs all three with the same code
ARCHITECTURES = (*BIASED_IF_ASKED, "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3")


def tensors_of_config(config: dict[str, Any]) -> Iterator[Entry]:
    """The tensors of a model with this configuration, before quantization.

    Raises ValueError for an architecture that is not in ARCHITECTURES.
    """
    kind, hidden, vocabulary = config["model_type"], config["hidden_size"], config["vocab_size"]
    if kind not in ARCHITECTURES:
        raise ValueError(f"{kind}: the layers of this architecture are not known here")
    yield Entry("model.embed_tokens.weight", "F32", (vocabulary, hidden))
    shapes = block_shapes(config)
    for block in range(config["num_hidden_layers"]):
        for name, shape in shapes.items():
            yield Entry(f"model.layers.{block}.{name}", "F32", shape)
    yield Entry("model.norm.weight", "F32", (hidden,))
    if not config.get("tie_word_embeddings", kind != "phi3"):
        yield Entry("lm_head.weight", "F32", (vocabulary, hidden))


def block_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a block, by its name in mlx-lm's code."""
    kind, hidden, wide = config["model_type"], config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads  # of a head
    queries, keys = heads * size, (config.get("num_key_value_heads") or heads) * size
    if kind == "phi3":
        into = {"qkv_proj": queries + 2 * keys}
        mlp = {"gate_up_proj": (2 * wide, hidden), "down_proj": (hidden, wide)}
    else:
        into = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
        mlp = dict.fromkeys(("gate_proj", "up_proj"), (wide, hidden))
        mlp["down_proj"] = (hidden, wide)
    attention = {name: (outputs, hidden) for name, outputs in into.items()}
    attention["o_proj"] = (hidden, queries)
    layers = {f"self_attn.{name}": shape for name, shape in attention.items()}
    layers |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    found: dict[str, tuple[int, ...]] = {f"{n}.weight": shape for n, shape in layers.items()}
    for name, (outputs, _) in layers.items():
        if name.startswith("mlp."):
            biased = config.get("mlp_bias", False)
        elif kind == "qwen2":
            biased = not name.endswith("o_proj")
        else:
            biased = kind in BIASED_IF_ASKED and config.get("attention_bias", False)
        if biased:
            found[f"{name}.bias"] = (outputs,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if kind.startswith("gemma"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    found |= {f"{name}.weight": (hidden,) for name in norms}
    if kind in ("qwen3", "gemma3_text"):
        found |= {f"self_attn.{name}.weight": (size,) for name in ("q_norm", "k_norm")}
    return found


def group_size_of(quantization: dict[str, Any]) -> int:
    """Weights per group, of a model or a layer that is quantized in this way."""
    default = MODE_GROUP_SIZES.get(str(quantization.get("mode")), GROUP_SIZE)
    return int(quantization.get("group_size") or default)


def tensor_bytes(
    entry: Entry, float_bytes: int, bits: int | None, group_size: int = GROUP_SIZE
) -> int:
    """Bytes of a tensor whose floats have `float_bytes` each.

    bits: of matrices that are quantized, None for no quantization. Each group of weights
    takes a scale and a bias in addition.
    """
    count = math.prod(entry.shape)
    if entry.kind not in FLOATS:
        return count * DTYPE_BITS[entry.kind] // 8
    matrix = entry.name.endswith(".weight") and len(entry.shape) in (2, 3)
    if bits is not None and matrix and entry.shape[-1] % group_size == 0:
        return count * bits // 8 + 2 * float_bytes * count // group_size
    return count * float_bytes
