"""Keys of files for older versions of mlx-lm -> the keys that it has now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from your_ai.errors import UserError
from your_ai.gates.text import quoted

KEYLESS = (
    "lora_parameters: keys is missing: all linear layers are adapted, as by mlx-lm now; older "
    "versions adapted queries and values: keys: [self_attn.q_proj, self_attn.v_proj]"
)
OLD_KEYS = ("lora_layers", "use_dora", "adapter_file", "wandb")


def modernized(given: Mapping[str, Any], source: str) -> tuple[dict[str, Any], list[str]]:
    """The settings of a file of mlx-lm with today's keys, and notes on those that were renamed.

    source: the file's name. Raises UserError if an old and a new key contradict each other.
    """
    found = {key: value for key, value in given.items() if key not in OLD_KEYS}
    old = {key: given[key] for key in OLD_KEYS if given.get(key) is not None}
    new: dict[str, Any] = {}
    if "lora_layers" in old:
        new["lora_layers"] = ("num_layers", old["lora_layers"])
    if "use_dora" in old:
        if not isinstance(old["use_dora"], bool):
            value = quoted(old["use_dora"])
            raise UserError(f"{source}: use_dora: expected true or false, found {value}")
        new["use_dora"] = ("fine_tune_type", "dora" if old["use_dora"] else "lora")
    if "adapter_file" in old:
        new["adapter_file"] = ("adapter_path", old["adapter_file"])
    if "wandb" in old:  # the name of the project
        found.setdefault("project_name", old["wandb"])
        new["wandb"] = ("report_to", "wandb")
    notes = []
    for key, (name, value) in new.items():
        if found.get(name, value) != value:
            raise UserError(
                f"{source}: {key}: contradicts {name}, its name in mlx-lm now; keep one of them"
            )
        found[name] = value
        notes.append(f"{key}: is {name} in mlx-lm now")
    return found, notes
