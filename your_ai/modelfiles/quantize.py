"""Quantize a model and write it shard by shard with `modelfiles.shards`.

The tensors equal those of `mlx_lm.convert`, bit for bit: mlx-lm loads and quantizes the model
lazily, and the tensors are computed and written one after the other.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.convert import MODEL_CONVERSION_DTYPES

from your_ai.errors import UserError, first_line
from your_ai.hub.awq_gptq import packing_of
from your_ai.hub.check import check_model
from your_ai.hub.config_values import GROUP_SIZE
from your_ai.memory.budget import limit_of
from your_ai.memory.limit import MemoryLimit
from your_ai.modelfiles.shards import (
    WriteProgress,
    lazy_of,
    load_as_written,
    read_bytes,
    write_model,
)
from your_ai.modelfiles.targets import Work

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZES = (32, 64, 128)
RECORD = "quantized.json"


def quantize(
    source: Path,
    target: Path,
    bits: int,
    group_size: int = GROUP_SIZE,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[WriteProgress]:
    """Quantize the model in `source` into a new folder `target`; continues interrupted work.

    Raises UserError, before anything is written, if the model cannot be quantized, the target
    exists or cannot be written, or memory or disk space is too small. Raises RunError if the
    source cannot be read to its end.
    """
    if os.path.lexists(target):
        raise UserError(f"{target}: exists; choose another name, or remove it first")
    limit = limit_of(max_memory_gb, force)
    yield from quantize_into(source, target, bits, group_size, limit, waits=False)


def work_of(target: Path) -> Work:
    return Work(target, "quantizing", RECORD)


# -- the lazy model -----------------------------------------------------------------------


def check_source(source: Path, bits: int, group_size: int) -> None:
    """Raise UserError for errors that can be found before the model is loaded."""
    if bits not in BITS:
        raise UserError(f"{bits} bits: MLX can quantize to {listed(BITS)} bits")
    if group_size not in GROUP_SIZES:
        raise UserError(f"group size {group_size}: MLX can use {listed(GROUP_SIZES)}")
    refuse_quantized(source, check_model(source))


def refuse_quantized(source: Path, config: dict[str, Any]) -> None:
    found = config.get("quantization")
    if packing_of(source, config) is not None:  # mlx-lm's own formats are detected when it loads
        found = config.get("quantization_config")
    if found is not None:
        bits = found.get("bits") if isinstance(found, dict) else found
        raise UserError(f"{source}: is already quantized to {bits} bits")


def listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def quantized_lazily(
    source: Path, bits: int, group_size: int = GROUP_SIZE
) -> tuple[nn.Module, dict[str, Any], int]:
    """Quantize a model lazily, as `mlx_lm.convert` does.

    Returns the model, its configuration and `Lazy.input_bytes`. Raises UserError if the model
    cannot be quantized.
    """
    check_source(source, bits, group_size)
    model, config = load_as_written(source)
    refuse_quantized(source, config)  # formats other than mlx-lm's are detected only now
    try:
        read = dict(tree_flatten(model.parameters()))
        cast_as_told(model, config)
        cast = dict(tree_flatten(model.parameters()))
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints the bits per weight
            model, config = mlx_lm_utils.quantize_model(model, config, group_size, bits)
    except Exception as error:  # the code of an architecture may raise any type
        reason = first_line(error)
        raise UserError(f"{source}: mlx-lm cannot quantize this model ({reason})") from error
    if not any("scales" in module for module in model.modules()):
        raise UserError(
            f"{source}: no layer can be quantized: no input size is a multiple of {group_size}"
        )
    return model, config, input_bytes(source, read, cast)


def cast_as_told(model: nn.Module, config: dict[str, Any]) -> None:
    """Cast the weights to the dtype in the configuration, as `mlx_lm.convert` does."""
    name = config.get("torch_dtype")
    if name is None:
        name = (config.get("text_config") or {}).get("dtype")
    if name not in MODEL_CONVERSION_DTYPES:
        return
    dtype, wanted = getattr(mx, name), getattr(model, "cast_predicate", lambda _: True)

    def convert(path: str, array: mx.array) -> mx.array:
        fits = wanted(path) and mx.issubdtype(array.dtype, mx.floating)
        return array.astype(dtype) if fits else array

    model.update(tree_map_with_path(convert, model.parameters()))


def input_bytes(source: Path, read: dict[str, mx.array], cast: dict[str, mx.array]) -> int:
    """Peak bytes of the inputs of a quantized tensor while it is computed.

    read, cast: each parameter before and after the cast.
    """
    sizes = read_bytes(source, read)
    changed = [name for name, array in read.items() if cast[name].dtype != array.dtype]
    for name in changed:
        sizes[name] += cast[name].nbytes
    return max(sizes.values())


def quantize_into(
    source: Path,
    target: Path,
    bits: int,
    group_size: int,
    limit: MemoryLimit,
    waits: bool,
) -> Iterator[WriteProgress]:
    """Quantize as `quantize` does, but without a check of the target.

    waits: wait for another process that quantizes the same model, and use its result.
    """
    lazy = lazy_of(*quantized_lazily(source, bits, group_size))
    work, settings = work_of(target), [bits, group_size]
    yield from write_model(lazy, source, work, settings, limit, waits=waits)
