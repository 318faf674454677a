"""How fast the newest run was."""

from __future__ import annotations

import statistics
from pathlib import Path

from your_ai.dashboard import history
from your_ai.errors import RunError, UserError
from your_ai.hub.registry import known
from your_ai.run import events
from your_ai.session import run_list

STEPS = 50  # the last of a run, for its speed


def seconds_for(tokens: int, model: str) -> float | None:
    """How long training on so many tokens takes at the speed of the newest run of this model.

    None if there is no such run, or it has no steps yet.
    """
    try:
        run = run_list.newest()
        if name_of_model(run.read_config().model) != name_of_model(model):
            return None
        steps = history.read(events.tail(run.events)[0]).steps[-STEPS:]
    except (UserError, RunError, OSError):
        return None
    speeds = [step.tokens / step.seconds for step in steps if step.seconds > 0 and step.tokens]
    return tokens / statistics.median(speeds) if speeds else None


def name_of_model(model: str) -> str:
    """Equal for an alias and its repository on the hub, and for all folders of one name."""
    found = known().get(model)
    return Path(model if found is None else found.repo).name
