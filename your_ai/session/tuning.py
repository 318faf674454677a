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

import contextlib
import dataclasses
import errno
import hashlib
import math
import os
import re
import shlex
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from your_ai.config import FIELDS, TrainConfig, build, nearest, to_yaml
from your_ai.dashboard.state import ViewState, fold_all
from your_ai.dashboard.trials import TrialRow, best_of, marked, measure_name, measure_text
from your_ai.data.sources import find_splits
from your_ai.errors import RunError, UserError
from your_ai.files import TEMPORARY, clean, read_text, replace_text, sha256, sync
from your_ai.gates.programs import python_module
from your_ai.gates.text import shortened
from your_ai.gates.yaml_files import read_yaml
from your_ai.hub.find import find_model
from your_ai.hub.fingerprint import fingerprint
from your_ai.memory.facts import facts_of
from your_ai.run import child, events
from your_ai.run.child import POLL_S
from your_ai.run.exits import FAILED, LOST, USER
from your_ai.run.folder import (
    CONFIG_BYTES,
    NAME,
    RunFolder,
    default_name,
    is_running,
    locked,
    with_absolute_paths,
)
from your_ai.run.stopping import SIGNALS, recorded_signals
from your_ai.session import run_list, tune_study
from your_ai.session.attach import PATIENCE
from your_ai.session.tune_study import SEARCHED, ToldTrial, TuneAbout, TuneStudy

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
    name = name or default_name(config)
    if not NAME.fullmatch(name):
        raise UserError(
            f"--name {shortened(name)}: use at most 100 letters, digits, dots, dashes and "
            "underscores"
        )
    tune = TuneFolder(TUNES / name)
    taken = UserError(
        f"--name {name}: {tune.path} exists; choose another name, or continue it: "
        f"your_ai tune --resume {name}"
    )
    if os.path.lexists(tune.path):
        raise taken
    config = with_absolute_paths(config)
    inputs = inputs_of(config)
    temporary = None
    try:
        TUNES.mkdir(exist_ok=True)
        clean(TUNES, older_than_s=3600)
        temporary = TuneFolder(Path(tempfile.mkdtemp(prefix=f"{TEMPORARY}{name}-", dir=TUNES)))
        temporary.path.chmod(0o755)
        temporary.settings.write_text(to_yaml(config), encoding="utf-8")
        sync(temporary.settings)
        about = TuneAbout(
            version=tune_study.VERSION,
            trials=trials,
            fixed=tuple(sorted(fixed)),
            settings=sha256(temporary.settings),
            inputs=inputs,
        )
        tune_study.create_study(temporary.study, about)
        os.rename(temporary.path, tune.path)
    except OSError as error:
        if temporary is not None and error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise taken from error
        raise UserError(f"{tune.path}: cannot be written ({error.strerror})") from error
    finally:
        if temporary is not None:
            shutil.rmtree(temporary.path, ignore_errors=True)
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


def open_tune(tune: TuneFolder) -> tuple[TuneStudy, TrainConfig]:
    """The study of a tune and its settings. Raises UserError if they are damaged or changed."""
    study = tune_study.open_study(tune.study)
    about = study.about
    if checksum(tune.settings) != about.settings:
        raise UserError(
            f"{tune.settings}: was changed; all trials must have the same settings: restore it, or "
            "start a new tune"
        )
    config = build(read_yaml(tune.settings), str(tune.settings))
    first = tune.trial(0).config
    if about.base and checksum(first) != about.base:
        raise UserError(f"{first}: was changed; restore it, or start a new tune")
    return study, config


def checksum(path: Path) -> str:
    try:
        return hashlib.sha256(read_text(path, CONFIG_BYTES, "replace").encode()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error


def check_inputs(config: TrainConfig, before: Mapping[str, str]) -> None:
    """Raise UserError if the model or the data changed since the tune began."""
    now = inputs_of(config)
    changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    if changed:
        names = shortened(", ".join(changed))
        raise UserError(
            f"the model or the data changed since the tune began ({names}); restore it, or start a "
            "new tune"
        )


# Running a trial


@dataclass(frozen=True)
class EndedRun:
    """How the processes of a run ended."""

    status: int
    """Exit status of the supervisor, as Popen gives it."""
    output: str = ""
    """What they printed."""


class TrialRunner(Protocol):
    """Trains a run, until it ends or `is_enough` returns true; passes on the signals received."""

    def __call__(
        self, folder: RunFolder, received: Sequence[int], is_enough: Callable[[], bool]
    ) -> EndedRun: ...


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
    """What the events of a trial's run say, read as they come."""

    folder: RunFolder
    worth: Callable[[int, float], bool] = lambda step, loss: True
    """Whether a trial with this validation loss at this step goes on."""
    state: ViewState = field(default_factory=ViewState)
    losses: dict[int, float] = field(default_factory=dict)
    """Validation losses by step, without those that are not finite."""
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
        step, loss = validation.step, validation.loss
        if not math.isfinite(loss):
            name, value = "loss", loss
            reward = validation.metrics.get("reward")
            if reward is not None and not math.isfinite(reward):
                name, value = "reward", reward
            self.pruned = f"the validation {name} is {value} at step {step}"
        elif step not in self.losses:  # a run that was killed repeats some
            self.losses[step] = loss
            started = self.state.started
            is_last = started is not None and step >= started.steps
            if not self.pruned and not is_last and not self.worth(step, loss):
                self.pruned = f"worse than most at step {step}"

    @property
    def is_done(self) -> bool:
        """Whether the run finished."""
        return self.state.finished is not None and self.state.finished.reason == "done"

    @property
    def has_diverged(self) -> bool:
        """Whether the last steps of the run were not finite."""
        skipped, step = self.state.skipped, self.state.step
        return skipped is not None and (step is None or skipped.step > step.step)


@dataclass(frozen=True)
class TrialEnd:
    """How a trial ended: its state in the study, its value, and why."""

    state: str
    value: float | None
    reason: str = ""


class TrialStopped(Exception):
    """The run of a trial was stopped by a signal; it can be resumed."""


def end_of(folder: RunFolder, watch: TrialWatch, ended: EndedRun | None) -> TrialEnd | None:
    """How a trial ended; None if its processes must be started again.

    ended: its processes; None if none was started, because the events say how it ended.
    Raises TrialStopped after a stop signal, and what the run reported if that is not due to the
    settings of the trial, as a full disk.
    """
    best = min(watch.losses.values(), default=None)
    if watch.is_done:
        if best is None:
            return TrialEnd(tune_study.FAILED, None, "no validation of it is finite")
        return TrialEnd(tune_study.FINISHED, best)
    if watch.pruned:
        return TrialEnd(tune_study.PRUNED, best, watch.pruned)
    if ended is None:
        return None
    status = ended.status
    if any(status in (128 + number, -number) for number in SIGNALS):
        raise TrialStopped
    if status < 0:  # somebody killed the supervisor
        return None
    error = child.reported_error(folder, status, ended.output)
    if status in (USER, LOST) or (status == FAILED and watch.has_diverged):
        return TrialEnd(tune_study.FAILED, None, str(error))
    raise error


def train_trial(
    folder: RunFolder,
    watch: TrialWatch,
    received: Sequence[int],
    show: Callable[[ViewState], None],
    run: TrialRunner,
) -> TrialEnd:
    """Train or continue the run of a trial until it has ended. Raises what `end_of` raises."""

    def look() -> bool:
        is_enough = watch.read()
        show(watch.state)
        return is_enough

    wait_for_process(folder, received)
    look()
    if (end := end_of(folder, watch, None)) is not None:
        return end
    for _ in range(MAX_LOST):
        ended = run(folder, received, look)
        look()
        if (end := end_of(folder, watch, ended)) is not None:
            return end
        wait_for_process(folder, received)
    raise RunError(
        f"{folder.path}: its supervisor was killed {MAX_LOST} times; its output is in "
        f"{folder.path / child.LOG}"
    )


def wait_for_process(folder: RunFolder, received: Sequence[int]) -> None:
    """Wait while the processes of a tune that was killed finish their step and save."""
    while is_running(folder):
        if received:
            raise TrialStopped
        time.sleep(POLL_S)


# The tune


def clock() -> float:
    """Seconds since some moment."""
    return time.monotonic()


class TuneView(Protocol):
    """Shows a tune while it runs."""

    def progress(self, number: int, settings: Mapping[str, Any], state: ViewState) -> None: ...

    def ended(self, rows: Sequence[TrialRow], row: TrialRow) -> None: ...


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
        contextlib.closing(Tuning(folder, view, received, run)) as tuning,
    ):
        if trials is not None:
            tuning.study.change_about(trials=trials)
        wanted = tuning.study.about.trials
        while len(tuning.told) < wanted and not received:
            if minutes is not None and clock() - began > 60 * minutes:
                break
            try:
                tuning.next_trial()
            except TrialStopped:
                return tuning.rows(), next(iter(received), signal.SIGINT)
            tuning.keep_the_best()
        tuning.keep_the_best()
        if received:
            return tuning.rows(), received[0]
        if len(tuning.told) >= wanted:
            shutil.rmtree(folder.prefix, ignore_errors=True)
        return tuning.rows(), 0


class Tuning:
    """A tune in progress."""

    def __init__(
        self, folder: TuneFolder, view: TuneView, received: Sequence[int], run: TrialRunner
    ) -> None:
        self.folder, self.view, self.received, self.run = folder, view, received, run
        self.study, self.config = open_tune(folder)
        self.about = self.study.about
        self.blocks = facts_of(find_model(self.config.model), float_bytes=4).blocks
        self.told: list[ToldTrial] = self.study.told()

    def close(self) -> None:
        self.study.close()

    def next_trial(self) -> None:
        """Run the next trial to its end, and record it."""
        check_inputs(self.config, self.about.inputs)
        end = self.further_trial() if self.told else self.first_trial()
        self.told = self.study.told()
        rows = self.rows()
        self.view.ended(rows, next(row for row in rows if row.number == end))

    def first_trial(self) -> int:
        """Train with the default settings. What it chose for `auto` is the same in all trials."""
        folder = self.folder.trial(0)
        self.begin(folder, self.config)
        watch = TrialWatch(folder)
        end = self.train(folder, watch, {})
        if end.state != tune_study.FINISHED or end.value is None:
            raise UserError(f"the default settings: {end.reason}")
        self.study.change_about(base=checksum(folder.config))
        base = folder.read_config()
        space = tune_study.space_of(base, self.about.fixed, self.blocks)
        settings = tune_study.chosen_in(base, space, self.blocks)
        self.study.add_first(space, settings, watch.losses, end.value)
        return 0

    def further_trial(self) -> int:
        first = self.folder.trial(0)
        base = first.read_config()
        space = tune_study.space_of(base, self.about.fixed, self.blocks)
        steps = max((e.step for e in recorded(first, events.Step)), default=0)
        trial, settings = self.study.next_trial(space, base.seed, steps)
        folder = self.folder.trial(trial.number)
        watch = TrialWatch(folder, lambda at, loss: not self.study.report(trial, at, loss))
        try:
            config = tune_study.settings_of(base, settings, self.about.fixed)
        except UserError as error:  # together they contradict another setting
            end = TrialEnd(tune_study.FAILED, None, str(error))
        else:
            self.begin(folder, config)
            end = self.train(folder, watch, settings)
        self.study.tell(trial.number, end.state, end.value, end.reason)
        return trial.number

    def begin(self, folder: RunFolder, config: TrainConfig) -> None:
        """Create the run of a trial, unless it was begun before."""
        if folder.config.exists():
            return
        if config.prefix_cache == "disk" and not config.prefix_cache_folder:
            config = dataclasses.replace(config, prefix_cache_folder=str(self.folder.prefix))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.write_config(with_absolute_paths(config))
        except OSError as error:
            raise UserError(f"{folder.path}: cannot be written ({error.strerror})") from error

    def train(self, folder: RunFolder, watch: TrialWatch, settings: Mapping[str, Any]) -> TrialEnd:
        def show(state: ViewState) -> None:
            self.view.progress(int(folder.name), settings, state)

        return train_trial(folder, watch, self.received, show, self.run)

    def rows(self) -> list[TrialRow]:
        return marked([row_of(self.folder.trial(trial.number), trial) for trial in self.told])

    def keep_the_best(self) -> None:
        """Write best.yaml; remove the checkpoints and adapters of all other trials."""
        rows = self.rows()
        best = best_of(rows)
        if best is None:
            return
        config = self.folder.trial(best.number).read_config()
        if Path(config.prefix_cache_folder) == Path(os.path.realpath(self.folder.prefix)):
            config = dataclasses.replace(config, prefix_cache_folder="")
        try:
            replace_text(self.folder.best, preset(self.folder.name, config, best, rows))
        except OSError as error:
            raise RunError(f"{self.folder.best}: cannot be written ({error.strerror})") from error
        for row in rows:
            if not row.is_best:
                trial = self.folder.trial(row.number)
                for path in (trial.checkpoints, trial.adapter):
                    shutil.rmtree(path, ignore_errors=True)


def recorded(folder: RunFolder, kind: type) -> Iterator[Any]:
    for record in events.tail(folder.events)[0]:
        if isinstance(record.event, kind):
            yield record.event


def row_of(folder: RunFolder, trial: ToldTrial) -> TrialRow:
    """A trial as the study and the events of its run describe it."""
    run = run_list.row_of(folder)
    is_reward = run is not None and run.best_reward is not None and trial.value is not None
    return TrialRow(
        number=trial.number,
        state=trial.state,
        validation_loss=None if is_reward else trial.value,
        reward=0.0 - trial.value if is_reward else None,
        settings=trial.settings,
        step=run and run.step,
        steps=run and run.steps,
        seconds=run and run.seconds,
        peak_bytes=run and run.peak_bytes,
        limit_bytes=run and run.limit_bytes,
        reason=trial.reason,
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
