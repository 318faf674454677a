"""Model sizes for estimates, read from the headers of its files: no weight is loaded."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from your_ai.gates.untrusted import BLOCK, EXPERT, Entry, read_header, read_json
from your_ai.hub.architectures import GROUP_SIZE, tensor_bytes, tensors_of_config
from your_ai.hub.config_values import HEADS, HIDDEN

# Tensors next to the text model in files of other libraries; mlx-lm ignores them.
LEFT_OUT = re.compile(r"(?:^|\.)(?:vision|visual|audio|multi_modal|embed_vision|embed_audio|mtp)")
VOCABULARY = ("embed_tokens", "lm_head")


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model in memory, with its floats in the compute dtype."""

    blocks: int
    linears: dict[str, tuple[int, int]]
    """(inputs, outputs) of each linear layer of a block, by its name in the block.

    For a layer with experts: of the experts that one token uses, together.
    """
    hidden: int
    """Hidden size D."""
    vocabulary: int
    """Vocabulary size V."""
    heads: int
    """Number of query heads."""
    float_bytes: int
    """Size of a number of the compute dtype."""
    block_bytes: int
    """Weights of the largest block."""
    blocks_bytes: int
    """Weights of all blocks."""
    vocabulary_bytes: int
    """The embedding, and the head if it is not tied."""
    rest_bytes: int
    """All other weights."""
    disk_bytes: int
    """Size of the model's files."""
    quantized: bool
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) of all experts of a layer together, by its name."""
    norms: int = 2
    """Norms of a block over all D features."""
    softcaps: bool = False
    """Whether attention scores and logits pass through a tanh, as in Gemma 2."""
    kinds: int = 1
    """Kinds of blocks; each kind is compiled separately."""

    @property
    def weights_bytes(self) -> int:
        return self.blocks_bytes + self.vocabulary_bytes + self.rest_bytes


def entries_of(folder: Path) -> Iterator[Entry]:
    """The tensors in a model's files, from the headers. Raises UserError if one is damaged."""
    for file in sorted(folder.glob("model*.safetensors")):
        yield from read_header(file)


def facts_of(folder: Path, float_bytes: int, quantize: int | None = None) -> ModelFacts:
    """The facts of a model folder that passed `hub.check_model`.

    float_bytes: size of a number of the compute dtype.
    quantize: bits, if the model is quantized on load.
    """
    config = read_json(folder / "config.json", "a model folder has one")
    disk_bytes = sum(file.stat().st_size for file in folder.glob("model*.safetensors"))
    entries = list(entries_of(folder))
    if any(entry.name.endswith(".scales") for entry in entries):
        quantize = None  # this is the quantized copy
    return facts_from(entries, config, float_bytes, quantize, disk_bytes)


def facts_of_config(
    config: dict[str, Any], bits: int | None, group_size: int, float_bytes: int
) -> ModelFacts:
    """The facts of a model from its config.json alone.

    bits, group_size: its quantization; bits is None if it is not quantized.
    float_bytes: size of a number of the compute dtype.

    disk_bytes is the size of the weights in that dtype. Raises ValueError if the layers of the
    architecture are not known here.
    """
    entries = list(tensors_of_config({**config, **(config.get("text_config") or {})}))
    found = facts_from(entries, config, float_bytes, bits, 0, group_size)
    return replace(found, disk_bytes=found.weights_bytes)


def facts_from(
    entries: list[Entry],
    config: dict[str, Any],
    float_bytes: int,
    quantize: int | None,
    disk_bytes: int,
    group_size: int = GROUP_SIZE,
) -> ModelFacts:
    """The facts of a model with these tensors.

    group_size: for tensors that will be quantized to `quantize` bits.
    """
    text = {**config, **(config.get("text_config") or {})}
    entries = [entry for entry in entries if is_held(entry.name, text)]
    by_block: dict[int, int] = {}
    vocabulary_bytes = rest_bytes = 0
    for entry in entries:
        size = tensor_bytes(entry, float_bytes, quantize, group_size)
        match = BLOCK.search(entry.name)
        if match is not None:
            by_block[int(match[1])] = by_block.get(int(match[1]), 0) + size
        elif layer_of(entry.name) in VOCABULARY:
            vocabulary_bytes += size
        else:
            rest_bytes += size
    linears, experts = linears_of(entries, text)
    hidden = int(first_of(text, HIDDEN, 0))
    return ModelFacts(
        blocks=max(by_block, default=-1) + 1,
        linears=linears,
        hidden=hidden,
        vocabulary=int(text.get("vocab_size") or 0),
        heads=int(first_of(text, HEADS, 1)),
        float_bytes=float_bytes,
        block_bytes=max(by_block.values(), default=0),
        blocks_bytes=sum(by_block.values()),
        vocabulary_bytes=vocabulary_bytes,
        rest_bytes=rest_bytes,
        disk_bytes=disk_bytes,
        quantized=quantize is not None or any(e.name.endswith(".scales") for e in entries),
        experts=experts,
        norms=norms_of(entries, hidden),
        softcaps=bool(text.get("attn_logit_softcapping", text.get("model_type") == "gemma2")),
        kinds=kinds_of(entries, text),
    )


def kinds_of(entries: list[Entry], config: dict[str, Any]) -> int:
    """The number of kinds of blocks, by their tensors and their attention (full or sliding)."""
    blocks: dict[str, set[tuple[str, tuple[int, ...]]]] = {}
    for entry in entries:
        match = BLOCK.search(entry.name)
        if match is not None:
            blocks.setdefault(match[1], set()).add((match[2], entry.shape))
    types = config.get("layer_types")
    reaches = len({str(kind) for kind in types}) if isinstance(types, list) else 1
    if config.get("sliding_window_pattern") or config.get("model_type") == "gemma3_text":
        reaches = max(2, reaches)
    return max(1, len({frozenset(found) for found in blocks.values()})) * max(1, reaches)


def norms_of(entries: list[Entry], hidden: int) -> int:
    """The maximum number of norms over all D features in a block; at least 2."""
    counts: dict[str, int] = {}
    for entry in entries:
        match = BLOCK.search(entry.name)
        if match is None or entry.shape != (hidden,):
            continue
        if "norm" in match[2] and match[2].endswith(".weight"):
            counts[match[1]] = counts.get(match[1], 0) + 1
    return max(2, *counts.values()) if counts else 2


def first_of(config: dict[str, Any], names: tuple[str, ...], default: int) -> Any:
    found = (config[name] for name in names if config.get(name) is not None)
    return next(found, default)


def layer_of(name: str) -> str:
    """The last part of the name of a tensor's layer."""
    return name.rpartition(".")[0].rpartition(".")[2]


def is_held(name: str, config: dict[str, Any]) -> bool:
    """Whether mlx-lm loads this tensor."""
    match = BLOCK.search(name)
    if match is not None and int(match[1]) >= (config.get("num_hidden_layers") or math.inf):
        return False  # a block for multi-token prediction
    tied = layer_of(name) == "lm_head" and config.get("tie_word_embeddings") is True
    return not tied and LEFT_OUT.search(name) is None


def linears_of(
    entries: list[Entry], config: dict[str, Any]
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """The fields `linears` and `experts` of ModelFacts."""
    scales = {e.name: e.shape for e in entries if e.name.endswith(".scales")}
    quantization = config.get("quantization") or {}
    sizes: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}  # number of experts
    for entry in entries:
        name, _, leaf = entry.name.rpartition(".")
        match = BLOCK.search(name + ".")
        if match is None or leaf != "weight" or len(entry.shape) < 2:
            continue
        layer, one = match[2].removesuffix("."), EXPERT.search(match[2])
        if one is not None:
            layer = layer.replace(one[0], "experts.")
            counts[layer] = max(counts.get(layer, 0), int(one[1]) + 1)
        elif len(entry.shape) == 3 and ("switch" in layer or "experts" in layer):
            counts[layer] = entry.shape[0]
        elif len(entry.shape) > 2:
            continue
        inputs, packed = entry.shape[-1], scales.get(f"{name}.scales")
        if packed is not None:
            own = quantization.get(name)
            found = own if isinstance(own, dict) else quantization
            inputs = packed[-1] * found.get("group_size", GROUP_SIZE)
        sizes[layer] = (inputs, entry.shape[-2])
    used = int(config.get("num_experts_per_tok") or 1)
    linears = {
        name: (used * i, used * o) if name in counts else (i, o) for name, (i, o) in sizes.items()
    }
    experts = {name: (n * sizes[name][0], n * sizes[name][1]) for name, n in counts.items()}
    return linears, experts


def layers_named(facts: ModelFacts, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of a block that match --lora-targets."""
    return [facts.linears[name] for name in names_of(facts, targets)]


def adapters_named(facts: ModelFacts, targets: tuple[str, ...]) -> list[tuple[int, int]]:
    """As `layers_named`, but with all experts of a layer together: each has an adapter."""
    return [facts.experts.get(name, facts.linears[name]) for name in names_of(facts, targets)]


def names_of(facts: ModelFacts, targets: tuple[str, ...]) -> list[str]:
    return [
        name
        for name in facts.linears
        if any(t in ("all-linear", name) or name.endswith(f".{t}") for t in targets)
    ]


def vocabulary_held(facts: ModelFacts) -> ModelFacts:
    """The same facts, for a model whose embedding and head must stay in memory."""
    rest = facts.rest_bytes + facts.vocabulary_bytes
    return replace(facts, rest_bytes=rest, vocabulary_bytes=0)
