"""PEFT's adapter_config.json: what it asks for, and whether an adapter of mlx-lm can do it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.config import nearest
from your_ai.errors import UserError

READ = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("use_dora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("bias", "init_lora_weights"),
)
# Of training, or of how others load it; of no weight in what was learned.
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
)
# How A and B begin; the other ways change the base's weights as well.
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
ALL_LINEAR = "all-linear"
HEAD = "lm_head"
LARGEST = 1e9  # of what the settings count and measure
FIRST_INDEX = r".*?\.[^.]*\.(?P<index>\d+)\."  # of a layer's path, as PEFT finds its block


@dataclass(frozen=True)
class Settings:
    """What an adapter_config.json says.

    base: of its model, as it is written there; scale: of the product of A and B; targets:
    names or ends of paths of layers, or a pattern; blocks: their indices, None for all;
    list_names: of the lists that blocks are in, none for any.
    """

    path: Path
    base: Any
    rank: int
    scale: float
    dropout: float
    dora: bool
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str
    blocks: tuple[int, ...] | None
    list_names: tuple[str, ...]


def read(path: Path, config: dict[str, Any]) -> Settings:
    """The settings in the file at `path`.

    Raises UserError, which names it, for those that an adapter of mlx-lm cannot have.
    """
    if config["peft_type"] != "LORA":
        raise UserError(f"{path}: peft_type {config['peft_type']}: only LORA can be imported")
    if config.get("bias", "none") != "none":
        raise UserError(f"{path}: bias {config['bias']}: mlx-lm's adapters have none")
    start = config.get("init_lora_weights", True)
    if not isinstance(start, str | bool | None) or start not in STARTS:
        raise UserError(
            f"{path}: init_lora_weights {start}: changed the base as well; save it with PEFT's "
            "path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if value and key not in (*READ, *HARMLESS):
            raise UserError(f"{path}: {key}: mlx-lm's adapters cannot do this")
    rank = number(path, config, "r", 8)
    alpha = number(path, config, "lora_alpha", 8)
    dropout = number(path, config, "lora_dropout", 0.0)
    if rank < 1 or rank != int(rank):
        raise UserError(f"{path}: r {rank}: must be a whole number of at least 1")
    if alpha <= 0:
        raise UserError(f"{path}: lora_alpha {alpha}: must be above 0")
    if not 0 <= dropout < 1:
        raise UserError(f"{path}: lora_dropout {dropout}: must be at least 0 and under 1")
    targets = texts(path, config, "target_modules")
    if not targets:
        raise UserError(f"{path}: target_modules: names no layer")
    return Settings(
        path=path,
        base=config.get("base_model_name_or_path"),
        rank=int(rank),
        scale=alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        dropout=float(dropout),
        dora=bool(config.get("use_dora")),
        targets=targets,
        excluded=texts(path, config, "exclude_modules"),
        blocks=indices(path, config),
        list_names=list_names(path, config),
    )


def number(path: Path, config: dict[str, Any], key: str, default: float) -> float:
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LARGEST:
        raise UserError(f"{path}: {key} {value}: must be a number")
    return value


def texts(path: Path, config: dict[str, Any], key: str) -> tuple[str, ...] | str:
    """A pattern, or a list of names; empty where there is none. A pattern is checked."""
    value = config.get(key)
    if not value:
        return ()
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        return tuple(value)
    try:
        re.compile(value)
    except (TypeError, re.error) as error:
        raise UserError(f"{path}: {key}: is neither a list of names nor a pattern") from error
    return value


def list_names(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """As patterns, which PEFT takes them for."""
    found = texts(path, config, "layers_pattern")
    names = (found,) if isinstance(found, str) else found
    for name in names:
        texts(path, {"layers_pattern": name}, "layers_pattern")
    return names


def indices(path: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    value = config.get("layers_to_transform")
    found = [value] if isinstance(value, int) else value or None
    if found is None:
        return None
    if not isinstance(found, list) or any(type(index) is not int for index in found):
        raise UserError(f"{path}: layers_to_transform: must be a list of whole numbers")
    return tuple(found)


def check_targets(settings: Settings, linears: Iterable[str]) -> None:
    """Raise UserError for a target that none of a model's linear layers is."""
    linears = list(linears)
    if isinstance(settings.targets, str):
        return
    for target in settings.targets:
        if not any(ends_with(path, target) for path in linears):
            names = sorted({path.rpartition(".")[2] for path in linears})
            raise UserError(
                f"{settings.path}: target_modules: the model has no layer {target}"
                f"{nearest(target, names)}"
            )


def targeted(settings: Settings, linears: Iterable[str]) -> set[str]:
    """Those of a model's linear layers that PEFT adapts by these settings."""
    return {path for path in linears if is_target(settings, path)}


def is_target(settings: Settings, path: str) -> bool:
    targets, excluded = settings.targets, settings.excluded
    if excluded and is_named(path, excluded):
        return False
    if targets == ALL_LINEAR:
        return path != HEAD
    if isinstance(targets, str):
        return is_named(path, targets)
    if path in targets:  # in full: it is meant whatever its block
        return True
    return is_named(path, targets) and (settings.blocks is None or is_in_blocks(settings, path))


def is_named(path: str, names: tuple[str, ...] | str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, path) is not None
    return any(ends_with(path, name) for name in names)


def ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def is_in_blocks(settings: Settings, path: str) -> bool:
    patterns = [rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in settings.list_names]
    matches = (re.match(pattern, path) for pattern in patterns or [FIRST_INDEX])
    match = next(filter(None, matches), None)
    return match is not None and int(match["index"]) in (settings.blocks or ())
