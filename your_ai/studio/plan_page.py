"""Plan: settings, the plan that follows from them, and the same as a file and as a command.

The form is made of the declarations of the settings, so that a new one is there by itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from starlette.responses import Response

from your_ai.config import (
    ABOUT,
    DEMO,
    DEMO_DATA,
    FIELDS,
    PANELS,
    TYPES,
    TrainConfig,
    coerce,
    default_text,
    describe,
    flag,
    joined_parts,
    negated,
    words_of,
)
from your_ai.config.reading import commented_yaml
from your_ai.errors import UserError
from your_ai.gates.text import message_line
from your_ai.hub.local import local_models
from your_ai.hub.registry import known
from your_ai.memory.limit import GB, detect, memory_here
from your_ai.run.folder import place_of
from your_ai.session.tune_space import SEARCHED
from your_ai.studio.pages import PageRequest, do, show

FIRST = ("objective", "model", "data", "columns", "epochs", "lora_rank", "max_seq_length", "run")
APART = (*FIRST, "max_memory")  # not behind the door
PLAIN = {  # for those who have not met the names of the settings
    "objective": "what is learned",
    "columns": "what the columns are",
    "epochs": "passes over the data",
    "lora_rank": "size of the adapters (rank)",
    "max_seq_length": "longest row, in tokens",
    "run": "name of the run",
}
LEAST_GB, STEP_GB = 0.3, 0.1


@dataclass(frozen=True)
class Control:
    """A setting as the form shows it."""

    name: str
    label: str
    help: str
    default: str
    kind: str
    """What it may be, in words."""
    value: str
    words: tuple[str, ...]
    """The words that it must be one of; empty if it may be something else."""
    objectives: str
    """The objectives that use it; empty for all."""
    searched: str
    """What `tune` would try; empty if it does not."""


def control(name: str, given: Mapping[str, str]) -> Control:
    kind = TYPES[name]
    words = ("true", "false") if kind is bool else tuple(words_of(kind))
    is_closed = kind is bool or ("a " not in describe(kind) and "values" not in describe(kind))
    return Control(
        name=name,
        label=PLAIN.get(name, name.replace("_", " ")),
        help=ABOUT[name].help,
        default=default_text(name).strip(" []").removeprefix("default: "),
        kind=describe(kind),
        value=given.get(name, ""),
        words=words if is_closed else (),
        objectives=", ".join(ABOUT[name].objectives),
        searched=SEARCHED.get(name, ""),
    )


def settings_of_form(form: Mapping[str, str]) -> dict[str, Any]:
    """The settings that a form gives, of their types. Raises UserError."""
    unknown = [name for name in form if name not in TYPES]
    if unknown:
        raise UserError(f"{unknown[0]}: is no setting")
    given: dict[str, Any] = {}
    for name, text in form.items():
        is_word = TYPES[name] is bool and text in ("true", "false")
        given[name] = coerce(name, text == "true" if is_word else text, flag(name))
    if (given.get("max_memory") or 0) >= most_gb():
        del given["max_memory"]  # the right end of the slider: what is free
    return given


def most_gb() -> float:
    """The right end of the slider: the limit that a run finds by itself on this machine."""
    return max(LEAST_GB + STEP_GB, round(detect(memory_here()).limit_bytes / GB, 1))


def memory_slider(asked: str) -> dict[str, Any]:
    """The value, ends and step of the slider, in GB. asked: by a link, which is kept as it is."""
    most = most_gb()
    try:
        value = min(float(asked), most)
    except ValueError:
        value = most
    if not value > 0:
        value = most
    step = STEP_GB if round(value / STEP_GB, 9).is_integer() else "any"
    return {"value": value, "least": min(LEAST_GB, value), "most": most, "step": step}


def as_field(value: Any) -> str:
    """The value of a setting as a field of the form, or an option, has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return joined_parts(value) if isinstance(value, list | tuple) else str(value)


def address_of(config: TrainConfig) -> str:
    """The address of the page, below the root, with the settings of a run that are no defaults."""
    given = {}
    for name in TYPES:
        value = getattr(config, name)
        if name not in ("run", "wait") and value != FIELDS[name].default:
            given[name] = as_field(value)
    return f"plan?{urlencode(given)}"


def command_of(given: Mapping[str, Any]) -> str:
    """The command that trains with these settings."""
    words = []
    for name, value in given.items():
        if isinstance(value, bool):
            words.append(flag(name) if value else negated(name))
        else:
            words += [flag(name), shlex.quote(as_field(value))]
    return " ".join(["your_ai train", *words])


def plan_page(asked: PageRequest) -> Response:
    return form_page(asked, asked.query)


def form_page(
    asked: PageRequest, fields: Mapping[str, str], fault: str = "", status: int = 200
) -> Response:
    """The form with what is given, and why it was refused."""
    given = {name: text for name, text in fields.items() if name in TYPES and text}
    behind = {
        panel: [control(name, given) for name in names if name not in APART]
        for panel, names in PANELS.items()
    }
    return asked.render(
        "plan",
        status,
        tab="plan",
        fault=fault,
        first=[control(name, given) for name in FIRST],
        behind=behind,
        about=ABOUT,
        slider=memory_slider(given.get("max_memory", "")),
        models=model_names(),
        datas=data_names(),
    )


def model_names() -> list[tuple[str, str]]:
    """Names of models, and where they are."""
    local = [m.alias or m.name for m in local_models() if m.fault is None]
    here = [(name, "here") for name in (DEMO, *local)]
    there = [(name, "to download") for name in known() if name not in local]
    return [*here, *there]


def data_names() -> list[str]:
    from your_ai.studio.uploads import given_files

    return [*(str(path) for path in given_files()), *DEMO_DATA]


def preview(asked: PageRequest) -> Response:
    """The plan of the settings in the form, or what is wrong with them."""
    given = settings_of_form(asked.form)
    plan, fault = None, ""
    try:
        if "run" in given and place_of(given["run"]).path.exists():
            raise UserError(f"{given['run']}: there is such a run already; choose another name")
        topic = repr([given.get(name) for name in ("model", "data", "objective")])
        plan = asked.studio.planner.ask_last("plan", topic, settings=given)
    except UserError as error:
        fault = message_line(error)
    yaml, command = commented_yaml(given), command_of(given)
    return asked.render("plan_shown", plan=plan, fault=fault, yaml=yaml, command=command)


def start(asked: PageRequest) -> Response:
    """Start the run, which waits for the memory of those that are there before it."""
    try:
        name = asked.studio.starter.ask("start", settings=settings_of_form(asked.form))
    except UserError as error:
        return form_page(asked, asked.form, message_line(error), 422)
    return asked.go(f"runs/{name}")


PAGES = [
    show("/plan", plan_page),
    do("/plan/preview", preview),
    do("/runs", start),
]
