"""LoRA: y = W x + s B A x, with mlx-lm's layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.tuner.lora import LoRALinear as Layer
from mlx_lm.tuner.utils import linear_to_lora_layers

__all__ = ["Layer", "fused_rows", "limits", "put"]


def put(model: nn.Module, count: int, parameters: dict[str, Any]) -> None:
    """Add mlx-lm's layers to the last `count` blocks."""
    linear_to_lora_layers(model, count, parameters)


def fused_rows(
    weight: mx.array, parts: Mapping[str, mx.array], scale: float, rows: slice
) -> mx.array:
    """Rows of W + scale * B A, separately for each expert if a layer has experts.

    lora_a, lora_b: (I, r) and (r, O), or (E, r, I) and (E, O, r) with experts.
    """
    a, b = (parts[name].astype(mx.float32) for name in ("lora_a", "lora_b"))
    if a.ndim == 3:
        return weight + (scale * b[rows]) @ a[rows]
    return weight + (scale * b[:, rows].T) @ a.T


def limits(model: nn.Module) -> str:
    """Nothing: everything that reads adapters reads these."""
    return ""
