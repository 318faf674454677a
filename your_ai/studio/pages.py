"""What all pages of the studio share: the studio's state, requests, answers and templates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import HTMLResponse, RedirectResponse, Response

from your_ai.config import flag
from your_ai.dashboard.view import duration
from your_ai.gates.text import counted, printable, shortened, size_text
from your_ai.session import run_list
from your_ai.session.run_list import RunRow
from your_ai.studio.boards import Boards
from your_ai.studio.talks import Talks
from your_ai.studio.worker import Worker

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent
STUDIO = Path("studio")  # what users give and make on the pages, beside runs/
READ_S = 0.03  # for the events of runs while somebody waits for a page
ON_S, REST_S = 0.02, 0.06  # then they are read in the background, in parts with rests between them
TABS = {
    "models": "Models",
    "data": "Data",
    "plan": "Plan",
    "runs": "Train",
    "try": "Try",
    "ship": "Ship",
}


@dataclass
class Studio:
    """The state of the server. All that must outlive it is in files."""

    token: str
    planner: Worker = field(default_factory=Worker)
    """Plans runs."""
    starter: Worker = field(default_factory=Worker)
    """Starts runs, which must not wait for a plan."""
    lister: Worker = field(default_factory=Worker)
    """Lists models with their plans."""
    reader: Worker = field(default_factory=Worker)
    """Reads data, which may take longer than a plan should wait."""
    answerer: Worker = field(default_factory=Worker)
    """Holds the model that is tried."""
    talks: Talks = field(default_factory=Talks)
    """The conversations with models that are tried."""
    boards: Boards = field(default_factory=Boards)
    """The live pages of runs that somebody watches."""

    @property
    def root(self) -> str:
        """The beginning of the path of all pages: only who has it can ask for anything."""
        return f"/{self.token}/"

    def close(self) -> None:
        for worker in (self.planner, self.starter, self.lister, self.reader, self.answerer):
            worker.end()
        self.boards.close()


@dataclass(frozen=True)
class PageRequest:
    """A request for a page, or for something to be done."""

    studio: Studio
    names: Mapping[str, str]
    """The names in its path."""
    query: Mapping[str, str]
    form: Mapping[str, str]
    """The fields of its form, without those that are empty."""
    body: bytes
    is_part: bool
    """Whether the page's script asks, which shows the answer in the page that is there."""

    def render(self, name: str, status: int = 200, **values: Any) -> Response:
        """Answer with the template NAME.html.j2."""
        page = templates().get_template(f"{name}.html.j2")
        known = {"root": self.studio.root, "tabs": TABS, "is_part": self.is_part}
        return HTMLResponse(printable(page.render(**known, **values)), status)

    def go(self, path: str) -> Response:
        """Answer that what was asked for is done, and show the page at `path`."""
        return RedirectResponse(self.studio.root + path, 303)


def run_rows() -> list[RunRow]:
    """The runs of this folder. What takes long to know of a long run comes with a later view."""
    rows = run_list.run_rows(read_s=READ_S)
    threading.Thread(target=read_on, daemon=True).start()
    return rows


READING_ON = threading.Lock()


def read_on() -> None:
    """Read all events of the runs that are listed, unless another thread does."""
    if READING_ON.acquire(blocking=False):
        try:
            while run_list.read_on(ON_S):
                time.sleep(REST_S)
        finally:
            READING_ON.release()


Answer = Callable[[PageRequest], Response]


def show(path: str, answer: Answer) -> tuple[str, str, Answer]:
    """Something to see: a GET, which changes nothing."""
    return "GET", path, answer


def do(path: str, answer: Answer) -> tuple[str, str, Answer]:
    """Something to do: a POST."""
    return "POST", path, answer


def compile_templates() -> None:
    """Compile all pages before somebody asks for the first."""
    for path in (FOLDER / "templates").glob("*.html.j2"):
        templates().get_template(path.name)


@cache
def templates() -> Environment:
    import jinja2

    folders = jinja2.FileSystemLoader([FOLDER / "templates", FOLDER.parent / "dashboard"])
    made = jinja2.Environment(loader=folders, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    made.filters |= {f.__name__: f for f in (size_text, duration, counted, shortened, flag)}
    return made
