"""Load models through mlx-lm, and add adapters.

Shapes: B rows, T tokens per row, D hidden size.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm.models.bitlinear_layers import BitLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.utils import load_model

from your_ai.config import ALL_LINEAR, REWARD, SOFT, ByLayer, TrainConfig, defaults, flag, nearest
from your_ai.config.by_layer import OUTSIDE, Place
from your_ai.config.names import selects
from your_ai.config.rounding import OPTION
from your_ai.data.batches import MULTIPLE
from your_ai.errors import UserError, first_line, is_memory_error
from your_ai.gates.text import counted, shown
from your_ai.gates.token_ids import EMBEDDINGS, HEADS, rows_of, vocabulary_of
from your_ai.gates.untrusted import EXPERT
from your_ai.hub.awq_gptq import packing_of
from your_ai.hub.check import check_model
from your_ai.hub.config_values import method_of
from your_ai.memory.workload import VocabularyArray
from your_ai.nets.adapter_kinds import put_adapters
from your_ai.nets.layer_sizes import LayerSize, sizes_in_config
from your_ai.nets.new_tokens import NewTokens
from your_ai.nets.parts import put, weights_read
from your_ai.nets.rounding import WRITTEN
from your_ai.nets.shared_keys import share_keys
from your_ai.nets.vocabulary import (
    put_trained_layers,
    rows_of_layer,
    trained_sizes,
    training_in,
    vocabulary_layers,
    vocabulary_training,
)
from your_ai.nets.vocabulary_lora import TIED, entries_of, put_low_rank
from your_ai.rng import derive_seed

EXPERTS = (SwitchLinear, QuantizedSwitchLinear)
POSITIONS = ("wpe", "position_embeddings", "embed_positions")
TRIED_TOKENS = 8  # length of the short row that tests a model
MATRICES = (".lora_a", ".lora_b")  # the ends of the names of A and B
# Settings that LoRA on the embedding or the head does not work with
WITHOUT_OUTSIDE = (
    *("use_dora", "qat", "init", "lora_dropout"),
    *("train", "add_tokens", "add_special_tokens"),
)
LINEAR = (nn.Linear, nn.QuantizedLinear, *EXPERTS)
R = TypeVar("R")


def load_network(folder: Path, dtype: mx.Dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of a folder and its configuration. The weights are lazy: read on first use.

    Raises UserError if the folder is incomplete or mlx-lm cannot load it.
    """
    raw_config = checked_config(folder)
    try:
        model, config = load_model(folder, lazy=True, model_config=positions_of(raw_config))
        model.freeze()
        model.eval()
        share_keys(model)
    except Exception as error:  # the code of an architecture may raise any type
        method = method_of(raw_config).get("quant_method")
        kind = f", quantized with {shown(method)}" if method else ""
        reason = first_line(error)
        raise UserError(f"{folder}: mlx-lm cannot load this model{kind} ({reason})") from error
    check_quantized_layers(folder, model)
    vocabulary = vocabulary_of(model)
    if vocabulary is not None and vocabulary < TRIED_TOKENS:
        raise UserError(f"{folder}: a model with a vocabulary of {vocabulary} cannot be used")
    check_written_tokens(folder, model, vocabulary)
    cast(model, dtype)
    return model, config


def checked_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder. Raises UserError if mlx-lm cannot read the folder."""
    config = check_model(folder)
    check_packing(folder, config)
    if glob.escape(str(folder)) != str(folder):
        raise UserError(f"{folder}: mlx-lm cannot load from a path with *, ? or [; rename it")
    return config


def check_written_tokens(folder: Path, model: nn.Module, vocabulary: int | None) -> None:
    """Raise UserError if the model's code writes the logits of tokens that it does not have.

    MLX does not check indices: that would damage other memory. Only phi3small writes any.
    """
    written = model.get("_dummy_tokenizer_ids")
    if written is None or vocabulary is None:
        return
    most = int(written.max().item())
    if most >= vocabulary:
        raise UserError(
            f"{folder}: mlx-lm's code of this architecture writes the logits of token {most}, but "
            f"the model has {counted(vocabulary, 'token')}; use a model with the full vocabulary"
        )


def check_packing(folder: Path, config: dict[str, Any]) -> None:
    """Raise UserError for AWQ or GPTQ weights: mlx-lm reads GPTQ as if it were AWQ."""
    if packing_of(folder, config) is not None:
        raise UserError(
            f"{folder}: AWQ and GPTQ weights must be repacked for MLX first; your_ai train, eval "
            "and generate do that"
        )


def check_quantized_layers(folder: Path, model: nn.Module) -> None:
    """Raise UserError for quantized layers that cannot compute here, or cannot be trained."""
    on_cpu = mx.default_device().type == mx.cpu
    for path, layer in model.named_modules():
        if isinstance(layer, nn.QQLinear):
            raise UserError(
                f"{folder}: {path} rounds its inputs, too (quantize_activations in config.json), "
                "so it cannot be trained; remove that line, and only weights are quantized"
            )
        if on_cpu and layer.get("global_scale") is not None:
            raise UserError(
                f"{folder}: {path} has a global scale (NVFP4), which MLX computes with only on a "
                "GPU; use another version of this model"
            )


def positions_of(config: dict[str, Any]) -> dict[str, Any]:
    """Convert the `rope_parameters` of a config.json to the older keys that mlx-lm reads.

    transformers 5 writes only `rope_parameters`. Without the older keys, most architectures of
    mlx-lm would use their default RoPE base instead of the one the model was trained with.
    """
    found: dict[str, Any] = {}
    kinds, text = config.get("rope_parameters"), config.get("text_config")
    if isinstance(kinds, dict):
        whole = kinds.get("full_attention", kinds)  # some configs have one set per attention kind
        found = {key: whole.get(key) for key in ("rope_theta", "partial_rotary_factor")}
        found["rope_local_base_freq"] = kinds.get("sliding_attention", {}).get("rope_theta")
        if whole.get("rope_type", "default") != "default":
            found["rope_scaling"] = whole
        found = {k: v for k, v in found.items() if v is not None and config.get(k) is None}
    if isinstance(text, dict) and (inner := positions_of(text)):
        found["text_config"] = text | inner
    return found


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast all floating-point parameters to `dtype`, except those the model wants to keep.

    Layers remember the dtype of their files, in which `fuse` writes them.
    """
    for layer in model.modules():
        kept = layer.get("scales", layer.get("weight"))
        if isinstance(kept, mx.array) and mx.issubdtype(kept.dtype, mx.floating):
            setattr(layer, WRITTEN, str(kept.dtype).removeprefix("mlx.core."))
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def convert(path: str, array: mx.array) -> mx.array:
        if wanted(path) and mx.issubdtype(array.dtype, mx.floating):
            return array.astype(dtype)
        return array

    model.update(tree_map_with_path(convert, model.parameters()))


def learned_positions(model: nn.Module) -> int | None:
    """The length of the learned position table; None without one.

    MLX does not check indices: a longer text would be read from other memory.
    """
    return rows_of(model, POSITIONS)


def check_positions(model: nn.Module, tokens: int, label: str) -> None:
    """Raise UserError if a row of `tokens` tokens is longer than the learned position table."""
    places = learned_positions(model)
    padded = -(-(tokens - 1) // MULTIPLE) * MULTIPLE
    if places is not None and padded > places:
        raise UserError(
            f"{label}: a row has {counted(tokens, 'token')}, but the model has "
            f"{counted(places, 'position embedding')}; use --max-seq-length "
            f"{places // MULTIPLE * MULTIPLE} and --too-long truncate or split"
        )


class TokenKeys(NamedTuple):
    """The random keys of dropout for each token: two arrays that broadcast to (B, T)."""

    rows: mx.array
    """(B, 1) or (B, T) uint32, the key of the text of each token."""
    places: mx.array
    """(1, T) or (B, T) uint32, the position of each token in its text."""


@dataclass(frozen=True)
class DropoutKeys:
    """The dropout keys of the current pass, shared with the LoRA layers of a model.

    current: the keys of exactly the tokens that the layers receive, or None outside training.
    The engine sets it before each pass, also before one that recomputes a block.
    """

    holder: list[TokenKeys | None]

    @property
    def current(self) -> TokenKeys | None:
        return self.holder[0]

    def set(self, keys: TokenKeys | None) -> None:
        self.holder[0] = keys

    def kept(self, function: Callable[..., R]) -> Callable[..., R]:
        """Wrap `function` so that it always runs with the keys that are current now."""
        keys = self.current

        def run(*args: Any) -> R:
            others = self.current
            self.set(keys)
            try:
                return function(*args)
            finally:
                self.set(others)

        return run


class KeyedDropout(nn.Module):
    """Dropout whose mask is a pure function of (row key, layer, position, feature).

    So the mask does not depend on how a step is split into micro-batches, padded, packed or
    recomputed, and needs no random state. `_features` gives the feature indices of an input
    that has only some of the features. The bits are murmur3's 32-bit finalizer over a counter
    (Appleby, 2011), applied once for the position and once for the feature.
    """

    def __init__(self, p: float, layer: int, keys: DropoutKeys) -> None:
        super().__init__()
        self.p = p
        # An array, so that all layers share one compiled kernel; private, so not a parameter.
        self._layer = uint32(layer)
        self._keys = keys

    def __call__(self, x: mx.array) -> mx.array:
        """x: (B, T, D)"""
        keys = self._keys.current
        if keys is None or self.p == 0:
            return x
        tokens = (keys.rows.shape[0], keys.places.shape[1])
        if x.ndim != 3 or x.shape[:2] != tokens:
            raise ValueError(f"dropout needs a (B, T, D) input, found shape {x.shape}")
        features = self.get("_features", mx.arange(x.shape[2], dtype=mx.uint32))
        keep = dropout_bits(keys, self._layer, features) >= uint32(int(self.p * 2**32))
        return mx.where(keep, x * (1 / (1 - self.p)), 0).astype(x.dtype)


def dropout_bits(keys: TokenKeys, layer: mx.array, features: mx.array) -> mx.array:
    """Uniform random bits, (B, T, D) uint32; layer: () key of a layer; features: (D,) uint32."""
    mixed = _mix(_mix(keys.rows ^ layer) + keys.places * uint32(0x9E3779B9))
    return _mix(mixed[..., None] + features * uint32(0x85EBCA77))


def _mix(h: mx.array) -> mx.array:
    h = (h ^ (h >> 16)) * uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def uint32(value: int) -> mx.array:
    return mx.array(value, mx.uint32)


@dataclass(frozen=True)
class Adapters:
    """The adapter layers that were added to a model."""

    dropout_keys: DropoutKeys
    config: dict[str, Any]
    """Contents of adapter_config.json, from which mlx-lm can add the layers again."""


def add_adapters(model: nn.Module, config: TrainConfig) -> Adapters:
    """Add adapter layers, initialized from the seed, to a frozen model.

    Raises UserError as `adapted_layers` does.
    """
    count, keys = adapted_layers(model, config)
    sizes = layer_sizes(model, config, count, keys)
    parameters = {
        **sizes_in_config(sizes),
        "dropout": config.lora_dropout,
        "keys": list(keys),
    }
    if config.adapter_kind.is_whole:
        parameters = {"keys": None if ALL_LINEAR in config.lora_targets else list(keys)}
    mx.random.seed(derive_seed(config.seed, "adapters"))  # used by from_base
    if config.qat:
        parameters[OPTION] = config.qat
    try:
        put_adapters(model, config.adapter_kind, count, parameters)
    except ValueError as error:
        raise UserError(f"--qat {config.qat}: {error}") from error
    outside = outside_sizes(model, config)
    for added in put_low_rank(model, outside):
        added.start(config.seed)
    cast_matrices(model, config.adapter_dtype)
    dropout_keys = DropoutKeys([None])
    if config.lora_dropout > 0:
        for name, module in model.named_modules():
            if "lora_a" in module:
                layer = derive_seed("dropout", name) % 2**32
                module.dropout = KeyedDropout(config.lora_dropout, layer, dropout_keys)
    return Adapters(
        dropout_keys=dropout_keys,
        config={
            "fine_tune_type": config.adapter_kind.name,
            "model": config.model,
            "num_layers": count,
            "lora_parameters": parameters,
            **training_in(model).entries,
            **entries_of(outside),
        },
    )


def train_vocabulary(model: nn.Module, config: TrainConfig, new: NewTokens) -> None:
    """Let a model train what the settings say of its embedding and head; before its adapters.

    Raises UserError if they cannot be trained.
    """
    vocabulary = vocabulary_of(model)
    if vocabulary is None and (config.train or new.spelled):
        raise UserError("--train, --add-tokens: the embedding of this model was not found")
    asked = vocabulary_training(config.train, new.trained(vocabulary or 0))
    try:
        if config.objective == REWARD and asked.head and vocabulary_layers(model)[1] is not None:
            raise ValueError("a reward model has no head over the vocabulary: --train embeddings")
        put_trained_layers(model, asked, getattr(mx, config.adapter_dtype))
    except ValueError as error:
        raise UserError(f"{'--train' if config.train else '--add-tokens'}: {error}") from error


def adapted_layers(model: nn.Module, config: TrainConfig) -> tuple[int, tuple[str, ...]]:
    """The number of last blocks that get adapters, and the layers, as paths in a block.

    Raises UserError if a target matches no layer, if the model has fewer blocks, or if the rank is
    larger than the layers.
    """
    blocks = model.layers
    _, count = defaults.largest(config, len(blocks))
    if count > len(blocks):
        raise UserError(
            f"--lora-layers {count}: the model has {counted(len(blocks), 'block')}; use "
            f"{len(blocks)} or all"
        )
    adapted = blocks[len(blocks) - count :]
    outside = targets_outside(model, config)
    inside = tuple(target for target in config.lora_targets if target not in outside)
    keys = find_targets(adapted, replace(config, lora_targets=inside)) if inside else ()
    if not keys:
        raise UserError(f"--lora-targets {','.join(outside)}: name layers of blocks, too")
    if config.adapter_kind.is_whole:
        if outside:
            raise UserError(f"--adapter full: trains blocks alone; leave {','.join(outside)} out")
        if (quantized := quantized_layer(adapted)) is not None:
            raise UserError(
                f"--adapter full: {quantized} is quantized, and so has no gradient; use a model "
                "that is not quantized, or train adapters (--adapter lora)"
            )
        return count, keys
    layers = [(place, layer) for _, place, layer in layers_at(model, count, keys)]
    places = [*(place for place, _ in layers), *((OUTSIDE, path) for path in outside.values())]
    for name in ("lora_rank", "lora_alpha"):
        ByLayer.of(getattr(config, name)).check(flag(name), places)
    check_ranks(layers, ranks_used(config, len(blocks)))
    return count, keys


def quantized_layer(blocks: list[nn.Module]) -> str | None:
    """The path in its block of a quantized layer; None if there is none."""
    named = (item for block in blocks for item in block.named_modules())
    return next((path for path, layer in named if "scales" in layer), None)


def targets_outside(model: nn.Module, config: TrainConfig) -> dict[str, str]:
    """The paths of the embedding and the head that --lora-targets names, by target.

    A name that layers of blocks have means those. Raises UserError if one cannot have LoRA, or with
    these settings.
    """
    found: dict[str, str] = {}
    names = {name for block in model.layers for name, _ in block.named_modules()}
    for target in config.lora_targets:
        leaf = target.rpartition(".")[2]
        if leaf not in (*EMBEDDINGS, *HEADS) or any(selects(target, name) for name in names):
            continue
        given = f"--lora-targets {target}"
        try:
            embedding, head = vocabulary_layers(model)
        except ValueError as error:
            raise UserError(f"{given}: {error}") from error
        if head is None:
            raise UserError(f"{given}: {TIED}")
        path = next((path for path in (embedding, head) if selects(target, path)), None)
        if path is None:
            continue
        for name in WITHOUT_OUTSIDE:
            if getattr(config, name):
                raise UserError(f"{flag(name)}: not supported with {given}")
        if config.objective in (REWARD, SOFT):
            raise UserError(f"--objective {config.objective}: not supported with {given}")
        if path == embedding and config.prefix_cache != "off":
            raise UserError(
                f"{given}: the embeddings change in each step, so nothing can be cached; use "
                "--prefix-cache off"
            )
        found[target] = path
    return found


def outside_sizes(model: nn.Module, config: TrainConfig) -> dict[str, LayerSize]:
    """The size of the LoRA on the embedding and the head, by path in the model."""
    ranks, alphas = ranks_used(config, len(model.layers)), ByLayer.of(config.lora_alpha)
    found = {}
    for path in targets_outside(model, config).values():
        rank = int(ranks.at((OUTSIDE, path)))
        found[path] = LayerSize(rank, lora_scale(config, rank, alphas.at((OUTSIDE, path))))
    return found


def vocabulary_sizes(model: nn.Module, config: TrainConfig) -> tuple[VocabularyArray, ...]:
    """The arrays to be trained of the vocabulary of a model without adapters, for the planner."""
    found, modules = list(trained_sizes(model)), dict(model.named_modules())
    for path in targets_outside(model, config).values():
        count, width = rows_of_layer(modules[path]).shape
        is_embedding = path.rpartition(".")[2] in EMBEDDINGS
        found.append(VocabularyArray(count, width, count, True, is_embedding, low_rank=path))
    return tuple(found)


def layers_at(
    model: nn.Module, count: int, keys: Container[str]
) -> Iterator[tuple[str, Place, nn.Module]]:
    """The layers at `keys`, paths in a block, in the last `count` blocks: the path of each in the
    model, its place, and the layer."""
    paths = {id(module): path for path, module in model.named_modules()}
    for index, block in list(enumerate(model.layers))[len(model.layers) - count :]:
        for name, layer in block.named_modules():
            if name in keys:
                yield f"{paths[id(block)]}.{name}", (index, name), layer


def ranks_used(config: TrainConfig, blocks: int) -> ByLayer:
    """The ranks of the layers if memory is no limit; blocks: of the model."""
    return ByLayer.of(config.lora_rank).with_default(defaults.largest(config, blocks)[0])


def layer_sizes(
    model: nn.Module, config: TrainConfig, count: int, keys: Container[str]
) -> dict[str, LayerSize]:
    """The size of the adapter of each layer, by the layer's path in the model; count, keys: as of
    `adapted_layers`."""
    ranks, alphas = ranks_used(config, len(model.layers)), ByLayer.of(config.lora_alpha)
    found = {}
    for path, place, _ in layers_at(model, count, keys):
        rank = int(ranks.at(place))
        found[path] = LayerSize(rank, lora_scale(config, rank, alphas.at(place)))
    return found


def lora_scale(config: TrainConfig, rank: int, alpha: float) -> float:
    """The factor of the product of A and B: alpha / r, or alpha / sqrt(r) with rsLoRA."""
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def cast_matrices(model: nn.Module, dtype: str) -> None:
    """Cast the matrices A and B of new adapters, which are float32.

    Vectors stay in float32: they are few, and rounded ones would change the model before it is
    trained.
    """

    def convert(path: str, array: mx.array) -> mx.array:
        return array.astype(getattr(mx, dtype)) if path.endswith(MATRICES) else array

    model.update(tree_map_with_path(convert, model.trainable_parameters()))


def check_ranks(layers: list[tuple[Place, nn.Module]], ranks: ByLayer) -> None:
    """Raise UserError for a rank that is above every dimension of the layers that have it."""
    largest: dict[int, int] = {}
    for place, layer in layers:
        rank = int(ranks.at(place))
        largest[rank] = max(largest.get(rank, 0), *dimensions_of(layer))
    for rank, most in largest.items():
        if rank > most:
            raise UserError(
                f"--lora-rank {rank}: the adapted layers have at most {most} inputs or outputs; "
                "a rank above that adds nothing"
            )


def dimensions_of(layer: nn.Module) -> tuple[int, int]:
    """(inputs, outputs) of a linear layer, quantized or not, or of each of its experts."""
    *_, outputs, inputs = layer.weight.shape
    if isinstance(layer, nn.QuantizedLinear | QuantizedSwitchLinear):
        inputs = inputs * 32 // layer.bits
    return inputs, outputs


def linear_layers(blocks: list[nn.Module]) -> dict[str, bool]:
    """The paths, relative to a block, of the linear layers that adapters can be added to, and
    whether each holds routed experts in any block.
    """
    found: dict[str, bool] = {}
    for block in blocks:
        kept = used_otherwise(block)
        for name, module in block.named_modules():
            if isinstance(module, LINEAR) and name not in kept:
                expert = isinstance(module, EXPERTS) or EXPERT.search(f"{name}.") is not None
                found[name] = found.get(name, False) or expert
    return found


def find_targets(blocks: list[nn.Module], config: TrainConfig) -> tuple[str, ...]:
    """The paths, relative to a block, of the linear layers that --lora-targets selects."""
    linear = linear_layers(blocks)
    if has_bit_linear(blocks):  # gradients pass through all of them
        raise UserError(
            "--lora-targets: the layers of this model are ternary (BitLinear), which cannot be "
            "adapted: their kernel has no gradient"
        )
    if ALL_LINEAR in config.lora_targets and len(config.lora_targets) > 1:
        raise UserError(
            "--lora-targets: all-linear includes every other layer of the blocks; beside it, only "
            "the embedding and the head can be named"
        )
    found: set[str] = set()
    for target in config.lora_targets:
        matches = {
            name
            for name, is_expert in linear.items()
            if selects(target, name, is_expert=is_expert, experts=config.lora_experts)
        }
        if not matches:
            raise UserError(f"--lora-targets {target}: {why_nothing_matches(target, linear)}")
        found |= matches
    experts = sorted(name for name in found if linear[name])
    supported = config.adapter_kind.adapts_experts
    if experts and (not supported or config.lora_dropout > 0 or config.qat):
        other = "qat" if config.qat else "lora_dropout"
        option = flag(other if supported else config.adapter_kind.setting)
        raise UserError(f"{option}: not supported on the expert layers {', '.join(experts)}")
    return tuple(sorted(found))


def why_nothing_matches(target: str, linear: dict[str, bool]) -> str:
    """Say why a target selects no layer. linear: the `linear_layers`."""
    experts = sorted(name for name in linear if selects(target, name))
    if experts:
        return (
            "only routed experts of the adapted blocks have it; give --lora-experts, or a path: "
            f"{experts[0]}"
        )
    names = sorted({name.rsplit(".", 1)[-1] for name in linear})
    return f"no adapted block has it{nearest(target, names)}; the layers are {', '.join(names)}"


def used_otherwise(block: nn.Module) -> set[str]:
    """The paths of layers whose weight the code of the block reads itself.

    An adapter there would have no effect, or has no such weight.
    """
    return {
        f"{path}.{name}".removeprefix(".")
        for path, module in block.named_modules()
        for name in weights_read(type(module))
    }


def has_bit_linear(blocks: list[nn.Module]) -> bool:
    return any(isinstance(m, BitLinear) for block in blocks for _, m in block.named_modules())


def adapter_arrays(model: nn.Module) -> dict[str, mx.array]:
    """The adapters by path in the model, e.g. `model.layers.2.self_attn.q_proj.lora_a`."""
    return dict(tree_flatten(model.trainable_parameters()))


def set_adapters(model: nn.Module, arrays: dict[str, mx.array]) -> None:
    """Set the adapters to `arrays`, as returned by `adapter_arrays`, in the dtypes of the model's.

    Arrays that are still in a file are read one after the other, each in place of an old one:
    adapters of a high rank take more memory than a step leaves free.

    Raises UserError if names or shapes differ.
    """
    own = adapter_arrays(model)
    dtypes = {name: array.dtype for name, array in own.items()}
    ours = {name: array.shape for name, array in own.items()}
    del own
    theirs = {name: array.shape for name, array in arrays.items()}
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            found, wanted = (text_of_shape(shapes.get(name)) for shapes in (theirs, ours))
            raise UserError(
                f"the adapter does not fit the model: {name} is {found}, expected {wanted}"
            )
    for name, array in arrays.items():
        cast = array.astype(dtypes[name])
        put(model, {name: cast})
        mx.eval(cast)


def text_of_shape(shape: tuple[int, ...] | None) -> str:
    return "missing" if shape is None else " x ".join(map(str, shape))


def check_forward_pass(model: nn.Module, adapters: Adapters, config: TrainConfig) -> None:
    """Run the model on a short row, as in training. Raises UserError if it fails."""
    model.train()
    tokens = mx.arange(TRIED_TOKENS)[None]
    adapters.dropout_keys.set(TokenKeys(mx.zeros((1, 1), mx.uint32), tokens.astype(mx.uint32)))
    try:
        mx.eval(model(tokens))
    except Exception as error:  # the code of an architecture may raise any type
        if is_memory_error(error):
            raise
        if config.lora_dropout > 0 and "dropout" in str(error):
            what = f"--lora-dropout: not supported with these --lora-targets ({first_line(error)})"
        else:
            what = f"{config.model}: the model fails on a short row ({first_line(error)})"
        raise UserError(f"{what}; try other settings, or --dtype float32") from error
    finally:
        adapters.dropout_keys.set(None)
        model.eval()
