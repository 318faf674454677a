"""The runs in a folder: their states, as a table or for programs; removes and stops runs."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import shutil
import signal
import stat
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from your_ai.config import REWARD as SCORES
from your_ai.dashboard import history
from your_ai.dashboard.metric_table import REWARD, is_rewarded, plain
from your_ai.dashboard.report import RolloutSample
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.dashboard.view import UNKNOWN, duration, or_unknown, peak_of_limit
from your_ai.errors import RunError, UserError
from your_ai.files import TEMPORARY, clean
from your_ai.gates.text import counted, loss_text, printable, shortened, size_text
from your_ai.gates.untrusted import is_number
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub import registry
from your_ai.run import events, requests
from your_ai.run.events import Event, Record
from your_ai.run.folder import LOCK, RUNS, SUPERVISOR_LOCK, RunFolder, is_running, locked, owner
from your_ai.run.rollout_files import (
    RolloutRecord,
    by_reward,
    known_reward,
    read_rollouts,
    rollout_file,
    rollout_steps,
)

ENDED = ("finished", "stopped", "died", "imported", "merged")
SILENCE_S = 60.0  # a working process writes its gauges more often than this
LAST_BYTES = 1 << 16  # at the end of events.jsonl, to read the last events from
DAY_S = 86400
HOUR_S = 3600

GAP = 2  # between columns
NEEDED = 4  # columns that are kept where names would have to be shortened for them ...
SHORTEST_NAME = 20  # ... but not to fewer characters than this
LONGEST_MODEL = 24
STYLES = {"running": "green", "waiting": "cyan", "paused": "yellow", "died": "red"}


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in the list; unknown values are None."""

    name: str
    state: str
    """running, waiting (for memory), paused, or one of ENDED."""
    model: str | None = None
    step: int | None = None
    """The last step so far, of `steps`."""
    steps: int | None = None
    last_loss: float | None = None
    best_loss: float | None = None
    """Lowest running mean of the training loss; None if the run trains on rewards."""
    last_reward: float | None = None
    """The mean reward of the last step, if the run trains on rewards."""
    best_mean_reward: float | None = None
    """The highest running mean of the reward."""
    best_validation: float | None = None
    """The loss of the best validation; None if validations measure rewards."""
    best_reward: float | None = None
    """The mean reward of the best validation, if that is what validations measure."""
    peak_bytes: int | None = None
    """Peak memory of the training process."""
    limit_bytes: int | None = None
    seconds: float | None = None
    """Running time, without pauses."""
    changed_at: float | None = None
    """Time of the last event, or of the run's files if there are no events; seconds since 1970."""
    size_bytes: int | None = None
    """Size of all files in the run's folder."""


def run_rows(runs: Path = RUNS, read_s: float = math.inf) -> list[RunRow]:
    """List the runs in `runs`, last changed first; an empty list if the folder does not exist.

    read_s: seconds to read events. Of a run with more, figures that need all are unknown, until
    later calls, or `read_on`, have read on. A run that cannot be read has a row without figures.
    Entries that are not runs are skipped. Raises UserError if `runs` itself cannot be read.
    """
    until = time.monotonic() + read_s
    found = [row for folder in folders(runs) if (row := row_of(folder, until)) is not None]
    return sorted(found, key=lambda row: (-(row.changed_at or 0.0), row.name))


def newest(runs: Path = RUNS) -> RunFolder:
    """Return the running run that changed last, or if none is running, the run that did.

    Raises UserError if there are no runs.
    """
    return by_age(runs)[0]


def newest_trained(runs: Path = RUNS) -> tuple[RunFolder, bool]:
    """Return the newest run with an adapter or a checkpoint, and whether it is `newest`.

    Raises UserError if there is none.
    """
    found = by_age(runs)
    trained = next((folder for folder in found if is_trained(folder)), None)
    if trained is None:
        raise UserError(
            f"no run in {runs} has an adapter or a checkpoint; the newest is "
            f"{found[0].reference}: your_ai watch shows it"
        )
    return trained, trained == found[0]


def newest_reward_model(runs: Path = RUNS) -> RunFolder | None:
    """Return the reward model that was trained last, if there is one; not one being trained."""
    found = [run for run in folders(runs) if os.path.isdir(run.adapter) and not is_running(run)]
    of_reward = [run for run in found if (config := run.settings()) and config.objective == SCORES]
    return max(of_reward, key=lambda run: touched_at(run) or 0.0, default=None)


def by_age(runs: Path) -> list[RunFolder]:
    """The runs in `runs`, running ones first, then the last changed. Raises UserError if none."""
    found = folders(runs)
    if not found:
        raise UserError(f"no runs in {runs}; start one: your_ai train")
    key = {folder: (is_running(folder), touched_at(folder) or 0.0) for folder in found}
    return sorted(found, key=key.__getitem__, reverse=True)


def is_trained(folder: RunFolder) -> bool:
    """Return whether a run has a config and an adapter or a checkpoint, intact or not."""
    with contextlib.suppress(OSError):
        saved = os.path.isdir(folder.adapter) or any(folder.checkpoints.glob("step-*"))
        return saved and os.path.isfile(folder.config)
    return False


def folders(runs: Path) -> list[RunFolder]:
    """Folders of the runs in `runs`, by name. Raises UserError if `runs` cannot be read."""
    try:
        names = sorted(os.listdir(runs))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{runs}: cannot be read ({error.strerror})") from error
    found = [RunFolder(runs / name) for name in names if not name.startswith(".")]
    return [folder for folder in found if is_run(folder)]


def is_run(folder: RunFolder) -> bool:
    """Return whether a folder contains a run's files, or cannot be read and so may contain them."""
    for path in (folder.config, folder.events):
        try:
            if stat.S_ISREG(os.stat(path).st_mode):
                return True
        except PermissionError:
            return True
        except OSError:
            continue
    return False


@dataclass
class WorkedTime:
    """The time between events, without pauses, waits and gaps between two processes."""

    seconds: float = 0.0
    last: Record | None = None
    is_paused: bool = False

    def add(self, record: Record) -> None:
        before, self.last = self.last, record
        if before is None:
            return
        if isinstance(
            before.event, (events.Paused, events.Waiting, events.Continued, events.Stage)
        ):
            self.is_paused = isinstance(before.event, (events.Paused, events.Waiting))
        gap_s = record.time - before.time
        if gap_s > SILENCE_S:  # no process, or an old version that wrote no gauges
            gap_s = min(gap_s, number(getattr(record.event, "seconds", 0.0)) or 0.0)
        if gap_s > 0 and not (self.is_paused or isinstance(before.event, events.Finished)):
            self.seconds += gap_s


PART_BYTES = 1 << 17  # that are read of an events file at once
READING = threading.Lock()  # several threads would read the same events, each for itself
KNOWN_RUNS = 200  # whose events are not read again if nothing was added
KINDS_OF_ROWS = (events.Started, events.Step, events.Skipped, events.Finished)


@dataclass
class EventsSoFar:
    """The part of a row that comes from the events of a run, which are read as they are added."""

    rest: events.EventsTail
    state: ViewState = dataclasses.field(default_factory=ViewState)
    last: dict[type[Event], Event] = dataclasses.field(default_factory=dict)
    """Of each of KINDS_OF_ROWS the last event, in order."""
    work: WorkedTime = dataclasses.field(default_factory=WorkedTime)
    is_whole: bool = False
    """Whether all events were read."""

    def read(self, until: float) -> None:
        """Read what was added: all, or a part, and others until a time of the monotonic clock.

        Raises UserError as `events.tail`.
        """
        self.is_whole = False
        while not self.is_whole:
            at = self.rest.offset
            self.add(self.rest.read(PART_BYTES))
            self.is_whole = self.rest.offset - at < PART_BYTES
            if time.monotonic() > until:
                return

    def add(self, records: Sequence[Record]) -> None:
        self.state = fold_all(self.state, records)
        for record in records:
            self.work.add(record)
            if (kind := type(record.event)) in KINDS_OF_ROWS:
                self.last.pop(kind, None)
                self.last[kind] = record.event

    def last_of(self, *kinds: type[Event]) -> Any:
        """The last event of some of KINDS_OF_ROWS; None if there is none."""
        return next((self.last[kind] for kind in reversed(self.last) if kind in kinds), None)

    def sketch(self) -> EventsSoFar:
        """With the end of the file, so that all is known that the last events say.

        Raises UserError, OSError.
        """
        with_end = EventsSoFar(self.rest, self.state, dict(self.last))
        with_end.add(last_records(self.rest.path, self.rest.offset))
        return with_end


@cache
def known_runs() -> dict[Path, EventsSoFar]:
    """The events of runs that this process has read, the latest last."""
    return {}


def events_so_far(folder: RunFolder, until: float) -> EventsSoFar:
    """The events of a run. What was read before in this process is not read again."""
    with READING:
        path, known = folder.events.absolute(), known_runs()
        found = known.pop(path, None) or EventsSoFar(events.EventsTail(path))
        if (rest := found.rest.followed()) is not found.rest:
            found = EventsSoFar(rest)
        try:
            found.read(until)
            known[path] = found
            if len(known) > KNOWN_RUNS:
                known.pop(next(iter(known)), None)
            return found if found.is_whole else found.sketch()
        except (UserError, OSError):
            return EventsSoFar(events.EventsTail(path), is_whole=True)


def read_on(seconds: float) -> bool:
    """Read on for so long in events of which a part was read; return whether there may be more."""
    with READING:
        found = next((each for each in known_runs().values() if not each.is_whole), None)
        if found is not None:
            try:
                found.read(time.monotonic() + seconds)
            except UserError:
                found.is_whole = True  # who asks for it next says so
        return found is not None


def row_of(folder: RunFolder, until: float = math.inf) -> RunRow | None:
    """Return the row of a run; None if its folder is deleted meanwhile.

    until: a time of the monotonic clock. Events that are not read by then are left for later.
    """
    running = is_running(folder)  # checked first: a run that ends after this has its last event
    happened = events_so_far(folder, until)
    state = happened.state
    at = happened.last_of(events.Started, events.Step, events.Skipped)
    total = happened.last_of(events.Started, events.Step)
    checked = state.best_validation
    best = None if checked is None else number(checked.loss)
    is_reward = checked is not None and checked.reward is not None
    step = state.step
    on_rewards = step is not None and is_rewarded(step.metrics)
    row = RunRow(
        name=folder.name,
        state=state_of(folder, running, state, happened.last_of(events.Started, events.Finished)),
        model=model_of(folder, state),
        step=at and whole(at.step),
        steps=total and whole(total.steps),
        last_loss=number(step.loss) if step and not on_rewards else None,
        best_loss=number(state.best_loss),
        last_reward=number(step.metrics.get(REWARD)) if step else None,
        best_mean_reward=number(state.reward_mean.best),
        best_validation=None if is_reward else best,
        best_reward=0.0 - best if is_reward and best is not None else None,
        peak_bytes=whole(state.highest_bytes),
        limit_bytes=whole(state.limit.limit_bytes) if state.limit else None,
        seconds=happened.work.seconds if happened.work.last else None,
        changed_at=number(state.last_at) or touched_at(folder),
        size_bytes=size_of(folder.path),
    )
    if not happened.is_whole:
        row = dataclasses.replace(
            row,
            best_loss=None, best_mean_reward=None, best_validation=None, best_reward=None,
            peak_bytes=None, seconds=None,
        )  # fmt: skip
    return row if os.path.isdir(folder.path) else None


def last_of(happened: Sequence[Event], *kinds: type) -> Any:
    return next((event for event in reversed(happened) if isinstance(event, kinds)), None)


def state_of(folder: RunFolder, running: bool, state: ViewState, ended: Event | None) -> str:
    """A run's state in a word; ended: the last event that is a start or an end."""
    if running:
        return "waiting" if state.is_waiting else "paused" if state.paused else "running"
    if folder.untrained is not None:
        return folder.untrained
    # A resume that fails before training begins does not change the state.
    if not isinstance(ended, events.Finished):
        return "died"
    return "finished" if ended.adapter else "stopped"


def model_of(folder: RunFolder, state: ViewState) -> str | None:
    if state.started is not None:
        return state.started.model
    try:
        folder.config_text()  # checks the size
        model = read_yaml(folder.config).get("model")
    except (UserError, OSError, ValueError, RecursionError):  # any error of the YAML parser
        return None
    return model if isinstance(model, str) else None


def number(value: Any) -> float | None:
    """Return a value from a file if it is a number of a usable size, else None."""
    return value if is_number(value) and -1e18 < value < 1e18 else None


def whole(value: Any) -> int | None:
    return None if number(value) is None else int(value)


def time_of(records: Sequence[Record]) -> float | None:
    """Time of the last record, in seconds since 1970."""
    return number(records[-1].time) if records else None


def touched_at(folder: RunFolder) -> float | None:
    """Time of a run's last event, read from the end of the file, or else of its files."""
    with contextlib.suppress(OSError, UserError):
        if (at := time_of(last_records(folder.events))) is not None:
            return at
    for path in (folder.events, folder.config):
        with contextlib.suppress(OSError):
            return os.stat(path).st_mtime
    return None


def last_records(path: Path, offset: int = 0) -> list[Record]:
    """The last events of a file, from byte `offset` on. Raises UserError, OSError."""
    return events.tail(path, max(offset, os.stat(path).st_size - LAST_BYTES))[0]


def size_of(folder: Path) -> int | None:
    """Bytes of the files in a folder; None if it cannot be read."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return None
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # deleted meanwhile
                total += os.lstat(os.path.join(path, name)).st_size
    return total


def rows_as_json(rows: Iterable[RunRow]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(row) for row in rows]


# In the order in which they are shown; the least important ones are dropped if there is no room.
COLUMNS: dict[str, Callable[[RunRow, float], str]] = {
    "run": lambda row, now: printable(row.name, one_line=True),
    "state": lambda row, now: row.state,
    "step": lambda row, now: UNKNOWN if row.step is None else f"{row.step}/{row.steps or '?'}",
    "loss": lambda row, now: loss_or_reward(row.last_loss, row.last_reward),
    "best": lambda row, now: loss_or_reward(row.best_validation, row.best_reward),
    "best mean": lambda row, now: loss_or_reward(row.best_loss, row.best_mean_reward),
    "peak of limit": lambda row, now: peak_of_limit(row.peak_bytes, row.limit_bytes),
    "worked": lambda row, now: or_unknown(row.seconds, duration),
    "changed": lambda row, now: or_unknown(row.changed_at, lambda at: ago(now - at)),
    "size": lambda row, now: or_unknown(row.size_bytes, size_text),
    "model": lambda row, now: or_unknown(row.model, short_model),
}
BY_IMPORTANCE = (
    *("run", "state", "step", "loss", "peak of limit", "changed"),
    *("best", "worked", "model", "best mean", "size"),
)
TO_THE_LEFT = ("run", "state", "model")


def runs_table(rows: Sequence[RunRow], now: float, width: int = 80) -> Table:
    """Make a table of the columns that fit into `width` characters; long names are shortened."""
    cells = {head: [text(row, now) for row in rows] for head, text in COLUMNS.items()}
    widths = {head: max(map(len, [head, *cells[head]])) for head in COLUMNS}
    kept = [*BY_IMPORTANCE]
    for least, most in ((widths["run"], NEEDED), (min(widths["run"], SHORTEST_NAME), 2)):
        while len(kept) > most and least + room_beside_name(widths, kept) > width:
            kept.pop()
    room = max(1, width - room_beside_name(widths, kept))
    cells["run"] = [crop(name, room) for name in cells["run"]]

    drawn = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    shown = [head for head in COLUMNS if head in kept]
    for head in shown:
        drawn.add_column(head, justify="left" if head in TO_THE_LEFT else "right", no_wrap=True)
    for index, row in enumerate(rows):
        style = {"state": STYLES.get(row.state, "")}
        drawn.add_row(*(Text(cells[head][index], style.get(head, "")) for head in shown))
    return drawn


def room_beside_name(widths: dict[str, int], heads: Sequence[str]) -> int:
    return sum(GAP + widths[head] for head in heads if head != "run")


def loss_or_reward(loss: float | None, reward: float | None) -> str:
    return or_unknown(loss, loss_text) if reward is None else f"reward {plain(reward)}"


def ago(seconds: float) -> str:
    """Format as `2:05 ago`, or from one day on as `3 days ago`."""
    seconds = max(0.0, seconds)  # another machine's clock may be ahead
    days = int(seconds // DAY_S)
    if not days:
        return f"{duration(seconds)} ago"
    return f"{counted(days, 'day')} ago"


def short_model(model: str) -> str:
    """Last part of a path or repo id."""
    return crop(printable(Path(model).name or model, one_line=True), LONGEST_MODEL)


def crop(text: str, most: int) -> str:
    """Shorten a text to at most `most` characters: its two ends."""
    if len(text) <= most:
        return text
    if most < 5:
        return text[:most]
    end = (most - 3) // 2
    return f"{text[: most - 3 - end]}...{text[-end:]}"


def remove(folder: RunFolder) -> int:
    """Delete a run; return the bytes freed.

    If the process is killed meanwhile, either the whole run is left, or only a temporary folder
    that is deleted later. Raises UserError if the run is running, is not a run, is not a folder
    in RUNS, or cannot be deleted.
    """
    if folder.path.is_symlink():
        raise UserError(f"{folder.path}: is a symbolic link; remove the link by hand")
    if not is_run(folder):
        raise UserError(f"{folder.path}: is not a run; list the runs with: your_ai runs")
    if folder.path.resolve().parent != RUNS.resolve():
        raise UserError(f"{folder.path}: is not in {RUNS}; remove it by hand")
    if is_running(folder):
        raise UserError(
            f"{folder.path}: is running; stop it first: your_ai runs stop {folder.reference}"
        )
    size_bytes = size_of(folder.path) or 0
    clean(folder.path.parent, older_than_s=HOUR_S)  # left by a killed removal
    with locked(folder, SUPERVISOR_LOCK), locked(folder, LOCK):  # no resume meanwhile
        try:
            temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY, dir=folder.path.parent))
            os.rename(folder.path, temporary)
        except OSError as error:
            raise UserError(f"{folder.path}: cannot be removed ({error.strerror})") from error
        shutil.rmtree(temporary, ignore_errors=True)
    if temporary.exists():
        raise UserError(f"{temporary}: the rest of {folder.name}; remove it by hand")
    return size_bytes


def prunable(
    rows: Iterable[RunRow],
    states: Sequence[str] = ("died", "stopped"),
    older_than_s: float = 0,
    now: float | None = None,
) -> list[RunRow]:
    """Return the rows in one of `states` that have not changed for `older_than_s` seconds.

    Never returns a running run, or one whose last change is unknown.
    now: in seconds since 1970; default: the current time.
    Raises UserError for an unknown state.
    """
    now = time.time() if now is None else now
    for state in states:
        if state not in ENDED:
            raise UserError(f"{state}: cannot be pruned; use {', '.join(ENDED)}")
    return [
        row
        for row in rows
        if row.state in states
        and row.changed_at is not None
        and max(0.0, now - row.changed_at) >= older_than_s
    ]


def stop(folder: RunFolder) -> int:
    """Ask the process of a run to save and end, as Ctrl-C does; return its process id.

    Raises UserError if there is no such process, or if it cannot be signaled.
    """
    pid = owner(folder)
    if pid is None:
        raise UserError(f"{folder.path}: is not running")
    if pid == 0:
        raise UserError(f"{folder.path}: its process is not known; stop it by hand")
    with contextlib.suppress(UserError):  # it only says why the run ended
        requests.ask(folder, requests.STOP)
    try:
        os.kill(pid, signal.SIGINT)
    except ProcessLookupError as error:
        requests.withdraw(folder, requests.STOP)
        raise UserError(f"{folder.path}: is no longer running") from error
    except PermissionError as error:
        raise UserError(
            f"{folder.path}: process {pid} belongs to another user; only that user can stop it"
        ) from error
    return pid


# How fast the newest run was


STEPS = 50  # the last of a run, for its speed


def seconds_for(tokens: int, model: str) -> float | None:
    """Seconds of training on so many tokens at the speed of the newest run of this model.

    None if there is no such run, or it has no steps yet.
    """
    try:
        run = newest()
        if name_of_model(run.read_config().model) != name_of_model(model):
            return None
        steps = history.read_history(events.tail(run.events)[0]).steps[-STEPS:]
    except (UserError, RunError, OSError):
        return None
    speeds = [step.tokens / step.seconds for step in steps if step.seconds > 0 and step.tokens]
    return tokens / statistics.median(speeds) if speeds else None


def name_of_model(model: str) -> str:
    """Equal for an alias and its repository on the hub, and for all folders of one name."""
    found = registry.known().get(model)
    return Path(model if found is None else found.repo).name


# Completions of a run that trains on rewards: the best and the worst of some steps


CHARACTERS = 2000  # maximum length of each text


def rollout_samples(run: Path) -> list[RolloutSample]:
    """The best and the worst completion of the first, the middle and the last step of a run.

    Files that cannot be read are left out.
    """
    try:
        steps = rollout_steps(run)
    except OSError:
        return []
    found = []
    for step in dict.fromkeys([*steps[:1], *steps[len(steps) // 2 :][:1], *steps[-1:]]):
        path = rollout_file(run, step)
        records = (read_rollouts(path) if path.is_file() else None) or []
        rewarded = [record for record in records if known_reward(record.reward) is not None]
        if rewarded:
            found.append(sample_of(step, "best", by_reward(rewarded, highest=True)[0]))
        if len(rewarded) > 1:
            found.append(sample_of(step, "worst", by_reward(rewarded, highest=False)[0]))
    return found


def sample_of(step: int, which: str, record: RolloutRecord) -> RolloutSample:
    texts = (record.question, record.completion, record.expected or "")
    question, completion, expected = (shortened(text, CHARACTERS) for text in texts)
    return RolloutSample(step, which, question, completion, expected, record.reward or 0.0)
