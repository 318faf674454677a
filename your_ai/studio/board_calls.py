"""The page of a run, drawn in a process of its own: a long run takes memory and time."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from your_ai.run.folder import RunFolder
from your_ai.serving.live_run import LiveRun


@cache
def live_run(run: str) -> LiveRun:
    return LiveRun(RunFolder(Path(run)))


def draw(run: str) -> dict[str, Any] | None:
    """A `DrawnRun` of the run in a folder, as JSON; None if it has not changed since the last."""
    drawn = live_run(run).draw()
    return None if drawn is None else asdict(drawn)
