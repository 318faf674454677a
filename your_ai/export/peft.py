"""Export an adapter for PEFT: `PeftModel.from_pretrained(model, FOLDER)`.

`adapter_model.safetensors` contains `base_model.model.PATH.lora_A.weight` (r, in) and
`.lora_B.weight` (out, r), and for magnitudes also `.lora_magnitude_vector` (out,). These are the
arrays of an mlx-lm adapter with the matrices transposed. PEFT decides from `adapter_config.json`
alone which layers it adapts, so the config must name exactly the layers in the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx

from your_ai.config.adapter_facts import settings_choosing
from your_ai.export.names import (
    block_of,
    check_dense,
    check_names,
    modules_of,
)
from your_ai.files import atomic_folder
from your_ai.hub.find import HubName
from your_ai.modelfiles.targets import write_error
from your_ai.nets.saved_adapter import Trained, has_score_head, read_score_head
from your_ai.nets.tokenizer import added_end_text
from your_ai.publish.card import CARD, exported_card
from your_ai.publish.training_notes import end_note
from your_ai.run.checkpoint import (
    ADAPTER_CONFIG,
    PEFT_ADAPTERS,
    SCORE_WEIGHT,
    save_arrays,
    write_json,
)

PREFIX = "base_model.model."
SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
ROUNDING = 1e-9  # relative; alpha is computed as scale * rank


def write(trained: Trained, target: Path) -> None:
    """Write the run's adapter to the folder `target`; an existing folder is replaced.

    Raises UserError, before anything is written, if PEFT does not know these layers by these
    names; also if `target` cannot be written.
    """
    check_dense(trained, "PEFT")
    check_names(trained.base)
    arrays = arrays_of(trained.adapter.layers)
    if has_score_head(trained.adapter):
        arrays[f"{PREFIX}{SCORE_WEIGHT}"] = read_score_head(trained.adapter)
    base = trained.hub_name
    try:
        with atomic_folder(target) as folder:
            save_arrays(folder / PEFT_ADAPTERS, arrays, "pt")
            write_json(folder / ADAPTER_CONFIG, config_of(trained, base))
            note = end_note(added_end_text(trained.base))
            text = exported_card(trained, "peft", note=note)
            (folder / CARD).write_text(text, encoding="utf-8")
    except OSError as error:
        raise write_error(target, error) from error


def arrays_of(layers: dict[str, dict[str, mx.array]]) -> dict[str, mx.array]:
    """Return the arrays of PEFT's file. layers: by their path in the model."""
    return {
        f"{PREFIX}{path}.{SUFFIXES[part]}": array.T if array.ndim == 2 else array
        for path, parts in layers.items()
        for part, array in parts.items()
    }


def config_of(trained: Trained, base: HubName | None) -> dict[str, Any]:
    """PEFT's adapter_config.json for the run's adapter."""
    adapter = trained.adapter
    is_reward = has_score_head(adapter)
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_reward else "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else base.repo,
        "revision": None if base is None else base.revision,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": whole(adapter.scale * adapter.rank),
        "lora_dropout": adapter.config["lora_parameters"].get("dropout", 0.0),
        **targets_of(set(adapter.layers), modules_of(trained.base)),
        **settings_choosing(adapter.kind),
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": [SCORE_WEIGHT.partition(".")[0]] if is_reward else None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def whole(alpha: float) -> int | float:
    """Return alpha as an int if it is a whole number up to rounding."""
    return round(alpha) if abs(alpha - round(alpha)) <= ROUNDING * abs(alpha) else alpha


def targets_of(layers: set[str], modules: set[str]) -> dict[str, Any]:
    """The settings with which PEFT adapts exactly `layers` out of a model's `modules`.

    Uses layer names and block indices if they suffice, because every reader of the format
    supports those; otherwise the full paths of the layers.
    """
    names = {path.rpartition(".")[2] for path in layers}
    namesakes = {path for path in modules | layers if path.rpartition(".")[2] in names}
    blocks = {block_of(path) for path in layers}
    if layers == namesakes:
        return {"target_modules": sorted(names), "layers_to_transform": None,
                "layers_pattern": None}  # fmt: skip
    if None not in blocks and layers == {path for path in namesakes if block_of(path) in blocks}:
        return {"target_modules": sorted(names), "layers_to_transform": sorted(blocks),
                "layers_pattern": "layers"}  # fmt: skip
    return {"target_modules": sorted(layers), "layers_to_transform": None, "layers_pattern": None}
