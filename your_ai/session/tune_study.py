"""The study of a tune: what was tried, what to try next, and which trials are not worth finishing.

optuna keeps it in an SQLite file. Each change is a transaction, so that kill -9 loses none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import math
import sqlite3
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from your_ai.config import TYPES, TrainConfig, coerce, defaults
from your_ai.errors import RunError, UserError
from your_ai.gates.untrusted import is_large
from your_ai.rng import derive_seed

if TYPE_CHECKING:
    from optuna.storages import RDBStorage
    from optuna.study import Study
    from optuna.trial import FrozenTrial, Trial

VERSION = 2  # of a tune's folder
STUDY = "your_ai"  # name of the study in its file
ABOUT = "about"  # the attribute of the study that has TuneAbout
REASON = "reason"  # the attribute of a trial that says why it failed or was pruned
FILE_BYTES = 1 << 28  # a larger file is not from this program
MOST_TRIALS = 10_000

SEARCHED = ("learning_rate", "lora_rank", "lora_layers", "lr_schedule")
SLOWEST, FASTEST = 0.25, 10.0  # learning rates that are searched, as multiples of the default
FASTER = 2.5  # the second trial differs from the first only in this multiple of the learning rate
RANKS = (4, 8, 16, 32)
LAYER_DIVISORS = (1, 2)  # all blocks, the last half
SCHEDULES = ("constant", "linear", "cosine")
RANDOM_TRIALS = 6  # the first trials, which are drawn without a model of the earlier ones
TRIALS_BEFORE_PRUNING = 4
UNPRUNED_SHARE = 0.25  # of the steps of a run: no trial is pruned before

FINISHED, PRUNED, FAILED = "finished", "pruned", "failed"  # states of a trial that has ended


def require_optuna() -> None:
    """Raise UserError if optuna is not installed."""
    if importlib.util.find_spec("optuna") is None:
        raise UserError(
            "tune needs the package optuna; in the checkout of your_ai, run: pip install '.[tune]'"
        )


# What is searched


@dataclass(frozen=True)
class Between:
    """A number that is drawn on a logarithmic scale."""

    low: float
    high: float


SearchSpace = dict[str, Between | tuple[Any, ...]]  # by setting: a range, or the choices


def space_of(base: TrainConfig, fixed: Sequence[str], blocks: int) -> SearchSpace:
    """What is searched around `base`, the settings of the first trial.

    fixed: settings that the user gave, which are not searched. blocks: of the model.
    """
    rate = base.learning_rate
    counts = dict.fromkeys(max(1, blocks // divisor) for divisor in LAYER_DIVISORS)
    layers = ["all" if count == blocks else count for count in counts]
    space: SearchSpace = {
        "learning_rate": Between(SLOWEST * rate, FASTEST * rate),
        "lora_rank": with_value(RANKS, base.lora_rank),
        "lora_layers": with_value(
            layers, "all" if base.lora_layers == blocks else base.lora_layers
        ),
        "lr_schedule": with_value(SCHEDULES, base.lr_schedule),
    }
    return {
        name: found if isinstance(found, Between) else allowed(base, name, found)
        for name, found in space.items()
        if name not in fixed
    }


def with_value(choices: Sequence[Any], value: Any) -> tuple[Any, ...]:
    return tuple(choices) if value in choices else (*choices, value)


def allowed(base: TrainConfig, name: str, choices: Sequence[Any]) -> tuple[Any, ...]:
    """The choices that do not contradict another setting."""
    found = []
    for choice in choices:
        with contextlib.suppress(UserError):
            dataclasses.replace(base, **{name: choice})
            found.append(choice)
    return tuple(found)


def settings_of(base: TrainConfig, chosen: Mapping[str, Any], fixed: Sequence[str]) -> TrainConfig:
    """`base` with the chosen settings. The adapters' scale stays, unless alpha is fixed."""
    alpha = base.lora_alpha
    if "lora_alpha" not in fixed and "lora_rank" in chosen:
        alpha = defaults.alpha_of_same_scale(base, base.lora_rank, chosen["lora_rank"])
    return dataclasses.replace(base, **{**chosen, "lora_alpha": alpha})


def chosen_in(config: TrainConfig, space: SearchSpace, blocks: int) -> dict[str, Any]:
    """The searched settings of a run, as the space names them."""
    values = {name: getattr(config, name) for name in space}
    if values.get("lora_layers") == blocks:
        values["lora_layers"] = "all"
    return values


# The study


@dataclass(frozen=True, kw_only=True)
class TuneAbout:
    """What a tune depends on; it must not change."""

    version: int
    trials: int
    """How many trials were asked for."""
    fixed: tuple[str, ...]
    """The settings that the user gave."""
    settings: str
    """sha256 of settings.yaml."""
    inputs: dict[str, str]
    """sha256 of the files of model and data, by name."""
    base: str = ""
    """sha256 of the first trial's config.yaml; empty until it has ended."""


@dataclass(frozen=True)
class ToldTrial:
    """A trial that has ended."""

    number: int
    state: str
    """finished, pruned or failed."""
    value: float | None
    """Its validation loss, or the negative of its reward; None if it failed."""
    settings: dict[str, Any]
    """What was searched."""
    reason: str
    """Why it failed or was pruned."""


@dataclass
class TuneStudy:
    """An open study."""

    path: Path
    study: Study
    storage: RDBStorage

    def close(self) -> None:
        self.storage.remove_session()
        self.storage.engine.dispose()

    @property
    def about(self) -> TuneAbout:
        with storage_errors(self.path):
            return parse_about(self.path, self.study.user_attrs.get(ABOUT))

    def change_about(self, **changes: Any) -> None:
        about = dataclasses.replace(self.about, **changes)
        with storage_errors(self.path):
            self.study.set_user_attr(ABOUT, json.dumps(dataclasses.asdict(about)))

    def told(self) -> list[ToldTrial]:
        """The trials that have ended, by number."""
        with storage_errors(self.path):
            trials = self.study.get_trials(deepcopy=False)
        return [told_of(self.path, trial) for trial in trials if trial.state.is_finished()]

    def add_first(
        self, space: SearchSpace, settings: dict[str, Any], losses: dict[int, float], value: float
    ) -> None:
        """Add the trial of the default settings, which has finished.

        losses: its validation losses by step.
        """
        from optuna.trial import create_trial

        distributions = {name: distribution(searched) for name, searched in space.items()}
        with storage_errors(self.path):
            self.study.add_trial(
                create_trial(
                    params=settings,
                    distributions=distributions,
                    value=value,
                    intermediate_values=losses,
                )
            )

    def next_trial(self, space: SearchSpace, seed: int, steps: int) -> tuple[Trial, dict[str, Any]]:
        """The trial that was interrupted, or else a new one, and its settings.

        What is drawn depends only on the seed and on the trials that have ended.
        steps: of a run.
        """
        from optuna.pruners import MedianPruner
        from optuna.samplers import TPESampler
        from optuna.trial import Trial, TrialState

        told = self.told()
        drawn = derive_seed(seed, "tune", len(told)) % (1 << 32)
        self.study.sampler = TPESampler(seed=drawn, n_startup_trials=RANDOM_TRIALS)
        self.study.pruner = MedianPruner(
            n_startup_trials=TRIALS_BEFORE_PRUNING, n_warmup_steps=int(UNPRUNED_SHARE * steps)
        )
        with storage_errors(self.path):
            running = self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
            if running:
                study_id = self.storage.get_study_id_from_name(STUDY)
                number = running[0].number
                trial = Trial(
                    self.study,
                    self.storage.get_trial_id_from_study_id_trial_number(study_id, number),
                )
            else:
                if len(told) == 1 and "learning_rate" in space:
                    first = told[0].settings
                    faster = {**first, "learning_rate": FASTER * first["learning_rate"]}
                    self.study.enqueue_trial(faster, skip_if_exists=True)
                trial = self.study.ask()
            return trial, {name: suggested(trial, name, space[name]) for name in space}

    def report(self, trial: Trial, step: int, loss: float) -> bool:
        """Record a validation loss; return whether the trial should be pruned."""
        with storage_errors(self.path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a trial that is resumed reports some steps again
            trial.report(loss, step)
            return trial.should_prune()

    def tell(self, number: int, state: str, value: float | None, reason: str = "") -> None:
        """Record how a trial ended. state: finished, pruned or failed."""
        from optuna.trial import TrialState

        states = {PRUNED: TrialState.PRUNED, FAILED: TrialState.FAIL}
        with storage_errors(self.path):
            if reason:
                study_id = self.storage.get_study_id_from_name(STUDY)
                trial_id = self.storage.get_trial_id_from_study_id_trial_number(study_id, number)
                self.storage.set_trial_user_attr(trial_id, REASON, reason)
            if state == FINISHED:
                self.study.tell(number, value)
            else:
                self.study.tell(number, state=states[state])


def suggested(trial: Trial, name: str, searched: Between | tuple[Any, ...]) -> Any:
    if isinstance(searched, Between):
        return trial.suggest_float(name, searched.low, searched.high, log=True)
    return trial.suggest_categorical(name, searched)


def distribution(searched: Between | tuple[Any, ...]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution

    if isinstance(searched, Between):
        return FloatDistribution(searched.low, searched.high, log=True)
    return CategoricalDistribution(searched)


def told_of(path: Path, trial: FrozenTrial) -> ToldTrial:
    from optuna.trial import TrialState

    names = {TrialState.COMPLETE: FINISHED, TrialState.PRUNED: PRUNED, TrialState.FAIL: FAILED}
    state, value = names[trial.state], trial.value
    reached = [loss for loss in trial.intermediate_values.values() if math.isfinite(loss)]
    if state == PRUNED:  # optuna's value is the last loss
        value = min(reached, default=None)
    if (state == FINISHED and value is None) or not math.isfinite(value or 0.0):
        raise UserError(f"{path}: is damaged (trial {trial.number} has no loss)")
    if not set(trial.params) <= set(SEARCHED):
        raise UserError(f"{path}: is damaged (trial {trial.number} has other settings)")
    label = f"{path}: trial {trial.number}"
    settings = {name: coerce(name, value, label) for name, value in trial.params.items()}
    reason = str(trial.user_attrs.get(REASON, ""))
    return ToldTrial(trial.number, state, value, settings, reason)


# The file


def create_study(path: Path, about: TuneAbout) -> None:
    """Write the file of a new study. Raises RunError if that fails."""
    from optuna.study import create_study

    quiet()
    with storage_errors(path):
        storage = storage_in(path)
        study = create_study(storage=storage, study_name=STUDY, direction="minimize")
        study.set_user_attr(ABOUT, json.dumps(dataclasses.asdict(about)))
        storage.remove_session()
        storage.engine.dispose()


def open_study(path: Path) -> TuneStudy:
    """Open the study in a file. Raises UserError if the file is damaged."""
    from optuna.study import load_study

    quiet()
    check_file(path)
    try:
        storage = storage_in(path)
        opened = TuneStudy(path, load_study(study_name=STUDY, storage=storage), storage)
        _ = opened.about, opened.told()  # read now, so that damage is found here
    except (UserError, MemoryError):
        raise
    except Exception as error:  # optuna does not say what it raises for a damaged file
        raise UserError(f"{path}: is damaged ({reason_of(error)}); start a new tune") from error
    return opened


def storage_in(path: Path) -> RDBStorage:
    from optuna.storages import RDBStorage

    # The path is not part of a URL, in which ? and % would have a meaning.
    creator = {"creator": lambda: sqlite3.connect(path)}
    return RDBStorage("sqlite://", engine_kwargs=creator)


def check_file(path: Path) -> None:
    """Raise UserError if a file is not an intact SQLite database with a study."""
    try:
        if is_large(path, FILE_BYTES):
            raise UserError(f"{path}: is not the study of a tune; start a new tune")
        address = f"file:{quote(str(path.absolute()))}?mode=rw"
        with contextlib.closing(sqlite3.connect(address, uri=True)) as database:
            (result,) = database.execute("PRAGMA quick_check(1)").fetchone()
            if result != "ok":
                raise sqlite3.DatabaseError(result)
            names = [row[0] for row in database.execute("SELECT study_name FROM studies LIMIT 2")]
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except sqlite3.Error as error:
        raise UserError(f"{path}: is damaged ({error}); start a new tune") from error
    if names != [STUDY]:
        raise UserError(f"{path}: is not the study of a tune; start a new tune")


def parse_about(path: Path, text: Any) -> TuneAbout:
    """Check what the file says about the tune. Raises UserError."""
    try:
        fields = json.loads(text)
        if fields.get("version") != VERSION:
            raise UserError(
                f"{path.parent}: was written by another version of your_ai; start a new tune"
            )
        about = TuneAbout(**{**fields, "fixed": tuple(fields["fixed"])})
        texts = (about.settings, about.base, *about.inputs, *about.inputs.values())
        ok = type(about.trials) is int and 1 <= about.trials <= MOST_TRIALS
        if ok and set(about.fixed) <= set(TYPES) and all(isinstance(t, str) for t in texts):
            return about
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    raise UserError(f"{path}: is damaged (it does not say what the tune depends on)")


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise RunError if the file cannot be read or written."""
    from optuna.exceptions import StorageInternalError
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except (sqlite3.Error, SQLAlchemyError, StorageInternalError) as error:
        raise RunError(
            f"{path}: cannot be used ({reason_of(error)}); free some disk space if it is short, "
            "then resume the tune"
        ) from error


def reason_of(error: BaseException) -> str:
    """The first line of the error that caused it, without SQL."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(getattr(error, "orig", None) or error).splitlines()
    return lines[0] if lines else type(error).__name__


def quiet() -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
