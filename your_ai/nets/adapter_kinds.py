"""The layers of each kind of adapter.

To add a kind, write a module like `lora.py`, enter it in KINDS, and its facts in
`config/adapter_facts.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn

from your_ai.config.adapter_facts import DORA, FULL, LORA, AdapterFacts
from your_ai.nets import dora, full, lora
from your_ai.nets.dora import NORMS as NORMS  # engines give layers their norms by this name
from your_ai.nets.layer_sizes import BY_LAYER, resize, sizes_by_layer
from your_ai.nets.mlx_types import Arrays


class AdapterKind(Protocol):
    """A kind of adapter; its implementations are modules."""

    def put(self, model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
        """Add untrained layers to the last `count` blocks, or let their own arrays be trained.

        parameters: `lora_parameters` of mlx-lm's adapter_config.json.
        """

    def fused_rows(
        self, weight: mx.array, parts: Mapping[str, mx.array], scale: float, rows: slice
    ) -> mx.array:
        """Rows of a layer's weight in float32, (n, I) or (n, O, I), with the adapter fused in.

        parts: the trained arrays of the layer by name. rows: a slice of the first axis.
        """

    def limits(self, model: nn.Module) -> str:
        """A sentence for the user on what cannot use the adapter of this model; or ""."""


KINDS: dict[AdapterFacts, AdapterKind] = {LORA: lora, DORA: dora, FULL: full}
ADAPTED = (lora.Layer, lora.RoundedLayer, dora.Layer)
NORMED = (dora.Layer,)  # the layers of kinds that have norms
Normed = list[tuple[str, dora.Layer]]


def put_adapters(
    model: nn.Module, facts: AdapterFacts, count: int, parameters: dict[str, Any]
) -> None:
    """Do as `AdapterKind.put`, with a rank and a scale of each layer if `parameters` have them."""
    KINDS[facts].put(model, count, parameters)
    if BY_LAYER in parameters:
        modules = dict(model.named_modules())
        for path, size in sizes_by_layer(parameters).items():
            resize(modules[path], size)


def normed_layers(module: nn.Module) -> Normed:
    """The layers of a module that need norms, with their paths."""
    return [(path, child) for path, child in module.named_modules() if isinstance(child, NORMED)]


def compute_magnitudes(module: nn.Module) -> None:
    """Compute the initial magnitudes (the norms of the weights), layer by layer."""
    for _, layer in normed_layers(module):
        layer.compute_magnitudes()


def norms_of(layers: Normed, frozen: Arrays | None = None) -> Arrays:
    """The norms of each layer by path; computed only if the adapter has changed.

    frozen: the weights by path, if the layers themselves do not have them.
    """
    found: Arrays = {}
    for path, layer in layers:
        linear = layer.linear
        if frozen is not None:
            linear = copy.copy(linear)
            dict.update(linear, {leaf: frozen[f"{path}.linear.{leaf}"] for leaf in linear})
        found[f"{path}.{NORMS}"] = layer.norms(linear)
    return found


@contextlib.contextmanager
def use_norms(layers: Normed, norms: Arrays) -> Iterator[None]:
    """Make the layers use these norms, from `norms_of`, until the `with` block ends."""
    for path, layer in layers:
        layer[NORMS] = norms[f"{path}.{NORMS}"]
    try:
        yield
    finally:
        for _, layer in layers:
            del layer[NORMS]


@contextlib.contextmanager
def use_any_norms(layers: Normed) -> Iterator[None]:
    """Do as `use_norms` for layers that were given none, with arrays that only have the right
    shapes: nothing is evaluated."""
    without = [(path, layer) for path, layer in layers if NORMS not in layer]
    with use_norms(without, {f"{path}.{NORMS}": layer.m for path, layer in without}):
        yield
