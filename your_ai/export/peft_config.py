"""Read PEFT's adapter_config.json, and check that an mlx-lm adapter can do the same."""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import regex

from your_ai.config import nearest
from your_ai.errors import UserError
from your_ai.gates.text import counted, shown
from your_ai.gates.untrusted import is_number

READ = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("use_dora", "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("bias", "init_lora_weights"),
)
# Settings of training or loading. They do not change the result of the adapter.
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", "ensure_weight_tying", "runtime_config"),
)
# Initializations of A and B that are accepted. The others also change the base's weights.
STARTS = (None, True, False, "gaussian", "eva", "orthogonal")
ALL_LINEAR = "all-linear"
HEAD = "lm_head"
LARGEST = 1e9  # limit of the numbers in the settings
MOST_NAMES, NAME_CHARACTERS = 100_000, 1000
PATTERN_CHARACTERS, MOST_PATTERNS = 100_000, 100
MATCH_S = 1.0  # seconds for all pattern matches of an adapter together
FIRST_INDEX = r".*?\.[^.]*\.(?P<index>\d+)\."  # the block index in a layer's path, as in PEFT


@dataclass(frozen=True)
class PeftSettings:
    """The settings in an adapter_config.json."""

    path: Path
    base: Any
    """The base model as the file names it."""
    rank: int
    scale: float
    """Factor of the product of A and B."""
    dropout: float
    dora: bool
    targets: tuple[str, ...] | str
    """Layer names or ends of layer paths, or one pattern."""
    excluded: tuple[str, ...] | str
    """Like `targets`."""
    blocks: tuple[int, ...] | None
    """Indices of the adapted blocks; None for all."""
    list_names: tuple[str, ...]
    """Names of the module lists that contain the blocks; empty for any."""


def read(path: Path, config: dict[str, Any]) -> PeftSettings:
    """Read the settings in the config of the file at `path`.

    Raises UserError, naming the file, for settings that an mlx-lm adapter cannot have.
    """
    if config["peft_type"] != "LORA":
        raise UserError(
            f"{path}: peft_type {shown(config['peft_type'])}: only LORA can be imported"
        )
    if config.get("bias", "none") != "none":
        raise UserError(
            f"{path}: bias {shown(config['bias'])}: mlx-lm adapters do not support biases"
        )
    start = config.get("init_lora_weights", True)
    if not isinstance(start, str | bool | None) or start not in STARTS:
        raise UserError(
            f"{path}: init_lora_weights {shown(start)}: it also changed the base's weights; save "
            "the adapter with PEFT's path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if value and key not in (*READ, *HARMLESS):
            raise UserError(f"{path}: {shown(key)}: mlx-lm adapters do not support this setting")
    rank = number(path, config, "r", 8)
    alpha = number(path, config, "lora_alpha", 8)
    dropout = number(path, config, "lora_dropout", 0.0)
    if rank < 1 or rank != int(rank):
        raise UserError(f"{path}: r {rank}: must be a whole number of at least 1")
    if alpha <= 0:
        raise UserError(f"{path}: lora_alpha {alpha}: must be above 0")
    if not 0 <= dropout < 1:
        raise UserError(f"{path}: lora_dropout {dropout}: must be at least 0 and below 1")
    targets = texts(path, config, "target_modules")
    if not targets:
        raise UserError(f"{path}: target_modules: names no layer")
    return PeftSettings(
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
    if not is_number(value) or not abs(value) < LARGEST:
        raise UserError(f"{path}: {key} {shown(value)}: must be a number")
    return value


def texts(path: Path, config: dict[str, Any], key: str) -> tuple[str, ...] | str:
    """Read a pattern, which is checked, or a list of names; empty if the setting is not given."""
    value = config.get(key)
    if not value:
        return ()
    if isinstance(value, list) and all(isinstance(name, str) for name in value):
        if len(value) > MOST_NAMES or any(len(name) > NAME_CHARACTERS for name in value):
            raise UserError(f"{path}: {key}: has too many or too long names for a real model")
        return tuple(value)
    fault = f"{path}: {key}: is neither a list of names nor a pattern"
    if not isinstance(value, str):
        raise UserError(fault)
    if len(value) > PATTERN_CHARACTERS:
        length = counted(len(value), "character")
        raise UserError(f"{path}: {key}: is a pattern of {length}; list the layers")
    compiled(value, fault)
    return value


@functools.cache
def compiled(pattern: str, fault: str) -> regex.Pattern:
    """Compile an untrusted pattern in the syntax of `re`. Raises UserError(fault) if invalid."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return regex.compile(pattern, regex.VERSION0)
    except (regex.error, RecursionError, OverflowError, ValueError) as error:
        raise UserError(fault) from error


def list_names(path: Path, config: dict[str, Any]) -> tuple[str, ...]:
    """Read layers_pattern, as a tuple of patterns, because PEFT treats names as patterns."""
    found = texts(path, config, "layers_pattern")
    names = (found,) if isinstance(found, str) else found
    if len(names) > MOST_PATTERNS:
        raise UserError(f"{path}: layers_pattern: has more than {MOST_PATTERNS} patterns")
    for name in names:
        texts(path, {"layers_pattern": name}, "layers_pattern")
    return names


def indices(path: Path, config: dict[str, Any]) -> tuple[int, ...] | None:
    value = config.get("layers_to_transform")
    found = [value] if isinstance(value, int) else value or None
    if found is None:
        return None
    if not isinstance(found, list) or len(found) > MOST_NAMES:
        raise UserError(f"{path}: layers_to_transform: must be a list of whole numbers")
    if any(type(index) is not int for index in found):
        raise UserError(f"{path}: layers_to_transform: must be a list of whole numbers")
    return tuple(found)


def check_targets(settings: PeftSettings, linears: Iterable[str]) -> None:
    """Raise UserError if a target matches none of the model's linear layers."""
    linears = list(linears)
    if isinstance(settings.targets, str):
        return
    ends = {end for path in linears for end in ends_of(path)}
    for target in settings.targets:
        if target not in ends:
            names = sorted({path.rpartition(".")[2] for path in linears})
            raise UserError(
                f"{settings.path}: target_modules: the model has no layer {shown(target)}"
                f"{nearest(shown(target), names)}"
            )


def targeted(settings: PeftSettings, linears: Iterable[str]) -> set[str]:
    """The model's linear layers that PEFT adapts with these settings.

    Raises UserError if matching the patterns takes longer than MATCH_S in total.
    """
    chosen = chooser(settings)
    try:
        return {path for path in linears if chosen(path)}
    except TimeoutError as error:
        raise UserError(
            f"{settings.path}: a pattern takes more than {MATCH_S:g} s to match the model's "
            "layers; list the layers by name"
        ) from error


def chooser(settings: PeftSettings) -> Callable[[str], bool]:
    """Return a test whether PEFT adapts the layer at a path.

    The test raises TimeoutError once MATCH_S seconds have passed since this call.
    """
    until = time.monotonic() + MATCH_S
    excluded, named = matcher(settings.excluded, until), matcher(settings.targets, until)
    in_full = frozenset(settings.targets) if isinstance(settings.targets, tuple) else frozenset()
    in_blocks = block_matcher(settings, until)

    def chosen(path: str) -> bool:
        if settings.excluded and excluded(path):
            return False
        if settings.targets == ALL_LINEAR:
            return path != HEAD
        if isinstance(settings.targets, str):
            return named(path)
        if path in in_full:  # a full path counts in any block
            return True
        return named(path) and in_blocks(path)

    return chosen


def matcher(names: tuple[str, ...] | str, until: float) -> Callable[[str], bool]:
    """Return a test whether a path ends with one of the names or fully matches the pattern."""
    if isinstance(names, str):
        pattern = compiled(names, "no pattern")
        return lambda path: pattern.fullmatch(path, timeout=left(until)) is not None
    known = frozenset(names)
    return lambda path: any(end in known for end in ends_of(path))


def block_matcher(settings: PeftSettings, until: float) -> Callable[[str], bool]:
    """Return a test whether a path is in one of the settings' blocks; always true without any."""
    if settings.blocks is None:
        return lambda path: True
    blocks = frozenset(settings.blocks)
    texts = [rf"(?:^|.*?\.){name}\.(?P<index>\d+)\." for name in settings.list_names]
    patterns = [
        compiled(text, f"{settings.path}: layers_pattern: is not a valid pattern") for text in texts
    ]

    def is_in(path: str) -> bool:
        for pattern in patterns or [compiled(FIRST_INDEX, "")]:
            if match := pattern.match(path, timeout=left(until)):
                index = match["index"] or ""
                return index.isdecimal() and int(index) in blocks
        return False

    return is_in


def left(until: float) -> float:
    """The seconds left until a time. Raises TimeoutError if it has passed."""
    seconds = until - time.monotonic()
    if seconds <= 0:
        raise TimeoutError
    return seconds


def ends_of(path: str) -> list[str]:
    """A layer's path, and the part after each of its dots."""
    parts = path.split(".")
    return [".".join(parts[index:]) for index in range(len(parts))]
