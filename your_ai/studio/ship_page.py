"""Ship: a run to Ollama, LM Studio, GGUF, Hugging Face and others, as `export` and `push` do."""

from __future__ import annotations

import contextlib
import shutil
import typing
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from starlette.responses import Response

from your_ai.config.requests import DTYPES, ExportRequest
from your_ai.config.setting import types_of
from your_ai.errors import UserError
from your_ai.export.lmstudio import home_folder
from your_ai.hub.find import REPO
from your_ai.run import folder as folders
from your_ai.run.folder import RunFolder
from your_ai.studio import jobs
from your_ai.studio.pages import PageRequest, do, run_rows, show

HAS_RESULT = ("finished", "stopped", "imported", "merged")


@dataclass(frozen=True)
class Destination:
    """A tool that a run can be shipped to."""

    to: str
    """The value of --to."""
    name: str
    text: str
    """What is written, and what is done with it."""
    needs: str = ""
    """The program that it needs; empty if none."""
    options: tuple[str, ...] = ()
    home: Callable[[], Path] | None = None
    """Finds the folder of the program, if that is what it is known by. Raises UserError."""

    @property
    def is_ready(self) -> bool:
        if self.home is not None:
            with contextlib.suppress(UserError):
                return self.home().is_dir()
            return False
        return not self.needs or shutil.which(self.needs) is not None

    @property
    def kinds(self) -> tuple[str, ...]:
        """Data types of a fused model; empty for an adapter."""
        return DTYPES.get(self.to, ()) if self.to != "gguf" or self.options else ()


DESTINATIONS = (
    Destination("gguf", "GGUF file", "The fused model in one file, for llama.cpp and all that are "
                "built on it.", options=("--fused",)),
    Destination("ollama", "Ollama", "A folder with the model and its template for ollama create; "
                "the next commands are shown.", needs="ollama"),
    Destination("lmstudio", "LM Studio", "The fused model, where LM Studio looks for it.",
                needs="LM Studio", home=home_folder),
    Destination("hf", "Hugging Face model", "The fused model for transformers, with its card."),
    Destination("peft", "PEFT adapter", "Only the adapter, for transformers with PEFT."),
    Destination("mlx", "MLX adapter", "Only the adapter, for mlx-lm."),
)  # fmt: skip


def ship_page(asked: PageRequest) -> Response:
    rows = [row for row in run_rows() if row.state in HAS_RESULT]
    names = [row.name for row in rows]
    chosen = asked.query.get("run", names[0] if names else "")
    if chosen and chosen not in names:
        folders.find(chosen)
        raise UserError(f"{chosen}: has no finished adapter yet; see Train")
    exports = [
        job for job in jobs.found() if job.words[:2] in (("export", chosen), ("push", chosen))
    ]
    return asked.render(
        "ship", tab="ship", names=names, chosen=chosen, places=DESTINATIONS, exports=exports
    )


def place_of(run: RunFolder) -> str:
    """The page that lists what was made of a run."""
    return f"ship?{urlencode({'run': run.name})}"


def export(asked: PageRequest) -> Response:
    """Begin the export of a run."""
    run, to = folders.find(asked.names["name"]), asked.form.get("to", "")
    place = next((each for each in DESTINATIONS if each.to == to), None)
    if place is None:
        known = typing.get_args(types_of(ExportRequest)["to"])
        raise UserError(f"{to or 'to'}: is no format; choose {', '.join(known)}")
    words = ["export", run.name, "--to", to, *place.options]
    if dtype := asked.form.get("dtype"):
        words += ["--dtype", dtype]
    if "replace" in asked.form:
        words.append("--force")
    job = jobs.begin(f"{run.name} to {place.name}", *words, then=place_of(run))
    return asked.go(f"jobs/{job.name}")


def push(asked: PageRequest) -> Response:
    """Begin to push the adapter of a run to the hub."""
    run, to = folders.find(asked.names["name"]), asked.form.get("to", "")
    if not REPO.fullmatch(to):
        raise UserError("push: give the name on the hub as OWNER/NAME")
    words = ("push", run.name, to)
    job = jobs.begin(f"{run.name} to the hub", *words, then=place_of(run))
    return asked.go(f"jobs/{job.name}")


PAGES = [
    show("/ship", ship_page),
    do("/ship/{name}/export", export),
    do("/ship/{name}/push", push),
]
