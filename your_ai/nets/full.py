"""Whole weights: no layers are added; the arrays of the blocks themselves are trained."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

__all__ = ["fused_rows", "limits", "put", "train_blocks"]

CONSTANT = "sinks"  # arrays of attention whose gradient is taken as 0 here (nets/attention.py)


def put(model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
    """Let the arrays of the last `count` blocks be trained: of the layers in `keys`, or all."""
    last = range(len(model.layers) - count, len(model.layers))
    train_blocks(model, last, parameters.get("keys"))


def train_blocks(model: nn.Module, blocks: Collection[int], keys: Collection[str] | None) -> None:
    """Let the arrays of these blocks be trained, and no others; keys: the paths of the layers in a
    block, None for all."""
    for index, block in enumerate(model.layers):
        block.freeze()
        for path, module in block.named_modules():
            if index in blocks and (keys is None or path in keys):
                module.unfreeze(recurse=False)
                module.freeze(recurse=False, keys=[n for n in module if is_constant(n, module)])


def is_constant(name: str, module: nn.Module) -> bool:
    """Return whether a child of a module is an array without a gradient, such as indices."""
    array = module[name]
    whole = isinstance(array, mx.array) and not mx.issubdtype(array.dtype, mx.floating)
    return whole or name == CONSTANT


def fused_rows(
    weight: mx.array, parts: Mapping[str, mx.array], scale: float, rows: slice
) -> mx.array:
    """The rows as they are: nothing was added to the weight."""
    return weight


def limits(model: nn.Module) -> str:
    """Nothing: the result is read like any model."""
    return ""
