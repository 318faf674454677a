"""Export the base model with the adapter fused in, for transformers.

The weights and their names are those of `your_ai fuse --to dequantized`. The names are
mlx-lm's, which equal transformers' names for the architectures that are accepted here. The
files are written by `modelfiles.shards`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from your_ai.errors import UserError
from your_ai.export.fused_weights import AUTO, DEQUANTIZED, base_of, fused_lazily
from your_ai.export.names import STACKS_EXPERTS, TRANSFORMERS, check_names
from your_ai.files import sha256
from your_ai.modelfiles import unfinished
from your_ai.modelfiles.shards import WriteProgress, write_model
from your_ai.modelfiles.unfinished import Work
from your_ai.nets.saved_adapter import Trained
from your_ai.publish.card import exported_card
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS

RECORD = "exported.json"


def write(
    trained: Trained,
    target: Path,
    dtype: str = AUTO,
    max_memory_gb: float | None = None,
    force: bool = False,
) -> Iterator[WriteProgress]:
    """Write the fused model to `target`. Continues a previous export that was interrupted.

    dtype: of the weights; auto keeps the dtype of the base.
    force: replace an existing model once the new one is complete.
    Raises UserError, before anything is written, if transformers uses other weight names or if
    memory or disk is too small; RunError if the base cannot be read completely.
    """
    kind = check_names(trained.base)
    if kind in STACKS_EXPERTS:
        raise UserError(
            f"{trained.base}: mlx-lm stores the experts of this {kind} model stacked, and "
            "transformers stores them separately; use your_ai fuse, for mlx-lm"
        )
    lazy = fused_lazily(trained, DEQUANTIZED, dtype, max_memory_gb)
    config = config_of(lazy.config, kind, next(iter(lazy.arrays.values())).dtype)
    card = exported_card(trained, "model", "transformers")
    lazy = replace(lazy, config=config, card=card)
    sums = [sha256(trained.adapter.folder / name) for name in (ADAPTERS, ADAPTER_CONFIG)]
    source, settings = base_of(trained, max_memory_gb), [*sums, dtype]
    yield from write_model(
        lazy, source, work_of(target), settings, max_memory_gb, False, replaces=force
    )


def interrupted_message(target: Path) -> str:
    """The message for a user who interrupted `write`."""
    return unfinished.interrupted_message(work_of(target))


def work_of(target: Path) -> Work:
    return Work(target, "exporting", RECORD)


def config_of(config: dict[str, Any], kind: str, dtype: mx.Dtype) -> dict[str, Any]:
    """Complete config.json for transformers. dtype: used if the config names none."""
    config = {"architectures": [TRANSFORMERS[kind]], **config}
    if not config.keys() & {"dtype", "torch_dtype"}:
        config["torch_dtype"] = str(dtype).removeprefix("mlx.core.")
    return config
