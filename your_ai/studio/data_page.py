"""Data: what was given, what training would see of it, and rows that are left out."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlencode

from starlette.responses import Response

from your_ai.config import DEMO_DATA, joined_parts, parts_of
from your_ai.errors import UserError, named_errors
from your_ai.gates.text import counted
from your_ai.hub.local import size_of
from your_ai.run.folder import RUNS, is_running
from your_ai.session import run_list
from your_ai.studio import jobs
from your_ai.studio.pages import PageRequest, do, show
from your_ai.studio.uploads import GIFT, GIVEN, MOVING, free_place, given_files, keep, place_of

SETTINGS = ("data", "columns", "objective", "model")  # others of a query are roles of columns
MOST_QUESTIONS = 50


def data_page(asked: PageRequest) -> Response:
    """The list of data, or one data set, whose content follows: reading it may take long."""
    if "data" not in asked.query:
        sizes = {p.name: p.stat().st_size if p.is_file() else size_of(p) for p in given_files()}
        made = [job for job in jobs.found() if job.words[:2] == ("data", "make")]
        return asked.render("data", tab="data", sizes=sizes, demos=DEMO_DATA, made=made)
    data = path_of(asked.query["data"])
    query = settings_in(asked.query)
    if not asked.is_part:
        address = urlencode({**query, "data": asked.query["data"]})
        return asked.render("data", tab="data", data=data, address=address)
    found = asked.studio.reader.ask("look", data=data, **query)
    train = found["splits"].get("train", {"rows": 0})
    return asked.render(
        "data_shown",
        data=data,
        found=found,
        rows=counted(train["rows"], "row"),
        plan=urlencode(plan_of(data, found)),
    )


def path_of(name: str) -> str:
    """The value of --data for a name: that of what was given, or of several; else the name."""
    given = {path.name: str(path) for path in given_files()}
    if name in given:
        return given[name]
    names = name.split(",")
    return ",".join(given[each] for each in names) if given.keys() >= {*names} else name


def settings_in(fields: Mapping[str, str]) -> dict[str, str]:
    """The settings of a look, with the roles that fields name for columns."""
    found = {name: fields.get(name, "") for name in SETTINGS[1:]}
    others = ((role, column) for role, column in fields.items() if role not in SETTINGS)
    roles = [f"{role}={column}" for role, column in others if column]
    return {**found, "columns": joined_parts([*roles, *parts_of("columns", found["columns"])])}


def plan_of(data: str, found: Mapping[str, str]) -> dict[str, str]:
    """The settings with which such a run is planned."""
    settings = {"data": data, "columns": found["columns"], "objective": found["objective"]}
    settings["model"] = found["model"]
    return {name: text for name, text in settings.items() if text}


def leave_out(asked: PageRequest) -> Response:
    """Write a file with the rows that were not chosen, and go on with it."""
    form = asked.form
    data = form.get("data", "")
    given = {name: form.get(name, "") for name in (*SETTINGS, "state", "rows")}
    gift = GIVEN / f"{GIFT}{secrets.token_hex(8)}"
    with named_errors(gift, "written"):
        gift.parent.mkdir(parents=True, exist_ok=True)
        count = asked.studio.reader.ask(
            "leave_out", **given, others="others" in form, into=str(gift)
        )
        name = f"{Path(data.split(',')[0]).stem}-without-{count}"
        with MOVING:
            files = list(gift.iterdir())
            kept = keep(*((files[0], f"{name}.jsonl") if len(files) == 1 else (gift, name)))
            shutil.rmtree(gift, ignore_errors=True)
    query = {name: given[name] for name in SETTINGS[1:] if given[name]}
    return asked.go(f"data?{urlencode({'data': kept.name, **query})}")


def make(asked: PageRequest) -> Response:
    """Begin to make questions and answers of documents; their page shows them when all are made."""
    data, model = asked.form.get("data", ""), asked.form.get("model", "")
    questions = asked.form.get("questions", "")
    if not model or model.startswith("-"):
        raise UserError("choose a model that writes the questions and answers")
    if not (questions.isascii() and questions.isdigit() and 1 <= int(questions) <= MOST_QUESTIONS):
        raise UserError(f"questions: expected a number from 1 to {MOST_QUESTIONS}")
    paths = [data] if Path(data).exists() else data.split(",")
    if any(path.startswith("-") for path in paths):
        raise UserError(f"{data}: is no document")
    place = free_place(f"{Path(paths[0]).stem}-questions.jsonl")
    words = ["data", "make", *paths, "--with", model, "--questions", questions, "--out", str(place)]
    then = f"data?{urlencode({'data': place.name})}"
    job = jobs.begin(f"Questions and answers of {Path(paths[0]).name}", *words, then=then)
    return asked.go(f"jobs/{job.name}")


def remove(asked: PageRequest) -> Response:
    name = asked.form.get("name", "")
    path = place_of(name)
    for run in filter(is_running, run_list.folders(RUNS)):
        config = run.settings()
        read = "" if config is None else f"{config.data},{config.valid}"
        if any(path.absolute() in (Path(p), *Path(p).parents) for p in read.split(",")):
            raise UserError(f"{name}: {run.name} trains on it; stop that run first")
    with named_errors(path, "removed"):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    return asked.go("data")


PAGES = [
    show("/data", data_page),
    do("/data/leave-out", leave_out),
    do("/data/make", make),
    do("/data/remove", remove),
]
