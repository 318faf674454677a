"""A run as one HTML page with charts, figures and tables. The page loads no other files.

The page has parts, each in an element of its own. A page that is live (`your_ai watch --web`)
gets the parts that have changed.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import gmtime, strftime
from typing import TYPE_CHECKING

from your_ai.config import FIELDS, TrainConfig, as_text, has_default
from your_ai.dashboard.chart_page import chart_html
from your_ai.dashboard.charts import CHARTS, DARK, LIGHT
from your_ai.dashboard.history import RunHistory, ending, finite, held, plan_changes, read_history
from your_ai.dashboard.measures import folded_actions, match_share
from your_ai.dashboard.metric_table import is_rewarded, other_values, phases_of, plain
from your_ai.dashboard.view import (
    duration,
    result_lines,
    reward_lines,
    validation_name,
    validation_text,
)
from your_ai.errors import UserError
from your_ai.files import replace_text
from your_ai.gates.text import counted, loss_text, printable, size_text
from your_ai.run import events
from your_ai.run.events import Action, Died, Skipped, Step

if TYPE_CHECKING:
    from jinja2 import Environment, Template

FOLDER = Path(__file__).parent
PART = re.compile(r"<!--part ([a-z]+)-->\n(.*?)\n<!--end-->", re.DOTALL)
COLORS_OF_MEMORY = ("active", "cache", "rest")
LINES = 20  # maximum lines of memory actions
NOT_SHOWN = ("run",)  # settings that differ always


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


@dataclass(frozen=True, kw_only=True)
class ShownSetting:
    name: str
    value: str
    default: str
    differs: bool


@dataclass(frozen=True, kw_only=True)
class Presence:
    """Facts that a live page has about the run beyond its events."""

    is_running: bool
    """Whether a process is working on it."""
    is_deleted: bool = False
    silent_s: int = 0
    """Seconds since the last event, if that is worth a word; else 0."""
    resume: str = ""
    """The command that continues the run."""
    unread: float = 0.0
    """Share of the events that is still to be read; so far, the page shows a part of them."""
    fault: str = ""
    """Why the events of the run cannot be read or shown."""


def report_page(
    past: RunHistory,
    name: str,
    config_text: str,
    config: TrainConfig | None = None,
    rollouts: Sequence[RolloutSample] = (),
    presence: Presence | None = None,
) -> str:
    """The page about the run `name`.

    config: the settings; None if they cannot be read.
    rollouts: completions to show, of a run that trains on rewards.
    presence: of a live page; None for a page in a file.
    """
    state, end = past.state, ending(past)
    numbers = (size_text, duration, match_share, loss_text, finite, counted, plain, chart_html)
    page = template("report.html.j2", *numbers, other_values, validation_name, validation_text)
    gauge = None if state.gauges is None else held(state.gauges)
    whole = max(gauge[-1], state.limit.limit_bytes if state.limit else 0) if gauge else 0
    text = page.render(
        name=name,
        past=past,
        state=state,
        ending=end if presence is None else presence_text(past, presence),
        presence=presence,
        results=[*result_lines(state), *reward_lines(state)] if end[0] == "finished" else [],
        began=strftime("%Y-%m-%d %H:%M UTC", gmtime(past.state.began_at or 0)),
        done=[step for _, step in past.of(Step)],
        on_rewards=any(is_rewarded(step.metrics) for step in past.steps),
        phases=phases_of(past.steps),
        charts={key: draw(past) for key, draw in CHARTS.items()},
        settings=[] if config is None else shown_settings(config),
        rollouts=rollouts,
        plans=list(plan_changes(past)),
        actions=past.of(Action),
        folded=folded_actions(action for _, action in past.of(Action)),
        most_lines=LINES,
        deaths=past.of(Died),
        notices=past.of(events.Notice, Skipped),
        config_text=config_text,
        gauge=gauge,
        gauge_whole=whole,
        gauge_parts=list(zip(COLORS_OF_MEMORY, (0, *gauge), gauge, strict=False)) if gauge else [],
        share=share,
        script=script(),
    )
    return printable(text)


def presence_text(past: RunHistory, presence: Presence) -> tuple[str, str]:
    """The state of a run on its live page, as a word and as a sentence."""
    state, (word, text) = past.state, ending(past)
    if presence.unread:
        read = f"{1 - presence.unread:.0%}"
        return "open", f"a first look, from a part of its events; all are being read: {read}"
    if presence.is_deleted:
        return "died", "the folder of this run was deleted; this is what it was before"
    if presence.is_running:
        what = state.doing_text
        if presence.silent_s:
            what += f"; last event {duration(presence.silent_s)} ago"
        return "running", what
    if word != "open":
        return word, text
    if not past.timeline:
        return "open", "this run has not begun"
    return "died", f"no process is working on this run; continue with: {presence.resume}"


def share(part: float, whole: float) -> str:
    """A part of a whole in percent, between 0 and 100."""
    return f"{min(100.0, max(0.0, 100 * part / whole)):.1f}" if whole > 0 else "0"


def shown_settings(config: TrainConfig) -> list[ShownSetting]:
    """The settings that the run's objective uses, first those that differ from their defaults."""
    shown = [
        ShownSetting(
            name=name.replace("_", "-"),
            value=as_text(getattr(config, name)),
            default=as_text(field.default),
            differs=not has_default(config, name),
        )
        for name, field in FIELDS.items()
        if name not in NOT_SHOWN and config.uses(name)
    ]
    return sorted(shown, key=lambda setting: not setting.differs)


def parts_of(page: str) -> dict[str, str]:
    """The parts of a page by their names. Text from outside is escaped, so it is never a part."""
    return dict(PART.findall(page))


@cache
def script() -> str:
    """The script of a live page, without which it would not change."""
    names = ("adapt.js", "live_page.js")
    return "".join((FOLDER / name).read_text(encoding="utf-8") for name in names)


def live_policy(frames: str = "'none'") -> str:
    """The Content-Security-Policy of a live page: this script, this server, nothing else.

    frames: the pages that may show it inside of them.
    """
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    return (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        f"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors {frames}"
    )


def write_report(
    records: Sequence[events.Record],
    name: str,
    config_text: str,
    out: Path,
    rollouts: Sequence[RolloutSample] = (),
    config: TrainConfig | None = None,
) -> None:
    """Write the page about the run `name` to `out`, completely or not at all.

    The arguments are those of `report_page`. Raises UserError if `out` cannot be written.
    """
    write_page(out, report_page(read_history(records), name, config_text, config, rollouts))


def template(name: str, *filters: Callable[..., object]) -> Template:
    """The template of a page, which knows the colors. filters: functions that it uses, by name."""
    pages = environment()
    pages.filters |= {function.__name__: function for function in filters}
    return pages.get_template(name, globals={"light": LIGHT, "dark": DARK})


@cache
def environment() -> Environment:
    """Return what compiles the templates, each once."""
    import jinja2

    folder = jinja2.FileSystemLoader(FOLDER)
    return jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, lstrip_blocks=True)


def write_page(path: Path, page: str) -> None:
    """Write a page, completely or not at all. Raises UserError if the file cannot be written."""
    try:
        path.parent.mkdir(exist_ok=True)
        replace_text(path, page)
    except OSError as error:
        if path.is_dir():
            raise UserError(f"{path}: is a folder; give the name of a file in it") from error
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); choose another path"
        ) from error
