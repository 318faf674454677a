"""Tune the settings of a run: train trials one after the other, and keep the best.

tunes/<name>/
    settings.yaml   the settings that the trials share, complete
    study.db        what was tried (session.tune_study)
    trials/000/     the run of the first trial, which has the default settings; then 001, ...
    prefix/         the prefix cache of the trials, with --prefix-cache disk, until the end
    best.yaml       a preset with the settings of the best trial
    report.html

Each trial is an ordinary run: a supervisor and a training process, which end after their step if
this process dies. `tune` may be called again at any time and continues. Does not import mlx.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from optuna.study import Study
from optuna.trial import FrozenTrial, Trial

from your_ai.config import FIELDS, TrainConfig, build, nearest, to_yaml
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.dashboard.trials import TrialRow, best_trial, measure_name, measure_text, with_best
from your_ai.data.sources import find_splits
from your_ai.errors import RunError, UserError, named_errors
from your_ai.files import replace_text, sha256
from your_ai.gates.programs import python_module
from your_ai.gates.text import shortened
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub.find import find_model, fingerprint
from your_ai.memory.facts import facts_of
from your_ai.run import child, events
from your_ai.run.child import FAILED, LOST, POLL_S, USER
from your_ai.run.folder import (
    RunFolder,
    default_name,
    is_running,
    locked,
    new_folder,
    place_of,
    with_absolute_paths,
)
from your_ai.run.stopping import SIGNALS, recorded_signals
from your_ai.session import run_list, tune_study
from your_ai.session.attach import PATIENCE
from your_ai.session.tune_space import SEARCHED

TUNES = Path("tunes")
TUNE_LOCK = "tune.lock"
FOUND = (*SEARCHED, "lora_alpha")  # alpha follows the rank
MAX_LOST = 3  # times in a row that the supervisor of a trial may be killed


@dataclass(frozen=True)
class TuneFolder:
    path: Path

    @property
    def name(self) -> str:
        return Path(os.path.abspath(self.path)).name

    @property
    def reference(self) -> str:
        """The argument of --resume for this tune, quoted for a shell."""
        return shlex.quote(self.name if self.path.parent == TUNES else str(self.path))

    @property
    def settings(self) -> Path:
        return self.path / "settings.yaml"

    @property
    def study(self) -> Path:
        return self.path / "study.db"

    @property
    def best(self) -> Path:
        """The preset with the best settings."""
        return self.path / "best.yaml"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def prefix(self) -> Path:
        """The prefix cache that the trials share."""
        return self.path / "prefix"

    def trial(self, number: int) -> RunFolder:
        return RunFolder(self.path / "trials" / f"{number:03}")


# The folder


def create_tune(config: TrainConfig, name: str, fixed: Sequence[str], trials: int) -> TuneFolder:
    """Create the folder of a new tune. It is whole or not there.

    fixed: the settings that the user gave, which are not searched.
    Raises UserError if the name is taken or invalid, or the folder cannot be written.
    """
    name = place_of(name or default_name(config), "--name").name
    tune = TuneFolder(TUNES / name)
    taken = f"--name {name}: {tune.path} exists; choose another name, or continue it: your_ai tune"
    config = with_absolute_paths(config)
    with new_folder(tune.path, f"{taken} --resume {name}") as temporary:
        new = TuneFolder(temporary)
        new.settings.write_text(to_yaml(config), encoding="utf-8")
        about = {
            "trials": trials,
            "fixed": sorted(fixed),
            "files": {new.settings.name: sha256(new.settings)},
            "inputs": inputs_of(config),
        }
        tune_study.create_study(new.study, about)
    return tune


def find_tune(name: str) -> TuneFolder:
    """Find an existing tune by its name or path. Raises UserError if there is none."""
    for path in (TUNES / name, Path(name)):
        if os.path.isfile(path / "settings.yaml"):
            return TuneFolder(path)
    names = [path.parent.name for path in TUNES.glob("*/settings.yaml")]
    name = shortened(name)
    near = nearest(name, names)
    raise UserError(f"--resume {name}: no tune with this name in {TUNES.absolute()}{near}")


def inputs_of(config: TrainConfig) -> dict[str, str]:
    """sha256 of the files that every trial reads, by name.

    Raises UserError if they cannot be read, or if there are no validation rows.
    """
    splits = find_splits(config).files
    if "valid" not in splits:
        raise UserError(
            f"--data {shortened(config.data)}: has no validation rows to compare trials by; give "
            "--valid FILE"
        )
    data = {f"data {split}": sha256(path) for split, path in splits.items() if split != "test"}
    return data | {f"model {n}": s for n, s in fingerprint(find_model(config.model)).items()}


def check_inputs(config: TrainConfig, study: Study) -> None:
    """Raise UserError if the model or the data changed since the tune began."""
    before, now = study.user_attrs["inputs"], inputs_of(config)
    changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    if changed:
        names = shortened(", ".join(changed))
        raise UserError(
            f"the model or the data changed since the tune began ({names}); restore it, or start a "
            "new tune"
        )


def settings_in(tune: TuneFolder, study: Study) -> TrainConfig:
    """The settings of a tune. Raises UserError if a file that all trials depend on was changed."""
    for name, before in study.user_attrs["files"].items():
        path = tune.path / name
        with named_errors(path, "read"):
            is_same = sha256(path) == before
        if not is_same:
            raise UserError(
                f"{path}: was changed; all trials must have the same settings: restore it, or "
                "start a new tune"
            )
    return build(read_yaml(tune.settings), str(tune.settings))


# Running a trial


class EndedRun(NamedTuple):
    status: int
    """Exit status of the supervisor, as Popen gives it."""
    output: str = ""
    """What they printed."""


TrialRunner = Callable[[RunFolder, Sequence[int], Callable[[], bool]], EndedRun]


def run_trial(
    folder: RunFolder, received: Sequence[int], is_enough: Callable[[], bool]
) -> EndedRun:
    """Train a run under a supervisor.

    The run stops after its step, and is saved, when `is_enough` returns true, at the first signal,
    and when this process dies.
    """
    command = python_module("your_ai.session.supervisor", str(folder.path), "--quiet")
    with child.open_log(folder) as log:
        start = log.seek(0, os.SEEK_END)
        with child.started(command, folder, log) as supervisor:
            was_stopped = False
            while supervisor.process.poll() is None:
                supervisor.pass_on(received, PATIENCE)
                if not was_stopped and is_enough():
                    was_stopped = True
                    supervisor.process.send_signal(signal.SIGTERM)
                time.sleep(POLL_S)
        return EndedRun(supervisor.process.returncode, child.read_log(log, start))


@dataclass
class TrialWatch:
    """The state of a trial's run by its events, read as they come."""

    folder: RunFolder
    trial: Trial | None = None
    """The trial of the study; None for the first while it trains."""
    state: ViewState = field(default_factory=ViewState)
    best: float | None = None
    """The lowest validation loss."""
    pruned: str = ""
    """Why the trial is not worth finishing; empty if it is."""
    offset: int = 0

    def read(self) -> bool:
        """Read new events; return whether the trial should be pruned."""
        records, self.offset = events.tail(self.folder.events, self.offset)
        for record in records:
            self.state = fold_all(self.state, [record])
            if isinstance(record.event, events.Validation):
                self.see(record.event)
        return bool(self.pruned)

    def see(self, validation: events.Validation) -> None:
        step, loss, started = validation.step, validation.loss, self.state.started
        if not math.isfinite(loss):
            reward = validation.metrics.get("reward")
            is_reward = reward is not None and not math.isfinite(reward)
            name, value = ("reward", reward) if is_reward else ("loss", loss)
            self.pruned = f"the validation {name} is {value} at step {step}"
            return
        self.best = loss if self.best is None else min(self.best, loss)
        if self.trial is not None and not self.pruned:
            is_last = started is not None and step >= started.steps
            if tune_study.is_worse(self.trial, step, loss) and not is_last:
                self.pruned = f"worse than most at step {step}"


class TrialEnd(NamedTuple):
    """The end of a trial: its state in the study, its value, and why."""

    state: str
    value: float | None = None
    reason: str = ""


class TrialStopped(Exception):
    """The run of a trial was stopped by a signal; it can be resumed."""


def end_of(watch: TrialWatch, ended: EndedRun | None) -> TrialEnd | None:
    """Return how a trial ended; None if its processes must be started again.

    ended: its processes; None if none was started, because the events say how it ended.
    Raises TrialStopped after a stop signal, and what the run reported if that is not due to the
    settings of the trial, as a full disk.
    """
    state = watch.state
    if state.finished is not None and state.finished.reason == "done":
        if watch.best is None:
            return TrialEnd(tune_study.FAILED, reason="no validation of it is finite")
        return TrialEnd(tune_study.FINISHED, watch.best)
    if watch.pruned:
        return TrialEnd(tune_study.PRUNED, reason=watch.pruned)
    if ended is None:
        return None
    status = ended.status
    if any(status in (128 + number, -number) for number in SIGNALS):
        raise TrialStopped
    if status < 0:  # somebody killed the supervisor
        return None
    error = child.reported_error(watch.folder, status, ended.output)
    skipped, step = state.skipped, state.step
    has_diverged = skipped is not None and (step is None or skipped.step > step.step)
    if status in (USER, LOST) or (status == FAILED and has_diverged):
        return TrialEnd(tune_study.FAILED, reason=str(error))
    raise error


# The tune


def clock() -> float:
    """Seconds since some moment."""
    return time.monotonic()


class TuneView(Protocol):
    def progress(self, number: int, settings: Mapping[str, Any], state: ViewState) -> None: ...

    def ended(self, row: TrialRow) -> None: ...


def tune(
    folder: TuneFolder,
    view: TuneView,
    *,
    trials: int | None = None,
    minutes: float | None = None,
    run: TrialRunner = run_trial,
) -> tuple[list[TrialRow], int]:
    """Run the trials that are missing; return all of them, and the signal that stopped it, or 0.

    trials: how many there shall be in all; default: as before.
    minutes: no trial starts later than this from now.
    Raises the error of the first trial if it failed, and other errors that are not due to the
    settings of a trial.
    """
    began = clock()
    with (
        recorded_signals() as received,
        locked(RunFolder(folder.path), TUNE_LOCK, "tune"),
        tune_study.storage_errors(folder.study),
    ):
        tuning = Tuning(folder, view, received, run)
        if trials is not None:
            tuning.study.set_user_attr("trials", trials)
        wanted = tuning.study.user_attrs["trials"]
        while True:
            rows = tuning.rows()
            tuning.keep_the_best(rows)
            is_late = minutes is not None and clock() - began > 60 * minutes
            if len(rows) >= wanted or received or is_late:
                break
            try:
                tuning.next_trial()
            except TrialStopped:
                return rows, next(iter(received), signal.SIGINT)
        if len(rows) >= wanted and not received:
            shutil.rmtree(folder.prefix, ignore_errors=True)
        return rows, next(iter(received), 0)


class Tuning:
    def __init__(
        self, folder: TuneFolder, view: TuneView, received: Sequence[int], run: TrialRunner
    ) -> None:
        self.folder, self.view, self.received, self.run = folder, view, received, run
        self.study, self.storage = tune_study.open_study(folder.study)
        self.config = settings_in(folder, self.study)
        self.fixed = self.study.user_attrs["fixed"]
        self.blocks = facts_of(find_model(self.config.model), float_bytes=4).blocks

    def next_trial(self) -> None:
        """Run the next trial to its end, and record it."""
        check_inputs(self.config, self.study)
        first = self.folder.trial(0)
        is_first = not tune_study.ended_trials(self.study)
        if is_first:
            self.train_first(first)
        base = first.read_config()
        space = tune_study.space_of(base, self.fixed, self.blocks)
        if is_first:
            default = tune_study.chosen_in(base, space, self.blocks)
            tune_study.enqueue_first(self.study, default)
        ran = run_list.row_of(first)
        steps = ran.step if ran is not None and ran.step is not None else 0
        trial, settings = tune_study.next_trial(self.study, self.storage, space, base.seed, steps)
        folder = self.folder.trial(trial.number)
        try:
            config = tune_study.trial_settings(base, settings, self.fixed)
        except UserError as error:  # together they contradict another setting
            end = TrialEnd(tune_study.FAILED, reason=str(error))
        else:
            self.begin(folder, config)
            end = self.train(TrialWatch(folder, trial), settings)
        tune_study.tell(self.study, trial, *end)
        self.view.ended(next(row for row in self.rows() if row.number == trial.number))

    def train_first(self, folder: RunFolder) -> None:
        """Train with the default settings. What it chose for `auto` is the same in all trials."""
        self.begin(folder, self.config)
        end = self.train(TrialWatch(folder), {})
        if end.state != tune_study.FINISHED:
            raise UserError(f"the default settings: {end.reason}")
        name = str(folder.config.relative_to(self.folder.path))
        files = self.study.user_attrs["files"]
        self.study.set_user_attr("files", {**files, name: sha256(folder.config)})

    def begin(self, folder: RunFolder, config: TrainConfig) -> None:
        """Create the run of a trial, unless it was begun before."""
        if folder.config.exists():
            return
        if config.prefix_cache == "disk" and not config.prefix_cache_folder:
            config = dataclasses.replace(config, prefix_cache_folder=str(self.folder.prefix))
        with named_errors(folder.path, "written"):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_config(with_absolute_paths(config))

    def train(self, watch: TrialWatch, settings: Mapping[str, Any]) -> TrialEnd:
        """Train or continue the run of a trial until it has ended. Raises what `end_of` raises."""
        folder = watch.folder

        def look() -> bool:
            is_enough = watch.read()
            self.view.progress(int(folder.name), settings, watch.state)
            return is_enough

        ended, times = None, 0
        while True:
            while is_running(folder):  # of a tune that was killed: it finishes its step and saves
                if self.received:
                    raise TrialStopped
                time.sleep(POLL_S)
            look()
            if (end := end_of(watch, ended)) is not None:
                return end
            if times == MAX_LOST:
                raise RunError(
                    f"{folder.path}: its supervisor was killed {MAX_LOST} times; its output is in "
                    f"{folder.path / child.LOG}"
                )
            ended, times = self.run(folder, self.received, look), times + 1

    def rows(self) -> list[TrialRow]:
        """The trials that have ended."""
        trials = tune_study.ended_trials(self.study)
        return with_best([trial_row(self.folder.trial(trial.number), trial) for trial in trials])

    def keep_the_best(self, rows: Sequence[TrialRow]) -> None:
        """Write best.yaml; remove the checkpoints and adapters of all other trials."""
        best = best_trial(rows)
        if best is None:
            return
        config = self.folder.trial(best.number).read_config()
        if Path(config.prefix_cache_folder) == Path(os.path.realpath(self.folder.prefix)):
            config = dataclasses.replace(config, prefix_cache_folder="")
        with named_errors(self.folder.best, "written", RunError):
            replace_text(self.folder.best, preset(self.folder.name, config, best, rows))
        for row in rows:
            if not row.is_best:
                trial = self.folder.trial(row.number)
                for path in (trial.checkpoints, trial.adapter, trial.base):
                    shutil.rmtree(path, ignore_errors=True)


def trial_row(folder: RunFolder, trial: FrozenTrial) -> TrialRow:
    """A trial as the study and the events of its run describe it."""
    run, value = run_list.row_of(folder), tune_study.value_of(trial)
    is_reward = run is not None and run.best_reward is not None and value is not None
    names = ("step", "steps", "seconds", "peak_bytes", "limit_bytes")
    return TrialRow(
        number=trial.number,
        state=tune_study.ENDED[trial.state],
        validation_loss=None if is_reward else value,
        reward=0.0 - value if is_reward and value is not None else None,
        settings=trial.params,
        reason=trial.user_attrs.get(tune_study.REASON, ""),
        **{name: getattr(run, name) for name in names if run is not None},
    )


def preset(name: str, config: TrainConfig, best: TrialRow, rows: Sequence[TrialRow]) -> str:
    """best.yaml: the settings that differ from the defaults, with comments."""
    import yaml

    defaults = TrainConfig()
    values = {
        field: list(value) if isinstance(value, tuple) else value
        for field in FIELDS
        if (value := getattr(config, field)) != getattr(defaults, field) or field in FOUND
    }
    values.pop("run", None)
    found = {field: values.pop(field) for field in FOUND}
    first = next((measure_text(row) for row in rows if row.number == 0), "unknown")

    def text(part: Mapping[str, Any]) -> str:
        return yaml.safe_dump(part, sort_keys=False, allow_unicode=True) if part else ""

    lines = [
        f"# Found by `your_ai tune`: the best of {len(rows)} trials in {name}, trial "
        f"{best.number:03}.",
        f"# Validation {measure_name([best])} {measure_text(best)}; with the default settings "
        f"{first}.",
    ]
    return (
        "\n".join(re.sub(r"[^\x20-\x7e]", "?", line) for line in lines)
        + f"\n\n# Searched:\n{text(found)}\n# The same in all trials:\n{text(values)}"
    )
