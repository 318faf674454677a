"""A job of the studio: its output while it works, and what became of it."""

from __future__ import annotations

from pathlib import Path

from starlette.responses import Response

from your_ai.studio import jobs
from your_ai.studio.pages import PageRequest, do, show


def job_page(asked: PageRequest) -> Response:
    job = jobs.named(asked.names["name"])
    return asked.render("job", tab=job.then.partition("?")[0], job=job, folder=Path.cwd())


def stop_job(asked: PageRequest) -> Response:
    job = jobs.named(asked.names["name"])
    jobs.stop(job)
    return asked.go(f"jobs/{job.name}")


def again(asked: PageRequest) -> Response:
    """Begin the same command again, which continues what it can."""
    job = jobs.named(asked.names["name"])
    return asked.go(f"jobs/{jobs.begin(job.title, *job.words, then=job.then).name}")


PAGES = [
    show("/jobs/{name}", job_page),
    do("/jobs/{name}/stop", stop_job),
    do("/jobs/{name}/again", again),
]
