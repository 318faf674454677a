"""What mixes the tokens in a block (attention, a recurrence, a convolution), from its tensors.

One place knows the kinds of mixers and how their sizes are read from the names and shapes of a
block's tensors, in mlx-lm's naming.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from your_ai.hub.config_values import HEADS
from your_ai.memory.sizes import (
    DELTA_CHUNK,
    LINEAR_CHUNK,
    LRU_CHUNK,
    RWKV_CHUNK,
    SELECTIVE_CHUNK,
    VECTOR_DELTA_CHUNK,
)

ATTENTION = "attention"
MLA = "latent attention"
GATED_DELTA = "gated delta"
KDA = "gated delta per channel"  # Kimi Linear
MAMBA1, MAMBA2, RWKV7, RGLRU = "mamba1", "mamba2", "rwkv7", "rglru"
LINEAR_ATTENTION, CONVOLUTION = "linear attention", "convolution"
# The last part of the names of layers that only attention has: queries, or all three together.
QUERIES = re.compile(
    r"(?:^|\.)(q_proj|qkv_proj|query_key_value|Wqkv|wqkv|c_attn|c_q|W_pack|att_proj|wq|qkv)$"
)
EXPANDED = ("deepseek_v2", "minicpm3", "youtu_llm")  # whose latent attention caches all heads
OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj", "wo", "attn_out")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class MixerFacts:
    """One mixer of a block. A size that the kind does not have is 0."""

    kind: str
    """One of the names above."""
    heads: int = 0
    """Query heads; of a recurrence, the heads of its state."""
    kv_heads: int = 0
    """Heads of keys and values; of a gated delta, of queries and keys; of Mamba 2, its groups."""
    key_dim: int = 0
    """Size of a key of one head; 0 for recurrences without keys."""
    value_dim: int = 0
    """Size of a value of one head, or the channels of one head of a recurrence."""
    state_size: int = 0
    """Numbers of Mamba's state for each channel."""
    conv_channels: int = 0
    """Channels of the short convolution."""
    cached: int = 0
    """Numbers that each token leaves in the cache of generation."""
    untiled: bool = False
    """Whether it cannot run on tiles of a row, because it needs more of other tokens than their
    keys and values, or their positions as numbers."""


def mixers_of(shapes: Shapes, linears: Shapes, config: Mapping[str, Any]) -> tuple[MixerFacts, ...]:
    """The mixers of a block, in no order; empty for a block that only has an MLP.

    shapes: of the tensors, by their names in the block.
    linears: (inputs, outputs) of the linear layers of the block, by their names.
    config: of the text model.
    """
    found: list[MixerFacts] = []
    for name in shapes:
        root, _, leaf = name.rpartition(".")
        at = f"{root}." if root else ""
        if leaf == "A_log":
            found.append(recurrence(at, shapes, linears, config))
        elif leaf == "r_k" and len(shapes[name]) == 2:
            heads, size = shapes[name]
            found.append(MixerFacts(kind=RWKV7, heads=heads, key_dim=size, value_dim=size))
        elif is_convolution(name, shapes[name]) and f"{at.removesuffix('conv.')}in_proj" in linears:
            found.append(MixerFacts(kind=CONVOLUTION, conv_channels=shapes[name][0]))
        elif leaf == "recurrent_param":
            found.append(MixerFacts(kind=RGLRU, heads=head_count(config), value_dim=0))
    recurrent = {name.rpartition(".")[0] for name in shapes if name.endswith((".A_log", ".r_k"))}
    for name in linears:
        root, _, leaf = name.rpartition(".")
        if root in recurrent:
            continue
        if leaf == "kv_a_proj_with_mqa":
            found.append(latent(config, linears[name]))
        elif QUERIES.search(name) and f"{root}.kv_a_proj_with_mqa" not in linears:
            found.append(attention(root, name, shapes, linears, config))
    return tuple(found)


def head_count(config: Mapping[str, Any]) -> int:
    return next((int(config[name]) for name in HEADS if config.get(name)), 1)


def whole(config: Mapping[str, Any], *names: str) -> int:
    """The first of these entries that is a whole number; 0 if none is."""
    return next((n for n in map(config.get, names) if isinstance(n, int)), 0)


def attention(
    root: str, name: str, shapes: Shapes, linears: Shapes, config: Mapping[str, Any]
) -> MixerFacts:
    """Attention whose queries come from the layer `name`; root: the path of the attention."""

    def outputs(*leaves: str) -> int:
        return next((linears[f"{root}.{n}"][1] for n in leaves if f"{root}.{n}" in linears), 0)

    heads = head_count(config)
    joined = name.rpartition(".")[2] not in ("q_proj", "c_q", "wq")
    width = next((linears[f"{root}.{n}"][0] for n in OUTPUTS if f"{root}.{n}" in linears), 0)
    width = width or int(linears[name][1])
    kept = [outputs("k_proj", "c_k", "wk"), outputs("v_proj", "c_v", "wv")]
    size = width // heads
    if joined:
        rest = max(0, linears[name][1] - width)
        kept = [rest // 2, rest // 2]
    keys = whole(config, "num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads
    head = size if joined or not kept[0] else (kept[0] // keys if kept[0] % keys == 0 else size)
    if kept[0] and not kept[1]:
        kept[1] = kept[0]  # its values are its keys
    kv_heads = kept[0] // head if head else 0
    kind = ATTENTION
    others = (
        f"{root}.conv_k" in shapes,
        f"{root}.index_q_proj" in linears,
        str(config.get("model_type")).startswith("minimax_m3"),  # its layers expect two caches
        has_temperatures(config),
        config.get("model_type") == "phi3small",  # its masks are sparse, in every second block
    )
    if f"{root}.g_proj" in linears and str(config.get("model_type")).startswith("bailing"):
        kind = LINEAR_ATTENTION
    return MixerFacts(
        kind=kind,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=head,
        value_dim=size,
        cached=sum(kept),
        untiled=any(others),
    )


def has_temperatures(config: Mapping[str, Any]) -> bool:
    """Return whether queries get factors that are computed from their positions, as in Llama 4."""
    return bool(config.get("attn_temperature_tuning", "attention_chunk_size" in config))


def latent(config: Mapping[str, Any], compressed: tuple[int, ...]) -> MixerFacts:
    """Multi-head latent attention; compressed: (inputs, outputs) of what is cached, but by the
    architectures that cache the keys and values of all heads."""
    heads, value = head_count(config), whole(config, "v_head_dim")
    key = whole(config, "qk_nope_head_dim") + whole(config, "qk_rope_head_dim")
    expanded = config.get("model_type") in EXPANDED
    return MixerFacts(
        kind=MLA,
        heads=heads,
        kv_heads=1,
        key_dim=key,
        value_dim=value,
        cached=heads * (key + value) if expanded else compressed[1],
        untiled=not expanded,
    )


def recurrence(at: str, shapes: Shapes, linears: Shapes, config: Mapping[str, Any]) -> MixerFacts:
    """The recurrence whose tensors begin with `at`."""
    log = shapes[f"{at}A_log"]
    heads = max(1, *log, 1)
    inner = linears.get(f"{at}out_proj", linears.get(f"{at}o_proj", (0, 0)))[0]
    own = (item for item in shapes.items() if item[0].startswith(at))
    channels = sum(shape[0] for name, shape in own if is_convolution(name, shape))
    short = MixerFacts(kind=KDA, heads=heads, conv_channels=channels)
    if f"{at}f_a_proj" in linears:
        size = linears.get(f"{at}k_proj", (0, 0))[1] // heads
        value = inner // heads
        return replace(short, kv_heads=heads, key_dim=size, value_dim=value)
    if any(f"{at}{name}" in linears for name in ("in_proj_qkvz", "in_proj_qkv", "q_proj")):
        keys = (channels - inner) // 2
        kv_heads = whole(config, "linear_num_key_heads") or heads
        return replace(
            short,
            kind=GATED_DELTA,
            kv_heads=kv_heads,
            key_dim=keys // kv_heads,
            value_dim=inner // heads,
        )
    if len(log) == 2:
        return replace(short, kind=MAMBA1, heads=log[0], value_dim=1, state_size=log[1])
    groups = whole(config, "mamba_n_groups", "n_groups") or 1
    state = max(0, channels - inner) // (2 * groups)
    state = state or whole(config, "mamba_d_state", "ssm_state_size", "state_size")
    return replace(short, kind=MAMBA2, kv_heads=groups, value_dim=inner // heads, state_size=state)


def is_convolution(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether it is the weight of a convolution over tokens: (channels, tokens, 1)."""
    return len(shape) == 3 and name.endswith(("conv1d.weight", "conv.conv.weight"))


# Tokens of a chunk of each kind of recurrence (nets.mixers), whose state is kept between chunks.
CHUNKS = {
    GATED_DELTA: DELTA_CHUNK,
    KDA: VECTOR_DELTA_CHUNK,
    RWKV7: RWKV_CHUNK,
    MAMBA2: LINEAR_CHUNK,
    LINEAR_ATTENTION: LINEAR_CHUNK,
    MAMBA1: SELECTIVE_CHUNK,
    RGLRU: LRU_CHUNK,
}
