"""PEFT's form of an adapter: write it, for `PeftModel.from_pretrained(model, FOLDER)`, and read it.

`adapter_model.safetensors` contains `base_model.model.PATH.lora_A.weight` (r, in) and
`.lora_B.weight` (out, r), and for magnitudes also `.lora_magnitude_vector` (out,). These are the
arrays of an mlx-lm adapter with the matrices transposed. PEFT decides from `adapter_config.json`
alone which layers it adapts, so the config must name exactly the layers in the file.
"""

from __future__ import annotations

import functools
import math
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import regex

from your_ai.config import nearest
from your_ai.config.adapter_facts import LORA, AdapterFacts, chosen_by, settings_choosing
from your_ai.errors import UserError
from your_ai.export.mlxlm import write_folder
from your_ai.export.names import (
    block_of,
    check_dense,
    check_layers,
    check_names,
    check_scorer,
    modules_of,
)
from your_ai.export.peft_experts import (
    check_experts,
    expert_layers,
    path_in_peft,
    unstacked_experts,
)
from your_ai.export.peft_vocabulary import (
    TIES,
    TOKENS,
    WHOLE,
    names_read,
    settings_of_vocabulary,
    tokens_read,
    vocabulary_arrays,
)
from your_ai.export.started import on_the_base
from your_ai.export.transformers_names import KNOWN
from your_ai.gates.text import counted, shown
from your_ai.gates.untrusted import is_number
from your_ai.hub.find import HubName
from your_ai.modelfiles.shards import open_shard, write_array
from your_ai.nets.layer_sizes import LayerSize
from your_ai.nets.saved_adapter import (
    Trained,
    check_is_adapter,
    has_score_head,
    read_adapter,
    read_score_head,
)
from your_ai.run.checkpoint import PEFT_ADAPTERS, SCORE_WEIGHT

PREFIX = "base_model.model."
SUFFIXES = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight", "m": "lora_magnitude_vector"}
ROUNDING = 1e-9  # relative; alpha is computed as scale * rank


def write(trained: Trained, target: Path) -> None:
    """Write the run's adapter to the folder `target`; an existing folder is replaced.

    Raises UserError, before anything is written, if PEFT does not know these layers by these
    names; also if `target` cannot be written.
    """
    check_is_adapter(trained.adapter)
    trained = on_the_base(trained)
    kind = check_names(trained.base)
    check_dense(trained, "PEFT", experts=True)
    check_experts(trained, kind)
    check_layers(trained, kind)
    lazy = read_adapter(trained.adapter.folder)  # again, as nothing else holds what is read of it
    arrays = arrays_of(lazy.layers, kind) | vocabulary_arrays(lazy, PREFIX)
    del lazy
    if has_score_head(trained.adapter):
        check_scorer(trained.base, KNOWN[kind])
        arrays[f"{PREFIX}{SCORE_WEIGHT}"] = read_score_head(trained.adapter)

    def save(folder: Path) -> None:
        with open_shard(folder / PEFT_ADAPTERS, dict(arrays), "pt") as file:
            for name in list(arrays):
                write_array(trained.adapter.folder, file, arrays.pop(name))
        if trained.tokenizer_files is not None:
            trained.tokenizer().save_pretrained(str(folder))

    write_folder(trained, target, "peft", config_of(trained, trained.hub_name, kind), save)


def arrays_of(layers: dict[str, dict[str, mx.array]], kind: str) -> dict[str, mx.array]:
    """Return the arrays of PEFT's file. layers: by their path in the model of type `kind`."""
    arrays = {
        f"{path}.{SUFFIXES[part]}": array.T if array.ndim == 2 else array
        for path, parts in layers.items()
        for part, array in parts.items()
    }
    found = unstacked_experts(arrays, kind)
    return {f"{PREFIX}{name}": array for name, array in found.items()}


def config_of(trained: Trained, base: HubName | None, kind: str) -> dict[str, Any]:
    """PEFT's adapter_config.json for the run's adapter. kind: the model_type of its base."""
    adapter, experts = trained.adapter, expert_layers(trained.adapter)
    in_peft = {path_in_peft(path, kind) for path in experts}
    layers = {*adapter.layers, *adapter.low_rank}
    targets = with_experts(layers - experts, in_peft, modules_of(trained.base))
    is_reward, vocabulary = has_score_head(adapter), settings_of_vocabulary(adapter)
    if is_reward:
        vocabulary[WHOLE] = [*(vocabulary[WHOLE] or []), SCORE_WEIGHT.partition(".")[0]]
    sizes = adapter.sizes if adapter.has_sizes else {}
    alpha = whole(adapter.scale * adapter.rank)
    alphas = {path: whole(size.scale * size.rank) for path, size in sizes.items()}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_CLS" if is_reward else "CAUSAL_LM",
        "base_model_name_or_path": None if base is None else base.repo,
        "revision": None if base is None else base.revision,
        "inference_mode": True,
        "r": adapter.rank,
        "lora_alpha": alpha,
        "lora_dropout": adapter.config["lora_parameters"].get("dropout", 0.0),
        **targets,
        **settings_choosing(adapter.kind),
        "use_rslora": False,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        **vocabulary,
        "rank_pattern": {p: rank for p, (rank, _) in sizes.items() if rank != adapter.rank},
        "alpha_pattern": {p: found for p, found in alphas.items() if found != alpha},
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


def with_experts(layers: set[str], experts: set[str], modules: set[str]) -> dict[str, Any]:
    """The settings with which PEFT adapts `layers`, as `targets_of`, and all experts.

    experts: their paths in PEFT, which finds experts by the last part alone, in all blocks.
    """
    found = targets_of(layers, modules)
    if experts and found["layers_to_transform"] is not None:
        found = {**found, **dict.fromkeys(("layers_to_transform", "layers_pattern"))}
        found["target_modules"] = layers
    names = {path.rpartition(".")[2] for path in experts}
    return {**found, "target_modules": sorted({*found["target_modules"], *names})}


# Read adapter_config.json, and check that an mlx-lm adapter can do the same


READ = (
    *("peft_type", "base_model_name_or_path", "r", "lora_alpha", "lora_dropout", "use_rslora"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *settings_choosing(LORA),
    *("bias", "init_lora_weights", "rank_pattern", "alpha_pattern", WHOLE, TOKENS),
)
# Settings of training or loading. They do not change the result of the adapter.
HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),
    *("megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
    *("qalora_group_size", TIES, "runtime_config"),
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
    kind: AdapterFacts
    targets: tuple[str, ...] | str
    """Layer names or ends of layer paths, or one pattern."""
    excluded: tuple[str, ...] | str
    """Like `targets`."""
    blocks: tuple[int, ...] | None
    """Indices of the adapted blocks; None for all."""
    list_names: tuple[str, ...]
    """Names of the module lists that contain the blocks; empty for any."""
    alpha: float
    rslora: bool
    ranks: dict[str, float]
    """The ranks of layers with another rank, by a pattern."""
    alphas: dict[str, float]
    """The same of alpha."""
    saved: tuple[str, ...]
    """The embeddings and heads that are saved as a whole, by name."""
    tokens: dict[str, tuple[int, ...]]
    """The tokens whose rows are trained, by the name of the layer."""
    ties: bool
    """Whether a head that the base ties to its embedding is trained with it."""


def read_settings(path: Path, config: dict[str, Any]) -> PeftSettings:
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
    rank = rank_in(path, config, "r", 8)
    alpha = alpha_in(path, config, "lora_alpha", 8)
    dropout = number(path, config, "lora_dropout", 0.0)
    if not 0 <= dropout < 1:
        raise UserError(f"{path}: lora_dropout {dropout}: must be at least 0 and below 1")
    targets = texts(path, config, "target_modules")
    if not targets:
        raise UserError(f"{path}: target_modules: names no layer")
    return PeftSettings(
        path=path,
        base=config.get("base_model_name_or_path"),
        rank=rank,
        scale=scale_of(rank, alpha, bool(config.get("use_rslora"))),
        dropout=float(dropout),
        kind=chosen_by(config),
        targets=targets,
        excluded=texts(path, config, "exclude_modules"),
        blocks=indices(path, config),
        list_names=list_names(path, config),
        alpha=alpha,
        rslora=bool(config.get("use_rslora")),
        ranks=patterns(path, config, "rank_pattern", rank_in),
        alphas=patterns(path, config, "alpha_pattern", alpha_in),
        saved=names_read(path, config),
        tokens=tokens_read(path, config),
        ties=bool(config.get(TIES)),
    )


def rank_in(path: Path | str, config: dict[str, Any], key: str, default: float = 0) -> int:
    rank = number(path, config, key, default)
    if rank < 1 or rank != int(rank):
        raise UserError(f"{path}: {shown(key)} {rank}: must be a whole number of at least 1")
    return int(rank)


def alpha_in(path: Path | str, config: dict[str, Any], key: str, default: float = 0) -> float:
    alpha = number(path, config, key, default)
    if alpha <= 0:
        raise UserError(f"{path}: {shown(key)} {alpha}: must be above 0")
    return alpha


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    return alpha / (math.sqrt(rank) if rslora else rank)


def patterns(
    path: Path, config: dict[str, Any], key: str, read: Callable[[str, dict[str, Any], str], float]
) -> dict[str, float]:
    """Read rank_pattern or alpha_pattern: a number for each pattern of layer paths."""
    given = config.get(key) or {}
    if not isinstance(given, dict) or len(given) > MOST_NAMES:
        raise UserError(f"{path}: {key}: must be an object with a number for each pattern")
    for pattern in given:
        texts(path, {key: pattern}, key)
    return {pattern: read(f"{path}: {key}", given, pattern) for pattern in given}


def sizes_of(settings: PeftSettings, layers: Iterable[str]) -> dict[str, LayerSize]:
    """The size of each layer. As in PEFT, the first pattern that matches a path counts.

    Raises UserError if matching the patterns takes longer than MATCH_S in total.
    """
    until = time.monotonic() + MATCH_S
    try:
        found = {}
        for path in layers:
            rank = int(first_match(settings.ranks, path, settings.rank, until))
            alpha = first_match(settings.alphas, path, settings.alpha, until)
            found[path] = LayerSize(rank, scale_of(rank, alpha, settings.rslora))
        return found
    except TimeoutError as error:
        raise too_slow(settings) from error


def first_match(values: dict[str, float], path: str, default: float, until: float) -> float:
    """The value of the first pattern that matches the whole path, or its end after a dot."""
    for pattern, value in values.items():
        known = compiled(rf"(.*\.)?({pattern})$", "no pattern")
        if known.match(path, timeout=left(until)):
            return value
    return default


def too_slow(settings: PeftSettings) -> UserError:
    return UserError(
        f"{settings.path}: a pattern takes more than {MATCH_S:g} s to match the model's "
        "layers; list the layers by name"
    )


def number(path: Path | str, config: dict[str, Any], key: str, default: float) -> float:
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
def compiled(pattern: str, fault: str) -> regex.Pattern[str]:
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


def missing_targets(settings: PeftSettings, linears: Iterable[str]) -> str:
    """The message about targets that match none of the model's linear layers; empty if all match.

    Raises UserError if none matches.
    """
    linears = list(linears)
    if isinstance(settings.targets, str):
        return ""
    ends = {end for path in linears for end in ends_of(path)}
    missing = [target for target in settings.targets if target not in ends]
    if not missing:
        return ""
    text = f"{settings.path}: target_modules: the model has no layer "
    if len(missing) < len(settings.targets):
        return text + shown(", ".join(missing))
    first, names = shown(missing[0]), sorted({path.rpartition(".")[2] for path in linears})
    raise UserError(f"{text}{first}{nearest(first, names)}")


def targeted(settings: PeftSettings, linears: Iterable[str]) -> set[str]:
    """The model's linear layers that PEFT adapts with these settings.

    Raises UserError if matching the patterns takes longer than MATCH_S in total.
    """
    chosen = chooser(settings)
    try:
        return {path for path in linears if chosen(path)}
    except TimeoutError as error:
        raise too_slow(settings) from error


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
