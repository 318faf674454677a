"""Ranks and scales of an adapter whose layers differ in them.

`lora_parameters` of adapter_config.json then also have `by_layer`: [rank, scale] of each layer by
its path in the model; `rank` is the largest of them. Checkpoints have the arrays as they are
trained. mlx-lm knows one rank and one scale, so the adapter that a run leaves is `evened`: ranks
are padded with zeros, and B is multiplied by the layer's scale over `scale`. `even` says so, and
readers here undo it.

Shapes: D inputs, O outputs, E experts, r rank of a layer, R the largest rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

from your_ai.config.adapter_facts import MATRICES
from your_ai.nets.mlx_types import Arrays

BY_LAYER, EVEN = "by_layer", "even"  # in `lora_parameters`


class LayerSize(NamedTuple):
    """The size of the adapter of a layer."""

    rank: int
    scale: float
    """The factor of the product of A and B: alpha / r, or alpha / sqrt(r) with rsLoRA."""


def sizes_in_config(sizes: Mapping[str, LayerSize]) -> dict[str, Any]:
    """The entries of `lora_parameters` with these sizes, by the paths of the layers."""
    rank = max(size.rank for size in sizes.values())
    scale = Counter(size.scale for size in sizes.values()).most_common(1)[0][0]
    if len(set(sizes.values())) == 1:
        return {"rank": rank, "scale": scale}
    return {"rank": rank, "scale": scale, BY_LAYER: {p: list(size) for p, size in sizes.items()}}


def sizes_by_layer(parameters: Mapping[str, Any]) -> dict[str, LayerSize]:
    """The sizes in `lora_parameters`; empty if all layers are alike."""
    found = parameters.get(BY_LAYER, {})
    return {path: LayerSize(int(rank), float(scale)) for path, (rank, scale) in found.items()}


def resize(layer: nn.Module, size: LayerSize) -> None:
    """Give a new layer of the largest rank a size of its own: the first columns of A."""
    layer.scale = size.scale
    for part in MATRICES:
        if layer[part].shape[rank_axis(layer[part], part)] != size.rank:
            layer[part] = of_rank(layer[part], part, size.rank)


def rank_axis(array: mx.array, part: str) -> int:
    """The axis of r; of A: (D, r) or (E, r, D), and of B: (r, O) or (E, O, r)."""
    return 1 if part == "lora_a" else 0 if array.ndim == 2 else 2


def of_rank(array: mx.array, part: str, rank: int) -> mx.array:
    """A or B with only its first `rank` columns or rows, or with zeros up to them."""
    axis = rank_axis(array, part)
    more = rank - array.shape[axis]
    if more > 0:
        return mx.pad(array, [(0, more if at == axis else 0) for at in range(array.ndim)])
    return mx.take(array, mx.arange(rank), axis=axis) if more else array


def evened(arrays: Arrays, config: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Arrays and adapter_config.json of an adapter in the form that mlx-lm loads.

    The products of A and B with their scales are the same. Scaled arrays are in float32.
    """
    parameters = config["lora_parameters"]
    if BY_LAYER not in parameters or parameters.get(EVEN):
        return arrays, config
    rank, scale = int(parameters["rank"]), float(parameters["scale"])
    found = changed(arrays, parameters, lambda size: LayerSize(rank, size.scale / scale))
    return found, {**config, "lora_parameters": {**parameters, EVEN: True}}


def as_trained(arrays: Arrays, config: dict[str, Any]) -> tuple[Arrays, dict[str, Any]]:
    """Undo `evened`."""
    parameters = dict(config["lora_parameters"])
    if not parameters.pop(EVEN, False):
        return arrays, config
    scale = float(parameters["scale"])
    found = changed(arrays, parameters, lambda size: LayerSize(size.rank, scale / size.scale))
    return found, {**config, "lora_parameters": parameters}


def changed(
    arrays: Arrays, parameters: dict[str, Any], change: Callable[[LayerSize], LayerSize]
) -> Arrays:
    """The arrays with other ranks, and B times a factor; change: of a layer's size to both."""
    sizes, found = sizes_by_layer(parameters), dict(arrays)
    for name, array in arrays.items():
        path, _, part = name.rpartition(".")
        if path not in sizes or part not in MATRICES or array.ndim < 2:
            continue  # who uses it compares shapes
        rank, factor = change(sizes[path])
        found[name] = of_rank(array, part, rank)
        if part == "lora_b" and factor != 1:
            found[name] = found[name].astype(mx.float32) * factor
    return found
