"""Adapters of experts in PEFT's form.

mlx-lm adapts all experts of a block with one stack of matrices. In PEFT's file each expert has its
own matrices, as in transformers 4. For transformers 5, where the experts are one tensor, PEFT
converts them itself; it does so for the model types of CONVERTED, and only for all experts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from your_ai.errors import UserError
from your_ai.export.names import modules_of
from your_ai.export.transformers_names import KNOWN, Rename, Unstack
from your_ai.export.transformers_weights import Arrays, applied, renamed
from your_ai.gates.text import counted
from your_ai.nets.layer_sizes import BY_LAYER, LayerSize, evened, sizes_in_config
from your_ai.nets.model import LINEAR
from your_ai.nets.saved_adapter import Adapter, Trained

CONVERTED = (
    *("deepseek_v2", "deepseek_v3", "exaone_moe", "glm4_moe", "glm4_moe_lite", "mellum"),
    *("mixtral", "olmoe", "qwen3_moe", "qwen3_next"),
)
ANY = "*"  # stands for the index of an expert
INDEX = re.compile(r"(?<=\.experts\.)\d+(?=\.)")


def path_in_peft(path: str, kind: str) -> str:
    """Return the path of a layer of mlx-lm in PEFT, with ANY as the index of an expert."""
    for rule in KNOWN[kind].rules:
        if isinstance(rule, Rename):
            path = renamed(path, rule.part, rule.theirs)
        elif isinstance(rule, Unstack):
            path = renamed(path, rule.part, rule.theirs.format(ANY))
    return path


def expert_layers(adapter: Adapter) -> set[str]:
    """The paths of the adapted layers that are stacked experts."""
    return {path for path, parts in adapter.layers.items() if parts["lora_a"].ndim > 2}


def check_experts(trained: Trained, kind: str) -> None:
    """Raise UserError if the adapter has experts that PEFT cannot adapt, or not alone."""
    stacked, folder = expert_layers(trained.adapter), trained.adapter.folder
    if not stacked:
        return
    if kind not in CONVERTED:
        raise UserError(
            f"{folder}: adapts experts, which PEFT does not adapt in {kind}; use --to mlx or hf"
        )
    sizes = trained.adapter.sizes
    if len(set(sizes.values())) > 1:  # its patterns would have to name each expert
        raise UserError(
            f"{folder}: has layers of different ranks or scales beside experts, which PEFT's form "
            "of this adapter does not have; use --to mlx or hf"
        )
    if any(trained.adapter.layers[path].keys() != {"lora_a", "lora_b"} for path in stacked):
        raise UserError(f"{folder}: PEFT adapts experts only with LoRA; use --to mlx or hf")
    paths = (INDEX.sub(ANY, path_in_peft(path, kind)) for path in modules_of(trained.base))
    experts = {path for path in paths if f".{ANY}." in path}
    missing = experts - {path_in_peft(path, kind) for path in stacked}
    if missing:
        raise UserError(
            f"{folder}: PEFT adapts the experts of all blocks and all their matrices, or none, and "
            f"{counted(len(missing), 'matrix', 'matrices')} are not adapted; use --to mlx or hf"
        )


def unstacked_experts(arrays: Arrays, kind: str) -> Arrays:
    """Return the arrays of an adapter with those of each expert on their own, as PEFT names them.

    arrays: by the path of the layer in mlx-lm, and PEFT's name of the part.
    """
    for rule in KNOWN[kind].rules:
        if isinstance(rule, Rename | Unstack):
            arrays = applied(rule, arrays)
    return arrays


def experts_of(network: nn.Module, kind: str) -> dict[str, list[str]]:
    """The paths in PEFT of all experts of each stack, by the path of the stack in mlx-lm."""
    if kind not in CONVERTED:
        return {}
    return {
        path: [path_in_peft(path, kind).replace(ANY, str(i)) for i in range(len(layer.weight))]
        for path, layer in network.named_modules()
        if isinstance(layer, LINEAR) and layer.weight.ndim > 2
    }


def with_stacks(file: Path, adapter: Adapter, experts: dict[str, list[str]]) -> Adapter:
    """Return the adapter with the experts' matrices stacked, as mlx-lm has them. Experts of a stack
    get one rank and one scale.

    Raises UserError if an expert has no matrices, or other experts of its stack have others.
    """
    arrays, sizes = dict(adapter.arrays), {path: adapter.sizes[path] for path in adapter.layers}
    parameters = {k: v for k, v in adapter.config["lora_parameters"].items() if k != BY_LAYER}
    for path, paths in experts.items():
        own = {one: sizes.pop(one) for one in paths if one in sizes}
        if not own:
            continue
        alike = sizes_in_config(own)
        of_stack = {n: array for n, array in arrays.items() if n.rpartition(".")[0] in own}
        arrays |= evened(of_stack, {"lora_parameters": alike})[0]
        sizes[path] = LayerSize(alike["rank"], alike["scale"])
        for part in ("lora_a", "lora_b"):
            found = [arrays.pop(f"{one}.{part}", None) for one in paths]
            pieces = [array.T for array in found if array is not None]
            if not pieces:
                continue
            if len(pieces) < len(found) or len({piece.shape for piece in pieces}) > 1:
                raise UserError(f"{file}: {path}: does not adapt all experts alike")
            arrays[f"{path}.{part}"] = mx.stack(pieces)
    parameters |= sizes_in_config(sizes) if sizes else {}
    config = {**adapter.config, "lora_parameters": parameters}
    return dataclasses.replace(adapter, arrays=arrays, config=config)


def all_paths(paths: Iterable[str], experts: dict[str, list[str]]) -> set[str]:
    """The paths, and those of all experts in PEFT."""
    return {*paths, *(one for each in experts.values() for one in each)}
