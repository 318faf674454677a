"""The bytes of tensors, and how quantized layers are grouped."""

from __future__ import annotations

import math
from typing import Any

from your_ai.gates.untrusted import DTYPE_BITS, Entry

GROUP_SIZE = 64  # MLX's default for quantized weights
MODE_GROUP_SIZES = {"mxfp4": 32, "mxfp8": 32, "nvfp4": 16}  # of modes other than affine
FLOATS = ("F64", "F32", "F16", "BF16")


def group_size_of(quantization: dict[str, Any]) -> int:
    """Weights per group, of a model or a layer that is quantized in this way."""
    default = MODE_GROUP_SIZES.get(str(quantization.get("mode")), GROUP_SIZE)
    return int(quantization.get("group_size") or default)


def tensor_bytes(
    entry: Entry, float_bytes: int, bits: int | None, group_size: int = GROUP_SIZE
) -> int:
    """Bytes of a tensor whose floats have `float_bytes` each.

    bits: of matrices that are quantized, None for no quantization. Each group of weights
    takes a scale and a bias in addition.
    """
    count = math.prod(entry.shape)
    if entry.kind not in FLOATS:
        return count * DTYPE_BITS[entry.kind] // 8
    matrix = entry.name.endswith(".weight") and len(entry.shape) in (2, 3)
    if bits is not None and matrix and entry.shape[-1] % group_size == 0:
        return count * bits // 8 + 2 * float_bytes * count // group_size
    return count * float_bytes
