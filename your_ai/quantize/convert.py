"""Models written quantized, shard by shard: a shard and a tensor are held, never the model.

The tensors are those of `mlx_lm.convert`, bit for bit: mlx-lm loads and quantizes the model
lazily, and they are computed and written one after the other. Until the result is whole it
lies beside its target, where a run that was cut off goes on:

    .NAME.quantizing/
        quantized.json      what the result depends on; sha256 of each finished shard
        model*.safetensors  the finished shards
        (the rest)          config.json last: without it no folder is taken for a model

The folder's own lock is held by the process that writes it.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_map_with_path
from mlx_lm import utils as mlx_lm_utils
from mlx_lm.convert import MODEL_CONVERSION_DTYPES

from your_ai.budget import limit_of, python_bytes
from your_ai.errors import RunError, UserError, lacked_memory
from your_ai.files import sha256, sync
from your_ai.hub.check import check_model
from your_ai.hub.fingerprint import fingerprint
from your_ai.memory import allocator
from your_ai.memory.facts import SIZES, entries_of
from your_ai.memory.plan import rounded_up
from your_ai.memory.sample import in_gb
from your_ai.model import first_line, load_tokenizer_of
from your_ai.quantize.unfinished import (
    check_disk,
    finished_shards,
    locked,
    read_record,
    unwritable,
    work_folder,
    write_record,
    written_bytes,
)

BITS = (2, 3, 4, 5, 6, 8)
GROUP_SIZE, GROUP_SIZES = 64, (32, 64, 128)
LIBRARIES = ("mlx", "mlx-lm")  # whose other releases may compute or name other tensors
INDEX = "model.safetensors.index.json"
SHARDS = 16  # about so many,
SHARD_LEAST_BYTES, SHARD_MOST_BYTES = 32_000_000, 1_000_000_000  # but of such a size
WORK_MARGIN = 0.05  # of what is held beside Python


@dataclass(frozen=True)
class Progress:
    """How much of the quantized model there is. kept_bytes: from a run that was cut off."""

    done_bytes: int
    total_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Lazy:
    """A model that is quantized, of which nothing was computed.

    arrays: by name, as they are written, and taken out for that; input_bytes: most that is
    held to compute one, without itself; index: `metadata` of the index file.
    """

    arrays: dict[str, mx.array]
    input_bytes: int
    config: dict[str, Any]
    keeps_vision: bool
    index: dict[str, int]


def quantize(
    source: Path,
    target: Path,
    bits: int,
    group_size: int = GROUP_SIZE,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[Progress]:
    """Write the model in `source` to a new folder `target`, quantized; goes on where it was.

    Raises UserError, before anything is written, for a model that cannot be quantized, a
    target that is there or cannot be written, and too little memory or disk; RunError where
    the source cannot be read to its end.
    """
    if os.path.lexists(target):
        raise UserError(f"{target}: exists; choose another name, or remove it first")
    yield from carried_out(source, target, bits, group_size, max_memory_gb, force, waits=False)


def left_behind(target: Path) -> str:
    """What to tell who has interrupted `quantize`."""
    work = work_folder(target)
    if not read_record(work)["shards"]:
        return f"{target}: stopped; the same command begins again"
    size = in_gb(written_bytes(work))
    return f"{target}: stopped; the same command goes on from {size}, or remove {work}"


# A model, lazily


def check_source(source: Path, bits: int, group_size: int) -> None:
    """Raise UserError for what can be seen to be wrong before the model is loaded."""
    if bits not in BITS:
        raise UserError(f"{bits} bits: MLX quantizes to {listed(BITS)}")
    if group_size not in GROUP_SIZES:
        raise UserError(f"groups of {group_size}: MLX quantizes groups of {listed(GROUP_SIZES)}")
    refuse_quantized(source, check_model(source))


def refuse_quantized(source: Path, config: dict[str, Any]) -> None:
    found = config.get("quantization")
    if found is not None:
        bits = found.get("bits") if isinstance(found, dict) else found
        raise UserError(f"{source}: is quantized to {bits} bits already")


def listed(numbers: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def quantized_lazily(
    source: Path, bits: int, group_size: int = GROUP_SIZE
) -> tuple[nn.Module, dict[str, Any], int]:
    """A model quantized as `mlx_lm.convert` does it, its configuration, and `Lazy.input_bytes`.

    Raises UserError where that is not possible.
    """
    check_source(source, bits, group_size)
    if glob.escape(str(source)) != str(source):
        raise UserError(f"{source}: mlx-lm finds no weights below a name with *, ? or [")
    try:
        model, config = mlx_lm_utils.load_model(source, lazy=True)
        refuse_quantized(source, config)  # other formats than mlx-lm's are seen only now
        read = dict(tree_flatten(model.parameters()))
        cast_as_told(model, config)
        cast = dict(tree_flatten(model.parameters()))
        with contextlib.redirect_stdout(io.StringIO()):  # mlx-lm prints the bits per weight
            model, config = mlx_lm_utils.quantize_model(model, config, group_size, bits)
    except UserError:
        raise
    except Exception as error:  # an architecture's code raises what it likes
        raise UserError(f"{source}: mlx-lm cannot load this model ({first_line(error)})") from error
    if not any("scales" in module for module in model.modules()):
        raise UserError(
            f"{source}: no layer can be quantized: none has a multiple of {group_size} inputs"
        )
    return model, config, input_bytes(source, read, cast)


def cast_as_told(model: nn.Module, config: dict[str, Any]) -> None:
    """Make the floats what the configuration says they are, as `mlx_lm.convert` does."""
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
    """Most that is held beside a quantized tensor while it is computed.

    read, cast: each parameter before and after its type is changed.
    """
    entries = {e.shape: math.prod(e.shape) * SIZES.get(e.kind, 1) for e in entries_of(source)}
    most = 0
    for name, array in read.items():
        size = array.nbytes
        if array.shape not in entries:  # made of others, or a part of one: both are held
            size += max(size, *entries.values())
        if cast[name].dtype != array.dtype:
            size += cast[name].nbytes
        most = max(most, size)
    return most


def lazy_model(source: Path, bits: int, group_size: int) -> Lazy:
    model, config, most = quantized_lazily(source, bits, group_size)
    arrays = dict(tree_flatten(model.parameters()))
    return Lazy(
        arrays=arrays,
        input_bytes=most,
        config=config,
        keeps_vision="vision_tower" in getattr(model, "model", {}),
        index={
            "total_size": sum(array.nbytes for array in arrays.values()),
            "total_parameters": mlx_lm_utils.get_total_parameters(model),
        },
    )


def cut(sizes: dict[str, int]) -> dict[str, list[str]]:
    """The tensors of each shard, by its file's name. The same for any budget.

    sizes: bytes of the tensors; one that is larger than a shard has one of its own.
    """
    most = min(SHARD_MOST_BYTES, max(SHARD_LEAST_BYTES, sum(sizes.values()) // SHARDS))
    shards: list[list[str]] = []
    held = 0
    for name, size in sizes.items():
        if not shards or held + size > most:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += size
    if len(shards) == 1:
        return {"model.safetensors": shards[0]}
    return {f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors": s for i, s in enumerate(shards)}


# The work


def carried_out(
    source: Path,
    target: Path,
    bits: int,
    group_size: int,
    max_memory_gb: float | None,
    force: bool,
    waits: bool,
) -> Iterator[Progress]:
    """waits: for another process that does the same, and has then done it."""
    lazy = lazy_model(source, bits, group_size)
    tokenizer = load_tokenizer_of(source, lazy.config.get("eos_token_id"))
    allocator.free()
    sizes = {name: array.nbytes for name, array in lazy.arrays.items()}
    shards = cut(sizes)
    largest = max(sum(sizes[name] for name in names) for names in shards.values())
    hold_memory(lazy.input_bytes + largest, max_memory_gb, force)
    work = work_folder(target)
    try:
        check_disk(target, sum(sizes.values()) - written_bytes(work))
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(work, waits, creates=True):
            if os.path.lexists(target):
                if waits:  # another process has done it
                    return
                raise UserError(f"{target}: exists; choose another name, or remove it first")
            key = [fingerprint(source), bits, group_size, shards, *map(version, LIBRARIES)]
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
            yield from write_shards(source, work, lazy, shards, digest)
            finish(source, work, target, lazy, shards, tokenizer)
    except OSError as error:
        raise unwritable(target, error) from error


def hold_memory(needed_bytes: int, max_memory_gb: float | None, force: bool) -> None:
    """Hold MLX to the limit. Raises UserError where what is needed beside Python is more."""
    limit = limit_of(max_memory_gb, force).limit_bytes
    needed_bytes = python_bytes() + int((1 + WORK_MARGIN) * needed_bytes)
    if needed_bytes > limit:
        least = in_gb(rounded_up(needed_bytes))
        raise UserError(
            f"--max-memory: quantizing this model takes {least}, more than {in_gb(limit)}; "
            "give that, or close other programs"
        )
    allocator.hold(limit, needed_bytes, python_bytes())


def write_shards(
    source: Path, work: Path, lazy: Lazy, shards: dict[str, list[str]], key: str
) -> Iterator[Progress]:
    """Compute and write what is not there yet; the record is kept up with it."""
    total = lazy.index["total_size"]
    finished = finished_shards(work, key)
    kept = done = sum(lazy.arrays[n].nbytes for s in finished for n in shards[s])
    for name in (n for s in finished for n in shards[s]):
        del lazy.arrays[name]
    yield Progress(done, total, kept)
    for shard, names in shards.items():
        if shard in finished:
            continue
        part: dict[str, mx.array] = {}
        for name in names:
            part[name] = lazy.arrays.pop(name)
            compute(source, part[name])
            done += part[name].nbytes
            yield Progress(done, total, kept)
        finished[shard] = save_shard(work / shard, part)
        write_record(work, {"key": key, "shards": finished})
        part.clear()
        allocator.free(collect=False)


def compute(source: Path, array: mx.array) -> None:
    try:
        mx.eval(array)
    except RuntimeError as error:
        if lacked_memory(error):
            raise UserError(f"{source}: not enough memory; close other programs") from error
        raise RunError(
            f"{source}: cannot be read any more ({first_line(error)}); put its files back; the "
            "same command then goes on"
        ) from error


def save_shard(path: Path, arrays: dict[str, mx.array]) -> str:
    """Write a shard, whole or not at all; its sha256. Raises OSError where it cannot be."""
    part = path.with_name("part.safetensors")
    try:
        mx.save_safetensors(str(part), arrays, {"format": "mlx"})
        sync(part)
        digest = sha256(part)
        os.replace(part, path)
    except RuntimeError as error:  # MLX's own for a disk that is full
        raise OSError(errno.ENOSPC, first_line(error)) from error
    finally:
        part.unlink(missing_ok=True)
    return digest


def finish(
    source: Path, work: Path, target: Path, lazy: Lazy, shards: dict[str, list[str]], tokenizer: Any
) -> None:
    """Write what `mlx_lm.convert` writes beside the weights, and put the whole in its place."""
    place = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": lazy.index, "weight_map": dict(sorted(place.items()))}
    (work / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    save_tokenizer(tokenizer, work)
    for pattern in ("*.py", "generation_config.json"):
        for path in source.glob(pattern):
            shutil.copy(path, work)
    mlx_lm_utils.create_model_card(work, None)
    temporary = work / "config.json.part"
    mlx_lm_utils.save_config(lazy.config, temporary, keep_vision_config=lazy.keeps_vision)
    os.replace(temporary, work / "config.json")
    for path in (*work.iterdir(), work):
        sync(path)
    os.rename(work, target)
    sync(target.parent)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises OSError where it cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # what is not written in Python raises what it likes
        raise OSError(errno.EIO, first_line(error)) from error
