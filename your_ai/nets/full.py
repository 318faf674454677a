"""Whole weights: no layers are added; the arrays of the blocks themselves are trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn

__all__ = ["fused_rows", "limits", "put"]

CONSTANT = "sinks"  # arrays of attention whose gradient is taken as 0 here (nets/attention.py)


def put(model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
    """Let the arrays of the last `count` blocks be trained: of the layers in `keys`, or all."""
    keys = parameters.get("keys")
    for block in model.layers[len(model.layers) - count :]:
        for path, module in block.named_modules():
            if keys is None or path in keys:
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
