"""Models written shard by shard: a shard and a tensor are held, never the model.

The tensors are given lazily, and computed and written one after the other. Until the result
is whole it lies beside its target, where a run that was cut off goes on:

    .NAME.DOING/
        RECORD              what the result depends on; sha256 of each finished shard
        model*.safetensors  the finished shards
        (the rest)          config.json last: without it no folder is taken for a model

The folder's own lock is held by the process that writes it.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm import utils as mlx_lm_utils

from your_ai.errors import RunError, UserError, lacked_memory
from your_ai.files import sha256, sync
from your_ai.gates.foreign import leaves
from your_ai.hub.check import check_model
from your_ai.hub.fingerprint import fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import limit_of, python_bytes
from your_ai.memory.facts import entries_of
from your_ai.memory.plan import rounded_up
from your_ai.memory.sample import in_gb
from your_ai.modelfiles.targets import check_target, unwritable
from your_ai.modelfiles.unfinished import Work, check_disk, finished_shards, locked, write_record
from your_ai.nets.model import first_line, load_tokenizer_of, positions_of

LIBRARIES = ("mlx", "mlx-lm")  # whose other releases may compute or name other tensors
INDEX = "model.safetensors.index.json"
SHARDS = 16  # about so many,
SHARD_LEAST_BYTES, SHARD_MOST_BYTES = 32_000_000, 1_000_000_000  # but of such a size
WORK_MARGIN = 0.05  # of what is held beside Python


@dataclass(frozen=True)
class WriteProgress:
    """How much of the model there is. kept_bytes: from a run that was cut off."""

    done_bytes: int
    total_bytes: int
    kept_bytes: int


@dataclass(frozen=True)
class Lazy:
    """A model of which nothing was computed.

    arrays: by name, as they are written, and taken out for that; input_bytes: most that is
    held to compute one, without itself; index: `metadata` of the index file; card: the text of
    README.md, None for mlx-lm's own.
    """

    arrays: dict[str, mx.array]
    input_bytes: int
    config: dict[str, Any]
    keeps_vision: bool
    index: dict[str, int]
    card: str | None = None


def load_as_written(source: Path) -> tuple[nn.Module, dict[str, Any]]:
    """The model of a folder, lazily and with the types of its files, and its configuration.

    Raises UserError for a folder that is not whole, or that mlx-lm cannot load.
    """
    told = check_model(source)
    if glob.escape(str(source)) != str(source):
        raise UserError(f"{source}: mlx-lm finds no weights below a name with *, ? or [")
    try:
        return mlx_lm_utils.load_model(source, lazy=True, model_config=positions_of(told))
    except Exception as error:  # an architecture's code raises what it likes
        raise UserError(f"{source}: mlx-lm cannot load this model ({first_line(error)})") from error


def write_model(
    lazy: Lazy,
    source: Path,
    work: Work,
    settings: list[Any],
    max_memory_gb: float | None,
    force: bool,
    *,
    waits: bool = False,
    replaces: bool = False,
) -> Iterator[WriteProgress]:
    """Write a model made of the one in `source` to the work's target; goes on where it was.

    settings: what the result depends on beside `source`. force: the limit may be more than the
    machine has. waits: for another process that does the same, and has then done it. replaces:
    a target that is there, once the new one is whole. Raises UserError for too little memory or
    disk, and a target that cannot be written; RunError where the source cannot be read.
    """
    target = work.target
    tokenizer = load_tokenizer_of(source, lazy.config.get("eos_token_id"))
    allocator.free()
    sizes = {name: array.nbytes for name, array in lazy.arrays.items()}
    shards = cut(sizes)
    needed_bytes = lazy.input_bytes + largest_shard(lazy.arrays)
    hold_memory(work.doing, needed_bytes, max_memory_gb, force)
    try:
        check_disk(target, sum(sizes.values()) - work.written_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(work.folder, waits, creates=True):
            if os.path.lexists(target) and not replaces:
                if waits:  # another process has done it
                    return
                raise UserError(f"{target}: exists; choose another name, or remove it first")
            key = [fingerprint(source), *settings, shards, *map(version, LIBRARIES)]
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
            yield from write_shards(source, work, lazy, shards, digest)
            finish(source, work.folder, lazy, shards, tokenizer)
            put_in_place(work, replaces)
    except OSError as error:
        raise unwritable(target, error, goes_on=True) from error


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


def read_bytes(source: Path, arrays: dict[str, mx.array]) -> dict[str, int]:
    """What is held to read each array of a model's files: itself, and what it is made of."""
    entries = {e.shape: e.end - e.start for e in entries_of(source)}
    found = {}
    for name, array in arrays.items():
        found[name] = array.nbytes
        if array.shape not in entries:  # made of others, or a part of one: both are held
            found[name] += max(array.nbytes, *entries.values())
    return found


def largest_shard(arrays: dict[str, mx.array]) -> int:
    """Bytes of the largest of the shards that these would be written as."""
    sizes = {name: array.nbytes for name, array in arrays.items()}
    return max(sum(sizes[name] for name in names) for names in cut(sizes).values())


def process_bytes_of(needed_bytes: int) -> int:
    """What the process holds that needs so much to write a model."""
    return python_bytes() + int((1 + WORK_MARGIN) * needed_bytes)


def hold_memory(doing: str, needed_bytes: int, max_memory_gb: float | None, force: bool) -> None:
    """Hold MLX to the limit. Raises UserError where what is needed beside Python is more."""
    limit = limit_of(max_memory_gb, force).limit_bytes
    needed_bytes = process_bytes_of(needed_bytes)
    if needed_bytes > limit:
        least = in_gb(rounded_up(needed_bytes))
        raise UserError(
            f"--max-memory: {doing} this model takes {least}, more than {in_gb(limit)}; "
            "give that, or close other programs"
        )
    allocator.hold(limit, needed_bytes, python_bytes())


def write_shards(
    source: Path, work: Work, lazy: Lazy, shards: dict[str, list[str]], key: str
) -> Iterator[WriteProgress]:
    """Compute and write what is not there yet; the record is kept up with it."""
    total = lazy.index["total_size"]
    finished = finished_shards(work.record, key)
    kept = done = sum(lazy.arrays[n].nbytes for s in finished for n in shards[s])
    for name in (n for s in finished for n in shards[s]):
        del lazy.arrays[name]
    yield WriteProgress(done, total, kept)
    for shard, names in shards.items():
        if shard in finished:
            continue
        part: dict[str, mx.array] = {}
        for name in names:
            part[name] = lazy.arrays.pop(name)
            compute(source, part[name])
            done += part[name].nbytes
            yield WriteProgress(done, total, kept)
        finished[shard] = save_shard(work.folder / shard, part)
        write_record(work.record, {"key": key, "shards": finished})
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
    source: Path, folder: Path, lazy: Lazy, shards: dict[str, list[str]], tokenizer: Any
) -> None:
    """Write what `mlx_lm.convert` writes beside the weights."""
    place = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": lazy.index, "weight_map": dict(sorted(place.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    for pattern in ("*.py", "generation_config.json"):
        for path in source.glob(pattern):
            if path.is_file() and not leaves(path, source):
                shutil.copy(path, folder)
    if lazy.card is None:
        mlx_lm_utils.create_model_card(folder, None)
    else:
        (folder / "README.md").write_text(lazy.card, encoding="utf-8")
    temporary = folder / "config.json.part"
    mlx_lm_utils.save_config(lazy.config, temporary, keep_vision_config=lazy.keeps_vision)
    os.replace(temporary, folder / "config.json")
    for path in (*folder.iterdir(), folder):
        sync(path)


def put_in_place(work: Work, replaces: bool) -> None:
    """Let the whole folder become the target; `replaces`: the one that is there."""
    moved = replaces and os.path.lexists(work.target)
    if moved:
        check_target(work.target, force=True)  # what is there now
        remove(work.replaced)
        os.rename(work.target, work.replaced)
    try:
        os.rename(work.folder, work.target)
    except OSError:
        if moved:
            os.rename(work.replaced, work.target)
        raise
    sync(work.target.parent)
    remove(work.replaced)  # also where a process ended between the renames


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Raises OSError where it cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # what is not written in Python raises what it likes
        raise OSError(errno.EIO, first_line(error)) from error
