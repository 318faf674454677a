"""Adapters of runs with `--init`, for programs that add them to the base as it was published.

Training adds s B A to weights that lack about s B0 A0, of the first adapter: what quantization
took away (loftq), or the largest part of the weights (pissa). To the base itself, only
s (B A - B0 A0) is added: an adapter of twice the rank, as PEFT converts those of PiSSA.

Shapes: D inputs, O outputs, r rank.
"""

from __future__ import annotations

import dataclasses

import mlx.core as mx

from your_ai.config.adapter_starts import ADJUSTED, INIT
from your_ai.nets.layer_sizes import BY_LAYER
from your_ai.nets.saved_adapter import (
    Trained,
    has_score_head,
    read_adapter,
    read_first,
    read_score_head,
)
from your_ai.run import checkpoint


def on_the_base(trained: Trained) -> Trained:
    """The run with its adapter as the base needs it, in a folder of its own.

    It is the same run unless --init changed where the adapter began. Raises UserError if the first
    adapter is damaged, RunError if the folder cannot be written.
    """
    adapter = trained.adapter
    if INIT not in adapter.config:
        return trained
    first = read_first(trained.folder).arrays
    arrays = {name: difference_of(name, array, first) for name, array in adapter.arrays.items()}
    if has_score_head(adapter):
        arrays[checkpoint.SCORE_WEIGHT] = read_score_head(adapter)
    parameters = {**adapter.config["lora_parameters"], "rank": 2 * adapter.rank}
    if BY_LAYER in parameters:
        sizes = parameters[BY_LAYER].items()
        parameters[BY_LAYER] = {path: [2 * rank, scale] for path, (rank, scale) in sizes}
    config = {**adapter.config, "lora_parameters": parameters}
    for key in (INIT, ADJUSTED):
        config.pop(key, None)
    place = trained.folder.exported
    checkpoint.save_adapter(place, arrays, config, adapter.step or 0)
    return dataclasses.replace(trained, adapter=read_adapter(place))


def difference_of(name: str, array: mx.array, first: dict[str, mx.array]) -> mx.array:
    """A (D, 2r) or B (2r, O) of B A - B0 A0; a vector as it is."""
    if name.endswith("lora_a"):
        return mx.concatenate([array, first[name]], axis=1)
    if name.endswith("lora_b"):
        return mx.concatenate([array, -first[name]], axis=0)
    return array
