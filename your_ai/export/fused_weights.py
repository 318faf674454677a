"""Fuse an adapter into the weights of its base, lazily.

The kind of the adapter (`nets/adapter_kinds.py`) computes the new weight W' as mlx-lm's layers do,
but in float32 and rounded only once, when written. A layer is computed in slices of rows, which
are then concatenated.

Weights that are quantized again are rounded up or down at random, so that their mean is W'. An
adapter changes most weights by less than one quantization step, along a few directions.
Rounding to the nearest value would undo the change: every 4-bit level is also an 8-bit level,
because 255 = 17 x 15. Random rounding errors have no common direction and cancel out.

Shapes: O outputs, I inputs, r rank, E experts. Arguments named `rows` are a slice of the first
axis.
"""

from __future__ import annotations

import copy
import glob
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import get_total_parameters

from your_ai.config.rounding import AFFINE, GGML_TYPES, GROUPS, Rounding
from your_ai.errors import UserError
from your_ai.files import sha256
from your_ai.memory.budget import limit_of
from your_ai.modelfiles.quantized_copies import model_folder
from your_ai.modelfiles.shards import Lazy, WriteProgress, load_as_written, read_bytes, write_model
from your_ai.modelfiles.targets import Work, check_target
from your_ai.nets.adapter_kinds import KINDS, AdapterKind
from your_ai.nets.model import LINEAR
from your_ai.nets.rounding import MLX_PARTS, float32_weight, packed, quantization_of
from your_ai.nets.saved_adapter import Adapter, Trained, check_generates, put_adapter, read_adapter
from your_ai.nets.tokenizer import GENERATION, added_end, content_of, open_tokenizer
from your_ai.nets.vocabulary import TrainedLayer, trained_layers, vocabulary_trained
from your_ai.nets.vocabulary_lora import LowRankLayer
from your_ai.publish.card import exported_card
from your_ai.rng import derive_seed
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS, files_beside

AUTO, SAME, DEQUANTIZED = "auto", "same", "dequantized"
TRAINED = "trained"  # what `auto` is after --qat: the adapted layers as they were rounded
HIGHER = ("4", "5", "6", "8")
FORMS = (AUTO, SAME, DEQUANTIZED, *HIGHER)
DTYPES = (AUTO, "float32", "bfloat16", "float16")
SLICE_BYTES = 4 << 20  # bytes in float32 of the rows that are computed together
SLICES_HELD = 8  # slices in memory at the same time: MLX runs about ten operations ahead


@dataclass(frozen=True)
class Change:
    """A layer of the base whose weights change."""

    layer: nn.Module
    seed: int
    """Seed of the random rounding."""
    parts: Mapping[str, mx.array]
    """The arrays of the adapter; empty if the layer is only dequantized."""
    kind: AdapterKind
    scale: float
    becomes: Rounding | None
    """The format of the result; None if it is not quantized."""
    dtype: mx.Dtype
    """The dtype of the result's floating-point arrays."""
    trained_for: Rounding | None = None
    """The format that the layer was rounded to in training: it is rounded so again."""
    rows: TrainedLayer | None = None
    """The layer with the rows that take the place of some, or are added."""


def base_of(trained: Trained, max_memory_gb: float | None = None) -> Path:
    """The folder with the weights used in training: a copy if it was quantized or repacked."""
    return model_folder(*trained.source, limit_of(max_memory_gb))


def fused_lazily(
    trained: Trained, to: str = AUTO, dtype: str = AUTO, max_memory_gb: float | None = None
) -> Lazy:
    """Return the base with the adapter fused in, under mlx-lm's names of the weights.

    to: the form of a quantized base. `same` quantizes the adapted layers again as they were;
    `4` to `8` quantizes them with this many bits if they have fewer; in both cases all other
    layers stay unchanged. `dequantized` leaves nothing quantized. `auto` is 8, or after training
        with --qat the format of that.
    dtype: of the weights if nothing is quantized; `auto` keeps the dtype of the base.
    max_memory_gb: memory limit for making the quantized copy of the base if it is missing.
    Raises UserError if the combination is not possible.
    """
    source = base_of(trained, max_memory_gb)
    network, config = load_as_written(source)
    parameters = get_total_parameters(network)
    arrays, modules = dict(tree_flatten(network.parameters())), dict(network.named_modules())
    adapter = read_adapter(trained.adapter.folder)  # read again: its arrays are released early
    network.freeze()  # only the adapter stays trainable
    put_adapter(network, adapter)  # checks that it fits
    quantized = any(map(quantization_of, modules.values()))
    to = form_of(to, dtype, source, adapter, modules)
    floats = None if dtype == AUTO else getattr(mx, dtype)
    changes = changes_of(network, modules, adapter, to, floats)
    keeps = getattr(network, "cast_predicate", lambda _: True)

    sizes, written, beside = read_bytes(source, arrays), dict[str, mx.array](), []
    pieces: dict[str, list[mx.array]] = {}
    for name, array in arrays.items():
        path, _, leaf = name.rpartition(".")
        if path in changes and (leaf in MLX_PARTS or changes[path].rows is not None):
            if leaf == "weight":
                read = sum(sizes.get(f"{path}.{part}", 0) for part in MLX_PARTS)
                beside.append(read + put_changed(path, changes[path], written, pieces))
        elif floats is not None and keeps(name) and mx.issubdtype(array.dtype, mx.floating):
            written[name] = array.astype(floats)
            pieces[name] = [array[rows].astype(floats) for rows in slices_of(array)]
            beside.append(sizes[name])
        else:
            written[name] = array
            beside.append(sizes[name] - array.nbytes)
    lazy = Lazy(
        arrays=written,
        input_bytes=max(beside),
        config=config_of(config, changes, to, floats),
        keeps_vision="vision_tower" in getattr(network, "model", {}),
        index={
            "total_size": sum(array.nbytes for array in written.values()),
            "total_parameters": parameters,
        },
        tokenizer_files=trained.tokenizer_files,
        card=exported_card(
            trained, "model", note=note_on(to) if quantized or to == TRAINED else ""
        ),
        pieces=pieces,
    )
    return with_turn_end(lazy, source)


def with_turn_end(lazy: Lazy, source: Path) -> Lazy:
    """Name the token that ends a turn as an end token of the model, if its files do not."""
    tokenizer = open_tokenizer(source, lazy.tokenizer_files)
    end = added_end(source, tokenizer)
    if end is None:
        return lazy
    named = {"eos_token_id": [*sorted(tokenizer.eos_token_ids - {end}), end]}
    generation = content_of(source / GENERATION)
    texts = {GENERATION: json.dumps({**generation, **named}, indent=4)} if generation else {}
    return replace(lazy, config={**lazy.config, **named}, texts=texts)


def note_on(to: str) -> str:
    """A sentence for the card about the weights of a base that was quantized."""
    notes = {
        SAME: "The adapted layers are quantized as they were.",
        TRAINED: "The adapted layers are rounded as they were in training (--qat).",
        DEQUANTIZED: "No layer is quantized.",
    }
    return notes.get(to, f"The adapted layers have {to} bits; the others are as they were.")


# Choosing the changes


def form_of(
    to: str, dtype: str, source: Path, adapter: Adapter, modules: Mapping[str, nn.Module]
) -> str:
    """Resolve `to` for this base: one of FORMS other than `auto`. Raises UserError if invalid."""
    for option, value, known in (("--to", to, FORMS), ("--dtype", dtype, DTYPES)):
        if value not in known:
            raise UserError(f"{option} {value}: give {', '.join(known[:-1])} or {known[-1]}")
    for path in adapter.layers:
        if not isinstance(modules[path], LINEAR) or modules[path].get("global_scale") is not None:
            kind = type(modules[path]).__name__
            raise UserError(f"{adapter.folder}: {path} is a {kind}, which cannot be fused")
    if to == AUTO and adapter.rounding not in ("", *GGML_TYPES):
        return TRAINED
    if not any(map(quantization_of, modules.values())):
        if to in HIGHER:
            then = "fuse it without --to, then quantize the result with your_ai quantize"
            raise UserError(f"--to {to}: {source} is not quantized; {then}")
        return SAME
    to = HIGHER[-1] if to == AUTO else to
    if to != DEQUANTIZED and dtype != AUTO:
        raise UserError(f"--dtype {dtype}: layers stay quantized; add --to {DEQUANTIZED}")
    found = (quantization_of(modules[path]) for path in adapter.layers)
    bits = [0 if own is None else own.bits for own in found]
    if to in HIGHER and int(to) < min(bits):
        raise UserError(
            f"--to {to}: the adapted layers already have {min(bits)} bits; give {min(bits)} or more"
        )
    return to


def changes_of(
    network: nn.Module,
    modules: Mapping[str, nn.Module],
    adapter: Adapter,
    to: str,
    floats: mx.Dtype | None,
) -> dict[str, Change]:
    """The changes by layer path. floats: the dtype of the result; None keeps the layer's dtype."""
    first = next(
        array.dtype
        for _, array in tree_flatten(network.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    )
    changes, after = {}, dict(network.named_modules())
    rows = {layer.path: layer for layer in trained_layers(network)}
    outside = (each for each in vocabulary_trained(network) if isinstance(each, LowRankLayer))
    adapted = adapter.layers | {each.path: each.as_layer for each in outside}
    sizes = adapter.sizes
    for path, layer in modules.items():
        own, parts = quantization_of(layer), adapted.get(path, {})
        if path in rows:
            parts = rows[path].trained
        if parts or (own and to == DEQUANTIZED):
            kind = layer.scales.dtype if own else layer.weight.dtype
            kind = kind if mx.issubdtype(kind, mx.floating) else first
            trained_for: Rounding | None = getattr(after[path], "rounding", None)
            becomes = None if to == DEQUANTIZED else raised(own, to)
            if to == TRAINED:
                becomes = trained_for or own
            seed = derive_seed("fuse", path)
            changes[path] = Change(
                layer, seed, parts, KINDS[adapter.kind],
                sizes[path].scale if path in sizes else adapter.scale, becomes, floats or kind,
                trained_for, rows.get(path),
            )  # fmt: skip
    return changes


def raised(own: Rounding | None, to: str) -> Rounding | None:
    """Return `own` with the bits of `to`, if those are more.

    MXFP8 has eight bits too, but three of them for digits: rounding would undo small changes.
    """
    if own is None or to in (SAME, TRAINED) or (own.bits >= int(to) and own.mode == AFFINE):
        return own
    return Rounding(int(to), own.group_size if own.group_size in GROUPS else GROUPS[0])


def config_of(
    config: dict[str, Any], changes: Mapping[str, Change], to: str, floats: mx.Dtype | None
) -> dict[str, Any]:
    """The config.json of the result, for mlx-lm and transformers."""
    config = copy.deepcopy(config)
    if to == DEQUANTIZED:
        for part in (config, config.get("text_config") or {}):
            part.pop("quantization", None)
            part.pop("quantization_config", None)
        floats = floats or next(iter(changes.values())).dtype
    for path, change in changes.items():
        if change.rows is not None:
            for part in (config, config.get("text_config") or {}):
                if "vocab_size" in part or part is config:
                    part["vocab_size"] = change.rows.count
        if change.becomes is not None and change.becomes != quantization_of(change.layer):
            config.setdefault("quantization", change.becomes.options)[path] = change.becomes.options
    if floats is not None:
        name = str(floats).removeprefix("mlx.core.")
        keys = [key for key in ("dtype", "torch_dtype") if key in config]
        config |= dict.fromkeys(keys or ["torch_dtype"], name)
    return config


# Computing the arrays


def put_changed(
    path: str,
    change: Change,
    written: dict[str, mx.array],
    pieces: dict[str, list[mx.array]],
) -> int:
    """Add the arrays of the changed layer to those of a `Lazy`.

    Returns the bytes for computing them, in addition to what the layer reads.
    """
    parts = changed_pieces(change)
    found = {part: mx.concatenate([p[part] for p in parts]) for part in parts[0]}
    written |= {f"{path}.{part}": array for part, array in found.items()}
    if list(found) == ["weight"]:
        pieces[f"{path}.weight"] = [part["weight"] for part in parts]
        return work_bytes(change)
    return work_bytes(change) + sum(array.nbytes for array in found.values())  # all at once


def changed_pieces(change: Change) -> list[dict[str, mx.array]]:
    """Successive rows of the changed weight: its arrays by their names in the layer."""
    if change.rows is not None:
        every = slices(change.layer, change.rows)
        return [rows_with_trained(change, change.rows, rows) for rows in every]
    pieces: list[dict[str, mx.array]] = []
    for rows in slices(change.layer):
        pieces.append(changed_rows(change, rows, list(pieces[-1].values()) if pieces else []))
    return pieces


def rows_with_trained(change: Change, trained: TrainedLayer, rows: slice) -> dict[str, mx.array]:
    """Rows of an embedding or a head: the base's, which are not rounded again if they stay in their
    format, and the trained ones."""
    layer, count = change.layer, change.layer.weight.shape[0]
    first, last = trained.between(rows.start, min(rows.stop, trained.count))

    def arrays_of(weight: mx.array) -> dict[str, mx.array]:
        if change.becomes is None:
            return {"weight": weight.astype(change.dtype)}
        return packed(weight.astype(mx.float32), change.becomes, change.dtype)

    own = arrays_of(trained.rows_between(first, last))
    if "bias" in trained:
        own["bias"] = trained.bias[first:last].astype(change.dtype)
    if "linear" not in trained:
        return own
    known = slice(min(rows.start, count), min(rows.stop, count))
    base = {name: layer[name][known] for name in own if layer.get(name) is not None}
    if change.becomes != quantization_of(layer):
        base |= arrays_of(dense_rows(layer, known, []))
    places = mx.array(trained.places(rows.start, min(rows.stop, trained.count)))
    return {n: mx.concatenate([base[n].astype(own[n].dtype), own[n]])[places] for n in own}


def changed_rows(change: Change, rows: slice, after: Sequence[mx.array]) -> dict[str, mx.array]:
    """Rows of the changed weight, as in `changed_pieces`, computed only after `after`."""
    weight = dense_rows(change.layer, rows, after)
    if change.parts:
        weight = change.kind.fused_rows(weight, change.parts, change.scale, rows)
    if change.becomes is None:
        return {"weight": weight.astype(change.dtype)}
    if change.becomes.mode == AFFINE and change.becomes != change.trained_for:
        weight = dithered(weight, change.becomes, derive_seed(change.seed, rows.start))
    return packed(weight, change.becomes, change.dtype)


def dense_rows(layer: nn.Module, rows: slice, after: Sequence[mx.array]) -> mx.array:
    """Rows of a layer's weight in float32, computed only after `after`."""
    given = [layer[name][rows] for name in MLX_PARTS if layer.get(name) is not None]
    parts: list[mx.array] = mx.depends(given, list(after)) if after else given
    return float32_weight(dict(zip(MLX_PARTS, parts, strict=False)), quantization_of(layer))


def dithered(weight: mx.array, becomes: Rounding, seed: int) -> mx.array:
    """Add uniform noise of one step, so that rounding to the nearest rounds at random."""
    _, steps, _ = mx.quantize(weight, **becomes.options)
    noise = mx.random.uniform(-0.5, 0.5, weight.shape, key=mx.random.key(seed))
    return weight + mx.repeat(steps, becomes.group_size, axis=-1) * noise


def slices(layer: nn.Module, trained: TrainedLayer | None = None) -> list[slice]:
    """Slices of the first axis; each slice of the weight has about SLICE_BYTES in float32.

    trained: has more rows, if new ones are added.
    """
    if trained is None:
        return slices_of(layer.weight, row_bytes(layer))
    return slices_of(trained.count, row_bytes(layer))


def slices_of(array: mx.array | int, of_row: int = 0) -> list[slice]:
    """Slices of the first axis, of about SLICE_BYTES. array: or its length. of_row: bytes of a row,
    if it becomes larger."""
    if not isinstance(array, int):
        if not array.ndim:
            return []
        of_row = max(of_row, array.nbytes // max(1, array.shape[0]))
        array = array.shape[0]
    step = max(1, SLICE_BYTES // max(1, of_row))
    return [slice(start, start + step) for start in range(0, array, step)]


def row_bytes(layer: nn.Module) -> int:
    """Bytes of one row of the weight in float32."""
    shape: list[int] = list(layer.weight.shape[1:])
    if quantization_of(layer):
        shape[-1] = layer.scales.shape[-1] * layer.group_size
    return 4 * math.prod(shape)


def work_bytes(change: Change) -> int:
    """Bytes for computing some rows of a changed layer, in addition to its input arrays."""
    adapter = sum(array.nbytes for array in change.parts.values())
    rows: int = min(change.layer.weight.shape[0], max(1, SLICE_BYTES // row_bytes(change.layer)))
    return adapter + SLICES_HELD * rows * row_bytes(change.layer)


# Write a fused model to a folder, shard by shard with `modelfiles.shards`


RECORD = "fused.json"


def fuse(
    trained: Trained,
    target: Path,
    to: str = AUTO,
    dtype: str = AUTO,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[WriteProgress]:
    """Write the base with the adapter fused in to `target`. Continues an interrupted `fuse`.

    to, dtype: see `fused_weights.fused_lazily`.
    force: replace an existing model once the new one is complete.
    Raises UserError, before anything is written, if the target is not possible or if memory or
    disk is too small; RunError if the base cannot be read completely.
    """
    check_generates(trained.adapter)
    check_target(target, force)
    if glob.escape(target.name) != target.name:
        raise UserError(
            f"{target}: mlx-lm cannot load a model from a folder with *, ? or [ in its name; "
            "choose another name"
        )
    source, adapter = base_of(trained, max_memory_gb), trained.adapter.folder
    spare_the_run(trained, source, target)
    lazy = fused_lazily(trained, to, dtype, max_memory_gb)
    names = (ADAPTERS, ADAPTER_CONFIG, *files_beside(adapter))
    settings = [*(sha256(adapter / name) for name in names), to, dtype]
    work = work_of(target)
    limit = limit_of(max_memory_gb)
    yield from write_model(lazy, source, work, settings, limit, replaces=force)


def work_of(target: Path) -> Work:
    return Work(target, "fusing", RECORD)


def spare_the_run(trained: Trained, source: Path, target: Path) -> None:
    """Raise UserError if `target` lies in the run's base, adapter or checkpoints."""
    run, there = trained.folder, target.resolve()
    for needed in (trained.base, source, run.adapter, run.checkpoints):
        if there.is_relative_to(needed.resolve()):
            raise UserError(f"{target}: belongs to the run itself ({needed}); choose another name")
