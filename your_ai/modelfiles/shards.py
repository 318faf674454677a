"""Write a model shard by shard: only one tensor or a part of one is in memory, never the model.

The tensors are lazy; they are computed and written one after the other. Until the result is
complete, it is in a folder next to its target, from which interrupted work continues:

    .NAME.DOING/
        RECORD              a key of the inputs and settings; sha256 of each finished shard
        model*.safetensors  the finished shards
        (other files)       config.json last: a folder without it is not a model

The process that writes the folder holds a lock on it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from your_ai.engine.spill import Place, bytes_of, header_of
from your_ai.errors import RunError, UserError, first_line, is_memory_error
from your_ai.files import sha256, sync
from your_ai.gates.untrusted import links_outside
from your_ai.hub.check import INDEX
from your_ai.hub.find import fingerprint
from your_ai.memory import allocator
from your_ai.memory.budget import python_bytes
from your_ai.memory.facts import entries_of
from your_ai.memory.limit import MemoryLimit, rounded_up
from your_ai.memory.sample import in_gb
from your_ai.modelfiles.targets import (
    Work,
    check_disk,
    check_target,
    finished_shards,
    locked,
    write_error,
    write_record,
)
from your_ai.nets.model import checked_config, positions_of
from your_ai.nets.tokenizer import open_tokenizer

LIBRARIES = ("mlx", "mlx-lm")  # other versions of these may compute or name tensors differently
SHARDS = 16  # target number of shards,
SHARD_LEAST_BYTES, SHARD_MOST_BYTES = 32_000_000, 1_000_000_000  # within these shard sizes
WORK_MARGIN = 0.05  # added to the memory needed in addition to Python


@dataclass(frozen=True)
class WriteProgress:
    """The share of the model that is written."""

    done_bytes: int
    total_bytes: int
    kept_bytes: int
    """Bytes kept from an interrupted run."""


@dataclass(frozen=True)
class Lazy:
    """A model whose arrays are not computed yet."""

    arrays: dict[str, mx.array]
    """By the name in the written file. Arrays are removed as they are written."""
    input_bytes: int
    """Peak memory to compute one array or one of its pieces, without that itself."""
    config: dict[str, Any]
    keeps_vision: bool
    index: dict[str, int]
    """`metadata` of the index file."""
    card: str | None = None
    """The text of README.md; None for the one that mlx-lm writes."""
    texts: dict[str, str] = field(default_factory=dict)
    """Other files to write, by name."""
    pieces: dict[str, list[mx.array]] = field(default_factory=dict)
    """Successive rows of some arrays, so that a large one need not be in memory as a whole."""
    tokenizer_files: Path | None = None
    """The folder of the tokenizer, if it is not that of the source."""

    def taken(self, name: str) -> list[mx.array]:
        """Remove an array; return its pieces, or the array itself if it has none."""
        whole = self.arrays.pop(name)
        return self.pieces.pop(name, None) or [whole]

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest array or piece that is computed at once."""
        at_once = (self.pieces.get(name) or [array] for name, array in self.arrays.items())
        return max(piece.nbytes for pieces in at_once for piece in pieces)


def lazy_of(model: nn.Module, config: dict[str, Any], input_bytes: int) -> Lazy:
    """A model to be written under its own names. input_bytes: as in `Lazy`."""
    arrays = dict(tree_flatten(model.parameters()))
    return Lazy(
        arrays=arrays,
        input_bytes=input_bytes,
        config=config,
        keeps_vision="vision_tower" in getattr(model, "model", {}),
        index={
            "total_size": sum(array.nbytes for array in arrays.values()),
            "total_parameters": mlx_lm_utils.get_total_parameters(model),
        },
    )


def load_as_written(source: Path) -> tuple[nn.Module, dict[str, Any]]:
    """Load the model of a folder lazily, with the dtypes of its files, and its configuration.

    Raises UserError if the folder is incomplete or mlx-lm cannot load it.
    """
    raw_config = checked_config(source)
    try:
        return mlx_lm_utils.load_model(source, lazy=True, model_config=positions_of(raw_config))
    except Exception as error:  # the code of an architecture may raise any type
        raise UserError(f"{source}: mlx-lm cannot load this model ({first_line(error)})") from error


def write_model(
    lazy: Lazy,
    source: Path,
    work: Work,
    settings: list[Any],
    limit: MemoryLimit,
    *,
    waits: bool = False,
    replaces: bool = False,
) -> Iterator[WriteProgress]:
    """Write a model derived from the one in `source` to the target; continues interrupted work.

    settings: everything the result depends on, except `source`.
    limit: of the memory of this process.
    waits: wait for another process that does the same work, and use its result.
    replaces: replace an existing target once the new one is complete.

    Raises UserError if memory or disk space is too small or the target cannot be written, and
    RunError if the source cannot be read.
    """
    target = work.target
    tokenizer = open_tokenizer(source, lazy.tokenizer_files)
    allocator.free()
    sizes = {name: array.nbytes for name, array in lazy.arrays.items()}
    shards = cut(sizes)
    hold_memory(work.doing, lazy.input_bytes + lazy.largest_bytes, limit)
    try:
        check_disk(target, sum(sizes.values()) - work.written_bytes)
        target.parent.mkdir(parents=True, exist_ok=True)
        with locked(work.folder, waits, creates=True):
            if os.path.lexists(target) and not replaces:
                if waits:  # another process has finished it
                    return
                raise UserError(f"{target}: exists; choose another name, or remove it first")
            key = [fingerprint(source), *settings, shards, *map(version, LIBRARIES)]
            digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
            yield from write_shards(source, work, lazy, shards, digest)
            finish(source, work.folder, lazy, shards, tokenizer)
            put_in_place(work, replaces)
    except OSError as error:
        raise write_error(target, error, goes_on=True) from error


def cut(sizes: dict[str, int]) -> dict[str, list[str]]:
    """The names of the tensors of each shard, by file name. Does not depend on the memory limit.

    sizes: bytes of each tensor; a tensor larger than a shard gets a separate shard.
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
    """Bytes needed to read each array: the array itself and the file tensors it is made from."""
    entries = {e.shape: e.end - e.start for e in entries_of(source)}
    found = {}
    for name, array in arrays.items():
        found[name] = array.nbytes
        if array.shape not in entries:  # made from other tensors, or part of one: count both
            found[name] += max(array.nbytes, *entries.values())
    return found


def process_bytes_of(needed_bytes: int) -> int:
    """Peak memory of a process that needs `needed_bytes` in addition to Python."""
    return python_bytes() + int((1 + WORK_MARGIN) * needed_bytes)


def hold_memory(doing: str, needed_bytes: int, limit: MemoryLimit) -> None:
    """Apply the memory limit to MLX. Raises UserError if Python and `needed_bytes` exceed it."""
    needed_bytes = process_bytes_of(needed_bytes)
    if needed_bytes > limit.limit_bytes:
        least, most = in_gb(rounded_up(needed_bytes)), in_gb(limit.limit_bytes)
        raise UserError(
            f"--max-memory: {doing} this model needs at least {least}, more than {most}; "
            "raise --max-memory, or close other programs"
        )
    allocator.set_limits(limit.limit_bytes, needed_bytes, python_bytes())


def write_shards(
    source: Path, work: Work, lazy: Lazy, shards: dict[str, list[str]], key: str
) -> Iterator[WriteProgress]:
    """Compute and write the shards that are missing; update the record after each."""
    total = lazy.index["total_size"]
    finished = finished_shards(work.record, key)
    kept = done = sum(lazy.arrays[n].nbytes for s in finished for n in shards[s])
    for name in (n for s in finished for n in shards[s]):
        del lazy.arrays[name]
    yield WriteProgress(done, total, kept)
    for shard, names in shards.items():
        if shard in finished:
            continue
        with open_shard(work.folder / shard, {name: lazy.arrays[name] for name in names}) as file:
            for name in names:
                done += lazy.arrays[name].nbytes
                pieces = lazy.taken(name)
                while pieces:
                    write_array(source, file, pieces.pop(0))
                allocator.free(collect=False)
                yield WriteProgress(done, total, kept)
        finished[shard] = sha256(work.folder / shard)
        write_record(work.record, {"key": key, "shards": finished})


def compute(source: Path, array: mx.array) -> None:
    try:
        mx.eval(array)
    except RuntimeError as error:
        if is_memory_error(error):
            raise UserError(f"{source}: not enough memory; close other programs") from error
        raise RunError(
            f"{source}: can no longer be read ({first_line(error)}); restore its files, then run "
            "the same command to continue"
        ) from error


@contextlib.contextmanager
def open_shard(path: Path, arrays: dict[str, mx.array], library: str = "mlx") -> Iterator[BinaryIO]:
    """Yield a safetensors file, to which these arrays are then written in this order. It is
    complete or not there at all. Raises OSError if it cannot be written.

    arrays: emptied. library: whose layout they have, mlx or pt.
    """
    places, end = dict[str, Place](), 0
    for name, array in arrays.items():
        places[name] = Place(end, array.shape, array.dtype)
        end += array.nbytes
    arrays.clear()  # they are computed after this
    part = path.with_name("part.safetensors")
    try:
        with part.open("wb") as file:
            file.write(header_of(places, library))
            yield file
        sync(part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_array(source: Path, file: BinaryIO, array: mx.array) -> None:
    compute(source, array)
    file.write(bytes_of(array))


def finish(
    source: Path, folder: Path, lazy: Lazy, shards: dict[str, list[str]], tokenizer: Any
) -> None:
    """Write the files that `mlx_lm.convert` writes in addition to the weights."""
    place = {name: shard for shard, names in shards.items() for name in names}
    index = {"metadata": lazy.index, "weight_map": dict(sorted(place.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=4), encoding="utf-8")
    save_tokenizer(tokenizer, folder)
    for pattern in ("*.py", "generation_config.json"):
        for path in source.glob(pattern):
            if path.is_file() and not links_outside(path, source):
                shutil.copy(path, folder)
    if lazy.card is None:
        mlx_lm_utils.create_model_card(folder, None)
    else:
        (folder / "README.md").write_text(lazy.card, encoding="utf-8")
    for name, text in lazy.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    temporary = folder / "config.json.part"
    mlx_lm_utils.save_config(lazy.config, temporary, keep_vision_config=lazy.keeps_vision)
    os.replace(temporary, folder / "config.json")
    for path in (*folder.iterdir(), folder):
        sync(path)


def put_in_place(work: Work, replaces: bool) -> None:
    """Rename the complete folder to the target; replaces: an existing target is replaced."""
    moved = replaces and os.path.lexists(work.target)
    if moved:
        check_target(work.target, force=True)  # it may have changed since the first check
        remove(work.replaced)
        os.rename(work.target, work.replaced)
    try:
        os.rename(work.folder, work.target)
    except OSError:
        if moved:
            os.rename(work.replaced, work.target)
        raise
    sync(work.target.parent)
    remove(work.replaced)  # also after a process was killed between the renames


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def save_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Save the tokenizer. Raises OSError if it cannot be written."""
    try:
        tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # native code of tokenizers may raise any type
        raise OSError(errno.EIO, first_line(error)) from error
