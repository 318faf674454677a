"""Write a fused model to a folder, shard by shard with `modelfiles.shards`."""

from __future__ import annotations

import glob
from collections.abc import Iterator
from pathlib import Path

from your_ai.errors import UserError
from your_ai.export.fused_weights import AUTO, base_of, fused_lazily
from your_ai.files import sha256
from your_ai.modelfiles import unfinished
from your_ai.modelfiles.shards import WriteProgress, write_model
from your_ai.modelfiles.targets import check_target
from your_ai.modelfiles.unfinished import Work
from your_ai.nets.saved_adapter import Trained, check_generates
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS

RECORD = "fused.json"


def fuse(
    trained: Trained,
    target: Path,
    to: str = AUTO,
    dtype: str = AUTO,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[WriteProgress]:
    """Write the base with the adapter fused in to `target`. Continues an interrupted `fuse`.

    to, dtype: see `fused_weights.fused_lazily`.
    force: replace an existing model once the new one is complete.
    Raises UserError, before anything is written, if the target is not possible or if memory or
    disk is too small; RunError if the base cannot be read completely.
    """
    check_generates(trained.adapter)
    check_target(target, force)
    if glob.escape(target.name) != target.name:
        raise UserError(
            f"{target}: mlx-lm cannot load a model from a folder with *, ? or [ in its name; "
            "choose another name"
        )
    source, adapter = base_of(trained, max_memory_gb), trained.adapter.folder
    spare_the_run(trained, source, target)
    lazy = fused_lazily(trained, to, dtype, max_memory_gb)
    settings = [*(sha256(adapter / name) for name in (ADAPTERS, ADAPTER_CONFIG)), to, dtype]
    work = work_of(target)
    yield from write_model(lazy, source, work, settings, max_memory_gb, False, replaces=force)


def interrupted_message(target: Path) -> str:
    """The message for a user who interrupted `fuse`."""
    return unfinished.interrupted_message(work_of(target))


def work_of(target: Path) -> Work:
    return Work(target, "fusing", RECORD)


def spare_the_run(trained: Trained, source: Path, target: Path) -> None:
    """Raise UserError if `target` lies in the run's base, adapter or checkpoints."""
    run, there = trained.folder, target.resolve()
    for needed in (trained.base, source, run.adapter, run.checkpoints):
        if there.is_relative_to(needed.resolve()):
            raise UserError(f"{target}: belongs to the run itself ({needed}); choose another name")
