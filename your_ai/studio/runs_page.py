"""Train: the runs of this folder, and one of them with its live charts."""

from __future__ import annotations

import time

from starlette.responses import Response

from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.run import folder as folders
from your_ai.run import requests
from your_ai.session import run_list
from your_ai.studio.pages import READ_S, PageRequest, do, run_rows, show
from your_ai.studio.plan_page import address_of, settings_of_form


def runs_page(asked: PageRequest) -> Response:
    rows = run_rows()
    cells = [
        {head: text(row, time.time()) for head, text in run_list.COLUMNS.items()} for row in rows
    ]
    return asked.render("runs", tab="runs", heads=list(run_list.COLUMNS), rows=cells)


def home(asked: PageRequest) -> Response:
    """Go to the runs, or, where there are none yet, to the data."""
    return asked.go("runs" if run_list.folders(folders.RUNS) else "data")


def run_page(asked: PageRequest) -> Response:
    folder = folders.find(asked.names["name"])
    run = run_list.row_of(folder, time.monotonic() + READ_S)
    if run is None:
        raise UserError(f"{folder.name}: is no longer there")
    if not asked.is_part:
        asked.studio.boards.of(run.name)  # is drawn while the browser reads this page
    config = folder.settings()
    again = "" if config is None else address_of(config)
    trained = run_list.is_trained(folder)
    return asked.render("run", tab="runs", run=run, again=again, is_trained=trained)


def change(asked: PageRequest) -> Response:
    """Pause, go on, save, stop, resume or remove a run."""
    name, what = asked.names["name"], asked.names["what"]
    folder = folders.find(name)
    if what in ("pause", "continue", "save"):
        if not folders.is_running(folder):
            raise UserError(f"{name}: is not running")
        if what == "continue":
            requests.withdraw(folder, requests.PAUSE)
        else:
            requests.ask(folder, requests.PAUSE if what == "pause" else requests.SAVE)
    elif what == "stop":
        run_list.stop(folder)
    elif what == "resume":
        changes = settings_of_form(asked.form)
        asked.studio.starter.ask("resume", run=str(folder.path), changes=changes)
    elif what == "remove":
        freed = run_list.remove(folder)
        return asked.render("done", tab="runs", text=f"{name} is removed: {size_text(freed)} free")
    else:
        raise UserError(f"{what}: cannot be done with a run")
    return asked.go(f"runs/{name}")


PAGES = [
    show("/", home),
    show("/runs", runs_page),
    show("/runs/{name}", run_page),
    do("/runs/{name}/{what}", change),
]
