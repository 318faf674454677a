"""Translate a file of `mlx_lm.lora --config` into our settings, and say what each key became.

A key that the file leaves out has mlx-lm's default, not ours. What mlx-lm would do otherwise than
this program is named in a note, or refused if it would change what is learned. This module does
not import mlx.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from your_ai.config.adapter_facts import FACTS, FULL, chosen_by, settings_choosing
from your_ai.config.names import FOLDER, NONE, flag
from your_ai.config.optimizers import OPTIMIZERS
from your_ai.config.setting import LARGEST
from your_ai.config.settings import FIELDS
from your_ai.config.values import as_number, coerce, joined_parts
from your_ai.errors import UserError
from your_ai.gates.text import counted, nearest, quoted, shortened, shown

# How the rows that are trained differ from those of mlx-lm, for users of its config files


LINE_BYTES = 1 << 20  # longer first rows are not looked at
PAIR, CHATS, ALPACA = ("prompt", "completion"), ("messages", "conversations"), "instruction"


def row_differences(path: Path) -> list[str]:
    """A line for each difference in the first row of a JSONL file; none if it cannot be read.

    mlx-lm takes prompt and completion before messages before text, knows no other formats, and no
    system prompt beside them.
    """
    try:
        with path.open("rb") as file:
            row: Any = json.loads(file.readline(LINE_BYTES))
    except (OSError, ValueError, RecursionError):  # whoever reads the rows will say it
        return []
    if not isinstance(row, dict):
        return []
    has_pair = all(key in row for key in PAIR)
    chat = next((key for key in CHATS if key in row), None)
    ours = chat or (has_pair and "prompt and completion") or (ALPACA in row and ALPACA) or "text"
    theirs = (
        "prompt and completion" if has_pair
        else "messages" if "messages" in row
        else "text" if "text" in row else None
    )  # fmt: skip
    notes = []
    if theirs is not None and ours != theirs:
        notes.append(f"rows: {ours} is trained, where mlx-lm takes {theirs}")
    if row.get("system") and ours != "text":
        notes.append("rows: the system prompt in the column system is shown, which mlx-lm ignores")
    return notes


# Keys of files for older versions of mlx-lm -> the keys that it has now


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
        new["use_dora"] = ("fine_tune_type", chosen_by(old).name)
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


# CONFIG_DEFAULTS of mlx_lm/lora.py; a test compares them.
DEFAULTS: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6b",
    "train": False,
    "fine_tune_type": "lora",
    "optimizer": "adam",
    "optimizer_config": {"adam": {}, "adamw": {}, "muon": {}, "sgd": {}, "adafactor": {}},
    "data": "mlx-community/WikiSQL",
    "seed": 0,
    "num_layers": 16,
    "batch_size": 4,
    "iters": 1000,
    "val_batches": 25,
    "learning_rate": 1e-5,
    "steps_per_report": 10,
    "steps_per_eval": 200,
    "resume_adapter_file": None,
    "adapter_path": "adapters",
    "save_every": 100,
    "test": False,
    "test_batches": 500,
    "max_seq_length": 2048,
    "config": None,
    "grad_checkpoint": False,
    "grad_accumulation_steps": 1,
    "clear_cache_threshold": 0,
    "lr_schedule": None,
    "lora_parameters": {"rank": 8, "dropout": 0.0, "scale": 20.0},
    "mask_prompt": False,
    "report_to": None,
    "project_name": None,
    "trust_remote_code": False,
}
# Columns of the data: mlx-lm's key -> our role, and the name that mlx-lm expects without it.
FEATURES = {
    "prompt_feature": ("prompt", "prompt"),
    "completion_feature": ("completion", "completion"),
    "chat_feature": ("messages", "messages"),
    "text_feature": ("text", "text"),
}
KEYS = (*DEFAULTS, "hf_dataset", *FEATURES)
DATASET_KEYS = (*("path", "name", "config", "train_split", "valid_split", "test_split"), *FEATURES)
TRAIN_ROWS, VALID_ROWS = "train[:80%]", "train[-10%:]"  # of hf_dataset, by mlx-lm's default
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")

KNOWN_OPTIMIZERS = {name: kind for name, kind in OPTIMIZERS.items() if kind.in_mlxlm}
SCHEDULES = {  # the arguments of mlx's schedules: at least, at most
    "cosine_decay": (2, 3),
    "linear_schedule": (3, 3),
    "exponential_decay": (2, 2),
    "step_decay": (3, 3),
}
# Keys of mlx-lm -> the settings that an adapter to begin with has, too.
OF_THE_ADAPTER = {
    "num_layers": ("lora_layers",),
    "fine_tune_type": ("use_dora",),
    "lora_parameters": ("lora_rank", "lora_alpha", "lora_targets", "lora_experts"),
}
# What becomes of keys that are no settings here, if the file has them.
NOT_USED = {
    "adapter_path": "the adapter is written to runs/NAME/adapter (--run NAME)",
    "steps_per_report": "every step is reported",
    "project_name": "trackers get the name of the run",
    "clear_cache_threshold": "the memory plan decides when the cache is cleared",
    "config": "only mlx-lm's command line uses it",
    "test_batches": "`your_ai eval` measures all test rows",
}
SWITCHES = {  # the same, if they are true
    "grad_checkpoint": "the memory plan decides what is computed again; the gradients are the same",
    "trust_remote_code": "no code of a model is ever run",
    "test": "measure the test rows afterwards with `your_ai eval`",
}
ALWAYS = (
    "not as in mlx-lm: the random numbers and the order of the rows; rows that do not fill a last "
    "batch are trained too; the padding token after each row, which mlx-lm trains, is not"
)


@dataclass(frozen=True)
class Translation:
    settings: dict[str, Any]
    notes: tuple[str, ...]
    """What each key became, which defaults are mlx-lm's, and what differs; a line each."""


@dataclass
class MlxlmFile:
    """The values of a file, checked when they are read."""

    given: Mapping[str, Any]
    source: str
    """The file's name, for messages."""
    notes: list[str] = field(default_factory=list)

    def has(self, key: str) -> bool:
        return self.given.get(key) is not None

    def value(self, key: str) -> Any:
        """The value of a key, or mlx-lm's default; null counts as left out."""
        return self.given[key] if self.has(key) else DEFAULTS.get(key)

    def text(self, key: str) -> str:
        value = self.value(key)
        if not isinstance(value, str):
            raise self.error(key, f"expected a text, found {quoted(value)}")
        return value

    def as_setting(self, key: str, name: str) -> Any:
        """The value of a key with the type of our setting `name`."""
        return coerce(name, self.value(key), f"{self.source}: {key}")

    def whole(self, key: str, least: int) -> int:
        return self.as_whole(self.value(key), key, least)

    def as_whole(self, value: Any, label: str, least: int) -> int:
        number: int | None = as_number(value, int)
        if number is None or not least <= number <= LARGEST:
            wanted = f"a whole number from {least} to {LARGEST}"
            raise self.error(label, f"expected {wanted}, found {quoted(value)}")
        return number

    def as_float(self, value: Any, label: str) -> float:
        number: float | None = as_number(value, float)
        if number is None:
            raise self.error(label, f"expected a number, found {quoted(value)}")
        return number

    def mapping(self, value: Any, label: str, known: Sequence[str]) -> Mapping[str, Any]:
        """A mapping with no other than the known keys."""
        if not isinstance(value, Mapping):
            raise self.error(label, f"expected `key: value` lines, found {quoted(value)}")
        for key in value:
            if key not in known:
                name = shortened(str(key))
                raise self.error(label, f"unknown key {name}{nearest(name, known)}")
        return value

    def error(self, label: str, text: str) -> UserError:
        return UserError(f"{self.source}: {label}: {text}")


def is_mlxlm(settings: Mapping[str, Any]) -> bool:
    """Return whether a file is one of mlx-lm, by a key that only mlx-lm has, or its lr_schedule."""
    return bool(only_mlxlm(settings))


def only_mlxlm(settings: Mapping[str, Any]) -> list[str]:
    return [
        key
        for key, value in settings.items()
        if (key in KEYS and key not in FIELDS)
        or (key == "lr_schedule" and isinstance(value, Mapping))
    ]


def translated(given: Mapping[str, Any], source: str) -> Translation:
    """Translate a file of mlx-lm. source: its name, for messages.

    Raises UserError for an unknown key, a key of ours, a value of the wrong type, and for what
    this program cannot train.
    """
    given, renamed = modernized(given, source)
    file = MlxlmFile(given, source, renamed)
    check_keys(file)
    settings: dict[str, Any] = {}
    became, defaults = [], []
    for keys, translate in GROUPS:
        found = translate(file)
        settings |= found
        named = [key for key in keys if file.has(key)]
        if named:
            became.append(f"{', '.join(named)}: {as_flags(found)}")
        else:
            ours = [n for n, v in found.items() if n in FIELDS and FIELDS[n].default == v]
            defaults.append(as_flags({n: v for n, v in found.items() if n not in ours}))
    if file.has("resume_adapter_file"):  # what the file does not say, the adapter does
        for key, names in OF_THE_ADAPTER.items():
            for name in names if not file.has(key) else ():
                settings.pop(name, None)
    notes = [f"{source} is a file of mlx-lm; {'; '.join(became)}"]
    if any(defaults):
        notes.append(f"not in {source}, so as in mlx-lm: {' '.join(filter(None, defaults))}")
    if not file.value("train"):
        file.notes.append("train: is not true, so that mlx-lm trains only with --train")
    file.notes += [f"{key}: {text}" for key, text in NOT_USED.items() if file.has(key)]
    file.notes += [f"{key}: {text}" for key, text in SWITCHES.items() if is_true(file, key)]
    return Translation(settings, (*notes, *file.notes, ALWAYS))


def check_keys(file: MlxlmFile) -> None:
    """Raise UserError for a key that is unknown, or ours."""
    for key in file.given:
        if key in KEYS:
            continue
        name = shortened(str(key))
        if key in FIELDS:
            theirs = only_mlxlm(file.given)[0]
            text = f"is a key of your_ai, but {theirs} is one of mlx-lm; use those of one program"
            raise file.error(name, text)
        raise UserError(f"{file.source}: unknown key {name}{nearest(name, KEYS)} (of mlx-lm)")


def is_true(file: MlxlmFile, key: str) -> bool:
    value = file.value(key)
    if not isinstance(value, bool):
        raise file.error(key, f"expected true or false, found {quoted(value)}")
    return value


def as_flags(settings: Mapping[str, Any]) -> str:
    return " ".join(as_flag(name, value) for name, value in settings.items() if value != ())


def as_flag(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag(name) if value else f"--no-{flag(name)[2:]}"
    return f"{flag(name)} {joined_parts(value) if isinstance(value, tuple) else shown(value)}"


# Each group of keys -> our settings


def same(name: str, **more: Any) -> Callable[[MlxlmFile], dict[str, Any]]:
    """A key that is called and means the same here. more: settings that belong to it."""
    return lambda file: {name: file.as_setting(name, name), **more}


def steps(file: MlxlmFile) -> dict[str, Any]:
    """Iterations are micro-batches: mlx-lm updates after grad_accumulation_steps of them."""
    iters, together = file.whole("iters", 1), file.whole("grad_accumulation_steps", 1)
    if iters < together:
        text = f"{iters} is less than grad_accumulation_steps {together}: nothing would be trained"
        raise file.error("iters", text)
    if iters % together:
        file.notes.append(
            f"iters: the last {counted(iters % together, 'iteration')} of {iters:,}, which mlx-lm "
            "computes without an update, left out"
        )
    if together > 1:
        file.notes.append(
            "grad_accumulation_steps: every trained token of a step counts the same; in mlx-lm, "
            "every micro-batch does"
        )
    return {"max_steps": iters // together, "grad_accumulation": together}


def every(key: str, name: str, **more: Any) -> Callable[[MlxlmFile], dict[str, Any]]:
    """An interval in iterations -> in steps. more: settings that belong to it."""

    def translate(file: MlxlmFile) -> dict[str, Any]:
        iters, together = file.whole(key, 1), file.whole("grad_accumulation_steps", 1)
        if iters % together:
            text = f"{iters} iterations are no whole number of steps of {together}"
            file.notes.append(f"{key}: {text}; {flag(name)} is rounded down, to at least 1")
        if key == "save_every" and file.has(key):
            kept = FIELDS["keep"].default
            file.notes.append(
                f"save_every: the newest {kept} checkpoints are kept (--keep), mlx-lm keeps all"
            )
        return {name: max(1, iters // together), **more}

    return translate


def mask_prompt(file: MlxlmFile) -> dict[str, Any]:
    masked = file.as_setting("mask_prompt", "mask_prompt")
    if masked:
        file.notes.append(
            "mask_prompt: all answers of a chat are trained, up to their end token; mlx-lm trains "
            "its last message and what the chat template writes after it"
        )
    return {"mask_prompt": masked}


def num_layers(file: MlxlmFile) -> dict[str, Any]:
    count = as_number(file.value("num_layers"), int)
    if count is None:
        text = f"expected a whole number, -1 for all, found {quoted(file.value('num_layers'))}"
        raise file.error("num_layers", text)
    return {"lora_layers": count if count > 0 else "all"}


def fine_tune_type(file: MlxlmFile) -> dict[str, Any]:
    kind = file.value("fine_tune_type")
    if kind == FULL.name:
        return {"adapter": kind}
    if kind not in list(FACTS):  # it may be of a type that a dict cannot look up
        known = " or ".join((*FACTS, FULL.name))
        raise file.error("fine_tune_type", f"expected {known}, found {quoted(kind)}")
    return settings_choosing(FACTS[kind])


def lora_parameters(file: MlxlmFile) -> dict[str, Any]:
    label = "lora_parameters"
    if file.value("fine_tune_type") == FULL.name:  # mlx-lm does not read them either
        return {}
    known = ("rank", "scale", "dropout", "keys", "alpha")
    found = file.mapping(file.value(label), label, known)
    for name in ("rank", "scale", "dropout"):
        if found.get(name) is None:
            hint = "; mlx-lm does not use alpha" if "alpha" in found else ""
            raise file.error(label, f"{name} is missing, which mlx-lm needs{hint}")
    if "alpha" in found:
        file.notes.append(f"{label}: alpha is not used, by mlx-lm neither: scale counts")
    rank = file.as_whole(found["rank"], f"{label}: rank", 1)
    scale = file.as_float(found["scale"], f"{label}: scale")
    return {
        "lora_rank": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": file.as_float(found["dropout"], f"{label}: dropout"),
        "lora_targets": targets(file, found.get("keys")),
        "lora_experts": found.get("keys") is None,
    }


def targets(file: MlxlmFile, keys: Any) -> tuple[str, ...]:
    """The layers to adapt: paths in a block; without keys, all linear layers."""
    label = "lora_parameters: keys"
    if keys is None:
        file.notes.append(KEYLESS)
        return ("all-linear",)
    if not isinstance(keys, list) or not keys or not all(isinstance(key, str) for key in keys):
        raise file.error(label, f"expected a list of names, found {quoted(keys)}")
    for key in keys:
        if key == "all-linear" or "," in key or not key.strip():
            raise file.error(label, f"{quoted(key)} is no path of a layer in a block")
        if "." not in key:
            file.notes.append(
                f"{label}: {shortened(key)} adapts every layer of this name; mlx-lm wants the "
                "whole path in a block, such as self_attn.q_proj"
            )
    return tuple(dict.fromkeys(key.strip() for key in keys))


def optimizer(file: MlxlmFile) -> dict[str, Any]:
    """The optimizer with mlx's defaults; mlx-lm does not clip gradients."""
    name = file.text("optimizer").lower()
    if name not in KNOWN_OPTIMIZERS:
        expected = ", ".join(KNOWN_OPTIMIZERS)
        raise file.error("optimizer", f"expected one of {expected}, found {quoted(name)}")
    label = f"optimizer_config: {name}"
    kind = KNOWN_OPTIMIZERS[name]
    known = [*kind.options, *["weight_decay"] * kind.decays]
    if kind.has_betas:
        known += ["betas", "eps", "bias_correction"]
    every = file.value("optimizer_config")
    configs = file.mapping(every, "optimizer_config", tuple(KNOWN_OPTIMIZERS))
    options = file.mapping(configs.get(name) or {}, label, known)
    if name == "adafactor":  # mlx's own defaults take another learning rate
        options = {"relative_step": True, "scale_parameter": True, **options}
    for option, ours in kind.options.items():
        value = options.get(option, ours)
        if value != ours and as_number(value, float) != ours:
            text = f"{option} {quoted(value)}: only {str(ours).lower()} is supported"
            raise file.error(label, f"{text}; set it, or use adamw")
    found: dict[str, Any] = {"optimizer": name, "max_grad_norm": 0.0}
    if kind.decays:
        decay = options.get("weight_decay", kind.mlxlm_decay)
        found["weight_decay"] = file.as_float(decay, f"{label}: weight_decay")
    if kind.has_betas:
        found |= adam(file, options, label)
    return found


def adam(file: MlxlmFile, options: Mapping[str, Any], label: str) -> dict[str, Any]:
    """The constants of Adam and AdamW; mlx does not correct the bias by default."""
    betas = options.get("betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2:
        raise file.error(f"{label}: betas", f"expected two numbers, found {quoted(betas)}")
    corrected = options.get("bias_correction", False)
    if not isinstance(corrected, bool):
        text = f"expected true or false, found {quoted(corrected)}"
        raise file.error(f"{label}: bias_correction", text)
    return {
        "adam_beta1": file.as_float(betas[0], f"{label}: betas"),
        "adam_beta2": file.as_float(betas[1], f"{label}: betas"),
        "adam_epsilon": file.as_float(options.get("eps", 1e-8), f"{label}: eps"),
        "adam_bias_correction": corrected,
    }


def learning_rate(file: MlxlmFile) -> dict[str, Any]:
    if not file.has("lr_schedule"):
        rate = file.as_setting("learning_rate", "learning_rate")
        return {"learning_rate": rate, "warmup_steps": 0}
    found = schedule(file)
    rate = file.as_setting("learning_rate", "learning_rate")
    if file.has("learning_rate") and rate != found["learning_rate"]:
        file.notes.append(
            f"learning_rate: {rate:g} is not used, by mlx-lm neither: the arguments of lr_schedule "
            "count"
        )
    return found


def schedule(file: MlxlmFile) -> dict[str, Any]:
    """mlx's schedules. They count updates from 0, as our steps do.

    mlx-lm's warm-up of N has its first rate at step 0 and the peak at steps N and N + 1, from which
    the schedule counts. So it is one of N + 1 steps here.
    """
    known = ("name", "arguments", "warmup", "warmup_init")
    given = file.mapping(file.value("lr_schedule"), "lr_schedule", known)
    name, arguments = given.get("name"), given.get("arguments")
    if not isinstance(name, str) or name not in SCHEDULES:
        expected = ", ".join(SCHEDULES)
        raise file.error("lr_schedule: name", f"expected one of {expected}, found {quoted(name)}")
    label = f"lr_schedule: arguments of {name}"
    least, most = SCHEDULES[name]
    if not isinstance(arguments, list) or not least <= len(arguments) <= most:
        count = f"{least} numbers" if least == most else f"{least} or {most} numbers"
        raise file.error(label, f"expected a list of {count}, found {quoted(arguments)}")
    values = [file.as_float(argument, label) for argument in arguments]
    found: dict[str, Any] = {"learning_rate": values[0], "warmup_steps": 0}
    if name == "cosine_decay":
        end = values[2] if len(values) == most else 0.0
        length = file.as_whole(arguments[1], label, 1)
        found |= {"lr_schedule": "cosine", "lr_decay_steps": length, "lr_end": end}
    elif name == "linear_schedule":
        length = file.as_whole(arguments[2], label, 1)
        found |= {"lr_schedule": "linear", "lr_decay_steps": length, "lr_end": values[1]}
    else:
        length = 1 if name == "exponential_decay" else file.as_whole(arguments[2], label, 1)
        kind = name.partition("_")[0]
        found |= {"lr_schedule": kind, "lr_decay_steps": length, "lr_decay_rate": values[1]}
    warmup = file.as_whole(given.get("warmup") or 0, "lr_schedule: warmup", 0)
    if warmup:
        first = file.as_float(given.get("warmup_init", 0.0), "lr_schedule: warmup_init")
        return {**found, "warmup_steps": warmup + 1, "warmup_init": first}
    if name == "linear_schedule" and values[0] == 0:  # a warm-up without a decay
        rate = {"learning_rate": values[1], "warmup_steps": length + 1, "warmup_init": 0.0}
        return {**rate, "lr_schedule": "constant"}
    return found


def data(file: MlxlmFile) -> dict[str, Any]:
    """The rows that mlx-lm reads: of a local folder, or of datasets of the hub."""
    if file.has("hf_dataset"):
        return validated(file, hub_rows(file))
    name = file.as_setting("data", "data")
    columns = columns_of(file, file.given)
    if os.path.isdir(name):
        return validated(file, {**folder_rows(file, Path(name)), "columns": columns})
    if HUB_NAME.fullmatch(name) and not os.path.exists(name):
        name = f"hf:{name}"
    return validated(file, {"data": name, "valid": FOLDER, "columns": columns})


def validated(file: MlxlmFile, found: dict[str, Any]) -> dict[str, Any]:
    """The same rows, without validation if val_batches is 0."""
    batches = file.whole("val_batches", -1)
    if batches == 0:
        return {**found, "valid": NONE}
    if batches > 0 and file.has("val_batches"):
        file.notes.append(f"val_batches: all validation rows are measured, not {batches} batches")
    return found


def folder_rows(file: MlxlmFile, folder: Path) -> dict[str, Any]:
    """mlx-lm reads train.jsonl and valid.jsonl; we would read other files of such names too."""
    try:
        entries = os.listdir(folder)
    except OSError as error:
        raise file.error("data", f"{folder}: cannot be read ({error.strerror})") from error
    file.notes += row_differences(folder / "train.jsonl")
    others = [
        entry
        for entry in entries
        if entry not in ("train.jsonl", "valid.jsonl", "test.jsonl") and not entry.startswith(".")
        if entry.lower().startswith(("train", "val", "dev")) or (folder / entry).is_dir()
    ]
    if not others:
        return {"data": str(folder), "valid": FOLDER}
    file.notes.append(f"data: only train.jsonl and valid.jsonl of {folder} are read, as by mlx-lm")
    valid = folder / "valid.jsonl"
    return {"data": str(folder / "train.jsonl"), "valid": str(valid) if valid.is_file() else NONE}


def hub_rows(file: MlxlmFile) -> dict[str, Any]:
    """The rows of hf_dataset: parts of splits, by default 80% and the last 10% of train."""
    value = file.value("hf_dataset")
    entries = value if isinstance(value, list) else [value]
    names: dict[str, list[str]] = {"train": [], "valid": []}
    columns = set()
    for entry in entries:
        dataset = file.mapping(entry, "hf_dataset", DATASET_KEYS)
        name = hub_name(file, dataset)
        for split, default in (("train", TRAIN_ROWS), ("valid", VALID_ROWS)):
            rows = dataset.get(f"{split}_split") or default
            if not isinstance(rows, str) or "," in rows or "=" in rows:
                raise file.error(f"hf_dataset: {split}_split", f"{quoted(rows)} is no split")
            names[split].append(f"{name}#{rows}")
        columns.add(columns_of(file, dataset))
    if len(columns) != 1:
        raise file.error("hf_dataset", "datasets with different columns are not supported together")
    found = {split: ",".join(of_split) for split, of_split in names.items()}
    return {"data": found["train"], "valid": found["valid"], "columns": columns.pop()}


def hub_name(file: MlxlmFile, dataset: Mapping[str, Any]) -> str:
    """`hf:OWNER/NAME[:CONFIG][@REVISION]` of an entry of hf_dataset."""
    path = dataset.get("path") or dataset.get("name")
    if not isinstance(path, str) or not HUB_NAME.fullmatch(path):
        raise file.error("hf_dataset: path", f"expected OWNER/NAME, found {quoted(path)}")
    options = file.mapping(dataset.get("config") or {}, "hf_dataset: config", ("name", "revision"))
    parts = [f"hf:{path}"]
    for key, mark in (("name", ":"), ("revision", "@")):
        value = options.get(key)
        if value is None:
            continue
        if not isinstance(value, str) or not re.fullmatch(r"[\w.+/-]+", value):
            raise file.error(f"hf_dataset: config: {key}", f"{quoted(value)} is not a name")
        parts.append(mark + value)
    return "".join(parts)


def columns_of(file: MlxlmFile, given: Mapping[str, Any]) -> tuple[str, ...]:
    """--columns from the features that are given: a pair, a chat or a text."""
    kinds = (("prompt_feature", "completion_feature"), ("chat_feature",), ("text_feature",))
    named = [kind for kind in kinds if any(given.get(key) is not None for key in kind)]
    if not named:
        return ()
    if len(named) > 1:
        keys = " and ".join(kind[0] for kind in named)
        raise file.error(keys, "rows of one kind are expected; keep one of them")
    found = []
    for key in named[0]:
        role, default = FEATURES[key]
        column = given.get(key, default)
        if not isinstance(column, str) or not column.strip():
            raise file.error(key, f"expected the name of a column, found {quoted(column)}")
        found.append(f"{role}={column.strip()}")
    return tuple(found)


def adapter(file: MlxlmFile) -> dict[str, Any]:
    """The file of the adapter to begin with; adapter_config.json beside it describes it."""
    given = file.has("resume_adapter_file")
    return {"from_adapter": file.text("resume_adapter_file")} if given else {}


def report_to(file: MlxlmFile) -> dict[str, Any]:
    return {"report_to": file.as_setting("report_to", "report_to")} if file.has("report_to") else {}


GROUPS: tuple[tuple[tuple[str, ...], Callable[[MlxlmFile], dict[str, Any]]], ...] = (
    (("model",), same("model")),
    (("data", "hf_dataset", *FEATURES, "val_batches"), data),
    (("iters", "grad_accumulation_steps"), steps),
    (("batch_size",), same("batch_size")),
    (("max_seq_length",), same("max_seq_length", too_long="truncate")),
    (("mask_prompt",), mask_prompt),
    (("num_layers",), num_layers),
    (("fine_tune_type",), fine_tune_type),
    (("lora_parameters",), lora_parameters),
    (("resume_adapter_file",), adapter),
    (("optimizer", "optimizer_config"), optimizer),
    (("learning_rate", "lr_schedule"), learning_rate),
    (("seed",), same("seed")),
    (("steps_per_eval",), every("steps_per_eval", "eval_every")),
    (("save_every",), every("save_every", "save_every", keep_best=False)),
    (("report_to",), report_to),
)
