"""Read settings from YAML files, presets and command-line flags, and write them.

This module does not import mlx.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from your_ai.config.mlxlm import is_mlxlm, translated
from your_ai.config.settings import (
    AUTO,
    DEMO,
    FIELDS,
    RESUMABLE,
    TrainConfig,
    flag,
    nearest,
)
from your_ai.config.values import coerce
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.gates.text import shortened
from your_ai.gates.yaml_files import read_yaml

LENGTHS = {"max_steps", "epochs"}


def find_preset(name: str) -> Path:
    """Find a YAML file by its path, or a preset that ships with your_ai by its name."""
    presets = {preset.stem: preset for preset in packaged("configs").glob("*.yaml")}
    if os.path.isfile(name):  # Path.is_file raises an error if the name is too long
        return Path(name)
    if (preset := name.removesuffix(".yaml")) in presets:
        return presets[preset]
    listed = ", ".join(sorted(presets))
    raise UserError(f"--config {shortened(name)}: no such file or preset; presets: {listed}")


def build(settings: Mapping[str, Any], source: str) -> TrainConfig:
    """Build a TrainConfig from names and values, each coerced to the type of its field.

    source: where the settings came from, for error messages.
    """
    values = {}
    for name, value in settings.items():
        if name not in FIELDS:
            key = shortened(str(name))
            raise UserError(f"{source}: unknown key {key}{nearest(key, FIELDS)}")
        values[name] = coerce(name, value, f"{source}: {name}")
    return TrainConfig(**values)


def default_text(name: str) -> str:
    """Return ` [default: 4]` for a setting that has a default, else an empty string."""
    value = FIELDS[name].default
    if value in (None, "", ()):
        return ""
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    return f" [default: {'on' if value is True else 'off' if value is False else text}]"


def resolve(
    flags: Mapping[str, Any],
    preset: str | None,
    needs_data: bool = True,
    on_note: Callable[[str], object] = lambda text: None,
) -> TrainConfig:
    """Return the settings of a new run: defaults, then the preset, then the flags.

    Uses the demo's preset if no preset and no data are given, and no model or the demo's model.
    preset: a name, or a file with our keys or with those of mlx-lm; on_note is then called with
    what each became and what differs.
    """
    settings: dict[str, Any] = {}
    if preset is None and flags.get("model", DEMO) == DEMO and "data" not in flags:
        preset = DEMO
    if preset is not None:
        path = find_preset(preset)
        settings = read_yaml(path)
        if is_mlxlm(settings):
            translation = translated(settings, str(path))
            settings = translation.settings
            for text in translation.notes:
                on_note(text)
        build(settings, str(path))  # so that an error about a key names the file
    settings = settings | {name: coerce(name, value, flag(name)) for name, value in flags.items()}
    config = build(settings, "settings")
    if needs_data and not config.data:
        raise UserError("--data is missing: give a folder with train.jsonl, or one .jsonl file")
    return config


def to_yaml(config: TrainConfig) -> str:
    """Write the whole config as YAML that `build` reads back; the last line is `...`."""
    import yaml

    values = dataclasses.asdict(config)
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True, explicit_end=True)


def resumed(saved: TrainConfig, flags: Mapping[str, Any]) -> TrainConfig:
    """Apply flags to the saved config of a run that is resumed.

    A new limit in steps replaces one in epochs, and the other way round.
    Raises UserError if a flag would change what the run computes.
    """
    changes: dict[str, Any] = {}
    if len(limits := flags.keys() & LENGTHS) == 1:
        (other,) = LENGTHS - limits
        changes = {} if getattr(saved, other) == AUTO else {other: None}
    for name, value in flags.items():
        value = coerce(name, value, flag(name))
        if value == getattr(saved, name):
            continue
        if name not in RESUMABLE:
            allowed = ", ".join(flag(n) for n in RESUMABLE)
            raise UserError(
                f"{flag(name)} {value}: the run started with {getattr(saved, name)}, which "
                f"cannot change on --resume (these may change: {allowed})"
            )
        changes[name] = value
    return dataclasses.replace(saved, **changes)
