"""Read settings from YAML files, presets and command-line flags, and write them.

This module does not import mlx.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from your_ai.config.adapter_facts import FULL
from your_ai.config.by_layer import ByLayer
from your_ai.config.checks import check_given, in_effect
from your_ai.config.mlxlm import is_mlxlm, translated
from your_ai.config.names import (
    ALL_LINEAR,
    AUTO,
    DEMO,
    DEMO_DATA,
    FOLDER,
    LEARNING_RATES,
    NONE,
    RANK_WAYS,
    SFT,
    SMALLER_LEARNING_RATE,
    flag,
)
from your_ai.config.setting import check_used
from your_ai.config.settings import ABOUT, ADAPTER_SETTINGS, ADDED, FIELDS, TrainConfig, is_used
from your_ai.config.values import as_number, coerce, has_patterns
from your_ai.errors import UserError
from your_ai.files import packaged
from your_ai.gates.paths import missing_text
from your_ai.gates.text import nearest, shortened
from your_ai.gates.yaml_files import read_yaml

if TYPE_CHECKING:
    import yaml


# Relative paths in a file of settings, which may be meant from the folder of that file


# Settings that are paths, ours and mlx-lm's.
PATHS = (
    *("model", "data", "valid", "prompt_template", "from_adapter", "hostfile", "judge_rubric"),
    *("teacher", "teacher_prompt", "resume_adapter_file"),
)
# Those that may also be an alias, an id on the hub, or a run.
NAMES = ("model", "from_adapter", "teacher")
LISTS = ("data",)  # several paths, separated by commas, each with =SHARE
WORDS = (DEMO, *DEMO_DATA, FOLDER, NONE, "-", "")


def check_there(settings: Mapping[str, Any], file: Path) -> None:
    """Raise UserError for a relative path that is neither in the current folder nor beside `file`.

    settings: what `found_beside` made of those in the file, without those that flags replace. A
    value that may be a name counts as a path if it begins with a dot or has two slashes.
    """
    if os.path.abspath(file.parent) == os.getcwd():
        return  # one place; the error of what is not there names it
    for name in PATHS:
        for path in (p.strip() for p, _ in paths_in(name, settings.get(name), file.parent)):
            is_name = name in NAMES and not path.startswith(".") and path.count("/") < 2
            if path in WORDS or path.startswith(("hf:", "~", "/")) or is_name or there(path):
                continue
            text = missing_text(path, beside=file.parent)
            raise UserError(f"{file}: {name} {shortened(path)}: {text}")


def found_beside(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings with whole paths where a relative path is only found in `folder`.

    folder: of the file that has the settings. A path that is found in the current folder, or
    nowhere, stays as it is.
    """
    found = dict(settings)
    for name in PATHS:
        if parts := paths_in(name, settings.get(name), folder):
            found[name] = ",".join(f"{whole_path(path, folder)}{share}" for path, share in parts)
    return found


def paths_in(name: str, value: Any, folder: Path) -> list[tuple[str, str]]:
    """The paths in the value of a setting, each with its `=SHARE`; none if it is no text."""
    if not isinstance(value, str):
        return []
    if name not in LISTS or there(value) or whole_path(value, folder) != value:
        return [(value, "")]
    parts = []
    for part in map(str.strip, value.split(",")):
        path, separator, share = part.rpartition("=")
        parts.append((part, "") if not path or there(part) else (path, separator + share))
    return parts


def whole_path(name: str, folder: Path) -> str:
    path = Path(os.path.expanduser(name))
    if name in WORDS or path.is_absolute() or there(name) or not there(str(folder / path)):
        return name
    return os.path.abspath(folder / path)


def there(name: str) -> bool:
    """Return whether a path exists; `os.path` does not raise for what is no path."""
    return os.path.exists(os.path.expanduser(name))


# Takes the values of --from and --model (None if not given), and returns the settings that the run
# takes over from the adapter.
SettingsOfAdapter = Callable[[str, str | None], Mapping[str, Any]]
OFTEN_CHANGED = ("epochs", "max_steps", "max_memory", "plan")  # of a run that is resumed
LENGTHS = {"max_steps", "epochs"}
# By kind of row; none for an environment, whose rows are its own.
DEMO_PRESETS: Mapping[str | None, str] = {
    "answers": DEMO,
    "pairs": "demo-dpo",
    "labels": "demo-kto",
    "prompts": "demo-grpo",
    "rated": "demo-reward",
}


def find_preset(name: str) -> Path:
    """Find a YAML file by its path, or a preset that ships with your_ai by its name."""
    presets = {preset.stem: preset for preset in packaged("configs").glob("*.yaml")}
    if os.path.isfile(name):  # Path.is_file raises an error if the name is too long
        return Path(name)
    if (preset := name.removesuffix(".yaml")) in presets:
        return presets[preset]
    missing = missing_text(name, "file or preset", presets)
    listed = "" if "; did you mean" in missing else f"; presets: {', '.join(sorted(presets))}"
    raise UserError(f"--config {shortened(name)}: {missing}{listed}")


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
    return f" [default: {as_text(value)}]"


def resolve(
    flags: Mapping[str, Any],
    preset: str | None,
    needs_data: bool = True,
    on_note: Callable[[str], object] = lambda text: None,
    settings_of_adapter: SettingsOfAdapter | None = None,
) -> TrainConfig:
    """Return the settings of a new run: defaults, then the preset, then the flags.

    settings_of_adapter: None refuses --from.

    Uses a preset of the demo if no preset and no data are given, and no model or the demo's model:
    the one whose rows the objective trains.
    preset: a name, or a file with our keys or with those of mlx-lm; on_note is then called with
    what each became and what differs.
    Raises UserError if the preset or a flag contradicts the adapter at --from, and for a setting of
    another objective, also if its value is the default.
    """
    settings = {} if preset is None else settings_in(preset, flags, on_note)
    chosen = () if is_whole(settings) else settings
    settings = settings | {name: coerce(name, value, flag(name)) for name, value in flags.items()}
    given = [name for name in {**dict.fromkeys(chosen), **flags} if settings[name] is not None]
    source = build(settings, "settings").from_adapter
    if source:
        if settings_of_adapter is None:
            raise UserError(f"{flag('from_adapter')} {source}: only works with train and plan")
        settings = of_adapter(settings, source, settings_of_adapter)
    is_demo = preset is None and settings.get("model", DEMO) == DEMO and "data" not in settings
    kind = build(settings, "settings").trained_kind if is_demo else None
    if name := DEMO_PRESETS.get(kind):
        demo = read_yaml(find_preset(name))
        if not source and demo.get("from_adapter") and settings_of_adapter is not None:
            # as if it had been named, so that its adapter decides what the others do
            return resolve(flags, name, needs_data, on_note, settings_of_adapter)
        settings = demo | settings
    rate = default_of("learning_rate", settings)
    config = build({"learning_rate": rate} | settings, "settings")
    check_used(ABOUT, given, config.objective)
    check_given(config, given)
    if needs_data and not config.data:
        raise UserError(
            "--data is missing: give a file (.jsonl, .csv, .parquet ...), or a folder with "
            "train.jsonl"
        )
    return config


def settings_in(
    preset: str, flags: Mapping[str, Any], on_note: Callable[[str], object]
) -> dict[str, Any]:
    """The settings in a preset or a file, those of mlx-lm translated, with paths that are there.

    flags: replace settings of the file, which are not checked. Raises UserError, with the file.
    """
    path = find_preset(preset)
    settings = found_beside(read_yaml(path), path.parent)
    replaced = {*flags, *(["resume_adapter_file"] if "from_adapter" in flags else [])}
    check_there({n: v for n, v in settings.items() if n not in replaced}, path)
    if is_mlxlm(settings):
        translation = translated(settings, str(path))
        settings = translation.settings
        for text in translation.notes:
            on_note(text)
    try:  # so that an error about a key names the file
        build(settings, str(path))
    except UserError:  # which flags may mend: a setting may need another
        with contextlib.suppress(UserError):
            build({**settings, **flags}, str(path))
            return settings
        raise
    return settings


def of_adapter(
    settings: Mapping[str, Any], source: str, settings_of_adapter: SettingsOfAdapter
) -> dict[str, Any]:
    """The settings, and what the run takes over from the adapter at `source`."""
    taken = settings_of_adapter(source, settings.get("model"))
    check_agreement(source, build(settings, "settings"), settings.keys(), taken)
    free = {name for name in ADAPTER_SETTINGS if settings.get(name) in (None, AUTO)}
    kept = {name: value for name, value in settings.items() if name not in free}
    return {**taken, **kept, "from_adapter": taken["from_adapter"]}


def is_whole(settings: Mapping[str, Any]) -> bool:
    """Return whether these are all settings of a run, as in its config.yaml, and not only some."""
    return FIELDS.keys() - ADDED.keys() <= settings.keys()


def check_agreement(
    source: str, config: TrainConfig, given: Iterable[str], taken: Mapping[str, Any]
) -> None:
    """Raise UserError if a setting that the user gave contradicts the adapter at `source`.

    given: the names of these settings; their values are in `config`.
    taken: the adapter's settings. `auto` agrees with each of them; `all`, `all-linear` and
        values by layer are compared later, with the model.
    """
    for name in ADAPTER_SETTINGS:
        if name not in given:
            continue
        ours, theirs = getattr(config, name), taken[name]
        if name == "lora_targets":
            agrees = ours == (ALL_LINEAR,) or same_targets(ours, theirs)
        elif name == "lora_layers":
            agrees = ours in (None, AUTO, "all", theirs)
        elif has_patterns(ours):  # compared later, with the model
            agrees = ByLayer.of(ours).default != AUTO
        elif name == "lora_alpha":
            agrees = not isinstance(theirs, str) and math.isclose(ours, theirs)
        else:
            agrees = ours in (AUTO, theirs)
        if not agrees:
            raise UserError(
                f"{flag(name)} {as_text(ours)}: the adapter of {flag('from_adapter')} "
                f"{shortened(source)} has {as_text(theirs)}; leave the setting out"
            )


def same_targets(targets: Iterable[str], names: Iterable[str]) -> bool:
    """Return whether --lora-targets selects each of the layer names, and nothing else."""
    targets, names = set(targets), set(names)

    def selects(target: str, name: str) -> bool:
        return name == target or name.endswith("." + target)

    used = all(any(selects(target, name) for name in names) for target in targets)
    return used and all(any(selects(target, name) for target in targets) for name in names)


def as_text(value: Any) -> str:
    """The value of a setting as the user would write it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    return shortened(",".join(value) if isinstance(value, tuple) else str(value)) or "none"


def to_yaml(config: TrainConfig) -> str:
    """Write the whole config as YAML that `build` reads back; the last line is `...`."""
    import yaml

    values = dataclasses.asdict(config)
    values = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
    dumper = quoting_dumper()
    return yaml.dump(values, Dumper=dumper, sort_keys=False, allow_unicode=True, explicit_end=True)


@cache
def quoting_dumper() -> type[yaml.SafeDumper]:
    """A dumper that quotes texts such as 1e5, which some readers take for a number."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = '"' if as_number(value, float) is not None else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return Dumper


def resumed(saved: TrainConfig, flags: Mapping[str, Any]) -> TrainConfig:
    """Apply flags to the saved config of a run that is resumed.

    A new limit in steps replaces one in epochs, and the other way round. So does a new choice of
    processes or hosts; who starts the processes with mlx.launch replaces the run's choice.
    Raises UserError if a flag would change what the run computes, or is a setting of another
    objective.
    """
    objective = coerce("objective", flags.get("objective", saved.objective), flag("objective"))
    if objective != saved.objective:  # named alone: other settings follow from it
        raise UserError(
            f"--objective {objective}: the run started with {saved.objective}, which cannot change "
            f"on --resume; start a new run, with --from {saved.run or 'RUN'} from its adapter"
        )
    check_used(ABOUT, (name for name in flags if flags[name] is not None), objective)
    changes = replaced_limits(saved, flags) | replaced_ranks(flags)
    for name, value in flags.items():
        value = coerce(name, value, flag(name))
        if value in (getattr(saved, name), in_effect(saved, name)):
            continue
        if not ABOUT[name].resumes:
            began = as_text(in_effect(saved, name))
            begin = f", with --from {saved.run or 'RUN'} from its adapter"
            begin = "" if name in ADAPTER_SETTINGS else begin  # the adapter has the same
            may = [flag(n) for n in flags if ABOUT[n].resumes] or map(flag, OFTEN_CHANGED)
            raise UserError(
                f"{flag(name)} {as_text(value)}: the run started with {began}, which "
                f"cannot change on --resume (these may: {', '.join(may)}); leave it out, or start "
                f"a new run{begin}"
            )
        changes[name] = value
    return dataclasses.replace(saved, **changes)


def replaced_limits(saved: TrainConfig, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The limit in steps or epochs that a new one of the other kind replaces."""
    if len(flags.keys() & LENGTHS) != 1:
        return {}
    (other,) = LENGTHS - flags.keys()
    return {} if getattr(saved, other) == AUTO else {other: None}


def replaced_ranks(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of processes or hosts that another, or none with --no-supervise, replaces."""
    ways = {name for name in RANK_WAYS if flags.get(name)}
    if len(ways) > 1 or (not ways and flags.get("supervise") is not False):
        return {}
    left = [name for name in RANK_WAYS if name not in ways]
    left += [] if ways & {"hosts", "hostfile"} else ["sync"]
    return {name: FIELDS[name].default for name in left}


# Write the chosen settings of a new run as a commented YAML file, for `train --config`


HEADER = """\
# Settings of a run, for `your_ai train --config` and `your_ai plan --config`.
# Every option of `your_ai train --help` can be set here, with _ for each -.
"""
OTHERS = """\

# Settings that are often changed, with their defaults. To change one, remove the # before its name.
"""
# In the order of the file. Those that the objective does not use are left out.
COMMON = (
    *("valid", "max_memory", "run", "max_seq_length", "epochs", "max_steps", "batch_size"),
    *("learning_rate", "lora_rank", "lora_layers", "quantize", "eval_every", "save_every"),
    *("patience", "samples", "report_to", "seed"),
    *("beta", "sft_weight", "reward", "rollouts", "prompts_per_step", "max_new_tokens"),
    *("kl_beta", "center_rewards"),
)


def commented_yaml(chosen: Mapping[str, Any]) -> str:
    """YAML with the chosen settings, and the common others commented out with their defaults.

    Each has its help text above it. `#name: value` is a setting, `# text` an explanation.
    """
    objective = chosen.get("objective", SFT)
    others = (n for n in COMMON if n not in chosen and is_used(n, objective))
    parts = [HEADER]
    parts += [f"\n{explained(name)}{line_of(name, value)}" for name, value in chosen.items()]
    parts.append(OTHERS)
    parts += [f"\n{explained(n)}#{line_of(n, default_of(n, chosen))}" for n in others]
    return "".join(parts)


def explained(name: str) -> str:
    return f"# {ABOUT[name].help}\n"


def default_of(name: str, settings: Mapping[str, Any]) -> Any:
    objective, whole = settings.get("objective", SFT), settings.get("adapter") == FULL.name
    if name == "learning_rate" and (objective != SFT or whole):
        return LEARNING_RATES.get(objective, SMALLER_LEARNING_RATE)
    return FIELDS[name].default


def line_of(name: str, value: Any) -> str:
    """`name: value` in one line of YAML, however long the value is."""
    import yaml

    flow = None if isinstance(value, tuple) else False
    value = list(value) if isinstance(value, tuple) else value
    return yaml.dump(
        {name: value},
        Dumper=quoting_dumper(),
        allow_unicode=True,
        width=math.inf,
        default_flow_style=flow,
    )
