"""A run as one HTML page with charts, figures and tables. The page loads no other files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from time import gmtime, strftime
from typing import TYPE_CHECKING

from your_ai.dashboard.charts import CHARTS, DARK, LIGHT, metric_points, render, svg
from your_ai.dashboard.history import (
    ending,
    finite,
    losses,
    plan_changes,
    read,
    smoothed,
)
from your_ai.dashboard.metric_table import (
    REWARD,
    is_rewarded,
    other_values,
    phases_of,
    plain,
)
from your_ai.dashboard.shares import match_share
from your_ai.dashboard.view import (
    duration,
    result_lines,
    reward_lines,
    validation_name,
    validation_text,
)
from your_ai.errors import UserError
from your_ai.files import TEMPORARY, sync
from your_ai.gates.text import counted, loss_text, printable, size_text
from your_ai.run import events
from your_ai.run.events import Action, Died, Skipped, Step

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True)
class RolloutSample:
    """A completion of a run that trains on rewards."""

    step: int
    which: str
    """best or worst."""
    question: str
    completion: str
    expected: str
    """Empty if its row has no expected answer."""
    reward: float


def write_report(
    records: Sequence[events.Record],
    name: str,
    config_text: str,
    out: Path,
    rollouts: Sequence[RolloutSample] = (),
) -> None:
    """Write the page about the run `name` to `out`, completely or not at all.

    rollouts: completions to show, of a run that trains on rewards.

    Raises UserError if matplotlib or jinja2 is not installed, or if `out` cannot be written.
    """
    require("matplotlib", "jinja2")
    past = read(records)
    numbers = (size_text, duration, match_share, loss_text, finite, counted, plain)
    used = (*numbers, other_values, validation_name, validation_text)
    state, is_done = past.state, ending(past)[0] == "finished"
    page = template("report.html.j2", *used).render(
        name=name,
        past=past,
        state=state,
        ending=ending(past),
        results=[*result_lines(state), *reward_lines(state)] if is_done else [],
        began=strftime("%Y-%m-%d %H:%M UTC", gmtime(past.state.began_at or 0)),
        done=[step for _, step in past.of(Step)],
        on_rewards=any(is_rewarded(step.metrics) for step in past.steps),
        means=smoothed(losses(past)),
        reward_means=smoothed(metric_points(past, REWARD)),
        phases=phases_of(past.steps),
        charts={key: (key, CHARTS[key][0], *svg(key, past)) for key in CHARTS},
        rollouts=rollouts,
        plans=list(plan_changes(past)),
        actions=past.of(Action),
        deaths=past.of(Died),
        notices=past.of(events.Notice, Skipped),
        config_text=config_text,
    )
    write_atomically(out, printable(page).encode())


def template(name: str, *filters: Callable[..., object]) -> Template:
    """The template of a page, which knows the colors. filters: functions that it uses, by name."""
    import jinja2

    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    pages = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    pages.filters |= {function.__name__: function for function in filters}
    return pages.get_template(name, globals={"light": LIGHT, "dark": DARK})


def write_plots(records: Sequence[events.Record], folder: Path, name: str) -> list[Path]:
    """Write each chart that has data to `folder`, as <name>-<chart>.png; return the paths.

    Raises UserError if matplotlib is not installed, or if `folder` cannot be written.
    """
    require("matplotlib")
    past, written = read(records), []
    for key in CHARTS:
        file = io.BytesIO()
        if render(key, past, file, format="png", dpi=200, metadata={"Software": None}):
            written.append(folder / f"{name}-{key}.png")
            write_atomically(written[-1], file.getvalue())
    return written


def require(*modules: str) -> None:
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        text = "reports need matplotlib and jinja2; run: pip install 'your_ai[report]'"
        raise UserError(text) from error


def write_atomically(path: Path, data: bytes) -> None:
    temporary = path.parent / f"{TEMPORARY}report-{os.getpid()}"
    try:
        path.parent.mkdir(exist_ok=True)
        try:
            temporary.write_bytes(data)
            sync(temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); choose another path"
        ) from error
