"""Model sizes for estimates, read from the headers of its files: no weight is loaded."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from your_ai.config.names import ALL_LINEAR, selects
from your_ai.gates.untrusted import BLOCK, EXPERT, Entry, read_header, read_json
from your_ai.hub.awq_gptq import as_in_mlx
from your_ai.hub.config_values import (
    GROUP_SIZE,
    HEADS,
    HIDDEN,
    MOST_BLOCKS,
    experts_used,
    group_size_of,
    tensor_bytes,
    text_part,
)
from your_ai.hub.config_values import quantization_of as quantization_in
from your_ai.hub.registry import Known, config_of
from your_ai.hub.row_caches import RowCache
from your_ai.memory.memoized import memoized
from your_ai.memory.mixer_facts import RWKV7, MixerFacts, mixers_of
from your_ai.memory.sizes import FEWEST_FEATURES, HEAD_SLICE_BYTES, SLICE_STEP

# Tensors next to the text model in files of other libraries; mlx-lm ignores them.
LEFT_OUT = re.compile(r"(?:^|\.)(?:vision|visual|audio|multi_modal|embed_vision|embed_audio|mtp)")
HEADS_OF_MODELS = ("lm_head", "embed_out", "output")
# Layers outside of the blocks with a row for each token of the vocabulary, as architectures call
# them. The staged and streamed plans leave them in their files.
VOCABULARY = (
    *("embed_tokens", "embed_tokens_per_layer", "embed", "embed_in", "embedding", "embeddings"),
    *("token_embeddings", "tok_embeddings", "word_embeddings", "wte"),
    *HEADS_OF_MODELS,
)
# Layers whose weight mlx-lm's code reads itself, so that they get no adapter: Gemma 3n, Kimi K3.
READ_OTHERWISE = (
    *("prediction_coefs", "correction_coefs"),
    *("self_attention_res_proj", "mlp_res_proj"),
)
# Architectures whose router has a matrix of its own, not a linear layer.
PLAIN_GATES = (
    *("deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v41", "dots1"),
    *("exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2", "kimi_vl", "kimi_k25"),
    *("mimo_v2_flash", "bailing_moe_v3", "nemotron_h", "muse_spark", "joyai_llm_flash"),
)
WINDOWS = (
    *("sliding_window", "window_size", "attention_window_size", "attention_chunk_size"),
    *("sliding_window_pattern", "hybrid_layer_pattern"),
)

Shape = tuple[int, ...]


@dataclass(frozen=True)
class BlockFacts:
    """Sizes of one kind of block."""

    linears: dict[str, tuple[int, int]]
    """(inputs, outputs) of each linear layer, by its name in the block.

    For a layer with experts: of the experts that one token uses, together.
    """
    weights_bytes: int
    experts: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) of all routed experts of a layer together, by its name."""
    norms: int = 2
    """Norms over all D features; at least 2."""
    mixers: tuple[MixerFacts, ...] = ()
    """What mixes the tokens; empty for a block that only has an MLP."""
    sparse: bool = False
    """Whether an activation of its MLP depends on all features, so that slices of it do, too."""
    dense: tuple[str, ...] = ()
    """Linear layers that are not quantized, of a quantized model."""
    arrays: dict[str, Shape] = field(default_factory=dict, compare=False, repr=False)
    """The shapes of all its arrays by name, those of experts together."""


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model in memory, with its floats in the compute dtype."""

    kinds: tuple[BlockFacts, ...]
    """The kinds of blocks; each kind is compiled separately."""
    order: tuple[int, ...]
    """For each block from the first to the last, the index of its kind in `kinds`."""
    hidden: int
    """Hidden size D."""
    vocabulary: int
    """Vocabulary size V."""
    heads: int
    """Number of query heads."""
    float_bytes: int
    """Size of a number of the compute dtype."""
    vocabulary_bytes: int
    """The embeddings of tokens, and the head if it is not tied."""
    rest_bytes: int
    """All other weights outside of the blocks."""
    quantized: bool
    """Whether linear layers are quantized, but for those that the blocks call dense."""
    softcaps: bool = False
    """Whether attention scores and logits pass through a tanh, as in Gemma 2."""
    passed: int = 0
    """Features that a block passes on in addition to D: more streams, or keys and values that
    later blocks share."""
    head_dense: bool = False
    """Whether the head is not quantized, of a quantized model."""
    config: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """The model's configuration."""
    known_caches: tuple[RowCache, ...] | None = field(default=None, compare=False, repr=False)
    """`row_caches`, if it is known."""
    config_digest: str = field(default="", compare=False)
    """Of the configuration, which also says what has no size, such as activations."""

    @cached_property
    def row_caches(self) -> tuple[RowCache, ...]:
        """The caches of a row, of all blocks, as mlx-lm's model has them; without a model that can
        be built, keys and values of D features each. Loads mlx, unless they are known."""
        if self.known_caches is not None:
            return self.known_caches
        with contextlib.suppress(Exception):  # the code of an architecture may raise any type
            from your_ai.hub.built_tensors import caches_built

            return caches_built(self.config, self.float_bytes)
        return (RowCache(0, 2 * self.hidden * self.float_bytes),) * self.blocks

    @property
    def has_windows(self) -> bool:
        """True if attention of some blocks may reach back a number of tokens only."""
        text = {**self.config, **text_part(self.config)}
        return bool(text.get("use_sliding_window", True)) and any(map(text.get, WINDOWS))

    @property
    def head_quantized(self) -> bool:
        return self.quantized and not self.head_dense

    @property
    def blocks(self) -> int:
        return len(self.order)

    @memoized
    def neighbours_bytes(self, count: float, resident: int = 0) -> int:
        """Weights in memory together while blocks are read one after the other.

        count: blocks at a time; a block counts whole, and its smaller neighbour with the rest.
        resident: of the blocks, from the last, that are not read.
        """
        read = self.blocks - resident
        if read < 2:
            return self.blocks_bytes - self.bytes_of_last(resident)
        sizes = [self.kinds[kind].weights_bytes for kind in self.order[:read]]
        return max(int(max(pair) + (count - 1) * min(pair)) for pair in set(pairwise(sizes)))

    @property
    def blocks_bytes(self) -> int:
        """Weights of all blocks."""
        return self.bytes_of_last(self.blocks)

    @property
    def weights_bytes(self) -> int:
        return self.blocks_bytes + self.vocabulary_bytes + self.rest_bytes

    @cached_property
    def linears(self) -> dict[str, tuple[int, int]]:
        """The linear layers of all kinds of blocks, as in BlockFacts."""
        return {name: size for kind in self.kinds for name, size in kind.linears.items()}

    @cached_property
    def experts(self) -> dict[str, tuple[int, int]]:
        """The routed experts of all kinds of blocks, as in BlockFacts."""
        return {name: size for kind in self.kinds for name, size in kind.experts.items()}

    @property
    def norms(self) -> int:
        """The maximum number of norms of a block."""
        return max((kind.norms for kind in self.kinds), default=2)

    @memoized
    def bytes_of_last(self, count: int) -> int:
        """Weights of the last `count` blocks."""
        return sum(self.kinds[kind].weights_bytes for kind in self.last(count))

    def last(self, count: int) -> tuple[int, ...]:
        """The kinds of the last `count` blocks."""
        return self.order[max(0, len(self.order) - count) :]

    @memoized
    def counts_of_last(self, count: int) -> dict[int, int]:
        """The number of blocks of each kind among the last `count`.

        Kinds that only differ in their mixers count as the first of them.
        """
        return dict(Counter(self.alike_of_last(count)))

    def alike_of_last(self, count: int) -> tuple[int, ...]:
        """The kinds of the last `count` blocks, as in `counts_of_last`."""
        return tuple(self._first_alike[kind] for kind in self.last(count))

    @cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """The first kind whose layers have the same sizes, for each kind."""
        sizes = [(kind.linears, kind.experts, kind.norms, kind.dense) for kind in self.kinds]
        return tuple(sizes.index(size) for size in sizes)

    @cached_property
    def alone(self) -> tuple[ModelFacts, ...]:
        """The facts of a model that only has blocks of one kind, for each kind."""
        return tuple(replace(self, kinds=(k,), order=(0,) * self.blocks) for k in self.kinds)


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
    entries, config = as_in_mlx(folder, config, list(entries_of(folder)))
    if any(entry.name.endswith(".scales") for entry in entries):
        quantize = None  # this is the quantized copy
    return facts_from(entries, config, float_bytes, quantize)


def facts_of_known(model: Known, float_bytes: int, quantize: int | None = None) -> ModelFacts:
    """The facts of a model of the registry, without its files and without mlx.

    quantize: as in `facts_of`.
    """
    bits = quantize if model.bits is None else None
    return facts_from(model.tensors, config_of(model), float_bytes, bits)


def facts_of_config(
    config: dict[str, Any], float_bytes: int, quantize: int | None = None
) -> ModelFacts:
    """The facts of a model from its config.json alone; mlx-lm builds it, without any weight.

    float_bytes: size of a number of the compute dtype.
    quantize: as in `facts_of`.

    Raises ValueError with a reason if mlx-lm cannot build the model.
    """
    from your_ai.hub.built_tensors import tensors_built  # loads mlx

    entries, config = tensors_built(config)
    bits = None if quantization_in(config) else quantize
    return facts_from(entries, config, float_bytes, bits)


def digest_of(config: dict[str, Any]) -> str:
    """The digest of a configuration, without what differs between a model and its copies."""
    kept = {k: v for k, v in config.items() if not k.startswith(("_", "quantization", "torch"))}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:32]


def facts_from(
    entries: list[Entry],
    config: dict[str, Any],
    float_bytes: int,
    quantize: int | None,
    group_size: int = GROUP_SIZE,
) -> ModelFacts:
    """The facts of a model with these tensors.

    group_size: for tensors that will be quantized to `quantize` bits.
    """
    text = {**config, **text_part(config)}
    entries = [entry for entry in entries if is_held(entry.name, text)]
    by_block: dict[int, list[Entry]] = {}
    vocabulary_bytes = rest_bytes = 0
    for entry in entries:
        place = place_of(entry.name)[0]
        if place is not None:
            by_block.setdefault(place, []).append(entry)
            continue
        size = tensor_bytes(entry, float_bytes, quantize, group_size)
        if layer_of(entry.name) in VOCABULARY:
            vocabulary_bytes += size
        else:
            rest_bytes += size
    hidden = int(first_of(text, HIDDEN, 0))
    count = max(by_block, default=-1) + 1
    if count > MOST_BLOCKS:
        raise ValueError(f"a tensor is in block {count - 1}, and no model has so many")
    types, sparse = layer_types_of(text, count), sparse_blocks(text)
    quantized = quantize is not None or any(e.name.endswith(".scales") for e in entries)
    divisor = None if quantize is None else group_size
    kinds: dict[Any, int] = {}
    found: list[BlockFacts] = []
    order: list[int] = []
    for index in range(count):
        tensors = by_block.get(index, [])
        own = quantization_of(config, tensors)
        key = (frozenset((name_in_block(e), e.shape) for e in tensors), str(own),
               types[index], index in sparse)  # fmt: skip
        if key not in kinds:
            size = sum(tensor_bytes(e, float_bytes, quantize, group_size) for e in tensors)
            kinds[key] = len(found)
            block = block_facts(tensors, config, text, size, hidden)
            dense = dense_layers(tensors, block.linears, divisor) if quantized else ()
            found.append(replace(block, sparse=index in sparse, dense=dense))
        order.append(kinds[key])
    return ModelFacts(
        passed=passed_on([(types[i], found[k]) for i, k in enumerate(order)], text, hidden),
        kinds=tuple(found),
        order=tuple(order),
        hidden=hidden,
        vocabulary=int(text.get("vocab_size") or 0),
        heads=int(first_of(text, HEADS, 1)),
        float_bytes=float_bytes,
        vocabulary_bytes=vocabulary_bytes,
        rest_bytes=rest_bytes,
        quantized=quantized,
        config=config,
        config_digest=digest_of(config),
        head_dense=quantized and is_head_dense(entries, divisor),
        softcaps=bool(text.get("attn_logit_softcapping", text.get("model_type") == "gemma2")),
    )


@functools.lru_cache(maxsize=1 << 16)  # names of large models are asked for several times
def place_of(name: str) -> tuple[int | None, str]:
    """The block of a tensor, None outside the blocks, and its name there."""
    match = BLOCK.search(name)
    return (None, name) if match is None else (int(match[1]), match[2])


def name_in_block(entry: Entry) -> str:
    return place_of(entry.name)[1]


def layer_types_of(config: dict[str, Any], count: int) -> list[str]:
    """The name that the config gives each block, such as one with a window; "" if it gives none."""
    found = config.get("layer_types")
    if not isinstance(found, list) or len(found) < count:
        return [""] * count
    return [str(each) for each in found]


def sparse_blocks(text: dict[str, Any]) -> frozenset[int]:
    """The blocks that only keep the largest activations of a token's MLP, as some of Gemma 3n."""
    pattern = text.get("activation_sparsity_pattern")
    if not isinstance(pattern, list):
        return frozenset()
    return frozenset(i for i, share in enumerate(pattern) if isinstance(share, float) and share)


def block_facts(
    entries: list[Entry],
    config: dict[str, Any],
    text: dict[str, Any],
    weights_bytes: int,
    hidden: int,
) -> BlockFacts:
    """The facts of a block with these tensors."""
    linears, experts = linears_of(entries, config, text)
    shapes = {name_in_block(entry): entry.shape for entry in entries}
    norms = sum(
        shape == (hidden,) and "norm" in name and name.endswith(".weight")
        for name, shape in shapes.items()
    )
    mixers = mixers_of(shapes, linears, text)
    arrays: dict[str, Shape] = {}
    for entry in entries:
        layer, one = linear_named(entry)
        name = f"{layer}.weight" if one is not None else name_in_block(entry)
        counted = arrays.get(name, (0,))[0] + 1
        arrays[name] = entry.shape if one is None else (counted, *entry.shape)
    return BlockFacts(linears, weights_bytes, experts, max(2, norms), mixers, arrays=arrays)


def first_of(config: dict[str, Any], names: tuple[str, ...], default: int) -> Any:
    found = (config[name] for name in names if config.get(name) is not None)
    return next(found, default)


def layer_of(name: str) -> str:
    """The last part of the name of a tensor's layer."""
    return name.rpartition(".")[0].rpartition(".")[2]


def is_held(name: str, config: dict[str, Any]) -> bool:
    """Return whether mlx-lm loads this tensor."""
    block = place_of(name)[0]
    if block is not None and block >= (config.get("num_hidden_layers") or math.inf):
        return False  # a block for multi-token prediction
    tied = layer_of(name) == "lm_head" and config.get("tie_word_embeddings") is True
    return not tied and LEFT_OUT.search(name) is None


def quantization_of(config: dict[str, Any], entries: list[Entry]) -> dict[str, Any]:
    """The settings of the layers in a block that are quantized in their own way, by name."""
    every = config.get("quantization") or {}
    layers = {entry.name.rpartition(".")[0] for entry in entries}
    own = {name: every[name] for name in layers if isinstance(every.get(name), dict)}
    places = [(place_of(f"{name}."), name) for name in sorted(own)]
    return {place: own[name] for (block, place), name in places if block is not None}


def linears_of(
    entries: list[Entry], config: dict[str, Any], text: dict[str, Any]
) -> tuple[dict[str, tuple[int, int]], dict[str, tuple[int, int]]]:
    """The fields `linears` and `experts` of BlockFacts."""
    scales = {e.name: e.shape for e in entries if e.name.endswith(".scales")}
    quantization = quantization_in(config)
    sizes: dict[str, tuple[int, int]] = {}
    counts: dict[str, int] = {}  # number of experts
    for entry in entries:
        name, _, leaf = entry.name.rpartition(".")
        if leaf != "weight" or len(entry.shape) < 2:
            continue
        layer, one = linear_named(entry)
        packed = scales.get(f"{name}.scales")
        if one is not None:
            counts[layer] = max(counts.get(layer, 0), int(one[1]) + 1)
        elif len(entry.shape) == 3 and ("switch" in layer or "experts" in layer):
            counts[layer] = entry.shape[0]
        elif len(entry.shape) > 2 or (packed is None and is_plain(layer, text)):
            continue
        inputs = entry.shape[-1]
        if packed is not None:
            own = quantization.get(name)
            found = own if isinstance(own, dict) else quantization
            inputs = packed[-1] * group_size_of(found)
        sizes[layer] = (inputs, entry.shape[-2])
    used = experts_used(text)
    linears = {
        name: (used * i, used * o) if name in counts else (i, o) for name, (i, o) in sizes.items()
    }
    experts = {name: (n * sizes[name][0], n * sizes[name][1]) for name, n in counts.items()}
    return linears, experts


def linear_named(entry: Entry) -> tuple[str, re.Match[str] | None]:
    """The name of a weight's layer in its block, as in BlockFacts, and where it names an expert."""
    layer = name_in_block(entry).removesuffix(".weight")
    one = EXPERT.search(f"{layer}.")
    if one is not None:
        layer = f"{layer}.".replace(one[0], "switch_mlp.").removesuffix(".")
    return layer, one


def dense_layers(
    entries: list[Entry], linears: Container[str], group_size: int | None
) -> tuple[str, ...]:
    """The linear layers in a block of a quantized model that are not quantized.

    group_size: as in `is_dense`.
    """
    packed = packed_in(entries)
    weights = [e for e in entries if e.name.endswith(".weight")]
    named = {linear_named(e)[0] for e in weights if is_dense(e, packed, group_size)}
    return tuple(sorted(name for name in named if name in linears))


def is_head_dense(entries: list[Entry], group_size: int | None) -> bool:
    """Return whether the head of a quantized model, or the embedding in its place, is dense."""
    weights = {
        layer_of(e.name): e
        for e in entries
        if e.name.endswith(".weight") and place_of(e.name)[0] is None
    }
    names = (*HEADS_OF_MODELS, *VOCABULARY)
    head = next((weights[name] for name in names if name in weights), None)
    return head is not None and is_dense(head, packed_in(entries), group_size)


def packed_in(entries: list[Entry]) -> set[str]:
    """The names of the layers that are quantized in the files."""
    return {e.name.removesuffix(".scales") for e in entries if e.name.endswith(".scales")}


def is_dense(weight: Entry, packed: Container[str], group_size: int | None) -> bool:
    """Return whether a weight of a quantized model is not quantized.

    group_size: if the model is quantized on load; weights that it does not divide stay.
    """
    if group_size is not None:
        return weight.shape[-1] % group_size != 0
    return weight.name.removesuffix(".weight") not in packed


def passed_on(blocks: list[tuple[str, BlockFacts]], text: dict[str, Any], hidden: int) -> int:
    """`ModelFacts.passed`, where the config says it; blocks: with their types."""
    found = hidden * (max(1, int(text.get("altup_num_inputs") or 1)) - 1)
    mixers = {(own, mixer.kind, mixer.cached) for own, block in blocks for mixer in block.mixers}
    if text.get("num_kv_shared_layers") or text.get("use_cla"):
        found += sum(cached for _, _, cached in mixers)
    if any(kind == RWKV7 for _, kind, _ in mixers):
        found += hidden  # the values of the first block
    return found


def is_plain(layer: str, text: dict[str, Any]) -> bool:
    """Return whether a matrix of this name is no linear layer of mlx-lm, and so has no adapter."""
    leaf = layer.rpartition(".")[2]
    if leaf in READ_OTHERWISE:
        return True
    return leaf.endswith("norm") or (leaf == "gate" and text.get("model_type") in PLAIN_GATES)


@memoized
def layers_named(
    facts: ModelFacts, targets: tuple[str, ...], experts: bool = False
) -> list[tuple[int, int]]:
    """(inputs, outputs) of the linear layers of a block that match --lora-targets.

    experts: the value of --lora-experts.
    """
    return [facts.linears[name] for name in names_of(facts, targets, experts)]


@memoized
def adapters_named(
    facts: ModelFacts, targets: tuple[str, ...], experts: bool = False
) -> list[tuple[int, int]]:
    """The sizes of `layers_named`, but with a layer's experts together: each has an adapter."""
    names = names_of(facts, targets, experts)
    return [facts.experts.get(name, facts.linears[name]) for name in names]


@memoized
def names_of(facts: ModelFacts, targets: tuple[str, ...], experts: bool = False) -> list[str]:
    """The linear layers of a block that match --lora-targets."""
    return [
        name
        for name in facts.linears
        if any(
            selects(target, name, is_expert=name in facts.experts, experts=experts)
            for target in targets
        )
    ]


@memoized
def arrays_named(facts: ModelFacts, targets: tuple[str, ...], experts: bool = False) -> list[Shape]:
    """The shapes of all arrays of a block, or of the linear layers that match --lora-targets."""
    every = facts.kinds[0].arrays
    if ALL_LINEAR in targets:
        return list(every.values())
    layers = names_of(facts, targets, experts)
    return [shape for name, shape in every.items() if name.rpartition(".")[0] in layers]


def vocabulary_held(facts: ModelFacts) -> ModelFacts:
    """The same facts, for a model whose embedding and head must stay in memory."""
    rest = facts.rest_bytes + facts.vocabulary_bytes
    return replace(facts, rest_bytes=rest, vocabulary_bytes=0)


# Sizes of the layers of a model, for estimates


MLPS = ("mlp", "feed_forward")  # they are computed in slices of features, if they are gated


@memoized
def widest_outputs(facts: ModelFacts) -> int:
    """M, the outputs of the widest linear layer of a block."""
    return max((o for kind in facts.kinds for _, o in kind.linears.values()), default=0)


@memoized
def largest_matrix_bytes(facts: ModelFacts) -> int:
    """Bytes of the largest weight matrix of a block, dequantized."""
    sizes = [size for kind in facts.kinds for size in kind.linears.values()]
    return max((i * o for i, o in sizes), default=0) * facts.float_bytes


@memoized
def quantized_matrix_bytes(facts: ModelFacts) -> int:
    """The same of those that are quantized; 0 if none is."""
    sizes = [
        inputs * outputs
        for kind in facts.kinds
        for name, (inputs, outputs) in kind.linears.items()
        if is_quantized(facts, kind, name)
    ]
    return max(sizes, default=0) * facts.float_bytes


def is_quantized(facts: ModelFacts, kind: BlockFacts, name: str) -> bool:
    """Return whether a linear layer of a block is quantized."""
    return facts.quantized and name not in kind.dense


@memoized
def dense_share(facts: ModelFacts) -> float:
    """The share of the layers in the MLP of such blocks, or of all if they have none, that are not
    quantized: from 0 to 1, which runs whole in the forward pass."""
    if not facts.quantized:
        return 1.0
    layers = [(name, name in kind.dense) for kind in facts.kinds for name in kind.linears]
    found = [is_dense for name, is_dense in layers if name.partition(".")[0] in MLPS]
    found = found or [is_dense for _, is_dense in layers]
    return sum(found) / len(found) if found else 0.0


def backward_features(hidden: int) -> int:
    """About the features of a slice of an MLP in its backward pass, for hidden size D."""
    return max(FEWEST_FEATURES, hidden // 2)


def forward_features(hidden: int) -> int:
    """The same in its forward pass, which needs a third of the arrays; of quantized weights."""
    return 2 * max(FEWEST_FEATURES, hidden)


def slice_width(inner: int, about: int) -> int:
    """The features of a slice of an MLP with F = `inner` features; near `about`, at most F."""
    count = -(-inner // about)
    return min(inner, -(-inner // count // SLICE_STEP) * SLICE_STEP)


def head_step(facts: ModelFacts, count: int) -> int:
    """Tokens per slice of the vocabulary, for `count` hidden states."""
    return max(1, HEAD_SLICE_BYTES // (4 * max(count, facts.hidden)))
