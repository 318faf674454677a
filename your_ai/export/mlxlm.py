"""Export an adapter for mlx-lm: `mlx_lm.generate --adapter-path FOLDER`."""

from __future__ import annotations

import shutil
from pathlib import Path

from your_ai.files import atomic_folder
from your_ai.modelfiles.targets import write_error
from your_ai.nets.saved_adapter import Trained, has_score_head
from your_ai.nets.tokenizer import added_end_text
from your_ai.publish.card import CARD, end_note, exported_card
from your_ai.run.checkpoint import ADAPTER_CONFIG, ADAPTERS, SCORE_HEAD, write_json


def write(trained: Trained, target: Path) -> None:
    """Write the run's adapter to the folder `target`; an existing folder is replaced.

    Raises UserError if it cannot be written.
    """
    base = trained.hub_name
    config = {key: value for key, value in trained.adapter.config.items() if key != "model"}
    if base is not None:  # never write the local path of the model
        config["model"] = base.repo
    try:
        with atomic_folder(target) as folder:
            for name in (ADAPTERS, *([SCORE_HEAD] if has_score_head(trained.adapter) else [])):
                shutil.copyfile(trained.adapter.folder / name, folder / name)
            write_json(folder / ADAPTER_CONFIG, config)
            note = end_note(added_end_text(trained.base))
            text = exported_card(trained, "adapter", note=note)
            (folder / CARD).write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(target, error) from error
