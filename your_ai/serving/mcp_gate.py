"""What agents may name: the one check of the arguments of `your_ai mcp`.

The server is bound to one folder. A path must lead into it, whatever links there are. Settings
that run the user's code or reach out to other machines need a permission that the user gave when
the server was started. What a setting that is a text names is declared with it; one that does not
say is refused.
"""

from __future__ import annotations

import os
import stat
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from your_ai.config import (
    ABOUT,
    DEMO,
    DEMO_DATA,
    FIELDS,
    FOLDER,
    NONE,
    TYPES,
    TrainConfig,
    build,
    find_preset,
    nearest,
)
from your_ai.config.mlxlm import is_mlxlm, translated
from your_ai.config.requests import EvaluateRequest
from your_ai.config.setting import Reach, settings_of
from your_ai.data.hub_datasets import PREFIX
from your_ai.errors import UserError
from your_ai.gates.text import shown
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub import find
from your_ai.hub.registry import known
from your_ai.rewards import names as rewards
from your_ai.run.folder import NAME, RUNS, RunFolder

MOST_ENTRIES = 100_000  # below a folder that is named
CODE, NETWORK = "--allow-code", "--allow-network"
ONLY_IN_TRAINING = ("report_to", "push_to", "force", "supervise")  # do nothing in an evaluation


@dataclass(frozen=True)
class Permissions:
    """The permissions that the user gave when the server was started."""

    code: bool = False
    """Python functions that settings name: rewards and metrics."""
    network: bool = False
    """Settings that reach other machines: judges, trackers, pushing to the hub."""


@dataclass(frozen=True)
class AgentGate:
    """The folder of the server, and what is allowed in it."""

    folder: Path
    """Absolute, without links. It is also the current folder of the process."""
    allowed: Permissions = Permissions()


# Paths


def check_path(gate: AgentGate, label: str, text: str) -> Path:
    """The path that a text names, absolute and without links; it need not exist.

    label: the parameter, for messages. Raises UserError if it leads out of the folder, if a link
    below it does, or if it is neither a file nor a folder.
    """
    check_characters(label, text)
    out = UserError(
        f"{label} {shown(text)}: leads out of {gate.folder}; name something in this folder"
    )
    if text.startswith("~") or ".." in Path(text).parts:
        raise out
    try:
        path = (gate.folder / text).resolve()
        if not path.is_relative_to(gate.folder):
            raise out
        status = path.stat()
    except FileNotFoundError:
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links
        reason = getattr(error, "strerror", None) or "a loop of links"
        raise UserError(f"{label} {shown(text)}: cannot be read ({reason})") from error
    if stat.S_ISDIR(status.st_mode):
        check_links_below(gate, label, path)
    elif not stat.S_ISREG(status.st_mode):
        raise UserError(f"{label} {shown(text)}: is not a regular file or a folder")
    return path


def check_characters(label: str, text: str) -> None:
    if not text.isprintable():
        raise UserError(f"{label} {shown(text)}: contains control characters")


def check_links_below(gate: AgentGate, label: str, folder: Path) -> None:
    """Raise UserError if a link anywhere below a folder leads out of the server's folder."""
    count = 0
    for place, folders, files in os.walk(folder):
        count += len(folders) + len(files)
        if count > MOST_ENTRIES:
            raise UserError(f"{label} {shown(folder.name)}: has more than {MOST_ENTRIES:,} files")
        for name in (*folders, *files):
            path = Path(place, name)
            if path.is_symlink() and not links_inside(gate, path):
                raise UserError(
                    f"{label}: the link {shown(str(path.relative_to(gate.folder)))} leads out of "
                    f"{gate.folder}; copy what it names into the folder"
                )


def links_inside(gate: AgentGate, path: Path) -> bool:
    try:
        return path.resolve().is_relative_to(gate.folder)
    except (OSError, RuntimeError):
        return False


def check_page(gate: AgentGate, label: str, text: str) -> Path:
    """The path of a page to write, .html in a folder that exists. Raises UserError."""
    path = check_path(gate, label, text)
    if path.suffix != ".html":
        raise UserError(f"{label} {shown(text)}: the page needs a name that ends with .html")
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{label} {shown(text)}: is a folder, or in one that does not exist")
    return path


# Runs


def check_runs(gate: AgentGate) -> None:
    """Raise UserError if the folder of runs leads out."""
    path = gate.folder / RUNS
    if path.is_symlink() and not links_inside(gate, path):
        raise UserError(f"{path}: is a link that leads out of {gate.folder}; remove it")


def names_of_runs(gate: AgentGate) -> list[str]:
    """The runs in the folder, by name."""
    return sorted(path.parent.name for path in (gate.folder / RUNS).glob("*/config.yaml"))


def find_run(gate: AgentGate, name: str) -> RunFolder:
    """The run with this name. Raises UserError, which names those that are there, if there is none.

    Also for a run whose folder is a link that leads out, or has one.
    """
    there = names_of_runs(gate)
    if NAME.fullmatch(name) and name in there:
        check_path(gate, "run", str(RUNS / name))
        return RunFolder(RUNS / name)
    listed = shown(", ".join(there)) if there else "none yet; train starts one"
    raise UserError(f"no run named {shown(name)}; runs here: {listed}{nearest(name, there)}")


# Settings


def check_model(gate: AgentGate, label: str, text: str) -> None:
    """A name of the registry, an id on the hub, or a folder inside."""
    if text == DEMO:
        return
    check_characters(label, text)
    is_name = text in known() or find.REPO.fullmatch(text) or find.FOLDER.fullmatch(text)
    if not is_name or os.path.lexists(gate.folder / text):
        check_path(gate, label, text)


def check_data(gate: AgentGate, label: str, text: str) -> None:
    """Files and folders inside, datasets of the hub, and embedded data; maybe several."""
    if text in (*DEMO_DATA, NONE, FOLDER):
        return
    if text == "-":
        raise UserError(f"{label} -: standard input belongs to the protocol; give a file")
    check_characters(label, text)
    if os.path.lexists(gate.folder / text) and ".." not in Path(text).parts:
        check_path(gate, label, text)
        return
    for part in text.split(","):
        for name in {part.strip(), part.rpartition("=")[0].strip()} - {""}:
            if name.startswith(PREFIX):
                check_path(gate, label, name.removeprefix(PREFIX))  # a dataset is no path
            check_path(gate, label, name)


def check_name(gate: AgentGate, label: str, text: str) -> None:
    """The name of a run, which is its folder in runs/."""
    if not NAME.fullmatch(text):
        raise UserError(
            f"{label} {shown(text)}: use at most 100 letters, digits, dots, dashes and underscores"
        )
    check_path(gate, label, str(RUNS / text))


def check_run_or_path(gate: AgentGate, label: str, text: str) -> None:
    """A run by its name, or an adapter inside."""
    check_path(gate, label, text)
    check_path(gate, label, str(RUNS / text))


def check_reward(gate: AgentGate, label: str, text: str) -> None:
    check_characters(label, text)
    found = rewards.parse_reward(text)
    if found.kind == rewards.FUNCTION:
        need_code(gate, label, text)
    elif found.kind == rewards.JUDGE:
        need_network(gate, label, text)
    elif found.kind == rewards.RUN:
        check_run_or_path(gate, label, found.argument.strip())


def check_metric(gate: AgentGate, label: str, text: str) -> None:
    if ":" in text:
        need_code(gate, label, text)


def check_tracker(gate: AgentGate, label: str, text: str) -> None:
    if text != "tensorboard":  # writes into the run's folder
        need_network(gate, label, text)


def need_code(gate: AgentGate, label: str, text: str) -> None:
    if not gate.allowed.code:
        raise UserError(
            f"{label} {shown(text)}: runs Python code; only a server that was started with {CODE} "
            "allows it"
        )


def need_network(gate: AgentGate, label: str, text: str) -> None:
    if not gate.allowed.network:
        raise UserError(
            f"{label} {shown(text)}: reaches other machines; only a server that was started with "
            f"{NETWORK} allows it"
        )


def refuse(gate: AgentGate, label: str, text: str) -> None:
    raise UserError(f"{label}: agents cannot set it; train from the command line")


def pass_text(gate: AgentGate, label: str, text: str) -> None:
    """Texts that are neither paths, nor code, nor addresses."""


def check_run(gate: AgentGate, label: str, text: str) -> None:
    find_run(gate, text)


Decision = Callable[[AgentGate, str, str], object]
# By what a setting names.
DECISIONS: dict[Reach, Decision] = {
    "text": pass_text,
    "model": check_model,
    "data": check_data,
    "file": check_path,
    "page": check_page,
    "name": check_name,
    "run": check_run,
    "run or path": check_run_or_path,
    "reward": check_reward,
    "metric": check_metric,
    "code": need_code,
    "tracker": check_tracker,
    "network": need_network,
    "refused": refuse,
}


def decision_of(name: str) -> Decision:
    """Decide about a setting: numbers, switches and choices are free, unknown texts refused."""
    if (reach := ABOUT[name].agents) is not None:
        return DECISIONS[reach]
    return refuse if is_text(TYPES[name]) else pass_text


def is_text(kind: Any) -> bool:
    """Return whether values of a type may be any text."""
    free = (int, float, bool, type(None))
    if kind in free or typing.get_origin(kind) is typing.Literal:
        return False
    parts = typing.get_args(kind)
    return not parts or any(is_text(part) for part in parts if part is not Ellipsis)


def check_settings(gate: AgentGate, settings: Mapping[str, Any], source: str) -> None:
    """Raise UserError for a setting that an agent may not use, or that is not valid.

    source: where the settings are from, for messages.
    """
    check_config(gate, build(settings, source), settings)


def check_config(gate: AgentGate, config: TrainConfig, names: typing.Iterable[str]) -> None:
    """`check_settings` for these settings of a config."""
    for name in names:
        value = getattr(config, name)
        if value == FIELDS[name].default:
            continue
        for text in value if isinstance(value, tuple) else (str(value),):
            decision_of(name)(gate, name, text)


def check_evaluated(gate: AgentGate, config: TrainConfig, request: EvaluateRequest) -> None:
    """Raise UserError if an evaluation of a run would use what an agent may not name."""
    unused = (*ONLY_IN_TRAINING, *(() if request.data is None else ("data", "valid")))
    check_config(gate, config, (name for name in FIELDS if name not in unused))
    for name, about in settings_of(EvaluateRequest).items():
        if about.agents is not None and (value := getattr(request, name)) is not None:
            DECISIONS[about.agents](gate, name, str(value))


def check_file_of_settings(gate: AgentGate, text: str) -> None:
    """Raise UserError for a YAML file outside, or with settings that an agent may not use.

    A preset that ships with your_ai is allowed, by its name.
    """
    check_path(gate, "config", text)
    path = find_preset(text)
    settings = read_yaml(path)
    if is_mlxlm(settings):
        settings = translated(settings, str(path)).settings
    check_settings(gate, settings, str(path))
