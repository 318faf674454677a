"""Describe a model to llama.cpp: its architecture, its settings, and its tensors.

`gguf_architectures.py` says what differs between model types.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError
from your_ai.export.gguf_architectures import (
    FLAGS,
    KNOWN,
    LOG_MULTIPLIER,
    NUMBERS,
    SLIDING,
    WHOLE_NUMBERS,
    Convert,
    GgufRule,
    LlamaCppModel,
    ModelSettings,
    Reorder,
    Shares,
    known_of,
)
from your_ai.export.transformers_names import TEXT_ALONE, Rename, kind_of
from your_ai.export.transformers_weights import applied, has_part, parts_of, renamed

if TYPE_CHECKING:
    import gguf

CONTEXT = 8192  # context length in tokens, if the model's config names none
ROPE_FACTORS = "rope_freqs.weight"
SUFFIXES = (".weight", ".bias", ".scale")
BLOCK_PART = re.compile(r"model\.layers\.(\d+)\.(\w+)\.(\w+)")
LONG_ROPES = ("longrope", "su")
UNROTATED = 1e30  # a divisor of RoPE's frequencies that leaves nothing of them


@dataclass(frozen=True)
class Description:
    """A model as llama.cpp describes it."""

    base: Path
    known: LlamaCppModel
    settings: ModelSettings
    names: gguf.TensorNameMap
    """gguf's names of the tensors."""

    @property
    def architecture(self) -> str:
        return self.known.architecture

    @property
    def rules(self) -> tuple[GgufRule, ...]:
        return (*TEXT_ALONE, *self.known.rules)

    @property
    def context(self) -> int:
        known = self.settings.get("max_position_embeddings")
        return known or self.settings.config.get("max_position_embeddings") or CONTEXT


def describe(base: Path, network: nn.Module, config: dict[str, Any]) -> Description:
    """Describe the model that mlx-lm loaded from `base`.

    Raises UserError if llama.cpp does not support it or computes it differently.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    known = known_of(config)
    if known is None:
        raise UserError(
            f"{base}: architecture {kind_of(config)} cannot be exported to GGUF; supported: "
            f"{', '.join(KNOWN)}"
        )
    name = known.architecture
    nested = "language_model" in network
    args = network.language_model.args if nested else network.args
    settings = ModelSettings(args, config.get("text_config", config) if nested else config)
    number = next(number for number, own in MODEL_ARCH_NAMES.items() if own == name)
    described = Description(base, known, settings, get_tensor_name_map(number, settings.blocks))
    for fault in faults(described):
        raise UserError(
            f"{base}: {fault}, which llama.cpp's {name} does not support; it cannot be exported "
            "to GGUF"
        )
    return described


def faults(described: Description) -> Iterator[str]:
    """Yield the properties of a model that llama.cpp does not support."""
    known, settings = described.known, described.settings
    if getattr(settings.args, "rope_traditional", False) != known.traditional:
        yield "rope_traditional is set"
    if not known.slides and SLIDING in (settings.get("layer_types") or []):
        yield "some layers have a sliding window"
    rope = settings.rope
    scaled = {"mscale", "mscale_all_dim"} & rope.keys()
    if LOG_MULTIPLIER in known.settings:
        scaled = rope.get("mscale", 1) != 1
    if known.scalings and (rope["type"] not in known.scalings or scaled):
        yield f"rope_scaling is {rope['type']}"
    for name, wanted in known.assumed.items():
        value = settings.get(name)
        wanted = wanted(settings) if callable(wanted) else wanted
        if value is not None and value != wanted:
            yield f"{name} is {value}"


# Settings


def add_parameters(writer: gguf.GGUFWriter, described: Description) -> None:
    for key, value in parameters(described).items():
        add_value(writer, f"{described.architecture}.{key}", value)


def add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    from gguf import GGUFValueType

    if isinstance(value, list):
        writer.add_array(key, value)
        return
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    kind = GGUFValueType.STRING if isinstance(value, str) else kinds[type(value)]
    writer.add_key_value(key, value, kind)


def parameters(described: Description) -> dict[str, Any]:
    """The settings that llama.cpp reads, by their names after the architecture's."""
    settings = described.settings
    found: dict[str, Any] = {
        "context_length": described.context,
        "attention.head_count": settings.heads,
        "attention.head_count_kv": settings.key_heads,
        "attention.key_length": settings.head_dim,
        "attention.value_length": settings.head_dim,
        "rope.dimension_count": settings.rotated_dim,
    }
    for table, kind in ((WHOLE_NUMBERS, int), (NUMBERS, float), (FLAGS, bool)):
        for key, names in table.items():
            value = settings.get(*names)
            found[key] = None if value is None else kind(value)
    found |= rope_scaling(described)
    for key, own in described.known.settings.items():
        value = settings.get(own) if isinstance(own, str) else own(settings)
        found[key] = float(value) if key in NUMBERS and value is not None else value
    dense = not found["expert_count"]
    return {
        key: value
        for key, value in found.items()
        if value is not None and not (dense and key.startswith("expert_"))
    }


def rope_scaling(described: Description) -> dict[str, Any]:
    rope = described.settings.rope
    if rope["type"] in LONG_ROPES:
        return {"rope.scaling.attn_factor": long_rope_scale(described.settings)}
    # llama3's scaling is stored as a tensor.
    if rope["type"] not in ("linear", "yarn") or not described.known.scalings:
        return {}
    found = {"rope.scaling.type": rope["type"], "rope.scaling.factor": float(rope["factor"])}
    if rope["type"] == "yarn":
        # mlx-lm's defaults.
        original = int(rope.get("original_max_position_embeddings", 4096))
        found |= {
            "rope.scaling.original_context_length": original,
            "rope.scaling.yarn_beta_fast": float(rope.get("beta_fast", 32)),
            "rope.scaling.yarn_beta_slow": float(rope.get("beta_slow", 1)),
        }
    return found


def long_rope_scale(settings: ModelSettings) -> float:
    """mlx-lm's factor of queries and keys with longrope."""
    original = settings.args.original_max_position_embeddings
    factor = settings.args.max_position_embeddings / original
    return 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))


def rope_factors(described: Description) -> dict[str, mx.array]:
    """The divisors of RoPE's frequencies as tensors by name, each (rotated_dim / 2,) float32."""
    settings, rope = described.settings, described.settings.rope
    if rope["type"] in LONG_ROPES:  # mlx-lm uses those of long texts for short ones, too
        factors = mx.array(rope["long_factor"], dtype=mx.float32)
        return {f"rope_factors_{length}.weight": factors for length in ("long", "short")}
    if described.architecture == "gemma4":
        return {ROPE_FACTORS: proportional(settings)}
    return {ROPE_FACTORS: llama3_factors(settings)} if rope["type"] == "llama3" else {}


def proportional(settings: ModelSettings) -> mx.array:
    """gemma4's factors: in blocks without a window, the last pairs of features are not rotated."""
    args = settings.args
    rope = args.rope_parameters.get("full_attention", {})
    pairs = args.global_head_dim // 2
    if rope.get("rope_type") != "proportional":
        return mx.ones(pairs)
    rotated = int(args.global_head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    kept = mx.arange(pairs) < rotated
    return mx.where(kept, mx.array(rope.get("factor", 1.0), dtype=mx.float32), UNROTATED)


def llama3_factors(settings: ModelSettings) -> mx.array:
    rope, head_dim = settings.rope, settings.head_dim
    factor, trained = rope["factor"], rope.get("original_max_position_embeddings", 8192)
    low, high = rope.get("low_freq_factor", 1.0), rope.get("high_freq_factor", 4.0)
    places = mx.arange(0, head_dim, 2, dtype=mx.float32)
    waves = 2 * math.pi * settings.args.rope_theta ** (places / head_dim)
    smooth = (trained / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return mx.where(waves > trained / low, factor, mx.where(waves < trained / high, 1, between))


# Tensors


def name_of(described: Description, path: str) -> str:
    """llama.cpp's name of a tensor after the rules. Raises UserError if it has none."""
    from gguf.constants import TENSOR_NAMES

    name = described.names.get_name(path, try_suffixes=SUFFIXES)
    block = BLOCK_PART.fullmatch(path)
    if block and f"blk.{{bid}}.{block[2]}" in TENSOR_NAMES.values():  # a rule made it
        return f"blk.{block[1]}.{block[2]}.{block[3]}"
    if name is None:
        raise UserError(
            f"{described.base}: {path} is a weight that llama.cpp's "
            f"{described.architecture} does not support; it cannot be exported to GGUF"
        )
    return name


def is_for(rule: GgufRule, name: str) -> bool:
    """Return whether the rule changes the tensor of this name."""
    if isinstance(rule, Reorder | Convert):
        return has_part(name, rule.parts)
    return has_part(name, (rule.part,) if isinstance(rule, Shares) else parts_of(rule))


def after(rule: GgufRule, arrays: dict[str, mx.array], of: ModelSettings) -> dict[str, mx.array]:
    """Return the tensors after a rule, in the same order."""
    if not isinstance(rule, Reorder | Shares | Convert):
        return applied(rule, arrays)
    found: dict[str, mx.array] = {}
    for name, array in arrays.items():
        if not is_for(rule, name):
            found[name] = array
        elif isinstance(rule, Shares):
            shares = mx.split(array, len(rule.theirs))
            found |= {
                renamed(name, rule.part, theirs): share
                for theirs, share in zip(rule.theirs, shares, strict=True)
            }
        elif isinstance(rule, Reorder) and rule.columns:
            found[name] = rule.change(array.swapaxes(0, -1), of).swapaxes(0, -1)
        else:
            found[name] = rule.change(array, of)
    return found


@dataclass(frozen=True)
class Arranged:
    """A tensor in llama.cpp's layout, not computed."""

    name: str
    path: str
    """Its name after the rules, for error messages."""
    array: mx.array
    work_bytes: int
    """Additional memory for computing it from what the file has."""
    pieces: list[mx.array]
    """As in `Lazy`; empty if it has none."""


def arranged(
    described: Description,
    arrays: Mapping[str, mx.array],
    pieces: Mapping[str, list[mx.array]],
) -> list[Arranged]:
    """Convert the parameters to llama.cpp's tensors; linear layers are (out, ...).

    pieces: as in `Lazy`. Raises UserError if llama.cpp does not have one of them.
    """
    of, kept = described.settings, dict(arrays)
    in_pieces = {id(arrays[name]): found for name, found in pieces.items()}
    work = {id(array): 0 for array in arrays.values()}
    keep = list(arrays.values())  # their ids stay theirs
    for rule in described.rules:
        before, kept = kept, after(rule, kept, of)
        changed = [a for name, a in before.items() if is_for(rule, name)]
        for array in kept.values():
            if id(array) not in work:
                work[id(array)] = max(
                    (1 + (id(a) in in_pieces)) * a.nbytes + work[id(a)] for a in changed
                )
                keep.append(array)
    return [
        Arranged(
            name_of(described, path),
            path,
            array.astype(mx.float32),
            work[id(array)],
            in_pieces.get(id(array), []),
        )
        for path, array in kept.items()
    ]


def adapted(
    described: Description, layer: str, lora_a: mx.array, lora_b: mx.array
) -> list[tuple[str, mx.array, mx.array]] | None:
    """llama.cpp's layers for an adapted one: the name of the weight, lora_a (..., rank, in) and
    lora_b (..., out, rank). None if an adapter of this one has another effect there.
    """
    of = described.settings
    parts = {f"{layer}.weight": (lora_a, lora_b)}
    if has_part(layer, described.known.unadapted):
        return None
    for rule in described.rules:
        for path, (first, second) in list(parts.items()):
            if not is_for(rule, path):
                continue
            del parts[path]
            if isinstance(rule, Rename):
                parts[renamed(path, rule.part, rule.theirs)] = (first, second)
            elif isinstance(rule, Reorder) and rule.columns:
                parts[path] = (rule.change(first.T, of).T, second)
            elif isinstance(rule, Reorder):
                parts[path] = (first, rule.change(second, of))
            elif isinstance(rule, Shares):
                shares = mx.split(second, len(rule.theirs))
                for theirs, share in zip(rule.theirs, shares, strict=True):
                    parts[renamed(path, rule.part, theirs)] = (first, share)
            else:
                return None
    return [(name_of(described, path), *both) for path, both in parts.items()]
