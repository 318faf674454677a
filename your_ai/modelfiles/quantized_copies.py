"""Copies of models in MLX's quantized layout, made once and kept in the store.

    $YOUR_AI_HOME/quantized/KEY-4bit/      for `train --quantize`
    $YOUR_AI_HOME/quantized/KEY-repacked/  of an AWQ or GPTQ model

KEY is a hash of the model's fingerprint. So the model is quantized from the start, and can be
streamed from files with quantized weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from your_ai.errors import UserError
from your_ai.hub.check import check_model
from your_ai.hub.config_values import GROUP_SIZE
from your_ai.hub.find import fingerprint, store
from your_ai.memory.budget import limit_of
from your_ai.memory.limit import MemoryLimit
from your_ai.modelfiles.quantize import RECORD, check_source, quantize_into, work_of
from your_ai.modelfiles.repack import is_repacked, repacked_model
from your_ai.modelfiles.shards import WriteProgress, write_model
from your_ai.modelfiles.targets import Work, locked, read_record, write_error

KEEP_DAYS = 30
REPACKED = ["repacked", 1]  # the number changes when `modelfiles.repack` computes something else


def needs_copy(source: Path, bits: int | None) -> bool:
    """Return whether a model is loaded from a copy; bits: of `--quantize`, or None."""
    return bits is not None or is_repacked(source)


def place_of_copy(source: Path, bits: int | None) -> Path:
    """The folder that a model is loaded from: its copy, or `source` itself if it needs none.

    It depends on the contents of the model's files, not on their location. Hashing them takes a
    while the first time.
    """
    if not needs_copy(source, bits):
        return source
    settings = REPACKED if bits is None else [bits, GROUP_SIZE]
    kind = "repacked" if bits is None else f"{bits}bit"
    key = json.dumps([fingerprint(source), *settings], sort_keys=True)
    return store() / "quantized" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}-{kind}"


def make_copy(
    source: Path, bits: int | None, limit: MemoryLimit | None = None
) -> Iterator[WriteProgress]:
    """Make the copy of a model, if it needs one, unless a complete one exists.

    bits: quantize to so many bits; None repacks an AWQ or GPTQ model. limit: of the memory of this
    process; by default what the machine has. Waits if another process is
    making it. Deletes copies that no run has used for a month. Raises the same errors as
    `quantize`.
    """
    if not needs_copy(source, bits):
        return
    if bits is not None:
        check_source(source, bits, GROUP_SIZE)
    target = place_of_copy(source, bits)
    delete_unused(target.parent, but=target)
    if use(target):
        return
    limit = limit or limit_of(None)
    if bits is not None:
        yield from quantize_into(source, target, bits, GROUP_SIZE, limit, waits=True)
    else:
        work = Work(target, "repacking", RECORD)
        lazy = repacked_model(source)
        yield from write_model(lazy, source, work, REPACKED, limit, waits=True)


def model_folder(source: Path, bits: int | None, limit: MemoryLimit | None = None) -> Path:
    """The folder that a model is loaded from: a copy, made if needed, or `source` itself."""
    for _ in make_copy(source, bits, limit):
        pass
    return place_of_copy(source, bits)


def use(folder: Path) -> bool:
    """Return whether a copy exists and is complete. Marks it as used now; deletes a damaged one."""
    try:
        with locked(folder, waits=True):
            with contextlib.suppress(OSError):  # the store may be read-only
                os.utime(folder)
            with contextlib.suppress(UserError):
                check_model(folder)
                shards = read_record(folder / RECORD)["shards"]
                if shards and shards.items() <= fingerprint(folder).items():
                    return True
            discard(folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise write_error(folder, error, goes_on=True) from error
    return False


def delete_unused(folder: Path, but: Path) -> None:
    """Delete the copies, complete or not, that were not used for a month."""
    oldest = time.time() - KEEP_DAYS * 86400
    for path in folder.iterdir() if folder.is_dir() else ():
        with contextlib.suppress(OSError, UserError):  # already deleted, or in use
            if path not in (but, work_of(but).folder) and path.stat().st_mtime < oldest:
                with locked(path, waits=False):
                    if path.stat().st_mtime < oldest:
                        discard(path)


def discard(folder: Path) -> None:
    """Delete a folder, config.json first: what an interruption leaves is not a model."""
    (folder / "config.json").unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
