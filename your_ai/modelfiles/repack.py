"""Repack AWQ and GPTQ weights for MLX.

mlx-lm reads AWQ, and would read GPTQ as AWQ, whose order of bits differs; it keeps the result in
memory. Here both are converted from what their formats mean (`hub.awq_gptq`), and written once to
a folder in MLX's layout (`modelfiles.quantized_copies`), which all plans and mlx-lm can use.

Shapes: I inputs, O outputs, G groups in the files, b bits.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.utils import infer_quant_config, load_config

from your_ai.errors import UserError, first_line
from your_ai.gates.untrusted import read_json
from your_ai.hub.awq_gptq import (
    PARTS,
    WORD_BITS,
    PackedLayer,
    Packing,
    common,
    packed_layers,
    packing_of,
    refused,
)
from your_ai.hub.built_tensors import build
from your_ai.hub.check import check_model
from your_ai.memory.facts import entries_of
from your_ai.modelfiles.shards import Lazy, lazy_of
from your_ai.nets.mlx_types import load_arrays
from your_ai.nets.model import positions_of
from your_ai.nets.rounding import MLX_PARTS

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of 8 neighboring outputs
LEAST_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # the lowest bit of each value
WORK_ARRAYS = 8  # arrays as large as a result that computing it needs, at most


def is_repacked(source: Path) -> bool:
    """Return whether a model must be repacked: its weights are AWQ or GPTQ."""
    config = read_json(source / "config.json", "a model folder has one")
    return packing_of(source, config) is not None


def repacked_lazily(source: Path) -> tuple[nn.Module, dict[str, Any], int]:
    """The model of an AWQ or GPTQ folder in MLX's layout, lazily.

    Returns the model, its configuration and `Lazy.input_bytes`. Raises UserError if its layout is
    not supported.
    """
    raw_config = check_model(source)
    packing = packing_of(source, raw_config)
    if packing is None:
        raise UserError(f"{source}: is neither AWQ nor GPTQ")
    layers = packed_layers(source, packing, entries_of(source))
    if not layers:
        raise refused(source, packing.method, "no tensor is named qweight")
    weights: dict[str, mx.array] = {}
    for file in sorted(source.glob("model*.safetensors")):
        weights |= load_arrays(file)
    arrays = repacked(source, packing, layers, weights)
    config = {**load_config(source), **positions_of(raw_config)}
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
    try:
        network = build(copy.deepcopy(config))
        put_weights(network, renamed(config, without_zero_biases(network, layers, arrays), layers))
        config["quantization"] = quantization_of(network)
        config["quantization_config"] = config["quantization"]
    except Exception as error:  # the code of an architecture may raise any type
        raise UserError(f"{source}: mlx-lm cannot load this model ({first_line(error)})") from error
    network.freeze()
    network.eval()
    sizes = [array.nbytes for _, array in tree_flatten(network.parameters())]
    return network, config, WORK_ARRAYS * max(sizes)


def repacked_model(source: Path) -> Lazy:
    """The repacked model, to be written."""
    network, config, most = repacked_lazily(source)
    return lazy_of(network, config, most)


def without_zero_biases(
    network: nn.Module, layers: Mapping[str, PackedLayer], arrays: dict[str, mx.array]
) -> dict[str, mx.array]:
    """The arrays without the biases of zeros that AutoGPTQ writes for layers that have none."""
    known = {name for name, _ in tree_flatten(network.parameters())}
    biases = {f"{name}.bias" for name in layers} & arrays.keys() - known
    return {n: a for n, a in arrays.items() if n not in biases or mx.any(a != 0).item()}


def renamed(
    config: dict[str, Any], arrays: dict[str, mx.array], layers: Mapping[str, PackedLayer]
) -> dict[str, mx.array]:
    """The arrays with mlx-lm's names, with experts stacked.

    Many architectures only know the name `weight` there, so scales and biases pass under it, too.
    """
    others = {n: a for n, a in arrays.items() if n.rpartition(".")[0] not in layers}
    others |= {f"{n}.bias": arrays[f"{n}.bias"] for n in layers if f"{n}.bias" in arrays}
    found: dict[str, dict[str, mx.array]] = {}
    for part in MLX_PARTS:
        given = others | {f"{name}.weight": arrays[f"{name}.{part}"] for name in layers}
        network = build(copy.deepcopy(config))  # some change when they rename, so only once each
        found[part] = network.sanitize(given) if hasattr(network, "sanitize") else given
    weights = dict(found["weight"])
    for name, array in found["weight"].items():
        if name.endswith(".weight") and array.dtype == mx.uint32:
            for part in MLX_PARTS[1:]:
                weights[f"{name.removesuffix('.weight')}.{part}"] = found[part][name]
    return weights


def put_weights(network: nn.Module, weights: dict[str, mx.array]) -> None:
    """Quantize the layers that have packed weights, and set all weights, as mlx-lm does."""

    def settings_of(path: str, layer: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(layer, "to_quantized") or f"{path}.scales" not in weights:
            return False
        return infer_quant_config(path, layer, weights)

    nn.quantize(network, class_predicate=settings_of)
    network.load_weights(list(weights.items()), strict=True)


def quantization_of(network: nn.Module) -> dict[str, Any]:
    """The `quantization` of a config.json: that of most layers, and of those that differ."""
    found = {
        path: {"group_size": layer.group_size, "bits": layer.bits, "mode": layer.mode}
        for path, layer in network.named_modules()
        if "scales" in layer
    }
    default = common(found.values())
    return default | {path: settings for path, settings in found.items() if settings != default}


def repacked(
    folder: Path, packing: Packing, layers: Mapping[str, PackedLayer], weights: dict[str, mx.array]
) -> dict[str, mx.array]:
    """All arrays of a model, with packed layers in MLX's layout; all floats in the scales' dtype.

    Raises UserError if the groups of a layer are not of neighboring inputs.
    """
    dtype = weights[f"{next(iter(layers))}.scales"].dtype
    found: dict[str, mx.array] = {}
    for name, array in weights.items():
        layer, _, part = name.rpartition(".")
        if layer not in layers:
            is_float = mx.issubdtype(array.dtype, mx.floating)
            found[name] = array.astype(dtype) if is_float else array
        elif part == "qweight":
            parts = {each: weights.get(f"{layer}.{each}") for each in PARTS}
            check_order(folder, packing, layer, layers[layer], parts["g_idx"])
            for leaf, made in layer_arrays(packing, layers[layer], parts).items():
                found[f"{layer}.{leaf}"] = made if leaf == "weight" else made.astype(dtype)
        elif part not in PARTS:
            found[name] = array.astype(dtype)
    return found


def check_order(
    folder: Path, packing: Packing, name: str, layer: PackedLayer, groups: mx.array | None
) -> None:
    """Raise UserError if inputs of a group are not neighbors. groups: (I,), or None if they are."""
    if groups is None:
        return
    expected = mx.arange(layer.inputs, dtype=mx.int32) // layer.group_size
    if not mx.array_equal(groups, expected).item():
        why = f"the inputs of {name} are not grouped in order (g_idx, from desc_act: true)"
        raise refused(folder, packing.method, f"{why}, which MLX cannot compute with")


def layer_arrays(
    packing: Packing, layer: PackedLayer, parts: Mapping[str, mx.array | None]
) -> dict[str, mx.array]:
    """The arrays of a layer in MLX's layout: weight (O, I * b / 32), scales and biases (O, G).

    biases: float32, not rounded yet.
    """
    qweight, scales = parts["qweight"], parts["scales"]
    assert qweight is not None
    assert scales is not None
    qweight = qweight.view(mx.uint32)
    # A word of GPTQ has neighboring inputs of one output, the first in its lowest bits: as MLX.
    weight = turned(qweight) if packing.method == "awq" else mx.contiguous(qweight.T)
    zeros = zero_points(packing, layer, parts["qzeros"])
    biases = -zeros * scales.astype(mx.float32)
    repeats = layer.group_size // layer.mlx_group_size
    scales, biases = (mx.repeat(array.T, repeats, axis=1) for array in (scales, biases))
    return {"weight": weight, "scales": mx.contiguous(scales), "biases": mx.contiguous(biases)}


def turned(qweight: mx.array) -> mx.array:
    """(I, O / 8) words of eight outputs, in AWQ's order, -> (O, I / 8) words of eight inputs."""
    inputs, words = qweight.shape
    rows = qweight.reshape(inputs // 8, 8, words)
    places = 4 * mx.arange(8, dtype=mx.uint32)[None, :, None]
    found = [(((rows >> (4 * place)) & 15) << places).sum(axis=1) for place in AWQ_ORDER]
    turned_words = mx.stack([each.astype(mx.uint32).T for each in found], axis=1)
    return turned_words.reshape(8 * words, inputs // 8)


def zero_points(packing: Packing, layer: PackedLayer, qzeros: mx.array | None) -> mx.array:
    """(G, O) float32, or a number if all are the same."""
    if qzeros is None:
        return mx.array(float(1 << (layer.bits - 1)))
    qzeros = qzeros.view(mx.uint32)
    less_one = packing.zeros_less_one
    if less_one and layer.bits in LEAST_ONES:
        # Added to whole words: where a zero point of 0 borrowed from its neighbor, that is undone.
        qzeros, less_one = qzeros + mx.array(LEAST_ONES[layer.bits], mx.uint32), False
    values = unpacked(qzeros, layer.bits)
    if packing.method == "awq":
        groups = values.shape[0]
        values = values.reshape(groups, -1, 8)[..., mx.array(AWQ_ORDER)].reshape(groups, -1)
    return values + 1 if less_one else values


def unpacked(words: mx.array, bits: int) -> mx.array:
    """(N, M * b / 32) words with M values each row, the first in the lowest bits, -> (N, M)."""
    rows, count = words.shape[0], words.shape[1] * WORD_BITS // bits
    ones = mx.ones((rows, count // WORD_BITS), mx.float32)
    return mx.dequantize(words, ones, mx.zeros_like(ones), group_size=WORD_BITS, bits=bits)
