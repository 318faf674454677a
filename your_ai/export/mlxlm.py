"""Export an adapter for mlx-lm: `mlx_lm.generate --adapter-path FOLDER`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from your_ai.export.started import on_the_base
from your_ai.files import atomic_folder
from your_ai.modelfiles.targets import write_error
from your_ai.nets.layer_sizes import evened
from your_ai.nets.saved_adapter import (
    Trained,
    check_is_adapter,
    check_no_vocabulary,
    has_score_head,
)
from your_ai.nets.tokenizer import added_end_text
from your_ai.publish.card import CARD, CardKind, end_note, exported_card
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS, SCORE_HEAD, save_arrays, write_json


def write(trained: Trained, target: Path) -> None:
    """Write the run's adapter to the folder `target`; an existing folder is replaced.

    Raises UserError if it cannot be written.
    """
    check_is_adapter(trained.adapter)
    trained = on_the_base(trained)
    base, adapter = trained.hub_name, trained.adapter
    check_no_vocabulary(adapter, "an adapter of mlx-lm")
    arrays, config = evened(adapter.arrays, adapter.config)
    config = {key: value for key, value in config.items() if key != "model"}
    if base is not None:  # never write the local path of the model
        config["model"] = base.repo

    def copy(folder: Path) -> None:
        for name in (ADAPTERS, *([SCORE_HEAD] if has_score_head(adapter) else [])):
            shutil.copyfile(adapter.folder / name, folder / name)
        if arrays is not adapter.arrays:
            save_arrays(folder / ADAPTERS, arrays)

    write_folder(trained, target, "adapter", config, copy)


def write_folder(
    trained: Trained,
    target: Path,
    kind: CardKind,
    config: dict[str, Any],
    save: Callable[[Path], None],
) -> None:
    """Write the folder `target` of an adapter: arrays, adapter_config.json and a card.

    save: writes the arrays into a folder. Raises UserError if `target` cannot be written.
    """
    try:
        with atomic_folder(target) as folder:
            save(folder)
            write_json(folder / ADAPTER_CONFIG, config)
            note = end_note(added_end_text(trained.base))
            text = exported_card(trained, kind, note=note)
            (folder / CARD).write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(target, error) from error
