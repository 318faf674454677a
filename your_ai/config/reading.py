"""Read settings from YAML files, presets and command-line flags, and write them.

This module does not import mlx.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from your_ai.config.settings import (
    AUTO,
    DEMO,
    FIELDS,
    RESUMABLE,
    TYPES,
    TrainConfig,
    flag,
    nearest,
)
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.gates.text import quoted, shortened
from your_ai.gates.yaml_files import read_yaml

LENGTHS = {"max_steps", "epochs"}
NUMBER_CHARACTERS = 100  # of a number that is given as text


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


def coerce(name: str, value: Any, label: str) -> Any:
    """Convert `value` to the type of field `name`.

    label: the beginning of the error message. Raises UserError if the value does not fit.
    """
    kind = TYPES[name]
    options = typing.get_args(kind)
    if value is None and type(None) in options:
        return None
    if kind == tuple[str, ...]:
        parts = value.split(",") if isinstance(value, str) else value
        if isinstance(parts, (list, tuple)) and all(isinstance(p, str) for p in parts):
            return tuple(p.strip() for p in parts if p.strip())
    elif kind is bool:
        if isinstance(value, bool):
            return value
    elif kind is str:
        if isinstance(value, (str, int, float)) and not isinstance(value, bool):
            with contextlib.suppress(ValueError):  # Python refuses to convert very long ints
                return str(value)
    elif typing.get_origin(kind) is Literal:
        if value in options:
            return value
    elif float in (kind, *options):
        number = as_number(value, float)
        if number is not None:
            return number
    else:  # int, perhaps also None or literals
        literals = [
            value
            for option in options
            if typing.get_origin(option) is Literal
            for value in typing.get_args(option)
        ]
        if value in literals:
            return value
        number = as_number(value, int)
        if number is not None and (int in (kind, *options) or number in literals):
            return number
    raise UserError(f"{label}: expected {describe(kind)}, found {quoted(value)}")


def as_number(value: Any, kind: type) -> Any:
    """Return `value` as an int or a float if the conversion is exact, else None.

    The text `1e-4` is a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    if isinstance(value, str) and len(value) > NUMBER_CHARACTERS:
        return None
    try:
        if kind is int and isinstance(value, (int, str)):  # a float has only 53 bits
            with contextlib.suppress(ValueError):
                return int(value)
        number = float(value)
    except ValueError:
        return None
    except OverflowError:
        number = math.inf
    if kind is float:
        return number
    return int(number) if math.isfinite(number) and number == int(number) else None


def describe(kind: Any) -> str:
    """Describe a type in words: `a whole number or all`."""
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    if kind in names:
        return names[kind]
    if typing.get_origin(kind) is Literal:
        return " or ".join(str(v) for v in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return "a list of names"
    parts = [describe(o) for o in typing.get_args(kind) if o is not type(None)]
    return " or ".join(parts)


def default_text(name: str) -> str:
    """Return ` [default: 4]` for a setting that has a default, else an empty string."""
    value = FIELDS[name].default
    if value in (None, "", ()):
        return ""
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    return f" [default: {'on' if value is True else 'off' if value is False else text}]"


def resolve(flags: Mapping[str, Any], preset: str | None, needs_data: bool = True) -> TrainConfig:
    """Return the settings of a new run: defaults, then the preset, then the flags.

    Uses the demo's preset if no preset and no data are given, and no model or the demo's model.
    """
    settings: dict[str, Any] = {}
    if preset is None and flags.get("model", DEMO) == DEMO and "data" not in flags:
        preset = DEMO
    if preset is not None:
        path = find_preset(preset)
        settings = read_yaml(path)
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
