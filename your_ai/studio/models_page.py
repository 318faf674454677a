"""Models: what is here, what fits on this machine, and downloads."""

from __future__ import annotations

from starlette.responses import Response

from your_ai.errors import UserError
from your_ai.gates.text import size_text
from your_ai.hub.local import folder_to_remove, remove_model
from your_ai.studio import jobs
from your_ai.studio.pages import PageRequest, do, show

DOWNLOAD = "download"


def models_page(asked: PageRequest) -> Response:
    """The page, whose table follows: planning all known models takes seconds."""
    downloads = [job for job in jobs.found() if job.words[:1] == (DOWNLOAD,)]
    running = {job.words[1]: job for job in downloads if job.state == "running"}
    found = asked.studio.lister.ask("models") if asked.is_part else None
    open_downloads = [job for job in downloads if job.state != "finished"]
    return asked.render(
        "models", tab="models", found=found, running=running, downloads=open_downloads
    )


def download(asked: PageRequest) -> Response:
    """Begin a download, or go on with one that stopped."""
    name = asked.form.get("name", "")
    if not name or name.startswith("-"):
        raise UserError("download: name a model, such as llama-8b or OWNER/NAME")
    return asked.go(f"jobs/{jobs.begin(f'Download {name}', DOWNLOAD, name, then='models').name}")


def remove(asked: PageRequest) -> Response:
    folder = folder_to_remove(asked.form.get("name", ""))
    freed = remove_model(folder)
    text = f"{folder.name} is removed: {size_text(freed)} free"
    return asked.render("done", tab="models", text=text)


PAGES = [
    show("/models", models_page),
    do("/models/download", download),
    do("/models/remove", remove),
]
